"""A rank's share of Parquet data as a stream of batches, for a share larger than memory.

    row groups ─► pools ─► blocks of arrays, mixed ─► batches
    └─────────── a thread, one block ahead ──────┘

The order depends on the seed, the epoch and the rank alone, and the sizes of row groups are in the files'
footers: a stream that continues in the middle of an epoch reads nothing of the batches before.
"""

from __future__ import annotations

import functools
import mmap
import operator
import os
import pickle
import sys
import zlib
from collections.abc import Iterator, Mapping
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, TypeVar

from hydrogen_magic.node.worker.data import batch_kinds
from hydrogen_magic.node.worker.data.batch_kinds import BatchKind, check_shapes, cut, joined, picked
from hydrogen_magic.node.worker.data.index_share import IndexShare
from hydrogen_magic.node.worker.data.parquet_shard import RowGroups, in_file_order, mixed, pools
from hydrogen_magic.node.worker.import_hooks import hooks

T = TypeVar("T")


@dataclass(frozen=True)
class StreamOptions:
    share: IndexShare
    seed: int | None
    """None: the rows are in the order of their files."""
    batch_size: int
    kind: str
    """Of :data:`~hydrogen_magic.node.worker.data.batch_kinds.KINDS`."""


def stream(dataset: Any, options: StreamOptions) -> ParquetStream:
    """Return the share as an iterable of batches; see ``hm.shard``."""
    try:
        size = operator.index(options.batch_size)
    except TypeError:
        size = 0
    if size < 1:
        raise ValueError(
            f"hm.shard() needs a whole number as batch_size, at least 1, got {options.batch_size!r}"
        )
    # Not a base class: ranks that read with NumPy or JAX do not import torch.
    hooks.add("torch.utils.data.dataset", _register)
    hooks.add("torch.utils.data.dataloader", _watch)
    return ParquetStream(dataset, options)


@dataclass
class _Place:
    """How far an iteration is."""

    n_done: int = 0
    """Batches that it has yielded, with those that it skipped."""
    is_finished: bool = False
    """The last batch was asked for in vain."""


