"""The agent's side of a worker process."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from hydrogen_magic.serialization.payload import memory_file
from hydrogen_magic.transport import framing


@dataclass
class PooledWorker:
    """The agent's ends of one worker's pipes.

    See :class:`~hydrogen_magic.node.worker.process_setup.WorkerPipes`.
    """

    control: socket.socket
    stdout: int
    stderr: int
    stop: int
    stacks: int
    pid: int = 0
    created_s: float = field(default_factory=time.monotonic)
    """Before its process was forked."""

    @classmethod
    def create(cls) -> tuple[PooledWorker, list[int]]:
        """Return the agent's ends and the worker's five descriptors, in the order of ``WorkerPipes``."""
        ours, theirs = framing.pair()
        ours.setblocking(False)
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        stop, their_stop = (end.detach() for end in framing.pair())
        stacks = memory_file("stacks")
        for fd in (out_read, err_read, stop, their_stop):
            os.set_blocking(fd, False)
        worker = cls(ours, out_read, err_read, stop, stacks)
        return worker, [theirs.detach(), out_write, err_write, their_stop, os.dup(stacks)]

    def close(self) -> None:
        """Close the connections; a worker that was never used then exits on its own."""
        self.control.close()
        for fd in (self.stdout, self.stderr, self.stop, self.stacks):
            os.close(fd)


def close_all(workers: Iterable[PooledWorker]) -> None:
    for worker in workers:
        worker.close()
