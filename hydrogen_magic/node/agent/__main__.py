"""``python -m hydrogen_magic.node.agent FD``: one agent, which reads its kernel's address from FD."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydrogen_magic.core import address_space, processes
from hydrogen_magic.core import messages as msg
from hydrogen_magic.node.agent.worker_pool import WorkerPool
from hydrogen_magic.transport import framing

if TYPE_CHECKING:
    from hydrogen_magic.node.agent.kernel_link import KernelLink

_GARBAGE = 20_000
"""Allocations between two runs of the cyclic garbage collector; an agent creates few cycles. The
events of a quarter of a second are thousands of objects."""


def main(arguments: Sequence[str]) -> None:
    """Start the forkserver first: its imports take longest and can run in parallel with ours."""
    processes.reset_signals()
    handover = socket.socket(fileno=int(arguments[0]))
    received = framing.receive(framing.FrameReader(handover))
    if received is None:
        return  # the kernel has already exited
    message, fds = received
    config = msg.decode(message, msg.AgentConfig)
    try:
        kernel = (
            os.pidfd_open(config.kernel_pid) if isinstance(config, msg.LocalAgentConfig) else -1
        )
    except ProcessLookupError:
        return
    address_space.raise_limit_of_workers(config.env)
    processes.become_subreaper()
    processes.use_batch_scheduling()  # and the ranks with this process
    gc.set_threshold(_GARBAGE)
    pool = WorkerPool(kernel)
    pool.start(config.fingerprint, config.env, config.sys_path, config.preload)

    from hydrogen_magic.node.agent.server import AgentServer

    server = AgentServer(config, _kernel_link(config, kernel, handover, fds), pool)
    asyncio.run(server.run())
    if server.is_terminated:  # all has ended: the signal's own action tells the kernel why
        signal.raise_signal(signal.SIGTERM)


def _kernel_link(
    config: msg.AgentConfig, kernel: int, handover: socket.socket, fds: list[int]
) -> KernelLink:
    if isinstance(config, msg.RemoteAgentConfig):
        from hydrogen_magic.node.agent.remote_link import RemoteLink

        return RemoteLink(config, socket.socket(fileno=fds[0]))
    from hydrogen_magic.node.agent.kernel_link import LocalLink

    return LocalLink(config.bind, kernel, handover)


if __name__ == "__main__":
    main(sys.argv[1:])
