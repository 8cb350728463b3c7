"""What a rank wrote to its descriptors: whole to a file, a bounded live part to the kernel.

Read in chunks, never in lines: a rank may print a gigabyte without a newline. The bytes go to the
rank's log as they are; the live text is decoded incrementally, so a character cut by a chunk's end,
or bytes that are no UTF-8 at all, disturb nobody.
"""

from __future__ import annotations

import codecs
import errno
import os
from collections import deque
from collections.abc import Callable

__all__ = ["Allowance", "LiveText", "RankLog"]

CHUNK = 1 << 16

_TAIL_CHARS = 16_000
"""What is kept of text that exceeds the allowance: a screenful or two of its end."""

_LOST_LOG_BYTES = 10 << 20
"""How much of a log is kept in memory once its disk is full."""


class Allowance:
    """How much live text a gang may send: a bucket that fills at ``per_s`` up to ``burst`` characters.

    A front end takes 200 kB/s without lagging, and a Jupyter server drops everything above 1 MB/s.
    """

    def __init__(
        self, clock: Callable[[], float], per_s: float = 128_000.0, burst: float = 256_000.0
    ):
        self._clock = clock
        self._per_s = per_s
        self._burst = burst
        self._level = burst
        self._at = clock()

    def take(self, wanted: int) -> int:
        """Return how many characters may be sent now, at most ``wanted``."""
        now = self._clock()
        self._level = min(self._burst, self._level + (now - self._at) * self._per_s)
        self._at = now
        granted = min(wanted, int(self._level))
        self._level -= granted
        return granted


class RankLog:
    """The rank's output as a file, in the order it arrived; survives a full disk in memory."""

    def __init__(self, path: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        self._fd: int | None = os.open(path, flags, 0o600)
        self._lost: deque[bytes] = deque()
        self._lost_bytes = 0

    def write(self, data: bytes) -> str | None:
        """Append ``data``; return what a person should be told when the disk has just run full."""
        if self._fd is not None:
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(self._fd, view) :]
                return None
            except OSError as error:
                os.close(self._fd)
                self._fd = None
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    return f"output is no longer written to its file: {error.strerror}"
                return "the disk is full: from here on only the last 10 MB of output are kept"
            finally:
                if self._fd is None:
                    self._keep(data)
        self._keep(data)
        return None

    def lost_tail(self) -> bytes:
        """Return what could not be written to the file, its last 10 MB."""
        return b"".join(self._lost)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _keep(self, data: bytes) -> None:
        self._lost.append(data)
        self._lost_bytes += len(data)
        while self._lost_bytes > _LOST_LOG_BYTES and len(self._lost) > 1:
            self._lost_bytes -= len(self._lost.popleft())


class LiveText:
    """Decoded text of one stream that waits to be sent, cut to its end where it is too much."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._skipped_bytes = 0

    def feed(self, data: bytes, final: bool = False) -> None:
        text = self._text + self._decoder.decode(data, final)
        excess = len(text) - 2 * _TAIL_CHARS
        if excess > 0:  # cut rarely, by a lot: cutting at each chunk would cost as much as the text
            self._skip(text[:-_TAIL_CHARS])
            text = text[-_TAIL_CHARS:]
        self._text = text

    def take(self, allowance: Allowance) -> tuple[str, int] | None:
        """Return ``(text, bytes left out before it)``, None when there is nothing to send."""
        if not self._text:
            return None
        granted = allowance.take(len(self._text))
        if granted == 0:
            return None  # keeps collecting; its end will be sent when there is allowance again
        self._skip(self._text[: len(self._text) - granted])
        text, skipped = self._text[len(self._text) - granted :], self._skipped_bytes
        self._text, self._skipped_bytes = "", 0
        return text, skipped

    def rest(self) -> tuple[str, int] | None:
        """Return what is left at the end of the stream, allowance or not: it holds the last words."""
        self.feed(b"", final=True)
        text, skipped = self._text, self._skipped_bytes
        self._text, self._skipped_bytes = "", 0
        return (text, skipped) if text or skipped else None

    def _skip(self, text: str) -> None:
        self._skipped_bytes += len(text.encode("utf-8", "replace"))
