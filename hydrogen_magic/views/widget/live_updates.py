"""The events of a gang as messages to pages, from the time of the first page on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hydrogen_magic.core.events import Event
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.views.elapsed import GangClock
from hydrogen_magic.views.widget.page_updates import PageMessage, PageUpdates


class LiveUpdates:
    """Collects events, and creates the messages about them.

    The :class:`PageUpdates` are created for the first page: without a page there is no cost. ``is_raised``:
    see there.
    """

    def __init__(self, gang: Gang, *, is_raised: bool, clock: Callable[[], float]) -> None:
        self.gang = gang
        self.state = GangState()
        self.page_updates: PageUpdates | None = None
        self._is_raised = is_raised
        self._clock = GangClock(clock)
        self._n_events = 0
        """Number of events so far, among those of ``gang``."""
        self._fresh: list[Event] = []
        """Events that :attr:`page_updates` has not processed yet."""

    def update(self, state: GangState, fresh: Sequence[Event] = ()) -> None:
        """Take the gang's current state; ``fresh``: the events since the last call."""
        self.state = state
        self._n_events += len(fresh)
        if self.page_updates is not None:
            self._fresh += fresh

    def events(self) -> Sequence[Event]:
        """Return all events so far; the oldest output may be missing, as in :class:`Gang`."""
        return self.gang.events()[: self._n_events]

    def start(self) -> PageUpdates:
        """Return the updates, begun with all events so far."""
        if self.page_updates is None:
            updates = PageUpdates(is_raised=self._is_raised)
            state = self.state
            updates.begin(state, self.events(), self._clock.now_s(state))
            # These are not sent: full() has the same. At the gang's end there are several.
            while updates.update(state, (), self._clock.now_s(state)) and state.is_terminal:
                pass
            self.page_updates = updates
        return self.page_updates

    def messages(self) -> Iterator[PageMessage]:
        """Yield one message about changes, if there are any; all of them after the gang's end."""
        if self.page_updates is None:
            return
        now_s = self._clock.now_s(self.state)
        fresh, self._fresh = self._fresh, []
        while (message := self.page_updates.update(self.state, fresh, now_s)) is not None:
            yield message
            if not self.state.is_terminal:
                return
            fresh = []  # at the end, the remaining data takes several messages

    def stop(self) -> None:
        """Drop the updates."""
        self.page_updates, self._fresh = None, []
