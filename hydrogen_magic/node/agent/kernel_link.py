"""What ties an agent to a kernel on the same machine, the wire apart.

Closures, results and profiles go as descriptors of memory files over an inherited socket, logs to
the kernel's own directory; and the kernel's end is seen by its process.
:mod:`~hydrogen_magic.node.agent.remote_link` is the same for a kernel elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import run_log
from hydrogen_magic.core.messages import (
    AgentCommand,
    LaunchFiles,
    LaunchRequest,
    LocalAgentConfig,
    RankFile,
    decode,
)
from hydrogen_magic.node.agent.rank_group import RankGroup
from hydrogen_magic.transport import framing
from hydrogen_magic.transport.channel import AgentLink

__all__ = ["LocalLink", "KernelLink"]


_KERNELS_END_S = 1.0
"""A kernel that ends closes its sockets some moments before its process is gone."""


class KernelLink(Protocol):
    """What an agent asks of whoever knows where its kernel is."""

    bind: str
    """Address for what ranks meet at."""
    interface: str
    """The network interface that faces the other hosts; empty on the kernel's machine."""

    def begin(
        self, link: AgentLink, over: Callable[[], None], expect_ranks: Callable[[], None]
    ) -> None:
        """Watch kernel and machine from now on; ``over`` is called when the agent should exit.

        ``expect_ranks`` is called when a gang is about to start with ranks on other hosts.
        """
        ...

    def take(self, command: AgentCommand, data: memoryview | None) -> bool:
        """Take a command of the kernel with its bytes; False when it is not for the link."""
        ...

    def localized(self, request: LaunchRequest) -> LaunchRequest:
        """Return a ``request`` with this machine's paths, environment and clock."""
        ...

    async def handed(self, group: RankGroup) -> list[int]:
        """Return descriptors, the caller's to close: of what ``group`` runs, then its ranks' channels.

        There are channels, one for each rank, where the ranks are fed while they run.
        """
        ...

    def hand_over(self, file: RankFile, fd: int) -> None:
        """Pass a rank's file on to the kernel; ``fd`` stays the caller's."""
        ...

    async def finish(self, group: RankGroup) -> None:
        """Return when all that was handed over has arrived, and what served this gang alone is gone."""
        ...

    def released(self, gang: str, attempt: int) -> None:
        """The kernel knows that nothing of the attempt is left."""
        ...

    def kernel_ended(self, group: RankGroup) -> None:
        """The gang is ended because the kernel has."""
        ...

    def close(self) -> None: ...


class LocalLink:
    """See :class:`KernelLink`."""

    interface = ""

    def __init__(self, config: LocalAgentConfig, handover: socket.socket) -> None:
        self.bind = config.bind
        self._kernel_pid = config.kernel_pid
        self._handover = handover
        self._handed_over = framing.FrameReader(handover)
        self._kernel = -1
        self._watching: asyncio.Task[None] | None = None
        self._is_cut_off = False

    def begin(
        self, link: AgentLink, over: Callable[[], None], expect_ranks: Callable[[], None]
    ) -> None:
        """Watch the kernel's process: a pipe may be held open by the kernel's forks."""

        def on_kernels_end() -> None:
            link.clean_up_after_hub()
            over()

        self._kernel = os.pidfd_open(self._kernel_pid)
        asyncio.get_running_loop().add_reader(self._kernel, on_kernels_end)
        self._watching = asyncio.ensure_future(self._watch_link(link, over))

    async def _watch_link(self, link: AgentLink, over: Callable[[], None]) -> None:
        """End when a kernel that lives cannot be reached: what was on the way is lost."""
        await link.lost()
        await asyncio.sleep(_KERNELS_END_S)
        self._is_cut_off = True
        print("hydrogen_magic agent: lost the connection to the kernel", file=sys.stderr)
        over()

    def take(self, command: AgentCommand, data: memoryview | None) -> bool:
        return False

    def localized(self, request: LaunchRequest) -> LaunchRequest:
        return request

    async def handed(self, group: RankGroup) -> list[int]:
        """Take what the kernel handed over just before its ``launch`` message."""
        while (received := framing.receive(self._handed_over)) is not None:
            message, fds = received
            files = decode(message, LaunchFiles)
            if (files.gang, files.attempt) == (group.gang, group.attempt):
                return fds
            for fd in fds:  # of a launch that never came
                os.close(fd)
        raise ConnectionError("the kernel closed the connection")

    def hand_over(self, file: RankFile, fd: int) -> None:
        framing.send(self._handover, file, [fd])

    async def finish(self, group: RankGroup) -> None:
        """It has arrived with the call."""

    def released(self, gang: str, attempt: int) -> None:
        """Nobody waits for that here."""

    def kernel_ended(self, group: RankGroup) -> None:
        """Finish the run's record in the kernel's stead: it has gone and cannot."""
        if not self._is_cut_off:
            run_log.write_end(Path(group.record_dir), ev.KERNEL_ENDED)

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        asyncio.get_running_loop().remove_reader(self._kernel)
        os.close(self._kernel)
