"""The ranks' output for pages: the newest lines, at a limited rate."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.units import counted
from hydrogen_magic.driver.state.output_lines import OutputLine, OutputLines, clean

MOST_LINES = 500
"""Lines of one message; at ten messages a second, no reader follows more."""
MOST_KEPT = 2000
"""Number of lines that a new page gets."""
LONGEST_LINE = 4000
"""Characters of a line; the rest is in the rank's file."""

_BYTES_PER_S = 80_000
_MOST_AT_ONCE_BYTES = 160_000
"""A long traceback of every rank passes completely; an endless stream is thinned out."""
_KEPT_BYTES = 1 << 20
_MOST_NOTES = 8
"""Ranks that get a note of their own about lines that are not shown."""
_LAST_OF_RANK = 10
_STREAMS = {"stdout": 0, "stderr": 1, ev.DRIVER: 0}
_NOTE = 2

_OF_LINES = (ev.Output, ev.InputRequested, ev.RankExited, ev.AttemptStarted)

_JsonLine = list[Any]
"""Rank, stream, text, time: ``OutputLine`` of the protocol."""


class LiveLines:
    """Lines of all ranks, assembled, shortened, and dropped if there are too many."""

    def __init__(self) -> None:
        self._output = OutputLines()
        self._waiting: list[tuple[OutputLine, float]] = []
        self._kept: deque[tuple[OutputLine, float]] = deque(maxlen=MOST_KEPT)
        self._last: dict[int, deque[str]] = {}
        self._n_before = 0
        """Number of lines before the kept ones, including dropped ones."""
        self._allowed_bytes = float(_MOST_AT_ONCE_BYTES)
        self._taken_s = 0.0

    def feed(self, events: Iterable[ev.Event], gang: str) -> None:
        """Process events that bring or end lines; other kinds are ignored."""
        for event in events:
            if isinstance(event, _OF_LINES):
                self._add(self._output.feed((event,), gang), event.at_s)

    def flush(self, at_s: float) -> None:
        """Complete unfinished lines: no more output will follow."""
        self._add(self._output.flush(), at_s)

    def take(self, now_s: float) -> tuple[list[_JsonLine], int]:
        """Return new lines, and how many were dropped before them."""
        elapsed_s = max(0.0, now_s - self._taken_s)
        self._taken_s = now_s
        grown = self._allowed_bytes + elapsed_s * _BYTES_PER_S
        self._allowed_bytes = min(_MOST_AT_ONCE_BYTES, grown)
        taken, n_left_out, spent = self._take_newest(MOST_LINES, self._allowed_bytes)
        self._allowed_bytes -= spent
        return [_json(*line) for line in taken], n_left_out

    def skip(self, now_s: float) -> None:
        """Keep new lines for :meth:`full` without a limit for messages: no page gets them by one."""
        self._taken_s = now_s
        self._take_newest(MOST_KEPT, _KEPT_BYTES)

    def _take_newest(
        self, most: int, most_bytes: float
    ) -> tuple[list[tuple[OutputLine, float]], int, int]:
        """Keep the newest of the new lines; return these, the number of others, and their size."""
        taken, spent = _newest(self._waiting, most, most_bytes)
        dropped = self._waiting[: len(self._waiting) - len(taken)]
        # A note counts as one of the lines it replaces.
        n_noted = sum(max(0, line.n_left_out - 1) for line, _ in self._waiting)
        notes = _notes(dropped)
        n_left_out = len(dropped) + n_noted - len(notes)
        taken = [*notes, *taken]
        self._waiting = []
        self._keep(taken, n_left_out)
        return taken, n_left_out, spent

    def full(self) -> tuple[list[_JsonLine], int]:
        """Return the last lines, and how many there were before them."""
        newest, _ = _newest(self._kept, MOST_KEPT, _KEPT_BYTES)
        return [_json(*line) for line in newest], self._n_before + len(self._kept) - len(newest)

    def last_of(self, rank: int) -> list[str]:
        """Return the last ten lines of one rank."""
        return list(self._last.get(rank, ()))

    def _add(self, lines: Iterable[OutputLine], at_s: float) -> None:
        for line in lines:
            self._waiting.append((line, at_s))
            if line.stream in _STREAMS:
                self._last.setdefault(line.rank, deque(maxlen=_LAST_OF_RANK)).append(line.text)

    def _keep(self, taken: list[tuple[OutputLine, float]], n_left_out: int) -> None:
        n_over = max(0, len(self._kept) + len(taken) - MOST_KEPT)
        # Dropped lines are between kept lines: a page that connects later is informed of them
        # before those.
        self._n_before += n_over + n_left_out
        self._kept.extend(taken)


def _newest(
    lines: Iterable[tuple[OutputLine, float]], most: int, most_bytes: float
) -> tuple[list[tuple[OutputLine, float]], int]:
    """Return the newest lines that fit, oldest first, and their approximate size in a message."""
    found: list[tuple[OutputLine, float]] = []
    spent = 0
    for line in reversed(list(lines)):
        size = len(line[0].text[:LONGEST_LINE].encode("utf-8", "replace")) + 30
        if len(found) >= most or spent + size > most_bytes:
            break
        spent += size
        found.append(line)
    return found[::-1], spent


def _notes(dropped: Sequence[tuple[OutputLine, float]]) -> list[tuple[OutputLine, float]]:
    """Return notes that take the place of lines: one for each rank, or for all if there are many."""
    n_lines = Counter[int]()
    for line, _ in dropped:
        n_lines[line.rank] += max(1, line.n_left_out)
    if len(n_lines) > _MOST_NOTES:
        of_all = f"... {counted(n_lines.total(), 'line')} of {len(n_lines)} ranks not shown here"
        return [(OutputLine(min(n_lines), "note", of_all), dropped[-1][1])]
    return [
        (OutputLine(rank, "note", f"... {counted(n, 'line')} not shown here"), dropped[-1][1])
        for rank, n in sorted(n_lines.items())
    ]


def _json(line: OutputLine, at_s: float) -> _JsonLine:
    return [line.rank, _STREAMS.get(line.stream, _NOTE), _shortened(line.text), round(at_s, 3)]


def _shortened(text: str) -> str:
    if len(text) <= LONGEST_LINE:
        return text
    return f"{clean(text[:LONGEST_LINE])} … {len(text) - LONGEST_LINE} characters more"
