"""A gang as its record has it: one that has ended, or that another kernel runs."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

from hydrogen_magic.core import run_log
from hydrogen_magic.core.events import Event
from hydrogen_magic.driver import history
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.gang_run import GangRun
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.driver.state.stored_results import SavedResults
from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.views import static_picture

_POLL_S = 0.5
"""Interval between looks at the record of a gang that runs elsewhere."""


class RecordedGang(Gang):
    """A gang known only from its record, of an earlier or another kernel. Any thread may use it."""

    def __init__(self, gang_id: str) -> None:
        path = run_log.run_dir(gang_id)
        record = run_log.Record(path, None, lambda text: None)
        run = GangRun(gang_id, record, results=SavedResults(gang_id, path))
        super().__init__(run, picture=static_picture)
        self._n_bytes = 0
        """Bytes of the record that have been read."""
        self._reading = threading.RLock()

    def events(self, start: int = 0) -> Sequence[Event]:
        """Return the events, from the ``start``-th on; the end is among them if its kernel died."""
        self._read()
        return super().events(start)

    def snapshot(self) -> GangState:
        """Return its state according to the record."""
        self._read()
        return history.with_machine(super().snapshot())

    def _read(self) -> None:
        with self._reading:
            if self._run.state.is_terminal:  # nothing follows, and the record may be deleted
                return
            self._read_on()
            if history.missing_end(self._run.events):
                self._read_on()  # its kernel may have recorded the end in between
                for end in history.missing_end(self._run.events):
                    self._run.append(end)

    def _read_on(self) -> None:
        for event, end in run_log.read_on(self.id, self._n_bytes):
            self._run.append(event)
            self._n_bytes = end

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it has ended according to its record; False if ``timeout`` seconds passed."""
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not self.snapshot().is_terminal:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(_POLL_S, left_s))
        return True

    def stop_for(self, reason: str, kill: bool = False) -> None:
        """Raise HydrogenError while it runs, like all requests: only its own kernel can reach the ranks."""
        self._refuse("stop it")

    def ask_stacks(self) -> None:
        """See :meth:`stop_for`."""
        self._refuse("request its stacks")

    def record(self, on: bool = True) -> None:
        """See :meth:`stop_for`."""
        self._refuse("record it")

    def profile(self, steps: int = 5) -> None:
        """See :meth:`stop_for`."""
        self._refuse("profile it")

    def _refuse(self, what: str) -> None:
        state = self.snapshot()
        if state.is_terminal:
            return
        if state.outlives:
            raise HydrogenError(f"this kernel is not attached: %gang attach {self.id}, then {what}")
        raise HydrogenError(
            f"gang {self.id} belongs to another kernel: {what} in the notebook that started it"
        )
