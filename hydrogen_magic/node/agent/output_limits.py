"""Limits on a rank's output: the log on disk, the live text, and the rate of a gang.

Output is read in chunks, not in lines: a rank may print a gigabyte without a newline. The bytes go
to the rank's log unchanged. Only the live part is decoded, incrementally, so characters split
between chunks and bytes that are not UTF-8 do no harm.
"""

from __future__ import annotations

import codecs
import errno
import os
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from hydrogen_magic.core.units import size_text

CHUNK = 1 << 16

_RESERVED_BYTES = 1 << 30
"""What a log leaves free on the disk, a tenth of a smaller one: a cell that prints without end must not keep
the notebook from being saved."""
_UNCHECKED_BYTES = 16 << 20
"""How much of a log is written before the space on the disk is looked at, each time."""

_TAIL_BYTES = 16_000
"""Size of the end that is kept of output over the limit: a screenful or two."""

_LOOK_FOR_LINE_BYTES = 1000
"""After a gap, the text starts at the beginning of a line if there is one within this distance."""

_NOTE = b"\n... the rest of the output is not kept ...\n"
"""The end of a log that could not be written any more. On other machines, the kernel's copy may lack it."""


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

    When the disk is nearly full, the file ends with a line that says so: errors show the last lines of a log.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd: int | None = None
        """None before the first output: most cells of a session print nothing."""
        self._n_unchecked = 0
        """Bytes since the space on the disk was looked at."""
        self.is_cut = False
        """The file is not continued."""

    def write(self, data: bytes) -> str | None:
        """Append ``data``; return a message for the user once the file cannot be written any more."""
        rest = memoryview(data)
        try:
            self._require_space(len(data))
            while rest and not self.is_cut:
                rest = rest[os.write(self._opened(), rest) :]
        except OSError as error:
            self.is_cut = True
            self._note_cut()
            return (
                f"its log cannot be written ({error.strerror}): the rest of its output is not kept"
            )
        return None

    def _require_space(self, nbytes: int) -> None:
        """Raise OSError if the disk has no space for more of this log."""
        self._n_unchecked += nbytes
        if self.is_cut or self._n_unchecked < _UNCHECKED_BYTES:
            return
        self._n_unchecked = 0
        disk = os.fstatvfs(self._opened())
        reserved = min(_RESERVED_BYTES, disk.f_blocks * disk.f_frsize // 10)
        if disk.f_bavail * disk.f_frsize < reserved:
            raise OSError(errno.ENOSPC, f"less than {size_text(reserved)} free on the disk")

    def _opened(self) -> int:
        if self._fd is None:
            flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
            self._fd = os.open(self._path, flags, 0o600)
            os.lseek(self._fd, 0, os.SEEK_END)  # the output of an earlier attempt stays
        return self._fd

    def _note_cut(self) -> None:
        """Write over the end of the file, which has its space already."""
        if self._fd is not None:
            with suppress(OSError):  # the error is reported in any case
                os.pwrite(self._fd, _NOTE, max(0, os.fstat(self._fd).st_size - len(_NOTE)))

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class LivePart(NamedTuple):
    """Text for the live view, and the number of bytes omitted before it."""

    text: str
    skipped_bytes: int = 0
    skipped_lines: int = 0


class LiveText:
    """Pending output of one stream; of too much, the end is kept."""

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
        """Return the part that may be sent now, None if there is none."""
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
