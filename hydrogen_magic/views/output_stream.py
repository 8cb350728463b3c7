"""The streams of this process, as text of ours is written to them."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TextIO


class OutputStream:
    """``sys.stdout`` or ``sys.stderr`` at the time of each call: prompt_toolkit and test runners change them.

    One that is None, as in a process that was started without it, discards the text. A character that its
    encoding lacks becomes "?". An ``optional`` stream that cannot be written (its reader has ended, its disk
    is full) gets nothing more, which is reported once; otherwise the error is raised.
    """

    def __init__(self, name: str = "stdout", *, optional: bool = False) -> None:
        self._name = name
        self._optional = optional
        self._is_lost = False

    @property
    def encoding(self) -> str:
        """The encoding of its characters."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write ``text``; return its length."""
        # A log under LANG=C cannot encode every character of a rank: "?" is better than an error.
        self._call("write", text.encode(self.encoding, "replace").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        """Pass on what is buffered."""
        self._call("flush")

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return bool(self._call("isatty"))

    @property
    def _stream(self) -> TextIO | None:
        stream: TextIO | None = getattr(sys, self._name)
        return stream

    def _call(self, method: str, *args: str) -> object:
        call = getattr(self._stream, method, None)  # an object of the user's may have `write` alone
        if self._is_lost or call is None:
            return None
        try:
            return call(*args)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            if not self._optional:
                raise
            self._is_lost = True
            with suppress(OSError, ValueError):  # stderr may have the same reader, or disk
                print(_explained(self._name, error), file=sys.stderr, flush=True)
        return None


def _explained(name: str, error: Exception) -> str:
    return (
        f"hydrogen_magic: {name} cannot be written ({error}), so nothing more is shown there; gangs are not "
        "affected: `python -m hydrogen_magic gang logs ID` shows the output of their ranks"
    )
