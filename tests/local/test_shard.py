"""Streams that are sharded, read by the worker processes of a DataLoader."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

import hydrogen_magic as hm
from tests.shards import parts


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.exhaustive)])
def test_a_stream_is_read_by_a_loaders_fresh_workers(
    start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They unpickle it. Each reads all of it, as it would without ``hm.shard``."""
    import torch

    class_of_items = torch.utils.data.datapipes.iter.IterableWrapper  # a class they can import
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    part = pickle.loads(pickle.dumps(hm.shard(class_of_items(range(10)))))
    loader = torch.utils.data.DataLoader(
        part, batch_size=None, num_workers=1, multiprocessing_context=start
    )
    assert list(loader) == [1, 5, 9]


def test_an_array_of_a_file_is_shuffled(tmp_path: Path) -> None:
    """h5py reads rows in increasing order only."""
    h5py = pytest.importorskip("h5py")
    rows = np.arange(20).reshape(10, 2)
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = rows
        found = parts(file["x"], 2, shuffle=True)
    assert np.array_equal(found, parts(rows, 2, shuffle=True))
