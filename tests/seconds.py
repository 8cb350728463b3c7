"""Spans in seconds, as a person writes them down."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hydrogen_magic.core import events as ev

__all__ = ["rows_of", "spans"]


def spans(
    at_s: float,
    rank: int,
    names: Iterable[str],
    starts_s: Iterable[float],
    ends_s: Iterable[float],
    depths: Iterable[int],
    skipped: int = 0,
    track: str = ev.SPANS,
) -> ev.Spans:
    return ev.Spans(
        at_s,
        rank,
        tuple(names),
        _nanoseconds(starts_s),
        _nanoseconds(ends_s),
        tuple(depths),
        skipped,
        track,
    )


def rows_of(event: ev.Spans) -> Iterator[tuple[str, float, float, int]]:
    """Yield name, start, end and depth."""
    rows = zip(event.names, event.starts_ns, event.ends_ns, event.depths, strict=True)
    return ((name, start / 1e9, end / 1e9, depth) for name, start, end, depth in rows)


def _nanoseconds(times_s: Iterable[float]) -> tuple[int, ...]:
    return tuple(round(time_s * 1e9) for time_s in times_s)
