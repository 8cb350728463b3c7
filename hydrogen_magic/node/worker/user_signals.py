"""Handlers of signals that the user's code sets: they run in the user's code, and never between two cells.

A handler may raise, as torch's does for SIGCHLD when a worker of a DataLoader was killed. In the wait for the
next cell, the exception would end the rank, and what its session holds would be lost.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

_OURS = {signal.SIGINT, signal.SIGTERM}
"""They stop the gang."""


class UserSignals:
    """The handlers of a process; used on its main thread."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[..., Any]] = {}
        self._arrived: dict[int, None] = {}

    def defer(self) -> None:
        """From now on only note signals that have a handler in Python."""
        for number in signal.valid_signals() - _OURS:
            handler = signal.getsignal(number)
            if callable(handler) and handler != self._note:
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def resume(self) -> None:
        """Restore the handlers, and call those whose signals have arrived; raises what they raise."""
        arrived, self._arrived = self._arrived, {}
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
        for number in arrived:
            signal.raise_signal(number)

    def _note(self, number: int, frame: object) -> None:
        self._arrived[number] = None
