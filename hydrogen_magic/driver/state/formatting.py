"""Text forms of numbers, times, sizes and ranks, for all views."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hydrogen_magic.core.events import ClosureSent, RowsDone
from hydrogen_magic.core.units import counted, first_of, size_text
from hydrogen_magic.driver.state.collective_waits import LateRanks


def duration(seconds: float) -> str:
    """Return ``0.4 s``, ``35 s``, ``2:05`` or ``1:02:05``."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:  # or it would be rounded to 10.0
        return f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float) -> str:
    """Return a number for a table: ``0.2134``, ``12.4``, ``1234.5``, ``1.2e-05``, ``nan``."""
    if not math.isfinite(value):
        return str(float(value))
    if float(value).is_integer() and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.1f}" if 10 <= abs(value) < 1e6 else f"{value:.4g}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 1``, ``ranks 0, 2 and 3`` or ``ranks 0 to 127``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    if len(ranks) > 8:
        return f"ranks {first_of(map(str, ranks), 8)}"
    *others, last = ranks
    return f"ranks {', '.join(map(str, others))} and {last}"


def late_text(late: LateRanks) -> str:
    """Return ``ranks waited for rank 1 in collectives: 34 % of the time``."""
    share = f"{100 * late.share:.0f} % of the time"
    return f"ranks waited for {ranks_text(late.ranks)} in collectives: {share}"


def progress_text(rows: RowsDone, is_over: bool = False) -> str:
    """Return ``1,200 of 5,000 rows · 800 rows/s · 4.8 s left · 4 chunks in flight · 12 rows failed``.

    On Spark also ``3 of 8 tasks``, or only that if the rows are unknown.
    """
    parts = [] if rows.tasks and not rows.done else _rows_texts(rows)
    left_s = None if is_over else _rows_left_s(rows)
    if left_s is not None:
        parts.append(f"{duration(left_s)} left")
    if rows.tasks:
        parts.append(f"{rows.tasks_done or 0:,} of {counted(rows.tasks, 'task')}")
    if rows.in_flight and not is_over:
        parts.append(f"{counted(rows.in_flight, 'chunk')} in flight")
    if rows.failed:
        parts.append(f"{counted(rows.failed, 'row')} failed")
    return " · ".join(parts)


def _rows_texts(rows: RowsDone) -> list[str]:
    if rows.total is None:
        parts = [counted(rows.done, "row")]
    else:
        about = "about " if rows.is_estimate else ""
        parts = [f"{rows.done:,} of {about}{counted(rows.total, 'row')}"]
    rate = _rows_per_s(rows)
    if rate is not None:
        parts.append(f"{rate:,.0f} rows/s")
    return parts


def _rows_per_s(rows: RowsDone) -> float | None:
    """Return the average rate of all ranks together, None before the first results."""
    elapsed_s, done = rows.at_s - rows.began_s, rows.done - rows.resumed
    return done / elapsed_s if done and elapsed_s > 0 else None


def _rows_left_s(rows: RowsDone) -> float | None:
    """Return the remaining time by the finished rows or else tasks; None: unknown."""
    done, total = rows.done - rows.resumed, rows.total
    total = None if total is None else total - rows.resumed
    if not done:
        done, total = rows.tasks_done or 0, rows.tasks
    elapsed_s = rows.at_s - rows.began_s
    return (total - done) * elapsed_s / done if done and total and elapsed_s > 0 else None


def closure_text(sent: ClosureSent) -> str:
    """Return ``sending the closure: 3.1 GB of 100 GB, complete on 12 of 100 hosts``."""
    sizes = f"{size_text(sent.sent_bytes)} of {size_text(sent.total_bytes)}"
    return f"sending the {sent.what}: {sizes}, complete on {sent.hosts_done} of {sent.hosts} hosts"
