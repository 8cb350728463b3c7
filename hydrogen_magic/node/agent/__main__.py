"""``python -m hydrogen_magic.node.agent FD``: one agent, which reads from FD who its kernel is."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydrogen_magic.core import processes
from hydrogen_magic.node.agent.worker_pool import WorkerPool
from hydrogen_magic.transport import framing

if TYPE_CHECKING:
    from hydrogen_magic.node.agent.kernel_link import KernelLink

_GARBAGE = 20_000
"""Objects made between two looks for garbage in cycles, of which an agent makes little. The events of a
quarter of a second are thousands."""


def main(arguments: Sequence[str]) -> None:
    """Start the forkserver first: its imports take longest and can run beside ours."""
    handover = socket.socket(fileno=int(arguments[0]))
    received = framing.receive(framing.FrameReader(handover))
    if received is None:
        return  # the kernel has gone already
    boot, fds = received
    try:
        kernel = -1 if boot["kernel_pid"] is None else os.pidfd_open(boot["kernel_pid"])
    except ProcessLookupError:
        return
    processes.become_subreaper()
    processes.use_batch_scheduling()  # and ranks with us
    gc.set_threshold(_GARBAGE)
    pool = WorkerPool(kernel)
    pool.start(boot["fingerprint"], boot["env"], boot["sys_path"], boot["preload"])

    from hydrogen_magic.node.agent.server import AgentServer

    asyncio.run(AgentServer(boot, _kernel_link(boot, handover, fds), pool).run())


def _kernel_link(boot: dict[str, Any], handover: socket.socket, fds: list[int]) -> KernelLink:
    if boot["kernel_pid"] is None:
        from hydrogen_magic.node.agent.remote_link import RemoteLink

        return RemoteLink(boot, socket.socket(fileno=fds[0]))
    from hydrogen_magic.node.agent.kernel_link import LocalLink

    return LocalLink(boot, handover)


if __name__ == "__main__":
    main(sys.argv[1:])
