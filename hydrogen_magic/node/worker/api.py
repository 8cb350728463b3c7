"""Functions that a cell calls on a rank: the rank's place in the gang, and reports to the views.

All of them also work in a plain process, which counts as the only rank and reports nothing.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from hydrogen_magic.core.library_types import is_a
from hydrogen_magic.core.processes import COOKIE
from hydrogen_magic.core.rank_gpu import gpu_of_rank
from hydrogen_magic.node.worker.reporting import metric_points as _points
from hydrogen_magic.node.worker.reporting import reporter as _reporter
from hydrogen_magic.node.worker.reporting import spans as _spans
from hydrogen_magic.node.wrapping import wraps

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Any])

_PROGRESS_S = 0.1
"""Maximum rate of reports about a bar: views redraw no faster."""


def rank() -> int:
    """Return this process's number in the gang, 0 to ``world_size() - 1``; 0 outside of one."""
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """Return this process's number among the ranks on the same machine; 0 outside of a gang."""
    return int(os.environ.get("LOCAL_RANK", 0))


def world_size() -> int:
    """Return the number of ranks in the gang; 1 outside of one."""
    return int(os.environ.get("WORLD_SIZE", 1))


def device() -> torch.device:
    """Return the device that this rank computes on.

    ``cuda:<local_rank>`` if the rank can see GPUs and torch can use them, ``cpu`` otherwise. If there are
    fewer GPUs than ranks (``--env CUDA_VISIBLE_DEVICES=0``), ranks share them in turn. The current device
    is not changed.

    Raises ImportError if torch is not installed.

    Example::

        model = Net().to(hm.device())
    """
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device(gpu_of_rank())


def log(step: int | None = None, **metrics: Any) -> None:
    """Report values of this rank, which are drawn as curves and kept in ``gang.metrics``.

    A call takes about a microsecond and never waits, neither for the GPU nor for a view.

    Args:
        step: The x value of the point, usually the training step. None counts the calls without
            a step: 0, 1, 2, …, from 0 in each attempt.
        **metrics: Numbers: Python's, NumPy's, or tensors of one element. A tensor on a GPU is
            copied there and read later. Several calls with one step end in one row.

    Raises:
        TypeError: A value is not a number, or ``step`` is not an integer.

    Example::

        hm.log(step, loss=loss, lr=scheduler.get_last_lr()[0])
    """
    reporter = _reporter.current()
    if reporter is not None:
        reporter.log(step, metrics)
        return
    _points.as_numbers(metrics)
    if step is not None:
        _points.as_step(step)
    is_child = multiprocessing.parent_process() is not None and COOKIE in os.environ
    if is_child and _reporter.may_warn():
        text = (
            f"hm.log() reports nothing here: this process, such as a worker of a DataLoader, was started by "
            f"rank {rank()}; return the values to the rank, and log them there"
        )
        try:
            warnings.warn(text, stacklevel=2)
        except UserWarning:  # python -W error: the values are no reason to end the process
            print(text, file=sys.stderr)


def track(iterable: Iterable[_T], total: float | None = None, desc: str = "") -> Track[_T]:
    """Iterate over ``iterable`` and show the progress of this rank.

    Args:
        iterable: The items to iterate over.
        total: Number of items; None takes ``len(iterable)``, or an unknown length.
        desc: The label of the bar.

    Example::

        for images, labels in hm.track(loader, desc="epoch 1"):
            ...
    """
    return Track(iterable, total, desc)


class Track(Generic[_T]):
    """The iterable that :func:`track` returns; every iteration over it has its own progress bar."""

    def __init__(self, iterable: Iterable[_T], total: float | None, desc: str) -> None:
        self._iterable = iterable
        self._total = _length(iterable) if total is None else total
        self._desc = desc

    def __len__(self) -> int:
        if self._total is None or not 0 <= self._total <= sys.maxsize:
            raise TypeError("this hm.track() has no length: pass total=…")
        return int(self._total)

    def __bool__(self) -> bool:
        return self._total != 0  # bool() would otherwise call __len__, which may raise

    def __iter__(self) -> Iterator[_T]:
        reporter = _reporter.current()
        bar = -1 if reporter is None else reporter.bars.new()
        n = _n_skipped(self._iterable)
        self._report(bar, n)
        due = time.monotonic() + _PROGRESS_S
        try:
            for item in self._iterable:
                yield item
                n += 1
                if time.monotonic() >= due:
                    self._report(bar, n)
                    due = time.monotonic() + _PROGRESS_S
        finally:
            self._report(bar, n, closed=True)

    def _report(self, bar: int, n: int, closed: bool = False) -> None:
        # Evaluated each time: a process forked inside the loop must not report.
        reporter = _reporter.current()
        if reporter is not None and bar >= 0:
            reporter.bars.update(bar, str(self._desc), n, self._total, closed=closed)


def _n_skipped(iterable: Any) -> int:
    """Return how many batches a resumed stream leaves out, also one that a DataLoader reads."""
    stream = (
        iterable if getattr(iterable, "num_workers", 0) else getattr(iterable, "dataset", iterable)
    )
    is_stream = is_a(stream, "hydrogen_magic.node.worker.data.parquet_stream", "ParquetStream")
    return int(stream.n_skipped) if is_stream else 0


def _length(iterable: Iterable[Any]) -> int | None:
    try:
        return len(iterable)  # type: ignore[arg-type]
    except (TypeError, OverflowError):  # it has no length, or one that len() cannot represent
        return None


class span:  # noqa: N801  used like a function, as contextlib.suppress is
    """Name an interval of time for the timeline: a context manager and a decorator.

    Spans of one thread nest. The decorator records a span for every call of a function, and for ``async``
    functions from their first to their last line.

    Args:
        name: The label in the timeline.

    Example::

        with hm.span("forward"):
            loss = model(batch)

        @hm.span("evaluate")
        def evaluate(): ...
    """

    def __init__(self, name: str) -> None:
        self._name = str(name)
        self._open: list[tuple[int, int]] = []

    def __enter__(self) -> span:
        self._open.append((time.monotonic_ns(), _spans.depth.spans))
        _spans.depth.spans += 1
        return self

    def __exit__(self, *error: object) -> None:
        end = time.monotonic_ns()
        start, depth = self._open.pop()
        _spans.depth.spans -= 1
        reporter = _reporter.current()
        if reporter is not None:
            # Not before the gang's launch, for a span opened before the reporter started.
            start_ns = max(0, reporter.at_ns(start))
            reporter.span(self._name, start_ns, reporter.at_ns(end), depth)

    def __call__(self, function: _F) -> _F:
        name = self._name
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with span(name):
                    return await function(*args, **kwargs)

            return cast("_F", awaited)

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with span(name):
                return function(*args, **kwargs)

        return cast("_F", called)
