"""Output of a rank: all of it to a file, and a bounded live part to the kernel.

Output is read in chunks, not in lines: a rank may print a gigabyte without a newline. The bytes go
to the rank's log unchanged. Only the live part is decoded, incrementally, so characters split
between chunks and bytes that are not UTF-8 do no harm.
"""

from __future__ import annotations

import codecs
import os
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

CHUNK = 1 << 16

_TAIL_BYTES = 16_000
"""Size of the end that is kept of output over the limit: a screenful or two."""

_LOOK_FOR_LINE_BYTES = 1000
"""After a gap, the text starts at the beginning of a line if there is one within this distance."""

_KEPT_BYTES = 10 << 20
"""How much of the newest output is kept in memory after writing has failed."""

_NOTE_BYTES = 64
"""Space for the line that marks a gap in a log."""


class TokenBucket:
    """Limits the live output of a gang: a bucket that fills at ``per_s`` up to ``burst`` bytes.

    A front end handles 200 kB/s without lag, and a Jupyter server drops output above 1 MB/s.
    """

    def __init__(
        self, clock: Callable[[], float], per_s: float = 128_000.0, burst: float = 256_000.0
    ):
        self._clock = clock
        self._per_s = per_s
        self._burst = burst
        self._level = burst
        self._at = clock()
        self.n_grants = 0
        """How often something was granted."""

    def take(self, wanted: int) -> int:
        """Return how many bytes may be sent now, at most ``wanted``."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._at) * self._per_s)
        self._at = now
        granted = min(wanted, int(self._level))
        self._level -= granted
        self.n_grants += granted > 0
        return granted


class RankLog:
    """The rank's output as a file, in the order it arrived.

    When the disk is full, the newest output is kept in memory and finally overwrites the last part
    of the file. So a log always has its beginning and, more importantly, its end.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: int | None = None
        """None before the first output: most cells of a session print nothing."""
        self._problem: OSError | None = None
        self._told = False
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._lost_bytes = 0

    def write(self, data: bytes) -> str | None:
        """Append ``data``; return a message for the user if the file cannot be written."""
        rest = memoryview(data)
        try:
            while rest and self._problem is None:
                rest = rest[os.write(self._opened(), rest) :]
        except OSError as error:
            self._problem = error
        if rest:
            self._keep(bytes(rest))
        if self._problem is None or self._told:
            return None
        self._told = True
        return (
            f"its log cannot be written ({self._problem.strerror}): only the end of its output is "
            "kept"
        )

    def _opened(self) -> int:
        if self._fd is None:
            flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            self._fd = os.open(self._path, flags, 0o600)
            os.lseek(self._fd, 0, os.SEEK_END)  # the output of an earlier attempt stays
        return self._fd

    def close(self) -> None:
        """Close the file; if output was lost, first write the newest output over its end."""
        if self._fd is None:
            return
        try:
            if self._kept:
                self._overwrite_end(self._fd)
        except OSError:
            pass  # the error has been reported already
        os.close(self._fd)
        self._fd = None

    def _keep(self, data: bytes) -> None:
        self._kept.append(data)
        self._kept_bytes += len(data)
        while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
            dropped = len(self._kept.popleft())
            self._kept_bytes -= dropped
            self._lost_bytes += dropped

    def _overwrite_end(self, fd: int) -> None:
        """Use the existing space of the file: half of it for the newest output."""
        size = os.fstat(fd).st_size
        newest = b"".join(self._kept)
        end = newest[-max(1, size // 2) :]
        start = size - len(end) - _NOTE_BYTES
        if start < 0:
            return  # a few lines: not worth overwriting the beginning
        lost = size - start + self._lost_bytes + len(newest) - len(end)
        note = f"\n... {lost} bytes are lost here ..."
        os.pwrite(fd, note.ljust(_NOTE_BYTES - 1).encode() + b"\n" + end, start)


class LivePart(NamedTuple):
    """Text for the live view, and the number of bytes omitted before it."""

    text: str
    skipped_bytes: int = 0
    skipped_lines: int = 0


class LiveText:
    """Pending output of one stream, cut to its end if there is too much."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting = bytearray()
        self._skipped_bytes = 0
        self._skipped_lines = 0
        self.turn = 0
        """The limit's number of grants at this stream's last one."""

    def feed(self, data: bytes) -> None:
        """Add new output of the rank."""
        self._waiting += data
        if len(self._waiting) > 2 * _TAIL_BYTES:  # rarely, by a lot: a cut moves the rest
            self._skip(len(self._waiting) - _TAIL_BYTES)

    def take(self, allowance: TokenBucket) -> LivePart | None:
        """Return the text that may be sent now, None if there is none."""
        granted = allowance.take(len(self._waiting))
        if granted == 0:
            return None  # continues to collect; the end is sent when the limit allows it
        self.turn = allowance.n_grants
        self._skip(len(self._waiting) - granted)
        return self._taken(final=False)

    def rest(self) -> LivePart | None:
        """Return the rest at the end of the stream regardless of the limit: the last output matters most."""
        return self._taken(final=True)

    def _taken(self, final: bool) -> LivePart | None:
        text = self._decoder.decode(bytes(self._waiting), final)
        self._waiting.clear()
        if not text and not (final and self._skipped_bytes):
            return None  # at most the beginning of a character
        part = LivePart(text, self._skipped_bytes, self._skipped_lines)
        self._skipped_bytes = self._skipped_lines = 0
        return part

    def _skip(self, n_bytes: int) -> None:
        """Omit the first ``n_bytes``, and the incomplete line or character after them."""
        if n_bytes <= 0:
            return
        begun = self._decoder.getstate()[0]
        self._decoder.reset()
        start = self._start_of_line(n_bytes) or self._start_of_character(n_bytes)
        self._skipped_lines += self._waiting.count(b"\n", 0, start)
        del self._waiting[:start]
        self._skipped_bytes += len(begun) + start

    def _start_of_line(self, after: int) -> int | None:
        """Return where a line begins soon ``after``, None if there is none."""
        end = min(after + _LOOK_FOR_LINE_BYTES, len(self._waiting) - 1)
        return self._waiting.find(b"\n", after - 1, end) + 1 or None

    def _start_of_character(self, after: int) -> int:
        end = min(after + 3, len(self._waiting))
        return next((n for n in range(after, end) if self._waiting[n] & 0xC0 != 0x80), end)
