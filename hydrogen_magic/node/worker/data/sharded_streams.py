"""A rank's share of a torch IterableDataset."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import islice
from typing import Any


def every_nth(data: Any, rank: int, world_size: int, drop_last: bool) -> Any:
    """Return an IterableDataset that yields one item of every ``world_size`` items of ``data``.

    The shares have equal lengths although the total is unknown: an item is yielded after its whole round
    has been read. Items of an incomplete last round are repeated, or dropped with ``drop_last``. With fewer
    items than ranks, the last round is as short as the data.

    A worker of a DataLoader reads ``data`` as usual: datasets that split themselves among the workers
    (``get_worker_info``) still do so, and others are read once per worker.
    """
    return _class_of_streams()(data, rank, world_size, drop_last)


@functools.lru_cache(maxsize=1)
def _class_of_streams() -> Any:
    """Return the class of the result of :func:`every_nth`; its base class is only imported on use."""
    from torch.utils.data import IterableDataset

    class Shard(IterableDataset):  # type: ignore[misc]
        def __init__(self, data: Any, rank: int, world_size: int, drop_last: bool) -> None:
            self.dataset = data
            self._numbers = rank, world_size, drop_last

        def __iter__(self) -> Iterator[Any]:
            return _every_nth(iter(self.dataset), *self._numbers)

        def __len__(self) -> int:
            _, world_size, drop_last = self._numbers
            n_items = len(self.dataset)  # TypeError for an unknown length, as usual
            return n_items // world_size if drop_last else -(-n_items // world_size)

        def __reduce__(self) -> Any:  # for DataLoader workers started by spawn
            return every_nth, (self.dataset, *self._numbers)

    return Shard


def _every_nth(items: Iterator[Any], rank: int, world_size: int, drop_last: bool) -> Iterator[Any]:
    while round_ := list(islice(items, world_size)):
        if len(round_) == world_size or not drop_last:
            yield round_[rank % len(round_)]
