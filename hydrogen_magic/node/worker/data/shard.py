"""This rank's even share of common data: ``hm.shard(data)``.

Shares are contiguous slices: arrays, frames and tensors are not copied. All ranks get the same number of
items, since the first to finish an epoch would wait for the others in its next collective.
The kind of data determines how items are taken. No library is imported for data of another library.
"""

from __future__ import annotations

import operator
import os
import random
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from hydrogen_magic.core.library_types import is_a
from hydrogen_magic.core.units import counted
from hydrogen_magic.node import dataset_handle
from hydrogen_magic.node.dataset_handle import DatasetHandle
from hydrogen_magic.node.worker import api
from hydrogen_magic.node.worker.data import parquet_shard, parquet_stream, sharded_streams
from hydrogen_magic.node.worker.data.batch_kinds import picked
from hydrogen_magic.node.worker.data.index_share import IndexShare
from hydrogen_magic.serialization.object_paths import describe

_TAKEN = (
    "It accepts a list, tuple, range or other sequence, a NumPy array, a torch tensor or "
    "Dataset, a pandas, Polars or Arrow frame or column, a dict of these, a handle of "
    "hm.dataset(), or the path, URL or glob of Parquet data, or a list of names that end in .parquet."
)

_SUFFIX = ".parquet"
_BATCH_SIZE = 1024
"""Of a handle's stream."""
_REMEDIES = {
    "generator": "make it a list first",
    "set": "sets have no order that all ranks agree on: use sorted(…)",
    "frozenset": "sets have no order that all ranks agree on: use sorted(…)",
    "deque": "make it a list first",
    "DataLoader": "shard its dataset, then make the DataLoader",
    "LazyFrame": "collect() it first, or pass the path of the Parquet data",
    "bytes": "a path is a str or a pathlib.Path",
}
"""Advice for objects that cannot be sharded directly."""


def shard(
    data: Any,
    *,
    drop_last: bool = False,
    shuffle: bool = False,
    seed: int = 0,
    batch_size: int | None = None,
) -> Any:
    """Return this rank's share of ``data``, which has the same length on every rank.

    Rank ``r`` gets the ``r``-th slice of ``data``, in its order; a view if the kind of data has views. In a
    plain process, which is the only rank, the share is all of it.

    Args:
        data: Data that is the same on every rank:

            * a list, tuple, range or other sequence that can be sliced,
            * a NumPy array, a torch tensor or another array, along its first axis,
            * a pandas, Polars or Arrow frame, table or column, by rows,
            * a dict of these, all of one length: every value's share, so that rows stay together,
            * a map-style torch Dataset: gives a ``torch.utils.data.Subset``; a Dataset of Hugging
              Face: gives one,
            * a torch IterableDataset: gives one that goes through all of it and yields every
              ``world_size``-th item, so all ranks must see the same items in the same order,
            * the path, URL or glob of Parquet data, a list of these that all end in ``.parquet``, or a
              PyArrow Dataset of Parquet files: gives a ``pyarrow.Table``; only row groups with rows of
              this rank are read. Files are read in the order of their paths. URLs are those of
              object stores (``s3://`` or ``s3a://``, ``abfss://``, ``gs://``, ``hdfs://``), ``dbfs:/``, and
              those that fsspec knows; credentials are those of the rank's environment,
            * a handle of :func:`hydrogen_magic.dataset`: gives a stream of batches, dicts of torch tensors
              by column (without torch, of NumPy arrays).
        drop_last: What happens when the length cannot be divided. False: no item is left out, and
            at most ``world_size - 1`` items are on two ranks, as in ``DistributedSampler``;
            they are at the borders of two slices (of an IterableDataset: in its last round). True: the
            last ``len % world_size`` items are on no rank.
        shuffle: Distribute the items in random order, the same on all ranks; for data that is sorted
            by its labels. This copies, and takes half a second per million items. Of Parquet data, row
            groups are distributed in random order, and the rows of a share mixed.
        seed: The seed of the random order, an int.
        batch_size: For Parquet data and handles. Return a stream of batches of this many rows, the last one
            with the rest, in place of one table; 1,024 by default for a handle. Every rank gets the same
            number of batches. Of a path they are tables of PyArrow. A thread reads ahead, a few
            row groups at a time, so the share may be larger than memory. With ``shuffle=True`` it mixes
            the rows of several row groups. See
            :class:`~hydrogen_magic.node.worker.data.parquet_stream.ParquetStream` for epochs, for
            continuing in the middle of one, and for other kinds of batches. A
            ``DataLoader(part, batch_size=None)`` takes it, with any number of workers; with
            ``persistent_workers=True`` they keep the order of the first epoch.

    Raises:
        TypeError: Such data cannot be divided, or it cannot be streamed in batches; the seed is no int.
        ValueError: There are fewer items than ranks, or a dict's values differ in length, or the data at
            the path is not Parquet.
        FileNotFoundError: There is nothing at the path; names the nearest existing folder. The data of
            a handle is not on this host.
        OSError: A URL cannot be read.
        ImportError: The package that reads URLs of this scheme is not installed.
        RuntimeError: The data of a handle has changed since :func:`hydrogen_magic.dataset` was called.

    Example::

        loader = DataLoader(hm.shard(dataset), batch_size=32, shuffle=True)
    """
    share = IndexShare(api.rank(), api.world_size(), drop_last)
    order = _whole_number(seed) if shuffle else None
    if isinstance(data, DatasetHandle):
        kind = "torch" if find_spec("torch") else "numpy"
        size = _BATCH_SIZE if batch_size is None else batch_size
        options = parquet_stream.StreamOptions(share, order, size, kind)
        return parquet_stream.stream(_opened(data), options)
    if _is_parquet(data):
        dataset = parquet_shard.open_dataset(data)
        if batch_size is not None:
            options = parquet_stream.StreamOptions(share, order, batch_size, "arrow")
            return parquet_stream.stream(dataset, options)
        return parquet_shard.table(dataset, share, order)
    if batch_size is not None:
        raise TypeError(
            f"hm.shard(batch_size=…) streams Parquet data, not a {describe(data)}: pass the handle that "
            "hm.dataset() returns for it in the notebook"
        )
    if is_a(data, "torch.utils.data", "IterableDataset"):
        if shuffle:
            raise ValueError(
                "hm.shard(shuffle=True) cannot shuffle an IterableDataset, which is read in its own "
                "order: shuffle what it reads"
            )
        return sharded_streams.every_nth(data, share.rank, share.world_size, drop_last)
    if isinstance(data, Mapping):
        return _shard_mapping(data, share, order)
    kind_of_data = _kind_of(data)
    return _part(data, kind_of_data, kind_of_data.count(data), share, order)


