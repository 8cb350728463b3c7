"""The events of a gang, in memory and in the run log, and the state that follows from them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from hydrogen_magic.core import run_log
from hydrogen_magic.core.events import Display, Event, Output
from hydrogen_magic.core.masking import Mask
from hydrogen_magic.driver.state.gang_state import GangState, fold

_SHOWN_CHARS = 8 << 20
"""Live output and displays kept in memory; the ranks' log files and the notebook have all of it."""


class EventLog:
    """The events so far, without secrets. Any thread may append."""

    def __init__(self, gang_id: str, record: run_log.Record, mask: Mask) -> None:
        self.state = GangState(gang=gang_id)
        """State after the last event."""
        self.events: list[Event] = []
        """Oldest first; the oldest output may be missing."""
        self._record = record
        self._mask = mask
        self._outputs: deque[int] = deque()
        """Indices of output events that are still kept, oldest first."""
        self._output_size = 0
        self._changed = threading.Condition()
        """Its lock is reentrant: a record that can no longer be written reports this by an event."""

    def append(self, event: Event) -> None:
        """Add ``event``, with masked secrets, to the state, to the list, and to the record on disk."""
        event = self._mask.event(event)
        with self._changed:  # the dispatcher has its own thread
            self.state = fold(self.state, event)
            self.events.append(event)
            self._record.append(event)
            if isinstance(event, (Display, Output)):
                self._thin_output(_size(event))
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until ``condition`` is true after an event, or ``timeout_s`` has passed."""
        with self._changed:
            self._changed.wait_for(condition, timeout_s)

    def _thin_output(self, size: int) -> None:
        """Drop the content of the oldest output if there is too much: a rank may print for days."""
        self._outputs.append(len(self.events) - 1)
        self._output_size += size
        while self._output_size > _SHOWN_CHARS:
            index = self._outputs.popleft()
            old = self.events[index]
            assert isinstance(old, (Display, Output))
            self._output_size -= _size(old)
            self.events[index] = _without_content(old)


def _size(event: Display | Output) -> int:
    return len(event.text) if isinstance(event, Output) else event.size_bytes


def _without_content(event: Display | Output) -> Event:
    if isinstance(event, Display):
        return replace(event, data={}, metadata="")
    skipped = event.skipped_bytes + len(event.text.encode("utf-8", "replace"))
    lines = event.skipped_lines + event.text.count("\n")
    return replace(event, text="", skipped_bytes=skipped, skipped_lines=lines)
