"""Ranks that write a lot, or nonsense. A plain local module: it travels whole, and imports little."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import time
from multiprocessing import shared_memory

import hydrogen_magic as hm


def writes_on_both() -> None:
    for fd in (1, 2):
        os.write(fd, b"rank %d on %d" % (hm.rank(), fd))


def everything_then_crash() -> None:
    libc = ctypes.CDLL(None)
    os.write(1, bytes(range(256)))
    libc.printf(b"by C, %d\n", 7)
    os.write(2, "é".encode()[:1])
    os.write(2, "é".encode()[1:] + "🙂\rשלום".encode())
    os.kill(os.getpid(), signal.SIGSEGV)


def flood(n_bytes: int, end: bytes) -> None:
    block = (b"x" * 65_535 + end) * 16
    for _ in range(n_bytes // len(block)):
        rest = memoryview(block)
        while rest:
            rest = rest[os.write(1, rest) :]


def log_points(n_points: int, per_s: float) -> None:
    begun = time.monotonic()
    for step in range(n_points):
        hm.log(step=step, loss=float(step))
        if step % 1000 == 999:
            time.sleep(max(0.0, begun + step / per_s - time.monotonic()))


def orphans(count: int) -> None:
    """Have children whose own children end after them: the agent inherits those."""
    for _ in range(count):
        subprocess.run(["sh", "-c", "sleep 0.05 &"], check=True)
    print("had", count, flush=True)
    time.sleep(1000)


def share() -> None:
    """Share memory by Python's own means, and as a DataLoader's worker does, until this rank is stopped."""
    block = shared_memory.SharedMemory(create=True, size=1 << 20)
    print(f"/dev/shm/{block.name}", child_that_shares(), flush=True)
    time.sleep(1000)


def child_that_shares() -> str:
    """Return the file that a child has made as a worker of a DataLoader does, which ends with this rank."""

    def share() -> None:
        path = f"/dev/shm/torch_{os.getpid()}_1_1"
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        sending.send(path)
        time.sleep(1000)

    receiving, sending = multiprocessing.Pipe(duplex=False)
    multiprocessing.get_context("fork").Process(target=share, daemon=True).start()
    path: str = receiving.recv()
    return path