def _whole_number(seed: object) -> int:
    try:
        return operator.index(seed)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"hm.shard(shuffle=True) got seed={seed!r}: pass an int, the same one on all ranks, which "
            "must agree on the order"
        ) from None


# ── Parquet data ─────────────────────────────────────────────────────────────────────────────────


def _is_parquet(data: Any) -> bool:
    if isinstance(data, (list, tuple)):  # other lists of names, such as those of images, are items
        return bool(data) and all(_is_parquet_name(item) for item in data)
    return isinstance(data, (str, os.PathLike)) or is_a(data, "pyarrow._dataset", "Dataset")


def _is_parquet_name(item: Any) -> bool:
    if not isinstance(item, (str, os.PathLike)):
        return False
    name = str(item)
    return name.endswith(_SUFFIX) or f"{_SUFFIX}?" in name  # with the options of a URL


def _opened(handle: DatasetHandle) -> Any:
    """Return the PyArrow Dataset of a handle, with the rows that the notebook has seen in it."""
    try:
        dataset = parquet_shard.open_dataset(_path_here(handle))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"the data of hm.dataset() is in {handle.place}, which does not exist on this host "
            f"({socket.gethostname()}): it was deleted, or only the notebook's machine has it; call "
            "hm.dataset(frame, path=…) with a folder or URL that all hosts can read"
        ) from error
    n_rows = parquet_shard.RowGroups.of(dataset, None).n_rows
    if n_rows != handle.n_rows:
        raise RuntimeError(
            f"{handle.place} has {counted(n_rows, 'row')} on this host, but had {handle.n_rows} when "
            "hm.dataset() was called: do not change the data meanwhile, or call hm.dataset() again"
        )
    return dataset


def _path_here(handle: DatasetHandle) -> str | tuple[str, ...]:
    """Return where this host has the data: in its agent's folder if it was sent here."""
    folder = os.environ.get(dataset_handle.FOLDER)
    if folder and handle.name and os.path.isdir(received := os.path.join(folder, handle.name)):
        return received
    return handle.path


# ── parts ────────────────────────────────────────────────────────────────────────────────────────


def _part(data: Any, kind: _Kind, n_items: int, share: IndexShare, seed: int | None) -> Any:
    start, stop = share.bounds(n_items)
    if seed is None:
        return kind.cut(data, start, stop)
    order = list(range(n_items))
    random.Random(seed).shuffle(order)  # the same whatever libraries a rank has loaded
    return kind.pick(data, order[start:stop])


def _shard_mapping(data: Mapping[Any, Any], share: IndexShare, seed: int | None) -> dict[Any, Any]:
    kinds = {name: _kind_of(value) for name, value in data.items()}
    counts = {name: kind.count(data[name]) for name, kind in kinds.items()}
    if len(set(counts.values())) != 1:
        said = ", ".join(f"{name!r}: {count}" for name, count in counts.items())
        differ = f"a dict whose values differ in length ({said}), but their items belong together"
        raise ValueError(f"hm.shard() got {differ if counts else 'an empty dict'}")
    n_items = next(iter(counts.values()))
    return {name: _part(data[name], kind, n_items, share, seed) for name, kind in kinds.items()}


# ── kinds of data ────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Kind:
    """Functions that take items from data of one kind."""

    count: Callable[[Any], int]
    cut: Callable[[Any, int, int], Any]
    """Items from a start to an end, not copied if possible."""
    pick: Callable[[Any, list[int]], Any]
    """Copies of the items with these indices."""