class ParquetStream:
    """The batches of one rank: what :func:`hydrogen_magic.shard` returns for Parquet data in batches.

    torch's DataLoader accepts it as a ``torch.utils.data.IterableDataset``. ``len()`` is the number of
    batches, which is the same on every rank.
    """

    def __init__(self, dataset: Any, options: StreamOptions) -> None:
        self._dataset = dataset
        self._options = options
        self._epoch = 0
        self._place = _Place()
        """The one in :meth:`state_dict`: of the iteration that has yielded last."""
        self.n_skipped = 0
        """Batches that the next iteration skips: a loaded state has them."""
        self._n_loaded = 0
        """Those of the epoch of a loaded state: as many, or more if its iteration was finished."""
        self._in_workers = mmap.mmap(-1, 1)  # shared with processes that are forked
        self._made_in = self._pid = os.getpid()
        self._n_state_workers = 0
        """Of the DataLoader in one of whose workers that state was taken; 0: in none."""
        groups = RowGroups.of(dataset, None)
        self._n_all_rows = groups.n_rows
        sizes = [group.n_rows for group in groups.groups]
        self._layout = None if options.seed is None else zlib.crc32(repr(sizes).encode())
        """Tells row groups of other sizes, which a shuffle would mix in another order."""
        start, stop = options.share.bounds(self._n_all_rows)
        self.n_rows: int = stop - start
        """Rows of this rank."""

    @property
    def is_in_workers(self) -> bool:
        """Whether workers of a DataLoader take the batches: their number is not known in this process."""
        return bool(self._in_workers[0])

    @is_in_workers.setter
    def is_in_workers(self, value: bool) -> None:
        if value or os.getpid() == self._made_in:  # a child must not clear what its parent knows
            self._in_workers[0] = value

    def __len__(self) -> int:
        return -(-self.n_rows // self._options.batch_size)

    def __iter__(self) -> Iterator[Any]:
        self._place, self.n_skipped, self._n_loaded = _Place(self.n_skipped), 0, 0
        self.is_in_workers = bool(_loader_worker()[1])
        return self._counted(self._place)

    def _counted(self, place: _Place) -> Iterator[Any]:
        for batch in self._batches(place.n_done):
            place.n_done += 1
            self._place = place
            yield batch
        place.is_finished = True

    def _batches(self, n_skipped: int) -> Iterator[Any]:
        if n_skipped:
            self._check_workers()
        if self._pid != os.getpid():
            self._dataset, self._pid = _after_fork(self._dataset), os.getpid()
        size, first_row = self._options.batch_size, self._options.share.bounds(self._n_all_rows)[0]
        first, end = _of_loader_worker(len(self))
        start, stop = first_row + first * size, first_row + min(end * size, self.n_rows)
        kind = batch_kinds.KINDS[self._options.kind]
        blocks = _ahead(self._blocks(start, stop, n_skipped * size, kind))
        for rows in _in_batches(blocks, size):
            yield kind.batch(rows)

    def _blocks(
        self, start: int, stop: int, n_skipped: int, kind: BatchKind
    ) -> Iterator[tuple[int, Any]]:
        """Yield the rows in their final order, without the first ``n_skipped``: their number, and a block."""
        seed = self._seed()
        groups = RowGroups.of(self._dataset, seed)
        pieces = groups.pieces(start, stop)
        for pool in pools(pieces) if seed is not None else ([piece] for piece in pieces):
            n_rows = sum(piece.n_rows for piece in pool)
            if n_skipped < n_rows:
                rows = groups.read(pool)
                if seed is None:
                    block = cut(kind.block(in_file_order(rows, pool)), n_skipped, n_rows)
                else:
                    block = picked(kind.block(rows), mixed(pool, seed)[n_skipped:])
                yield n_rows - n_skipped, block
            n_skipped = max(0, n_skipped - n_rows)

    def _check_workers(self) -> None:
        """Refuse to continue where a loader has other workers: each mixes its own part of the rows."""
        _, n_workers = _loader_worker()
        if n_workers != self._n_state_workers:
            raise ValueError(
                f"this state was taken with num_workers={self._n_state_workers} of the DataLoader, but this "
                f"one has num_workers={n_workers}: use as many, or start the epoch again with set_epoch()"
            )

    def _seed(self) -> str | None:
        # A random number generator takes text: no two epochs have the same order by accident.
        return None if self._options.seed is None else f"{self._options.seed} {self._epoch}"

    # ── epochs, and continuing in one ──

    def set_epoch(self, epoch: int) -> None:
        """Choose the random order of the next iteration; call it on all ranks alike.

        The epoch of a loaded state keeps its place in the epoch, another one begins at its start.

        Raises TypeError if ``epoch`` is not an integer.
        """
        try:
            epoch = operator.index(epoch)
        except TypeError:
            raise TypeError(f"set_epoch() needs a whole number, got {epoch!r}") from None
        is_same = epoch == self._epoch
        self._n_loaded = self.n_skipped = self._n_loaded if is_same else 0
        self._place = _Place(self._place.n_done if is_same else 0)
        self._epoch, self.is_in_workers = epoch, False

    def state_dict(self) -> dict[str, int | None]:
        """Return the epoch and the number of batches that were taken from it, for :meth:`load_state_dict`.

        They are those of the iteration that has yielded the last batch. To evaluate inside of a training
        loop, use another stream.

        Ranks that take the same number of batches have equal states, so that the one that rank 0 saves
        with ``hm.checkpoint`` is right for all. In workers of a DataLoader each has its own:
        ``torchdata``'s ``StatefulDataLoader`` collects these, a plain ``DataLoader`` does not. To continue,
        the loader needs the same ``num_workers``.

        Raises RuntimeError if workers of a plain ``DataLoader`` have taken batches of this epoch.
        """
        n_workers = _loader_worker()[1]
        if self.is_in_workers and not n_workers:
            raise RuntimeError(
                "workers of the DataLoader take the batches, so how many were taken is not known here: use "
                "num_workers=0 (a thread reads ahead), or StatefulDataLoader of torchdata; or call "
                "set_epoch() with the next epoch before"
            )
        # A worker that has finished its part of an epoch does not begin the next one alone.
        is_finished = self._place.is_finished and not n_workers
        place = {"epoch": self._epoch, "batch": self._place.n_done, "workers": n_workers}
        return {**place, "finished": int(is_finished), **self._identity()}

    def load_state_dict(self, state: Mapping[str, int | None]) -> None:
        """Let the next iteration continue after the last batch before :meth:`state_dict`.

        If that iteration was finished, the next one begins at the start, unless :meth:`set_epoch` names the
        finished epoch: then no batch is left.

        Raises ValueError if the remaining rows would not be those that are left: if the state is of another
        number of rows, of a shuffle of row groups of other sizes, or of another batch size, seed or number of
        ranks.
        """
        changed = [name for name, value in self._identity().items() if state.get(name) != value]
        if changed:
            was, now = (
                {name: each.get(name) for name in changed} for each in (state, self._identity())
            )
            raise ValueError(
                f"this state belongs to a stream with {_listed(was)}, but this one has {_listed(now)}: "
                "restore these, or start the epoch again with set_epoch()"
            )
        self._epoch = int(state["epoch"] or 0)
        self._n_loaded, is_finished = int(state["batch"] or 0), bool(state.get("finished"))
        self.n_skipped = 0 if is_finished else self._n_loaded
        self._place = _Place(self._n_loaded, is_finished=is_finished)
        self._n_state_workers = int(state.get("workers") or 0)
        self.is_in_workers = False

    def _identity(self) -> dict[str, int | None]:
        share = self._options.share
        return {
            "rows": self._n_all_rows,
            "row_groups": self._layout,
            "ranks": share.world_size,
            "batch_size": self._options.batch_size,
            "seed": self._options.seed,
            "drop_last": share.drop_last,
        }

    # ── kinds of batches ──

    def to_torch(self) -> Any:
        """Return the same stream with dicts of torch tensors, by column."""
        return self._of_kind("torch")

    def to_numpy(self) -> Any:
        """Return the same stream with dicts of NumPy arrays, by column."""
        return self._of_kind("numpy")

    def to_jax(self) -> Any:
        """Return the same stream with dicts of JAX arrays, by column."""
        return self._of_kind("jax")

    def to_tf(self) -> Any:
        """Return the same stream with dicts of TensorFlow tensors, by column."""
        return self._of_kind("tf")

    def to_arrow(self) -> Any:
        """Return the same stream with tables of PyArrow."""
        return self._of_kind("arrow")

    def _of_kind(self, kind: str) -> ParquetStream:
        return _restored(self._dataset, replace(self._options, kind=kind), self._state())

    # ── pickling, for DataLoader workers started by spawn ──

    def __reduce__(self) -> Any:
        return _restored, (self._dataset, self._options, self._state())

    def _state(self) -> tuple[int, int, int, int]:
        return self._epoch, self.n_skipped, self._n_loaded, self._n_state_workers


def _restored(
    dataset: Any, options: StreamOptions, state: tuple[int, int, int, int]
) -> ParquetStream:
    found = stream(dataset, options)
    found._epoch, found.n_skipped, found._n_loaded, found._n_state_workers = state
    found._place = _Place(found._n_loaded, is_finished=found.n_skipped < found._n_loaded)
    return found


def _after_fork(dataset: Any) -> Any:
    """Return the Dataset for a forked process, which cannot use the connections and threads of a store."""
    from pyarrow import fs

    if not isinstance(dataset.filesystem, fs.LocalFileSystem):
        with suppress(Exception):  # a file system of the user's own may refuse
            return pickle.loads(pickle.dumps(dataset))
    return dataset


def _register(module: ModuleType) -> None:
    """Have a DataLoader accept streams; ``module`` is ``torch.utils.data.dataset``."""
    module.IterableDataset.register(ParquetStream)


@functools.cache
def _watch(module: ModuleType) -> None:
    """Note streams that workers will read; ``module`` is ``torch.utils.data.dataloader``.

    A worker notes it itself when it begins, also for a stream inside of another dataset. That is later, and
    has no effect here if the worker was started by spawn.
    """
    iterator: Any = module._MultiProcessingDataLoaderIter
    original = iterator._reset

    @functools.wraps(original)
    def reset(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(loader.dataset, ParquetStream):
            loader.dataset.is_in_workers = True
        original(self, loader, *args, **kwargs)

    iterator._reset = reset


def _of_loader_worker(n_batches: int) -> tuple[int, int]:
    """Return the batches of a DataLoader's worker, in one of which this may run."""
    here, n_workers = _loader_worker()
    if n_workers == 0:
        return 0, n_batches
    return n_batches * here // n_workers, n_batches * (here + 1) // n_workers


def _loader_worker() -> tuple[int, int]:
    """Return the number of this worker of a DataLoader, and how many there are; 0 of 0 in none."""
    data = sys.modules.get("torch.utils.data")
    worker = None if data is None else data.get_worker_info()
    return (0, 0) if worker is None else (worker.id, worker.num_workers)


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """Yield the items, each of them made by a thread while the one before is used.

    Each thread makes one item: TensorFlow may keep an iterator whose loop has ended for a long time.
    """
    coming = _made_by_thread(items)
    try:
        while (item := coming.result()) is not None:
            coming = _made_by_thread(items)
            yield item
    finally:
        futures.wait([coming])


def _made_by_thread(items: Iterator[T]) -> futures.Future[T | None]:
    reader = futures.ThreadPoolExecutor(1, "hydrogen_magic-read")
    try:
        return reader.submit(next, items, None)
    finally:
        reader.shutdown(wait=False)


def _in_batches(blocks: Iterator[tuple[int, Any]], size: int) -> Iterator[Any]:
    """Yield parts of blocks; a batch with rows of several is a copy."""
    n_rest, rest = 0, None
    shapes: dict[str, Any] = {}
    for n_rows, block in blocks:
        check_shapes(block, shapes)
        first = 0
        if n_rest:
            first = min(size - n_rest, n_rows)
            n_rest, rest = n_rest + first, joined(rest, cut(block, 0, first))
            if n_rest < size:
                continue
            yield rest
        end = first + (n_rows - first) // size * size
        for start in range(first, end, size):
            yield cut(block, start, start + size)
        n_rest, rest = n_rows - end, cut(block, end, n_rows)
    if n_rest:
        yield rest
