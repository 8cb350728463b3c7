"""SIGINT while a gang is launched and watched."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol


class _Stoppable(Protocol):
    """A gang, or several."""

    def stop(self, kill: bool = False) -> None: ...


class Interrupts:
    """SIGINT while a gang is launched and watched: the first stops it, the second kills it."""

    def __init__(self) -> None:
        self.count = 0
        self.gang: _Stoppable | None = None
        self.before: Any = None
        """The signal handler at other times."""
        self._is_asking = False
        self._is_over = False
        """The gang has ended while its cell asked the user: the next signal is ours."""

    def __call__(self, signum: int, frame: object) -> None:
        if not self._is_over:
            self.count += 1
            self._stop_gang()
        if self._is_asking:
            raise KeyboardInterrupt

    @contextmanager
    def while_asking(self) -> Iterator[Callable[[], None]]:
        """Let SIGINT also raise; the result does it from another thread, when the gang has ended.

        Nothing is raised outside.
        """
        with suppress(KeyboardInterrupt):
            self._is_asking = True
            try:
                yield self._give_up_asking
            finally:
                self._is_asking = False
        self._is_asking = False  # the signal may have come just before it was set above

    def _give_up_asking(self) -> None:
        if self._is_asking and self.before is not None:
            self._is_over = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def take(self, gang: _Stoppable) -> None:
        """Stop ``gang`` (or a sweep) on SIGINT from now on, and at once if there already was one."""
        self.gang = gang
        self._stop_gang()

    def _stop_gang(self) -> None:
        if self.gang is not None and self.count > 0:
            # The first one does not kill a gang that is being stopped: a page that has asked for that, and
            # heard nothing, interrupts, too.
            self.gang.stop(kill=self.count > 1)


@contextmanager
def interrupts_held() -> Iterator[Interrupts]:
    """Prevent SIGINT from raising between two lines of ours, which would leave a gang unattended.

    Interrupts stop the gang that ``take`` gets, as :func:`.attending.attend` inside of it does; without a
    gang they raise at the end. Only the main thread receives signals; in other threads this does nothing.
    """
    held = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield held  # the installed one is for the main thread's gang
        return
    outer = signal.getsignal(signal.SIGINT)
    if isinstance(outer, Interrupts):
        yield outer
        return
    if outer is signal.SIG_IGN:  # as a shell starts jobs in the background
        yield held
        return
    held.before = signal.signal(signal.SIGINT, held)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, held.before or signal.SIG_DFL)
    if held.count and held.gang is None:
        raise KeyboardInterrupt


@contextmanager
def interrupts_raise() -> Iterator[None]:
    """Undo :func:`interrupts_held` while there is no gang to stop: SIGINT interrupts the code itself."""
    held = signal.getsignal(signal.SIGINT)
    if (
        not isinstance(held, Interrupts)
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    signal.signal(signal.SIGINT, held.before or signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, held)