def _kind_of(data: Any) -> _Kind:
    """Return the kind of data that can be sliced; raise TypeError for other data."""
    packages = _packages(data)
    if is_a(data, "torch.utils.data", "Dataset") and hasattr(data, "__len__"):
        return _DATASET
    if "pyspark" in packages:
        raise TypeError(
            f"hm.shard() cannot take a {describe(data)}, which exists only in the notebook's "
            "process and on the cluster: call hm.dataset() on it in the notebook, and pass the handle"
        )
    if "datasets" in packages and hasattr(data, "select"):
        return _TABLE_OF_EXAMPLES
    if "pandas" in packages and hasattr(data, "iloc"):
        return _PANDAS
    if packages & {"polars", "pyarrow"} and hasattr(data, "slice") and hasattr(data, "__len__"):
        return _POLARS if "polars" in packages else _ARROW
    if getattr(data, "shape", None) is not None and hasattr(data, "__getitem__"):
        return _ARRAY
    if isinstance(data, Sequence) and type(data).__name__ not in _REMEDIES:
        _refuse_tuple_of_arrays(data)
        return _SEQUENCE
    raise TypeError(_refusal(data))


def _packages(data: Any) -> set[str]:
    return {base.__module__.partition(".")[0] for base in type(data).__mro__}


def _refuse_tuple_of_arrays(data: Any) -> None:
    """Refuse ``hm.shard((x, y))``, which would give x to one rank and y to another."""
    if isinstance(data, tuple) and data and all(getattr(item, "shape", None) for item in data):
        raise TypeError(
            f"hm.shard() got a tuple of {len(data)} arrays: to get this rank's rows of each, pass "
            'a dict, hm.shard({"x": x, "y": y}); to divide the arrays themselves among the '
            "ranks, pass a list, hm.shard(list(…))"
        )


def _refusal(data: Any) -> str:
    remedy = _REMEDIES.get(type(data).__name__)
    if remedy is None and hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        remedy = "shard its indices, hm.shard(range(len(data)))"
    elif remedy is None and hasattr(data, "shard"):  # of tf.data, and streams of Hugging Face
        remedy = "call its own shard(hm.world_size(), hm.rank())"
    elif remedy is None and hasattr(data, "__iter__"):
        remedy = "make it a list first"
    hint = f": {remedy}" if remedy else ""
    return f"hm.shard() cannot take a {describe(data)}{hint}. {_TAKEN}"


# ── taking items ─────────────────────────────────────────────────────────────────────────────────


def _slice(data: Any, start: int, stop: int) -> Any:
    return data[start:stop]


def _slice_sequence(data: Any, start: int, stop: int) -> Any:
    try:
        return data[start:stop]
    except TypeError as error:
        message = f"hm.shard() cannot slice a {describe(data)} ({error}): make it a list first"
        raise TypeError(message) from error


def _slice_by_length(data: Any, start: int, stop: int) -> Any:
    return data.slice(start, stop - start)


def _slice_pandas(data: Any, start: int, stop: int) -> Any:
    # A shallow copy: pandas 2 would warn of every column added to a slice.
    return data.iloc[start:stop].copy(deep=False)


def _subset(data: Any, numbers: Sequence[int]) -> Any:
    return sys.modules["torch.utils.data"].Subset(data, numbers)


def _pick_items(data: Any, numbers: list[int]) -> Any:
    picked = [data[number] for number in numbers]
    return tuple(picked) if isinstance(data, tuple) else picked


def _pick_rows(data: Any, numbers: list[int]) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        return data[torch.tensor(numbers)]
    if _packages(data) & {"tensorflow"}:
        return sys.modules["tensorflow"].gather(data, numbers)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return data[numbers]
    if isinstance(data, numpy.ndarray):
        return data[numpy.array(numbers)]
    # In increasing order: h5py takes no other, and what is on a disk is read faster.
    order = numpy.argsort(numbers)
    return data[numpy.array(numbers)[order]][numpy.argsort(order)]


def _pick_arrow(data: Any, numbers: list[int]) -> Any:
    return picked(data, numbers) if hasattr(data, "column_names") else data.take(numbers)


def _count_rows(data: Any) -> int:
    if len(data.shape) == 0:
        raise TypeError(
            f"hm.shard() got a {describe(data)} without dimensions: a single value cannot be "
            "divided"
        )
    return int(data.shape[0])


_SEQUENCE = _Kind(len, _slice_sequence, _pick_items)
_ARRAY = _Kind(_count_rows, _slice, _pick_rows)
_PANDAS = _Kind(len, _slice_pandas, lambda data, numbers: data.iloc[numbers])
_POLARS = _Kind(len, _slice_by_length, lambda data, numbers: data[numbers])
_ARROW = _Kind(len, _slice_by_length, _pick_arrow)
_TABLE_OF_EXAMPLES = _Kind(
    len,
    lambda data, start, stop: data.select(range(start, stop)),
    lambda data, numbers: data.select(numbers),
)
"""A Dataset of Hugging Face: it has a shape too, but its slices are dicts."""
_DATASET = _Kind(len, lambda data, start, stop: _subset(data, range(start, stop)), _subset)
