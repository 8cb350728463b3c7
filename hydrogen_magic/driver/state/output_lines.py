"""Output of ranks as complete lines without control sequences.

The input is text cut anywhere: inside a line, between ``\\r`` and the text that overwrites it, inside an
escape sequence. The output is lines that can be printed one after another, whatever a rank wrote: colours
are kept; cursor movements, links, titles and bells are removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.units import size_text

_LONGEST_PARTIAL = 16_384
"""An unfinished line of more characters is shown in pieces."""


@dataclass(frozen=True)
class OutputLine:
    """One line to print, without its end."""

    rank: int
    stream: str
    """As in :class:`~hydrogen_magic.core.events.Output`; ``note``: our own note about the output."""
    text: str
    n_left_out: int = 0
    """Number of lines that a note replaces."""


class OutputLines:
    """Builds every rank's lines from :class:`~hydrogen_magic.core.events.Output` events."""

    def __init__(self) -> None:
        self._partial: dict[tuple[int, str], str] = {}

    def feed(self, events: Iterable[ev.Event], gang: str = "ID") -> list[OutputLine]:
        """Return the lines that ``events`` complete, in order; other kinds are ignored."""
        lines: list[OutputLine] = []
        for event in events:
            if isinstance(event, ev.Output):
                lines += self._take(event, gang)
            elif isinstance(event, (ev.InputRequested, ev.RankExited)):
                lines += self.flush(event.rank)
            elif isinstance(event, ev.AttemptStarted):
                lines += self.flush()
        return lines

    def flush(self, rank: int | None = None) -> list[OutputLine]:
        """Return incomplete lines (of ``rank``, or of all)."""
        keys = [key for key in self._partial if rank is None or key[0] == rank]
        lines = [_line(*key, self._partial.pop(key)) for key in keys]
        return [line for line in lines if line.text]

    def _take(self, event: ev.Output, gang: str) -> list[OutputLine]:
        key = (event.rank, event.stream)
        lines: list[OutputLine] = []
        if event.skipped_bytes:
            cut = [_line(*key, text) for text in [self._partial.pop(key, "")] if text]
            # The end of a line that was cut is counted with its beginning.
            lines += [*cut, _skipped(event, gang, max(0, event.skipped_lines - len(cut)))]
        *whole, partial = (self._partial.pop(key, "") + event.text).split("\n")
        lines += [_line(*key, text) for text in whole]
        partial = _shortened(partial)
        while len(partial) > _LONGEST_PARTIAL:
            lines.append(_line(*key, partial[:_LONGEST_PARTIAL]))
            partial = partial[_LONGEST_PARTIAL:]
        if partial:
            self._partial[key] = partial
        return lines


def clean(text: str) -> str:
    """Return ``text`` without control characters; SGR colours are kept, and reset at its end."""
    text = _CONTROL.sub("", _ESCAPES.sub(lambda match: match["sgr"] or "", text))
    has_colour = _SGR.search(text) and not text.endswith(("\x1b[0m", "\x1b[m"))
    return f"{text}\x1b[0m" if has_colour else text


def final_lines(text: str) -> list[str]:
    """Return a log's lines as a terminal would finally show them: cleaned, with overwritten text
    removed.
    """
    lines = [clean(_rewritten(line)) for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]


def without_colour(text: str) -> str:
    """Return ``text`` without control characters and without colours."""
    return _CONTROL.sub("", _ESCAPES.sub("", text))


def clean_name(text: str) -> str:
    """Return ``text`` as one plain line, spaces at its ends removed."""
    return without_colour(text.replace("\n", " ").replace("\t", " ")).strip()


_SGR = re.compile(r"\x1b\[[0-9;:]*m")
_ESCAPES = re.compile(
    r"(?P<sgr>\x1b\[[0-9;:]*m)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?"  # cursor movements, erasing, modes
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"  # links
    r"|\x1b[ -/]*[0-~]?"  # other escapes, cut ones included
)
_CONTROL = re.compile(
    "[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f-\x9f"
    # controls that change the direction of all following text, including our own
    "\u202a-\u202e\u2066-\u2069\u2028\u2029"
    "\ud800-\udfff]|\x1b(?!\\[[0-9;:]*m)"
)


def _line(rank: int, stream: str, text: str) -> OutputLine:
    return OutputLine(rank, stream, clean(_rewritten(text)))


def _rewritten(text: str) -> str:
    """Return the final text on a terminal: the last text written after a ``\\r``."""
    if "\r" not in text:
        return text
    return next((part for part in reversed(text.split("\r")) if part), "")


def _shortened(partial: str) -> str:
    """Drop text that a ``\\r`` has overwritten, so that a day of progress bar stays small."""
    return _rewritten(partial) + ("\r" if partial.endswith("\r") else "")


def _skipped(event: ev.Output, gang: str, n_lines: int) -> OutputLine:
    where = f"; all of it: %gang logs {gang} --rank {event.rank}" if event.is_logged else ""
    text = f"... {size_text(event.skipped_bytes)} not shown here{where}"
    return OutputLine(event.rank, "note", text, n_lines)
