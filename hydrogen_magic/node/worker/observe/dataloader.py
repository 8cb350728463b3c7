"""Observer of the waits for data: the start of a DataLoader's iterator, and every batch.

It also detects a forgotten ``DistributedSampler``: a rank trains, and reads all of a data set that each has.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from types import ModuleType
from typing import Any

from hydrogen_magic.core.library_types import derives_from
from hydrogen_magic.node.worker.observe import helpers
from hydrogen_magic.node.worker.observe.span_recording import recorded
from hydrogen_magic.node.worker.reporting import reporter as _reporter
from hydrogen_magic.node.wrapping import wraps

_WAIT = "data wait"
_LIBRARY = "torch.utils.data"
_sent: dict[int, tuple[weakref.ref[Any], int]] = {}
"""Data sets that came with a closure, and their lengths, by their identities."""
_BY_RANK = frozenset({"rank", "get_rank", "world_size", "get_world_size", "environ", "getenv"})
"""Names in the code of a data set that may read other samples on each rank."""
_seen = helpers.for_each_gang(list[str])
"""The hint, once it was decided whether to give it."""


def attach(module: ModuleType) -> None:
    """Record the waits, and see epochs; ``module`` is ``torch.utils.data.dataloader``."""
    iterator, loader = module._BaseDataLoaderIter, module.DataLoader
    next_batch = recorded(_WAIT, iterator.__next__)

    @wraps(next_batch)
    def __next__(self: Any) -> Any:  # noqa: N807
        try:
            return next_batch(self)
        except StopIteration:
            _end_epoch(self)
            raise

    iterator.__next__ = __next__
    loader.__iter__ = helpers.followed(recorded(_WAIT, loader.__iter__), _begin_epoch)


def note_sent(value: Any) -> None:
    """Note a value that every rank was sent, if it is a data set of torch, or a DataLoader with one."""
    value = value.dataset if derives_from(type(value), _LIBRARY, "DataLoader") else value
    if derives_from(type(value), _LIBRARY, "Dataset") and not _depends_on_rank(type(value)):
        with contextlib.suppress(Exception):  # of the user's __len__; an IterableDataset has none
            _sent[id(value)] = weakref.ref(value), len(value)


def _depends_on_rank(kind: type[Any]) -> bool:
    methods = (getattr(kind, name, None) for name in ("__getitem__", "__getitems__", "__len__"))
    codes = (code for each in methods if (code := getattr(each, "__code__", None)))
    return any(not _BY_RANK.isdisjoint(code.co_names) for code in codes)


def _begin_epoch(epoch: Any, loader: Any) -> None:
    reporter = _reporter.current()
    epoch._hydrogen_start = sys.maxsize if reporter is None else reporter.steps.count


@helpers.safely
def _end_epoch(epoch: Any) -> None:
    reporter = _reporter.current()
    start = getattr(epoch, "_hydrogen_start", sys.maxsize)  # set by DataLoader's own __iter__
    if reporter is None or reporter.rank or _seen() or not _has_read_all(epoch):
        return
    n_batches = len(epoch._index_sampler)
    if reporter.steps.count < start + max(2, n_batches):
        return  # a rank that takes every other batch takes fewer steps
    _seen().append(
        f"reads all {n_batches} batches of a data set that every rank has: to give each rank its share, pass"
        " hm.shard(dataset), or sampler=DistributedSampler(dataset), to the DataLoader"
    )
    if reporter.exchanges.is_data_parallel():
        reporter.notice("info", *_seen())


def _has_read_all(epoch: Any) -> bool:
    """Return whether an iterator has read each sample of a data set that every rank was sent."""
    torch, batches, data = sys.modules[_LIBRARY], epoch._index_sampler, epoch._dataset
    sampler = batches.sampler if type(batches) is torch.BatchSampler else batches
    if type(sampler) not in (torch.RandomSampler, torch.SequentialSampler) or id(data) not in _sent:
        return False
    sent, n_samples = _sent[id(data)]
    is_once = not getattr(sampler, "replacement", False) and len(sampler) == len(data) == n_samples
    is_all = is_once and sampler.data_source is data and epoch._num_yielded == len(batches)
    return is_all and sent() is data
