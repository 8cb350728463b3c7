"""Streams that are sharded, read by the worker processes of a DataLoader."""

from __future__ import annotations

import pytest

import hydrogen_magic as hm


def test_a_stream_is_read_by_a_loaders_fresh_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They unpickle it. Each reads all of it, as it would without ``hm.shard``."""
    import torch

    class_of_items = torch.utils.data.datapipes.iter.IterableWrapper  # a class they can import
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    part = hm.shard(class_of_items(range(10)))
    loader = torch.utils.data.DataLoader(
        part, batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    assert list(loader) == [1, 5, 9]
