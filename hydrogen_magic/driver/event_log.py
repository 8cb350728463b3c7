"""The events of a gang, in memory and in the run log, and the state that follows from them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hydrogen_magic.core import run_log
from hydrogen_magic.core.event_history import EventHistory
from hydrogen_magic.core.events import Event
from hydrogen_magic.core.masking import Mask
from hydrogen_magic.driver.state.gang_state import GangState, fold


class EventLog:
    """The events so far, without secrets. Any thread may append."""

    def __init__(self, gang_id: str, record: run_log.Record, mask: Mask) -> None:
        self.state = GangState(gang=gang_id)
        """State after the last event."""
        self.events = EventHistory()
        """Oldest first; the oldest output may be missing."""
        self._record = record
        self._mask = mask
        self._changed = threading.Condition()
        """Its lock is reentrant: a record that can no longer be written reports this by an event."""

    def append(self, event: Event) -> None:
        """Add ``event``, with masked secrets, to the state, to the list, and to the record on disk."""
        event = self._mask.event(event)
        with self._changed:  # the dispatcher has its own thread
            self.state = fold(self.state, event)
            self.events.append(event)
            self._record.append(event)
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until ``condition`` is true after an event, or ``timeout_s`` has passed."""
        with self._changed:
            self._changed.wait_for(condition, timeout_s)
