"""Reads Horovod's timeline on rank 0's host while it is written, for the view and for the record.

Rank 0 reports where its Horovod writes (:mod:`.observe.timeline`). A poll, four times a second, reads new
data and takes milliseconds at most: if events arrive faster, some are omitted from the view, and counted,
but never from the file.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.masking import Mask
from hydrogen_magic.frameworks.horovod.node.timeline_file import (
    ParsedEvents,
    count_spans,
    cut,
    last_border,
    named_tensors,
)
from hydrogen_magic.frameworks.horovod.node.timeline_spans import SpanBuilder
from hydrogen_magic.node.agent.timeline_following import ShippedFile, TimelineFollower

_LOOK_S = 0.25
_BUDGET_S = 0.025
"""Time limit of a poll; the agent has to watch its ranks."""
_CHUNK_BYTES = 128 << 10
"""Bytes read at a time: some 2,000 events, a millisecond."""
_FAR_BEHIND_BYTES = 2 << 20
"""If more is unread, this much is skipped: over a second of the busiest training."""
_PASS_OVER_BYTES = 1 << 20
"""Bytes skipped at a time: some milliseconds."""
_TAIL_BYTES = 4 << 20
"""Bytes read at the end."""
_FINISH_S = 2.0
"""Time limit for that: it takes milliseconds, unless the file is not a timeline."""
_LONGEST_S = 1e8
"""A larger distance from the gang's launch is damage."""
_UNSAFE = bytes.maketrans(b'"\\', b"'/")


class Timelines(TimelineFollower):
    """The timelines of rank 0's Horovod in one attempt: one file after the other."""

    def __init__(
        self, zero_s: float, emit: Callable[[ev.Event], None], mask: Mask | None = None
    ) -> None:
        self.kept: list[ShippedFile] = []
        """Those that belong to the gang's record."""
        self._zero_s = zero_s
        self._emit = emit
        self._mask = mask or Mask()
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
        wall_zero_s = self._zero_s + timeline.wall_ahead
        self._following = _Follower(path, kept, wall_zero_s, self._mask)

    def poll(self) -> None:
        """Send new data; most calls do nothing."""
        following = self._following
        if following is not None and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LOOK_S
            self._try(following, lambda: following.poll(self._now_s()))

    def finish(self) -> None:
        """Read the rest of a completed file, and make it valid JSON."""
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
        self._send(*following.drain())

    def _send(self, spans: Sequence[tuple[str, int, int, int]], skipped: int) -> None:
        if not spans and not skipped:
            return
        names, starts_ns, ends_ns, depths = zip(*spans, strict=True) if spans else ((),) * 4
        event = ev.Spans(
            self._now_s(), self._rank, names, starts_ns, ends_ns, depths, skipped, ev.COORDINATOR
        )
        self._emit(event)

    def _now_s(self) -> float:
        return time.monotonic() - self._zero_s


