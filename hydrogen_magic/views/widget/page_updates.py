"""Messages about a gang to pages: changes ten times a second, and what a new page keeps of all before.

Single-threaded: callers hold a lock. ``protocol.ts`` defines the messages. Each message has a budget for
each kind of data; data over it waits (curves, spans) or is dropped and counted (lines). The first messages
after the gang's end bring all the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.state.failure_report import report
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.driver.state.span_tracks import Key, SpanTrack, SpanTracks, newest
from hydrogen_magic.views.curves import ALL_RANKS, CurveChange, Curves
from hydrogen_magic.views.text_table import MOST_ROWS
from hydrogen_magic.views.widget.json_values import curve_part, span_part, stack_text
from hydrogen_magic.views.widget.live_lines import LiveLines
from hydrogen_magic.views.widget.rank_rows import followed_ranks
from hydrogen_magic.views.widget.state_diff import StateDiff

_HEARTBEAT_S = 1.0
"""A page without messages for a few seconds reports that."""
_BUCKETS_PER_S = 3000
"""120 kB a second: with all the rest less than 200 kB."""
_MOST_BUCKETS = 1000
"""Buckets in one message: 40 kB."""
_MANY_POINTS = 1000
_MANY_POINTS_EVERY_S = 0.19
"""With this many points per message, curves are updated in every other one: that takes half the time."""
_MOST_SPANS = 4000
"""Spans in one message: 60 kB."""
_MOST_SPANS_AT_ONCE = 64_000
"""Spans in each of several messages that follow each other at once: 1 MB."""
_MOST_SPANS_KEPT = 900_000
"""The newest spans, for a page that comes late: one with a million drops the oldest tenth."""
_CATCH_UP = 16
"""If more spans wait, this many messages send them: a track never lags far behind."""
_BLOCK = 4096
"""Events of the time without pages that are processed at a time; there may be millions."""
_MOST_STACKS = 64
"""Different stacks that are sent; those of a thousand ranks are mostly alike."""
_MOST_WATCHED = 16
_MOST_TURNED = 4
"""Pages whose ranks in the timeline are remembered: one that was closed or reloaded does not say so."""
_MOST_DETAIL_BUCKETS = 8192
"""Buckets of one series: twice the pixels of a wide screen."""


class PageMessage(NamedTuple):
    """A message as sent: JSON, and the binary columns it refers to."""

    content: dict[str, Any]
    buffers: list[bytes]


class PageUpdates:
    """Follows one gang and creates the messages about changes.

    Of more than 16 ranks, curves are sent of all ranks together, rank 0, failed ranks, and those requested
    by :meth:`watch`; spans are sent of these ranks, the first 16, and those requested by
    :meth:`watch_tracks`. ``is_raised``: a cell waits for the gang, and its error also shows the failure's
    traceback.
    """

    def __init__(self, *, is_raised: bool = False) -> None:
        self._is_raised = is_raised
        self.curves = Curves()
        self.tracks = SpanTracks()
        self._lines = LiveLines()
        self._diff = StateDiff()
        self._watched: tuple[int, ...] = ()
        self._watched_tracks: dict[str, tuple[int, ...]] = {}
        """Client -> ranks that its timeline shows; the client that turned last is the last one."""
        self._state = GangState()
        self._now_s = 0.0
        self._seq = 0
        self._sent_s = -math.inf
        self._allowed_buckets = float(_MOST_BUCKETS)
        self._curves_age_s = 0.0
        self._n_names_sent = 0
        self._spans_sent: dict[Key, int] = {}
        self._stacks: dict[str, Any] | None = None
        self._report: dict[str, Any] | None = None

    def update(
        self, state: GangState, fresh: Sequence[ev.Event], now_s: float
    ) -> PageMessage | None:
        """Return a ``Delta`` for all pages, None if nothing has changed.

        ``fresh``: the events since the last call; ``state`` is the state after them. There is at least one
        message a second while the gang runs.
        """
        is_restart = self._is_restart(fresh)
        elapsed_s = max(0.0, now_s - self._now_s)
        self._state, self._now_s = state, now_s
        self._feed(fresh)
        self._flush()
        buffers: list[bytes] = []
        content = self._changes(elapsed_s, fresh, buffers)
        if is_restart:
            content["restarted"] = True
        if not content and (state.is_terminal or now_s - self._sent_s < _HEARTBEAT_S):
            return None
        self._seq += 1
        self._sent_s = now_s
        return PageMessage({**self._head(), **content}, buffers)

    def begin(self, state: GangState, events: Sequence[ev.Event], now_s: float) -> None:
        """Process the events of the time without pages; no message has their lines and spans.

        :meth:`full` has those that a page keeps.
        """
        self._state, self._now_s = state, now_s
        for start in range(0, len(events), _BLOCK):
            self._feed(events[start : start + _BLOCK])
        self._flush()
        self._lines.skip(now_s)
        sizes = self.tracks.sizes()
        self._spans_sent = {key: sizes[key] for key in self._waiting_spans()}
        if any(rank.stacks for rank in state.ranks):
            self._stacks = self._all_stacks()

    def full(self, to: str) -> Iterator[PageMessage]:
        """Yield what was sent so far and a page keeps, as ``Delta``s for the client ``to``."""
        tracks = {key: self.tracks.spans(*key).part(0, n) for key, n in self._spans_sent.items()}
        kept, since_s = newest(tracks, _MOST_SPANS_KEPT)
        parts = list(_in_parts(kept))
        for place, part in enumerate(parts):
            buffers: list[bytes] = []
            content = {} if place else self._everything(buffers)
            if since_s and not place:
                content["spans_since_s"] = since_s
            content["spans"] = [span_part(*key, spans, buffers) for key, spans in part]
            content["parts_left"] = len(parts) - place - 1
            yield PageMessage({**self._head(), "to": to, **content}, buffers)

    def detail(self, request: Mapping[str, Any]) -> PageMessage:
        """Return the requested ``Detail``. Raises ValueError for an unknown metric."""
        metric, start, until = request["metric"], request["from"], request["until"]
        if metric not in self.curves.metrics():
            raise ValueError(f"there is no metric named {metric!r}")
        n_buckets = min(_MOST_DETAIL_BUCKETS, request["buckets"])
        width, series = self.curves.detail(metric, start, until, n_buckets)
        buffers: list[bytes] = []
        ranks = self._ranks()
        shown = {r: b for r, b in series.items() if ranks is None or r in ranks or r == ALL_RANKS}
        bad_steps, tip = self.curves.bad_steps(metric), self.curves.tip(metric)
        change = CurveChange(metric, width, shown, bad_steps, tip)
        head = {"kind": "detail", "to": request["client"], "id": request["id"]}
        part = curve_part(change, buffers)
        return PageMessage({**head, "from": start, "until": until, **part}, buffers)

    def watch(self, ranks: Sequence[int]) -> None:
        """Also send these ranks, at most 16, in place of those requested before.

        All pages show the same rows: the summary tells them which ranks were chosen.
        """
        self._watched = tuple(dict.fromkeys(rank for rank in ranks if rank >= 0))[:_MOST_WATCHED]
        self._diff.reset_interval()

    def watch_tracks(self, client: str, ranks: Sequence[int]) -> None:
        """Also send the spans of these ranks, at most 16, in place of those ``client`` requested before.

        Those that other pages requested are still sent, and the first 16, which a new page shows.
        """
        self._watched_tracks.pop(client, None)
        self._watched_tracks[client] = tuple(ranks[:MOST_ROWS])
        if len(self._watched_tracks) > _MOST_TURNED:
            del self._watched_tracks[next(iter(self._watched_tracks))]

    # ── input ────────────────────────────────────────────────────────────────────────────────────

    def _is_restart(self, events: Sequence[ev.Event]) -> bool:
        """Return whether pages must drop the stacks of an earlier attempt."""
        begins = any(isinstance(event, ev.AttemptStarted) for event in events)
        return begins and self._stacks is not None

    def _feed(self, events: Sequence[ev.Event]) -> None:
        self.curves.feed(events)
        self.tracks.feed(events)
        self._lines.feed(events, self._state.gang)
        if any(isinstance(event, ev.AttemptStarted) for event in events):
            self._stacks = None

    def _flush(self) -> None:
        self.tracks.flush(self._now_s)
        if self._state.is_terminal:
            self._lines.flush(self._now_s)

    # ── output ───────────────────────────────────────────────────────────────────────────────────

    def _head(self) -> dict[str, Any]:
        return {"kind": "delta", "seq": self._seq, "now_s": round(self._now_s, 3)}

    def _changes(
        self, elapsed_s: float, events: Sequence[ev.Event], buffers: list[bytes]
    ) -> dict[str, Any]:
        content = self._diff.changes(self._state, self._known_watched(), self._now_s, buffers)
        parts = {
            "curves": self._curve_changes(elapsed_s, buffers),
            "spans_since_s": self._skip_old_spans(),
            "spans": self._span_changes(buffers),
            **self._new_names(),
        }
        content.update({key: part for key, part in parts.items() if part})
        content.update(_lines_part(*self._lines.take(self._now_s)))
        if any(isinstance(event, ev.RankStacks) for event in events):
            self._stacks = self._all_stacks()
            content["stacks"] = self._stacks
        if self._report is None and self._state.state == "FAILED":
            content["report"] = self._report = self._failure()
        return content

    def _everything(self, buffers: list[bytes]) -> dict[str, Any]:
        """Return everything sent so far but spans; waiting data is sent to all pages later."""
        ranks = self._ranks()
        curves = [curve_part(change, buffers) for change in self.curves.full(ranks)]
        content: dict[str, Any] = {
            "full": True,
            **self._diff.full(buffers),
            "curves": curves,
            "names": self.tracks.names[: self._n_names_sent],
            **_lines_part(*self._lines.full()),
        }
        if self._stacks is not None:
            content["stacks"] = self._stacks
        if self._report is not None:
            content["report"] = self._report
        return content

    def _ranks(self) -> list[int] | None:
        """Return the ranks whose curves are sent; None: those of all ranks."""
        return followed_ranks(self._state, self._known_watched())

    def _known_watched(self) -> list[int]:
        return [rank for rank in self._watched if rank < len(self._state.ranks)]

    def _curve_changes(self, elapsed_s: float, buffers: list[bytes]) -> list[dict[str, Any]]:
        grown = self._allowed_buckets + elapsed_s * _BUCKETS_PER_S
        self._allowed_buckets = min(_MOST_BUCKETS, grown)
        self._curves_age_s += elapsed_s
        is_soon = self._curves_age_s < _MANY_POINTS_EVERY_S
        if is_soon and self.curves.n_new_points > _MANY_POINTS and not self._state.is_terminal:
            return []
        self._curves_age_s = 0.0
        most = math.inf if self._state.is_terminal else self._allowed_buckets
        changes = self.curves.changes(self._ranks(), most)
        n_sent = sum(len(b) for change in changes for b in change.series.values())
        self._allowed_buckets = max(0.0, self._allowed_buckets - n_sent)
        return [curve_part(change, buffers) for change in changes]

    def _span_changes(self, buffers: list[bytes]) -> list[dict[str, Any]]:
        waiting = sorted((n, key) for key, n in self._waiting_spans().items())
        n_waiting = sum(n for n, _ in waiting)
        is_end = self._state.is_terminal
        left = _MOST_SPANS_AT_ONCE if is_end else max(_MOST_SPANS, n_waiting // _CATCH_UP)
        parts = []
        for place, (n, key) in enumerate(waiting):
            taken = min(n, max(1, left // (len(waiting) - place)))
            left -= taken
            parts.append(self._next_spans(key, taken, buffers))
        return parts

    def _waiting_spans(self) -> dict[Key, int]:
        """Return (rank, track) -> number of spans that pages have not been sent."""
        ranks = self._ranks_of_tracks()
        return {
            key: n - self._spans_sent.get(key, 0)
            for key, n in self.tracks.sizes().items()
            if n > self._spans_sent.get(key, 0) and (ranks is None or key[0] in ranks)
        }

    def _skip_old_spans(self) -> float:
        """Leave out waiting spans that pages would drop at once; return the time before which, or 0.

        A page that turns to other ranks may ask for the spans of hours.
        """
        waiting = self._waiting_spans()
        if sum(waiting.values()) <= _MOST_SPANS_KEPT:
            return 0.0
        sizes = self.tracks.sizes()
        tracks = {
            key: self.tracks.spans(*key).part(sizes[key] - n, sizes[key])
            for key, n in waiting.items()
        }
        kept, since_s = newest(tracks, _MOST_SPANS_KEPT)
        self._spans_sent.update((key, sizes[key] - len(spans)) for key, spans in kept.items())
        return since_s

    def _ranks_of_tracks(self) -> set[int] | None:
        """Return the ranks whose spans are sent; None: those of all ranks."""
        followed = self._ranks()
        if followed is None:
            return None
        return {*followed, *range(MOST_ROWS), *chain(*self._watched_tracks.values())}

    def _next_spans(self, key: Key, n: int, buffers: list[bytes]) -> dict[str, Any]:
        start = self._spans_sent.get(key, 0)
        self._spans_sent[key] = start + n
        return span_part(*key, self.tracks.spans(*key).part(start, start + n), buffers)

    def _new_names(self) -> dict[str, Any]:
        """Return the names that pages have not been sent, and the index of the first one."""
        start = self._n_names_sent
        names = self.tracks.names[start:]
        self._n_names_sent += len(names)
        return {"names": names, "names_at": start} if names else {}

    def _all_stacks(self) -> dict[str, Any]:
        """Return the ranks' stacks as ``Stacks``, equal ones once.

        The rarest come first: a rank in a different place is the one that the others wait for.
        """
        ranks: dict[str, list[int]] = {}
        for rank in self._state.ranks:
            if rank.stacks:
                ranks.setdefault(stack_text(rank.stacks, self._state.cells), []).append(rank.rank)
        groups = sorted(ranks.items(), key=lambda group: len(group[1]))
        shown, others = groups[:_MOST_STACKS], groups[_MOST_STACKS:]
        return {
            "groups": [{"ranks": ranks, "text": text} for text, ranks in shown],
            "n_left_out": sum(len(ranks) for _, ranks in others),
        }

    def _failure(self) -> dict[str, Any]:
        culprit = self._state.culprit
        last = [] if culprit is None else self._lines.last_of(culprit)
        text = report(self._state, last)
        return {"text": text, "is_raised": self._is_raised}


def _in_parts(tracks: Mapping[Key, SpanTrack]) -> Iterator[list[tuple[Key, SpanTrack]]]:
    """Yield the spans in parts for one message each, at least one."""
    part: list[tuple[Key, SpanTrack]] = []
    n = 0
    for key, spans in tracks.items():
        for start in range(0, max(1, len(spans)), _MOST_SPANS_AT_ONCE):
            piece = spans.part(start, start + _MOST_SPANS_AT_ONCE)
            if n + len(piece) > _MOST_SPANS_AT_ONCE:
                yield part
                part, n = [], 0
            part.append((key, piece))
            n += len(piece)
    yield part


def _lines_part(lines: list[list[Any]], n_left_out: int) -> dict[str, Any]:
    part: dict[str, Any] = {"lines": lines} if lines else {}
    return {**part, "lines_skipped": n_left_out} if n_left_out else part
