"""Reads Horovod's timeline on rank 0's host while it is written, for the view and for the record.

Rank 0 reports where its Horovod writes (:mod:`.observe.timeline`). A poll, four times a second, reads new
data and takes milliseconds at most: if events arrive faster, the view lags behind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.frameworks.horovod.node.timeline_file import cut
from hydrogen_magic.frameworks.horovod.node.timeline_spans import SpanBuilder
from hydrogen_magic.node.agent.timeline_following import ShippedFile, TimelineFollower

_LOOK_S = 0.25
_BUDGET_S = 0.025
"""Time limit of a poll; the agent has to watch its ranks."""
_CHUNK_BYTES = 128 << 10
"""Bytes read at a time: some 2,000 events, a millisecond."""
_FINISH_S = 2.0
"""Time limit for reading the rest, which takes milliseconds."""


class Timelines(TimelineFollower):
    """The timelines of rank 0's Horovod in one attempt: one file after the other."""

    def __init__(self, zero_s: float, emit: Callable[[ev.Event], None]) -> None:
        self.kept: list[ShippedFile] = []
        """Those that belong to the gang's record."""
        self._zero_s = zero_s
        self._emit = emit
        self._following: _Follower | None = None
        self._rank = 0
        self._next_s = 0.0

    def turn_to(self, rank: int, timeline: msg.TimelineFile) -> None:
        """Follow the file of ``timeline`` from now on, and none where its path is empty."""
        self.finish()
        if not timeline.path:
            return
        self._rank = rank
        path = Path(timeline.path)
        kept = ShippedFile(path) if timeline.is_kept else None
        if kept is not None:
            self.kept.append(kept)
        self._following = _Follower(path, kept, self._zero_s + timeline.wall_ahead)

    def poll(self) -> None:
        """Send new data; most calls do nothing."""
        following = self._following
        if following is not None and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LOOK_S
            self._try(following, lambda: following.poll(self._now_s()))

    def finish(self) -> None:
        """Read the rest of a completed file, and close its brackets."""
        following, self._following = self._following, None
        if following is not None:
            self._try(following, following.finish)
            following.close()

    def _try(self, following: _Follower, read: Callable[[], None]) -> None:
        try:
            read()
        except Exception as error:  # a rank wrote it: watching the ranks must continue
            self._following = None
            following.close()
            text = f"Horovod's timeline can no longer be read: {error}"
            self._emit(ev.Notice(self._now_s(), "warning", text))
        self._send(following.drain())

    def _send(self, spans: Sequence[tuple[str, int, int, int]]) -> None:
        if not spans:
            return
        names, starts_ns, ends_ns, depths = zip(*spans, strict=True)
        event = ev.Spans(
            self._now_s(), self._rank, names, starts_ns, ends_ns, depths, 0, ev.COORDINATOR
        )
        self._emit(event)

    def _now_s(self) -> float:
        return time.monotonic() - self._zero_s


class _Follower:
    """One file. ``wall_zero_s``: the wall-clock time at the gang's time 0."""

    def __init__(self, path: Path, kept: ShippedFile | None, wall_zero_s: float) -> None:
        self._path = path
        self._kept = kept
        self._wall_zero_s = wall_zero_s
        self._origin_s: float | None = None
        """The gang's time at the timeline's time 0."""
        self._fd = -1
        self._read = 0
        """Bytes that have been read, up to the end of an event."""
        self._weaver = SpanBuilder()

    def poll(self, now_s: float) -> None:
        """Continue reading, for some milliseconds at most."""
        until_s = time.monotonic() + _BUDGET_S
        while self._read_on() and time.monotonic() < until_s:
            pass
        if self._origin_s is not None:
            is_all_read = self._behind() < _CHUNK_BYTES
            now_us = int((now_s - self._origin_s) * 1e6)
            self._weaver.cut_long(now_us if is_all_read else None)

    def finish(self) -> None:
        """Read to the end, up to a limit, and close its brackets."""
        until_s = time.monotonic() + _FINISH_S
        while (is_more := self._read_on()) and time.monotonic() < until_s:
            pass
        if is_more:  # the rest is kept in the record, but not drawn
            self._read += max(0, self._behind() - _CHUNK_BYTES)
            self._advance(cut(os.pread(self._fd, _CHUNK_BYTES, self._read)).n_bytes)
        if self._kept is not None and self._fd >= 0:
            self._close_brackets()

    def drain(self) -> list[tuple[str, int, int, int]]:
        """Return the spans that ended since the last call, on the gang's clock, in nanoseconds."""
        spans = self._weaver.drain()
        if self._origin_s is None:
            return []
        origin_ns = round(self._origin_s * 1e9)
        return [(n, origin_ns + s * 1000, origin_ns + e * 1000, depth) for n, s, e, depth in spans]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    # ── reading ──

    def _behind(self) -> int:
        """Return how many bytes are unread; opens the file when it exists."""
        if self._fd < 0:
            try:
                flags = os.O_RDWR if self._kept is not None else os.O_RDONLY
                # The path may name a pipe, where a read must not block.
                self._fd = os.open(self._path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                return 0
        return os.fstat(self._fd).st_size - self._read

    def _read_on(self) -> bool:
        """Read a chunk; return whether there may be more."""
        if self._behind() <= 0:
            return False
        data = os.pread(self._fd, _CHUNK_BYTES, self._read)
        found = cut(data)
        if found.origin_us is not None:
            self._origin_s = found.origin_us / 1e6 - self._wall_zero_s
        self._weaver.take(found.events)
        n_bytes = found.n_bytes
        if n_bytes == 0 and len(data) == _CHUNK_BYTES:
            n_bytes = _CHUNK_BYTES  # a tensor's name fills the chunk
        self._advance(n_bytes)
        return n_bytes > 0

    def _advance(self, n_bytes: int) -> None:
        self._read += n_bytes
        if self._kept is not None:
            self._kept.settled = self._read

    def _close_brackets(self) -> None:
        """Leave complete objects and a bracket: a killed rank leaves half an object, or a comma."""
        if self._read == 0:
            self._path.unlink(missing_ok=True)  # nothing was recorded
            return
        if os.pread(self._fd, 2, self._read) != b"]":
            os.ftruncate(self._fd, self._read)
            os.pwrite(self._fd, b"]", self._read)
