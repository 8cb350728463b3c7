"""Closure: from the call until two ranks hold a captured array, and what that takes in memory.

    python benchmarks/closure.py --rounds 3

Every way ends when both ranks have read one number of each page of the array. Memory is the growth
of the whole process tree's proportional set size (PSS) over what it was before the call, the
caller's own array not counted, sampled every 20 ms in calls that are not timed.
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
from _common import answer_file, in_turn, torchrun
from _results import Table, parse_arguments, report

NP = 2
SIZES_MB = (0, 1, 100, 1000)
QUICK_SIZES_MB = (0, 1, 100)
IN_BAND = "pickled through pipes"
PAGE_NUMBERS = 512
"""Every 512th float64 lies on a page of its own (4 KiB)."""
PIPE_BYTES = 1 << 20
"""The most that Linux gives an ordinary user: the peers' pipes are made as fast as they can be."""
HELD_S = 0.2
"""So long a rank holds the array afterwards, for the memory to be sampled."""


def touch(array: Any) -> float:
    """Read one number of each page; return when that was done (a clock all processes share)."""
    import time

    pages = array[::PAGE_NUMBERS]
    assert float(pages.sum()) == len(pages)
    at_s = time.monotonic()
    time.sleep(HELD_S)
    return at_s


# ── the ways: each returns when its last rank held the array ─────────────────────────────────────


def product(array: Any) -> float:
    import hydrogen_magic as hm

    def cell() -> float:
        return touch(array)

    gang = hm.launch(cell, np=NP)
    gang.wait(300)
    return float(max(gang.results))


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
        torchrun(__file__, "--rank", str(path.parent))
        ranks = path.parent.glob("rank-*.json")
        return max(float(json.loads(rank.read_text())) for rank in ranks)


def be_torchrun_rank(folder: Path) -> None:
    array = pickle.loads((folder / "closure.pickle").read_bytes())
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(touch(array)))


# ── rounds ───────────────────────────────────────────────────────────────────────────────────────


Found = tuple[float, float]
"""Seconds until the last rank held the array, and the tree's growth in MB."""


def held_after_s(way: Callable[[Any], float], size_mb: int) -> float:
    import numpy

    array = numpy.ones(size_mb * 125_000)
    start = time.monotonic()
    return way(array) - start


def measure(way: Callable[[Any], float], size_mb: int) -> Found:
    from tests.memory import Memory

    seconds = held_after_s(way, size_mb)
    with Memory() as memory:  # sampling takes a part of a core
        held_after_s(way, size_mb)
    return seconds, (memory.peak - memory.before) / 1e6 - size_mb


def rows_of(size_mb: int, found: dict[str, list[Found]]) -> list[list[Any]]:
    """Return one row for each way, with its ratio to in-band pickling."""
    medians = {
        name: [*map(statistics.median, zip(*each, strict=True))] for name, each in found.items()
    }
    base_s = medians[IN_BAND][0]
    return [
        [f"{size_mb:,} MB", name, seconds, seconds / base_s, grown_mb]
        for name, (seconds, grown_mb) in medians.items()
    ]


def main() -> None:
    run = parse_arguments(__doc__.splitlines()[0], rounds=3, quick_rounds=1)
    in_band = InBand()  # first, while this process is small
    ways: dict[str, Callable[[Any], float]] = {
        IN_BAND: in_band.measure,
        "hydrogen_magic, warm": product,
        "torchrun, pickle file": by_torchrun,
    }
    print(f"closure: np {NP}, {run.rounds} rounds, {run.machine}", flush=True)
    held_after_s(product, 0)  # the launch that makes it warm
    rows = []
    for size_mb in QUICK_SIZES_MB if run.quick else SIZES_MB:
        found: dict[str, list[Found]] = {name: [] for name in ways}
        for number in range(run.rounds):
            for name in in_turn([*ways], number):
                found[name].append(measure(ways[name], size_mb))
        rows += rows_of(size_mb, found)
    in_band.close()
    columns = {"array": "", "": "", "median": "s", f"x {IN_BAND}": "", "peak growth": "MB"}
    report(run, Table("closure", "call until both ranks hold the array", columns, rows))


if __name__ == "__main__":
    if "--rank" in sys.argv:
        be_torchrun_rank(Path(sys.argv[-1]))
    else:
        main()