class _Follower:
    """One file. ``wall_zero_s``: the wall-clock time at the gang's time 0."""

    def __init__(
        self, path: Path, kept: ShippedFile | None, wall_zero_s: float, mask: Mask
    ) -> None:
        self._path = path
        self._kept = kept
        self._mask = mask
        self._wall_zero_s = wall_zero_s
        self._origin_s: float | None = None
        """The gang's time at the timeline's time 0."""
        self._fd = -1
        self._read = 0
        """Bytes of complete objects that have been read."""
        self._weaver = SpanBuilder()
        self._skipped = 0

    def poll(self, now_s: float) -> None:
        """Continue reading, for some milliseconds at most."""
        until_s = time.monotonic() + _BUDGET_S
        is_far = self._behind() > _FAR_BEHIND_BYTES
        while is_far and time.monotonic() < until_s:
            is_far = self._pass_over(_CHUNK_BYTES)  # the newest event has been read
        while self._read_on() and time.monotonic() < until_s:
            pass
        if self._origin_s is not None:
            is_all_read = self._behind() < _CHUNK_BYTES
            now_us = int((now_s - self._origin_s) * 1e6)
            self._weaver.cut_long(now_us if is_all_read else None)

    def finish(self) -> None:
        """Read to the end, up to a limit, and close its brackets."""
        until_s = time.monotonic() + _FINISH_S
        while time.monotonic() < until_s:
            if not (self._pass_over(_TAIL_BYTES) or self._read_on() or self._read_on(is_end=True)):
                if self._kept is not None and self._fd >= 0:
                    self._close_brackets()
                return

    def drain(self) -> tuple[list[tuple[str, int, int, int]], int]:
        """Return spans on the gang's clock, in nanoseconds, and the number of omitted events since the last
        call.
        """
        skipped, self._skipped = self._skipped, 0
        spans = self._weaver.drain()
        if self._origin_s is None:
            return [], skipped + len(spans)  # its beginning is damaged: the origin is unknown
        origin_ns = round(self._origin_s * 1e9)
        told = [(n, origin_ns + s * 1000, origin_ns + e * 1000, depth) for n, s, e, depth in spans]
        return told, skipped

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

    def _read_on(self, *, is_end: bool = False) -> bool:
        """Read a chunk; return whether there may be more. ``is_end``: the file is complete."""
        behind = self._behind()
        if behind <= 0:
            return False
        found = cut(os.pread(self._fd, min(behind, _CHUNK_BYTES), self._read), is_end=is_end)
        if found.n_lost:
            self._weaver.forget()
            self._skipped += 1
        self._note_origin(found)
        self._weaver.take(found.events)
        self._escape(found.tensors)
        self._advance(found.n_bytes)
        return found.n_bytes > 0

    def _pass_over(self, n_left: int) -> bool:
        """Skip complete events, except for the last ``n_left`` bytes, without parsing them.

        In pieces: return whether any bytes were skipped.
        """
        n_bytes = min(self._behind() - n_left, _PASS_OVER_BYTES)
        if n_bytes <= 0:
            return False
        data = os.pread(self._fd, n_bytes, self._read)
        until = last_border(data)
        if self._origin_s is None:
            self._note_origin(cut(data[:_CHUNK_BYTES]))
        self._escape(named_tensors(data[:until]))
        self._skipped += count_spans(data[:until])
        self._weaver.forget()
        self._advance(until)
        return until > 0

    def _advance(self, n_bytes: int) -> None:
        self._read += n_bytes
        if self._kept is not None:
            self._kept.settled = self._read

    def _note_origin(self, found: ParsedEvents) -> None:
        if found.origin_us is not None:
            origin_s = found.origin_us / 1e6 - self._wall_zero_s
            self._origin_s = origin_s if abs(origin_s) < _LONGEST_S else None

    # ── repair ──

    def _escape(self, tensors: Iterable[tuple[int, bytes]]) -> None:
        """Replace, byte by byte, what makes the file invalid, and secrets: Horovod writes only behind it."""
        for at, name in tensors:
            safe = _safe(self._mask.blanked(name))
            if safe != name and self._kept is not None:
                os.pwrite(self._fd, safe, self._read + at)

    def _close_brackets(self) -> None:
        """Leave complete objects and a bracket: a killed rank leaves half an object, or a comma."""
        if self._read == 0:
            self._path.unlink(missing_ok=True)  # nothing was recorded
            return
        if os.pread(self._fd, 2, self._read) != b"]":
            os.ftruncate(self._fd, self._read)
            os.pwrite(self._fd, b"]", self._read)


def _safe(name: bytes) -> bytes:
    """Return a name of the same length that is valid between quotes in JSON."""
    plain = name.translate(_UNSAFE)
    if any(byte < 0x20 for byte in plain):
        plain = bytes(byte if byte >= 0x20 else 0x20 for byte in plain)
    try:
        plain.decode("utf-8")
    except UnicodeDecodeError:
        plain = bytes(byte if byte < 0x80 else 0x3F for byte in plain)
    return plain
