"""Stretches of time on a rank: how deep they nest, and how they leave it as columns."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from hydrogen_magic import events as ev

__all__ = ["LONGEST_NAME", "Span", "as_events", "depth"]

LONGEST_NAME = 200
"""Characters: more than anybody draws, and thousands of them still make a small message."""

Span = tuple[int, str, float, float, int, str]
"""Number, name, start, end (seconds on the gang's clock), depth, track."""


class _Depth(threading.local):
    spans = 0
    """How many are open on this thread, whoever opened them."""


depth = _Depth()


def as_events(at_s: float, rank: int, spans: Sequence[Span], skipped: int) -> Iterator[ev.Spans]:
    """Yield one event for each track; ``skipped`` is told with the first."""
    tracks: dict[str, list[Span]] = {ev.SPANS: []} if skipped else {}
    for span in spans:
        tracks.setdefault(span[5], []).append(span)
    for track, own in tracks.items():
        _, names, starts, ends, depths, _ = zip(*own, strict=True) if own else ((),) * 6
        names = tuple(name[:LONGEST_NAME] for name in names)
        yield ev.Spans(at_s, rank, names, starts, ends, depths, skipped, track)
        skipped = 0
