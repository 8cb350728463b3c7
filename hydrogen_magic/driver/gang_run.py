"""One run of a gang: adds its events to the state and the record, and keeps its results and its error.

Its controller changes it; :class:`~hydrogen_magic.driver.gang.Gang` is the user's view of it.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace

from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import run_log
from hydrogen_magic.core.event_history import EventHistory
from hydrogen_magic.core.events import Event, GangEnded
from hydrogen_magic.core.masking import Mask
from hydrogen_magic.driver.rank_logs import RankLogs
from hydrogen_magic.driver.state import failure_report
from hydrogen_magic.driver.state.gang_results import GangResults
from hydrogen_magic.driver.state.gang_state import GangState, fold
from hydrogen_magic.driver.state.waiting_ranks import waits_at_stop
from hydrogen_magic.errors import (
    GangStoppedError,
    GangTimeoutError,
    HydrogenError,
    RankFailedError,
    RendezvousError,
)
from hydrogen_magic.serialization.payload import Payload


class GangRun:
    """Events, results and end of one run. Thread-safe."""

    def __init__(
        self,
        gang_id: str,
        record: run_log.Record,
        mask: Mask | None = None,
        results: GangResults | None = None,
    ) -> None:
        self.id = gang_id
        self.mask = mask or Mask()
        """Removes secrets from what is shown and recorded."""
        self.state = GangState(gang=gang_id)
        """State after the last event."""
        self.events = EventHistory()
        """Oldest first, without secrets; the oldest output may be missing."""
        self.rank_logs = RankLogs(record.path, self.events)
        self.results = results or GangResults(gang_id, record.path)
        """Results of the ranks; after a failure or a stop they are in the run log instead."""
        self.results.are_temporary = record.is_temporary
        self.ended = threading.Event()
        """Nothing of the gang is left."""
        self.is_attended = False
        """A cell waits for the gang, and asks the user what ranks request."""
        self.tracked = threading.Event()
        """Its tracker has everything; set without one."""
        self.tracked.set()
        self._record = record
        self._adding = threading.RLock()
        """Reentrant: a record that can no longer be written reports this by an event."""
        self._error: BaseException | None = None

    def emit(self, event: Event) -> None:
        """Add an event of this gang as it happens, unless the gang has ended.

        Its end gets the last metrics, and has to be the last event: a record that does not end with it looks
        like that of a lost gang.
        """
        with self._adding:
            if self.state.is_terminal:
                return
            if isinstance(event, GangEnded):
                event = replace(event, metrics=dict(self.state.last_metrics))
            self.append(event)

    def append(self, event: Event) -> None:
        """Add a complete ``event``, possibly read from a record, after removing secrets.

        It becomes part of the state, of the list, and of the record on disk.
        """
        event = self.mask.event(event)
        with self._adding:  # the dispatcher has its own thread
            self.state = fold(self.state, event)
            self.events.append(event)
            self._record.append(event)

    def deliver(self, rank: int, part: msg.ResultPart, section: Payload) -> None:
        """Store a part of a rank's results; it is unpickled on demand."""
        part = replace(part, error=self.mask.text(part.error))
        self.results.add(rank, self.state.attempt, part, section)

    def finish(self, error: BaseException | None = None) -> None:
        """Nothing of the gang is left; wake up waiting threads."""
        self._error = error
        self._record.close()
        if self._record.is_incomplete:
            with suppress(Exception):  # the disk is still full: that costs the record alone
                # The process that owns an outliving gang waits for space.
                run_log.complete(self.id, self.events, only_now=not self.state.outlives)
        self.ended.set()

    def error(self) -> BaseException | None:
        """Return the error of a failed, stopped or timed-out gang, otherwise None."""
        state = self.state
        if self._error is not None:
            return self._error
        if state.state == "FAILED":
            return self._failure(state)
        if state.state == "STOPPED":
            kind = GangTimeoutError if state.stop_reason == "timeout" else GangStoppedError
            return kind("; ".join(filter(None, (state.reason, waits_at_stop(state)))))
        return None

    def _failure(self, state: GangState) -> HydrogenError:
        if state.culprit is not None:
            last_lines = self.rank_logs.last_lines(state.culprit)
            report = failure_report.report(state, last_lines, self.results.saved_note)
            return RankFailedError(
                state.reason,
                rank=state.culprit,
                report=report,
                gang=self.id,
                session=state.session or None,
            )
        if state.fault is None:
            return HydrogenError(state.reason)
        is_rendezvous = state.fault.type == RendezvousError.__name__
        return (RendezvousError if is_rendezvous else HydrogenError)(state.fault.message)
