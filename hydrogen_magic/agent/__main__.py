"""``python -m hydrogen_magic.agent FD``: one agent, told who its kernel is over the inherited FD."""

from __future__ import annotations

import asyncio
import socket
import sys

from hydrogen_magic import frames, processes
from hydrogen_magic.agent.nursery import Nursery


def main() -> None:
    """Start the template first: its imports take longest and can run beside ours."""
    handover = socket.socket(fileno=int(sys.argv[1]))
    received = frames.receive(frames.FrameReader(handover))
    if received is None:
        return  # the kernel has gone already
    boot = received[0]
    processes.become_subreaper()
    nursery = Nursery()
    nursery.start(boot["fingerprint"], boot["env"], boot["sys_path"], boot["preload"])

    from hydrogen_magic.agent.supervise import Agent

    asyncio.run(Agent(boot, handover, nursery).run())


if __name__ == "__main__":
    main()
