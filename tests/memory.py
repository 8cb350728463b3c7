"""How much memory a tree of processes holds, shared pages counted once."""

from __future__ import annotations

import gc
import os
import threading

from hydrogen_magic.core import processes

__all__ = ["Memory"]

_SAMPLE_S = 0.02


class Memory:
    """The largest PSS of this process and its descendants while a block runs."""

    before: int
    """Bytes when the block began."""
    peak: int
    """Bytes, sampled every 20 ms."""

    def __enter__(self) -> Memory:
        gc.collect()
        self.before = self.peak = self._now()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        below = [process.pid for process in processes.descendants(os.getpid())]
        return sum(map(_pss_bytes, [os.getpid(), *below]))


def _pss_bytes(pid: int) -> int:
    lines = (
        processes.read(f"/proc/{pid}/smaps_rollup").decode().splitlines()
    )  # none if it has ended
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
