"""Closure: from the call until two ranks hold a captured array, and what that takes in memory.

    python benchmarks/closure.py --rounds 3

Every way ends when both ranks have read one number of each page of the array. Memory is the growth
of the whole process tree's proportional set size (PSS) over what it was before the call, the
caller's own array not counted, sampled every 30 ms.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
from _common import (
    answer_file,
    lacks,
    machine,
    parse_arguments,
    torchrun,
)

NP = 2
SIZES_MB = (0, 1, 100, 1000)
QUICK_SIZES_MB = (0, 1, 100)
SAMPLE_S = 0.03
PAGE_NUMBERS = 512
"""Every 512th float64 lies on a page of its own (4 KiB)."""
PIPE_BYTES = 1 << 20
"""The most that Linux gives an ordinary user: the peers' pipes are made as fast as they can be."""


def touch(array: Any) -> float:
    """Read one number of each page; return when that was done (a clock all processes share)."""
    import time

    pages = array[::PAGE_NUMBERS]
    assert float(pages.sum()) == len(pages)
    return time.monotonic()


# ── memory of a process tree ─────────────────────────────────────────────────────────────────────


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                text = Path(f"/proc/{name}/stat").read_text()
            except OSError:
                continue  # it ended between the two looks
            parent = int(text[text.rindex(")") + 2 :].split()[1])
            found.setdefault(parent, []).append(int(name))
    return found


def tree_pss_bytes() -> int:
    """Return the proportional set size of this process and all below it."""
    children, queue, total = _children(), [os.getpid()], 0
    while queue:
        pid = queue.pop()
        queue.extend(children.get(pid, ()))
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue  # it ended, or is a zombie
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


class PeakMemory:
    """Samples the tree while the block runs; ``growth_bytes`` is the peak over the beginning."""

    def __enter__(self) -> PeakMemory:
        self._before = self._peak = tree_pss_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(SAMPLE_S):
            self._peak = max(self._peak, tree_pss_bytes())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.growth_bytes = max(0, max(self._peak, tree_pss_bytes()) - self._before)


# ── the ways: each returns when its last rank held the array ─────────────────────────────────────


def product(array: Any) -> float:
    import hydrogen_magic as hm

    def cell() -> float:
        return touch(array)

    gang = hm.launch(cell, np=NP)
    gang.wait(300)
    return max(gang.results)


class InBand:
    """cloudpickle's bytes through pipes to two children forked before the array was made."""

    def __init__(self) -> None:
        self._ends = [self._fork() for _ in range(NP)]

    def _fork(self) -> tuple[int, Any, Any]:
        to_child, from_parent = os.pipe(), os.pipe()
        fcntl.fcntl(to_child[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        pid = os.fork()
        if pid == 0:
            os.close(to_child[1])
            os.close(from_parent[0])
            _serve_in_band(to_child[0], from_parent[1])
        os.close(to_child[0])
        os.close(from_parent[1])
        return pid, os.fdopen(to_child[1], "wb"), os.fdopen(from_parent[0], "rb")

    def measure(self, array: Any) -> float:
        data = cloudpickle.dumps(array)
        writers = [threading.Thread(target=_write, args=(end[1], data)) for end in self._ends]
        for writer in writers:
            writer.start()
        held = [struct.unpack("d", end[2].read(8))[0] for end in self._ends]
        for writer in writers:
            writer.join()
        return float(max(held))

    def close(self) -> None:
        # The second child inherited the first one's pipe: all writers first, then all exits.
        for _, writer, _ in self._ends:
            writer.close()
        for pid, _, reader in self._ends:
            os.waitpid(pid, 0)
            reader.close()


def _write(pipe: Any, data: bytes) -> None:
    pipe.write(struct.pack("q", len(data)))
    pipe.write(data)
    pipe.flush()


def _read_exactly(reader: int, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        view = view[os.readv(reader, [view]) :]
    return data


def _serve_in_band(reader: int, writer: int) -> None:
    code = 1
    try:
        while header := os.read(reader, 8):
            data = _read_exactly(reader, struct.unpack("q", header)[0])
            array = pickle.loads(data)
            os.write(writer, struct.pack("d", touch(array)))
            del array, data
        code = 0
    finally:
        os._exit(code)


def by_torchrun(array: Any) -> float:
    with answer_file() as path:
        (path.parent / "closure.pickle").write_bytes(cloudpickle.dumps(array))
        torchrun(Path(__file__), "--rank", str(path.parent))
        ranks = path.parent.glob("rank-*.json")
        return max(json.loads(rank.read_text()) for rank in ranks)


def be_torchrun_rank(folder: Path) -> None:
    array = pickle.loads((folder / "closure.pickle").read_bytes())
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(touch(array)))


# ── rounds ───────────────────────────────────────────────────────────────────────────────────────


def measure(way: Callable[[Any], float], size_mb: int) -> tuple[float, float]:
    """Return seconds until the last rank held the array, and the tree's growth in MB."""
    import numpy

    array = numpy.ones(size_mb * 125_000)
    with PeakMemory() as memory:
        start = time.monotonic()
        seconds = way(array) - start
    return seconds, memory.growth_bytes / 1e6


def report(size_mb: int, found: dict[str, list[tuple[float, float]]]) -> None:
    """Print one line for each way, with its ratio to in-band pickling."""
    base = statistics.median(seconds for seconds, _ in found["in-band through pipes"])
    for name, values in found.items():
        seconds = statistics.median(value[0] for value in values)
        grown = statistics.median(value[1] for value in values)
        line = f"| {size_mb:>5} MB | {name:24} | {seconds:8.3f} | {seconds / base:9.2f} |"
        print(f"{line} {grown:13.0f} |", flush=True)


def main() -> None:
    arguments = parse_arguments(__doc__.splitlines()[0], rounds=3, quick_rounds=1)
    in_band = InBand()  # first, while this process is small
    ways: dict[str, Callable[[Any], float]] = {"in-band through pipes": in_band.measure}
    missing = lacks("hydrogen_magic.driver.launcher")
    if missing:
        print(f"hydrogen_magic: not measured: {missing}")
    else:
        ways["hydrogen_magic, warm"] = product
    ways["torchrun, pickle file"] = by_torchrun
    print(f"closure: np {NP}, {arguments.rounds} rounds, {machine()}\n", flush=True)
    print("|     size | way                      | median s | x in-band | peak growth MB |")
    print(
        "|----------|--------------------------|----------|-----------|---------------|", flush=True
    )
    if not missing:
        measure(product, 0)  # the launch that makes it warm
    for size_mb in QUICK_SIZES_MB if arguments.quick else SIZES_MB:
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, way in ways.items():
                found[name].append(measure(way, size_mb))
        report(size_mb, found)
    in_band.close()


if __name__ == "__main__":
    if "--rank" in sys.argv:
        be_torchrun_rank(Path(sys.argv[-1]))
    else:
        main()
