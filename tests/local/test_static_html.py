"""What stays when a gang has ended: its picture, and no more data than is wanted."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver import attending
from hydrogen_magic.driver.state.gang_state import GangState, replay
from hydrogen_magic.views.widget import retained_views
from hydrogen_magic.views.widget.page_updates import PageUpdates
from hydrogen_magic.views.widget.static_html import static_html, static_view
from tests import seconds


def failed_gang() -> list[ev.Event]:
    """Return a gang of which rank 1 fails after a few lines, and rank 0 writes on."""
    error = ev.ErrorReport("ValueError", "bad batch 17")
    return [
        ev.GangLaunched(0.0, "cafe", "--np 2", 2, "local", "torch", 1.0, "", {}),
        ev.AttemptStarted(0.0, 0),
        ev.RankPhase(0.1, 0, "running"),
        ev.RankPhase(0.1, 1, "running"),
        ev.Metrics(1.0, 0, (1, 2, 3), (1.0,) * 3, {"loss": (0.5, 0.25, 0.125)}),
        seconds.spans(1.0, 0, ("f", "b"), (0.2, 0.5), (0.4, 0.9), (0, 0)),
        ev.Output(1.0, 1, "stdout", "the last words of rank 1\n"),
        ev.Output(1.1, 0, "stdout", "".join(f"line {n}\n" for n in range(500))),
        ev.RankFailed(1.5, 1, error, "running"),
        ev.RankExited(1.6, 1, 1),
        ev.GangEnded(2.0, "FAILED", "rank 1 failed", 1),
    ]


def test_the_picture_is_the_same_from_a_feed_that_was_told_all() -> None:
    events = failed_gang()
    feed = PageUpdates()
    for n in range(1, len(events) + 1):
        feed.update(replay(events[:n]), events[n - 1 : n], n / 10)
    state = replay(events)
    drawn = static_view(events, "cafe", feed)
    assert (drawn.curves, drawn.tracks) == (feed.curves, feed.tracks)
    html = drawn.html(state, with_output=True)
    assert html == static_html(state, events)
    assert "loss" in html and "line 499" in html and "line 0" in html


def test_a_culprit_has_its_last_words_however_much_others_write() -> None:
    events = failed_gang()
    html = static_view(events, "cafe").html(replay(events), with_output=False)
    assert "the last words of rank 1" in html and "line 499" not in html


class Counted:
    def __init__(self) -> None:
        self.closed = 0

    def close_widget(self) -> None:
        self.closed += 1


def test_views_that_end_in_threads_are_closed_once_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retained_views, "_kept", deque())
    views = [Counted() for _ in range(200)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(retained_views.retain, views))
    assert sorted(view.closed for view in views) == [0] * 4 + [1] * 196


class EndedGang:
    """As much of a gang as it takes to follow it."""

    id = "cafe"

    def events(self, start: int = 0) -> list[ev.Event]:
        return failed_gang()[start:]

    def snapshot(self) -> GangState:
        return replay(failed_gang())

    def wait(self, timeout: float | None = None) -> bool:
        return True


class BrokenView:
    """Shows the first time and never again."""

    interval_s = 0.0

    def __init__(self) -> None:
        self._n_shown = 0

    def update(self, state: GangState, fresh: Sequence[ev.Event]) -> None:
        self._n_shown += 1
        assert self._n_shown == 1

    def close(self, state: GangState) -> None: ...


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_follows_a_detached_gang_is_done_though_its_view_breaks() -> None:
    done = threading.Event()
    attending.follow(EndedGang(), BrokenView(), done.set)  # type: ignore[arg-type]
    assert done.wait(10)
