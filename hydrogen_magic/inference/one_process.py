"""Whether the ranks are faster than one process, which is measured on the first chunks.

Until a rank has answered some chunks alone, with the threads of all cores, the others get none. It has one
chunk at a time: a second one would still use these threads while the other ranks predict.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

_FIRST_LIMIT_S = 0.5
_FIRST_LIMIT_OF_MANY_S = 5.0
"""How long other ranks wait for the first answer: longer if one batch is a small part of the rows."""
_MANY_BATCHES = 20
"""Per rank."""
_MORE_LIMIT_S = 0.25
"""How long they wait after it."""
_LONG_S = 0.05
"""Chunks that take as long are measured well enough, without a first one that is shorter: warming up takes
most of it."""
_MOST_CHUNKS = 3
"""Of a fast predict they have 1, 8 and 64 batches; sending takes most of the time of a single one. The chunks
of a slower one are as small as :data:`_LONG_S` allows: a predict that holds the GIL uses one core of many."""
_SHARED_S = 5.0
"""How long all ranks predict before their rate is compared."""
_MIN_LOSS_S = 1.0
"""A loss that a user would notice."""


@dataclass
class OneProcessTiming:
    """``batch_size`` and ``n_rows``: of the frame; ``n_rows`` is None if it is not known."""

    n_ranks: int
    batch_size: int
    n_rows: int | None
    clock: Callable[[], float] = time.monotonic
    rank: int | None = None
    """The rank that predicts alone."""
    is_over: bool = False
    """True from the start: one process is not timed, as where the ranks are on other machines."""
    row_s: float | None = None
    """Time of one row in one process; None if no chunk was answered in time."""
    cell_s: float = 0.0
    """How long the cell ran before its ``predict`` was known."""
    _n_chunks: int = 0
    """Answered so far."""
    _measured_s: float = 0.0
    _until_s: float = 0.0
    _shared_since: tuple[float, int] = (0.0, 0)
    """When all ranks began to predict, and the rows done by then."""
    _has_warned: bool = False

    def __post_init__(self) -> None:
        self.is_over = self.is_over or self.n_ranks == 1

    def may_send(self, rank: int, in_flight: int) -> bool:
        """Return whether ``rank`` may get a chunk now; ``in_flight``: how many it has."""
        if self.rank is None:
            many = _MANY_BATCHES * self.n_ranks * self.batch_size
            has_many = self.n_rows is not None and self.n_rows >= many
            limit_s = _FIRST_LIMIT_OF_MANY_S if has_many else _FIRST_LIMIT_S
            self.rank, self._until_s = rank, self.clock() + limit_s
        self.is_over = self.is_over or self.clock() > self._until_s
        return self.is_over or (rank == self.rank and not in_flight)

    def most_rows(self, limit: int) -> int:
        """Return how many rows the next chunk may have: whole batches, at most ``limit``."""
        if self.is_over or self.row_s is None:
            return limit
        n_batches = math.ceil(_LONG_S / self.row_s / self.batch_size)
        return min(limit, n_batches * self.batch_size)

    def answered(self, rank: int, seconds: float, n_rows: int) -> None:
        """Take note of an answer."""
        if self.is_over or rank != self.rank or not n_rows:
            return
        if self.row_s is None:
            self._until_s = self.clock() + _MORE_LIMIT_S
        self._n_chunks += 1
        self._measured_s += seconds if self._n_chunks > 1 or seconds > _LONG_S else 0.0
        self.row_s = min(seconds / n_rows, self.row_s or seconds)
        self.is_over = self._measured_s > _LONG_S or self._n_chunks == _MOST_CHUNKS

    def left(self, rank: int) -> None:
        """Take note of a rank that has ended."""
        self.is_over = self.is_over or rank == self.rank

    def warning(self, rows: int, elapsed_s: float, *, is_last: bool = False) -> str | None:
        """Return a text, once, if one process would be faster.

        ``rows``: rows done; ``elapsed_s``: since the gang was started; ``is_last``: all rows are done.
        """
        if not self.is_over or self.row_s is None or self._has_warned or self.n_ranks == 1:
            return None
        text = self._of_whole(rows, elapsed_s) if is_last else self._of_rates(rows)
        self._has_warned = text is not None
        return text

    def _of_whole(self, rows: int, elapsed_s: float) -> str | None:
        alone_s = self.cell_s + rows * (self.row_s or 0.0)
        if elapsed_s - alone_s < _MIN_LOSS_S or elapsed_s < 1.2 * alone_s:
            return None
        return (
            f"{self.n_ranks} ranks took {elapsed_s:.1f} s; one process would take about {alone_s:.1f} s,"
            f" by its time for the first rows: {_ALTERNATIVE}"
        )

    def _of_rates(self, rows: int) -> str | None:
        now_s = self.clock()
        if not self._shared_since[0]:
            self._shared_since = now_s, rows
        seconds, done = now_s - self._shared_since[0], rows - self._shared_since[1]
        alone_rate = 1 / max(self.row_s or 0.0, 1e-9)
        if seconds < _SHARED_S or not done or done / seconds * 1.2 > alone_rate:
            return None
        return (
            f"{self.n_ranks} ranks predict {done / seconds:,.0f} rows/s; one process predicted"
            f" {alone_rate:,.0f} rows/s on the first rows: {_ALTERNATIVE}"
        )


_ALTERNATIVE = (
    "use --np 1, or call predict in the notebook. A predict that uses all cores, or a small frame, gains"
    " nothing from more ranks"
)
