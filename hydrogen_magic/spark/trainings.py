"""The trainings of one ``fitMultiple``, which end together.

``CrossValidator`` calls them in threads. When one fails, or the cell is interrupted, it raises in the main
thread and leaves the others to themselves.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.errors import GangStoppedError
from hydrogen_magic.views import shell_here

NOT_TRAINED = "not trained: another training of the same call has failed"


class Trainings:
    """An iterator of numbers and models. Each call of ``next`` trains one; any thread may call it.

    After a failure the gangs of the others are stopped, and the remaining models are not trained.
    """

    def __init__(
        self,
        fit: Callable[[int, Callable[[Gang], None]], Any],
        count: int,
        on_cancel: Callable[[], None] = lambda: None,
    ) -> None:
        """``fit`` is called with a number, and a function to call with the gang that it has launched.

        ``on_cancel`` is called when no other training may begin.
        """
        self._fit = fit
        self._on_cancel = on_cancel
        self._numbers = iter(range(count))
        self._n_unfinished = count
        self._lock = threading.Lock()
        self._gangs: list[Gang] = []  # of trainings that run: an ended one holds its model
        self._is_cancelled = False
        self._forget_cell = _cancel_on_interrupt(self)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self

    def __next__(self) -> tuple[int, Any]:
        with self._lock:
            number = next(self._numbers)
        gangs: list[Gang] = []

        def launched(gang: Gang) -> None:
            gangs.append(gang)
            self._gangs.append(gang)
            if self._is_cancelled:
                gang.stop()

        try:
            if self._is_cancelled:
                raise GangStoppedError(NOT_TRAINED)
            return number, self._fit(number, launched)
        except BaseException:
            self.cancel()
            raise
        finally:
            self._finished(gangs)

    def _finished(self, gangs: list[Gang]) -> None:
        with self._lock:
            for gang in gangs:
                self._gangs.remove(gang)
            self._n_unfinished -= 1
        if not self._n_unfinished:
            self._forget_cell()

    def cancel(self) -> None:
        """Stop the gangs that run, and let none begin. Does not wait."""
        self._is_cancelled = True
        for gang in list(self._gangs):
            if not gang.wait(0):
                gang.stop()
        self._on_cancel()


def _cancel_on_interrupt(trainings: Trainings) -> Callable[[], None]:
    """Cancel the trainings if the running cell ends by an interrupt; the value is called to give that up."""
    shell = shell_here()
    if shell is None:
        return lambda: None
    events = shell.events

    def ended(result: Any) -> None:
        forget()
        if isinstance(result.error_in_exec, KeyboardInterrupt):
            trainings.cancel()

    def forget() -> None:
        with contextlib.suppress(ValueError):  # the cell has ended
            events.unregister("post_run_cell", ended)

    events.register("post_run_cell", ended)
    return forget
