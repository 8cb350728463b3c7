"""The link from an agent to a kernel on the same machine, apart from the channel.

Closures, results and profiles are passed as descriptors of memory files over an inherited socket.
Logs go to the kernel's own directory. The end of the kernel is detected by its process.
:mod:`~hydrogen_magic.node.agent.remote_link` is the counterpart for a kernel on another machine.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import run_log
from hydrogen_magic.core.network import PortRange
from hydrogen_magic.node.agent.rank_group import RankGroup
from hydrogen_magic.transport import framing
from hydrogen_magic.transport.channel import AgentLink

_KERNELS_END_S = 1.0
"""A kernel that exits closes its sockets some moments before its process ends."""


class KernelLink(ABC):
    """The agent's interface to its kernel, on this or another machine.

    Methods with a body here do what suffices if the link has nothing to do with the call.
    """

    bind: str
    """Address on which the rendezvous is served."""
    ports: PortRange | None = None
    """Its possible ports; None: any."""
    interface = ""
    """The network interface that faces the other hosts; empty on the kernel's machine."""

    @abstractmethod
    def begin(
        self, link: AgentLink, over: Callable[[], None], expect_ranks: Callable[[], None]
    ) -> None:
        """Start watching kernel and machine; ``over`` is called when the agent should exit.

        ``expect_ranks`` is called before a gang starts that has ranks on other hosts.
        """

    def take(self, command: msg.AgentCommand, data: memoryview | None) -> bool:
        """Take a command of the kernel with its bytes; False when it is not for the link."""
        return False

    def localized(self, request: msg.LaunchRequest) -> msg.LaunchRequest:
        """Return a ``request`` with this machine's paths, environment and clock."""
        return request

    @abstractmethod
    async def launch_files(self, group: RankGroup) -> list[int]:
        """Return descriptors, owned by the caller: of the closure of ``group``, then of its ranks'
        channels.

        There is one channel for each rank if the ranks receive data while they run.
        """

    @abstractmethod
    def send_file(self, file: msg.RankFile, fd: int) -> None:
        """Pass a rank's file on to the kernel; ``fd`` stays the caller's."""

    async def finish(self, group: RankGroup) -> None:
        """Return when all files have arrived, and the processes that served only this gang have exited."""
        return

    def released(self, gang: str, attempt: int) -> None:
        """The kernel has learned that nothing of the attempt is left."""
        return

    def kernel_ended(self, group: RankGroup) -> None:
        """The gang ends because the kernel has exited."""
        return

    @abstractmethod
    def close(self) -> None: ...


class LocalLink(KernelLink):
    """See :class:`KernelLink`. A file has arrived with the call that sends its descriptor."""

    def __init__(self, bind: str, kernel: int, handover: socket.socket) -> None:
        """``kernel``: its pidfd, which is closed with this link."""
        self.bind = bind
        self._kernel = kernel
        self._handover = handover
        self._frames = framing.FrameReader(handover)
        self._watching: asyncio.Task[None] | None = None
        self._is_cut_off = False

    def begin(
        self, link: AgentLink, over: Callable[[], None], expect_ranks: Callable[[], None]
    ) -> None:
        """Watch the kernel's process: forks of the kernel may hold a pipe open."""

        loop = asyncio.get_running_loop()

        def on_kernels_end() -> None:
            loop.remove_reader(self._kernel)  # it stays readable
            link.clean_up_after_hub()
            over()

        loop.add_reader(self._kernel, on_kernels_end)
        self._watching = asyncio.ensure_future(self._watch_link(link, over))

    async def _watch_link(self, link: AgentLink, over: Callable[[], None]) -> None:
        """End if a kernel that is alive cannot be reached: messages on their way are lost."""
        await link.lost()
        await asyncio.sleep(_KERNELS_END_S)
        self._is_cut_off = True
        print("hydrogen_magic agent: lost the connection to the kernel", file=sys.stderr)
        over()

    async def launch_files(self, group: RankGroup) -> list[int]:
        """Receive the descriptors that the kernel sent just before its ``launch`` message."""
        while (received := framing.receive(self._frames)) is not None:
            message, fds = received
            files = msg.decode(message, msg.LaunchFiles)
            if (files.gang, files.attempt) == (group.gang, group.attempt):
                return fds
            framing.close_all(fds)  # of a launch that never arrived
        raise ConnectionError("the kernel closed the connection")

    def send_file(self, file: msg.RankFile, fd: int) -> None:
        framing.send(self._handover, file, [fd])

    def kernel_ended(self, group: RankGroup) -> None:
        """Finish the run's record on behalf of the kernel, which has exited."""
        if not self._is_cut_off:
            run_log.write_end(Path(group.record_dir), ev.KERNEL_ENDED)

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        asyncio.get_running_loop().remove_reader(self._kernel)
        os.close(self._kernel)
