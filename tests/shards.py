"""Shares of every rank in one process, and Parquet data to share. Ranks import it: no pytest."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydrogen_magic as hm
from hydrogen_magic.node import dataset_handle


def parts(data: Any, world_size: int, **options: Any) -> list[Any]:
    """Return what each of so many ranks gets."""
    outside = dict(os.environ)
    got = []
    try:
        for rank in range(world_size):
            os.environ.update(WORLD_SIZE=str(world_size), RANK=str(rank))
            got.append(hm.shard(data, **options))
        return got
    finally:
        os.environ.clear()
        os.environ.update(outside)


def rows_of(batches: Any) -> list[int]:
    """Return the values of ``x`` in all batches, of whatever kind."""
    columns = (batch["x"] for batch in batches)
    return [
        int(x) for column in columns for x in getattr(column, "to_pylist", lambda c=column: c)()
    ]


def read_here(rows: Any, *unread: Any) -> tuple[int, int, str]:
    """Return the number and the sum of this rank's rows of a handle, and the folder of its host's data."""
    received = os.path.join(os.environ[dataset_handle.FOLDER], rows.name)
    columns = [batch["x"] for batch in hm.shard(rows, batch_size=4096).to_numpy()]
    n_rows, total = sum(map(len, columns)), sum(int(x.sum()) for x in columns)
    return n_rows, total, received if os.path.isdir(received) else rows.path


def n_files_here(rows: Any) -> int:
    """Return how many files of a handle's data this rank's host has received; reads none of them."""
    return len(os.listdir(os.path.join(os.environ[dataset_handle.FOLDER], rows.name)))


def are_all_numbers(found: Sequence[tuple[int, int, str]], n_rows: int) -> bool:
    """Whether ranks have read the numbers below ``n_rows`` with :func:`read_here`."""
    counts, totals, _ = zip(*found, strict=True)
    return sum(counts) == n_rows and sum(totals) == sum(range(n_rows))


def read_again(rows: Any, folder: str) -> tuple[int, int, str]:
    """Like :func:`read_here`; the first attempt fails once there is a file ``deleted``."""
    found = read_here(rows)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        Path(folder, "read").touch()
        while not os.path.exists(os.path.join(folder, "deleted")):
            time.sleep(0.01)
        raise RuntimeError("on purpose")
    return found


def write_parquet(folder: Path) -> Path:
    """Write three files in two directories, of 10, 0 and 13 rows, in groups of at most 4."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    x = pa.array(range(23))
    pieces = {
        "year=2025/part-0": (0, 10),
        "year=2026/part-0": (10, 0),
        "year=2026/part-1": (10, 13),
    }
    for name, (start, length) in pieces.items():
        path = folder / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"x": x.slice(start, length)}), path, row_group_size=4)
    (folder / "_SUCCESS").touch()
    return folder
