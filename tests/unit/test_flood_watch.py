"""When the kernel is found to send more messages than pages may get."""

from __future__ import annotations

import pytest

from hydrogen_magic.views.widget.flood import FloodWatch


@pytest.fixture(autouse=True)
def n_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore after each test what watches have seen."""
    monkeypatch.setattr(FloodWatch, "n_seen", 0)


class Sender:
    """A kernel that sends messages at a rate, and a clock; ``n_unseen``: messages since the last view."""

    def __init__(self, n_unseen: int = 0) -> None:
        self.now_s = 100.0
        self.n_sent = 5000.0
        FloodWatch.n_seen = 5000 - n_unseen
        self.watch = FloodWatch(lambda: int(self.n_sent), lambda: self.now_s)

    def send(self, per_s: float, for_s: float) -> list[bool]:
        """Return what each look found, ten a second."""
        found = []
        for _ in range(round(for_s * 10)):
            self.now_s += 0.1
            self.n_sent += per_s / 10
            found.append(self.watch.poll())
        return found


def test_it_is_time_to_send_again_several_times_after_a_flood() -> None:
    sender = Sender()
    assert not any(sender.send(1000, 5)) and sender.watch.is_on
    found = sender.send(20, 12)
    assert not sender.watch.is_on and sender.watch.is_recent and sender.watch.is_over
    times = [0.1 * number for number, is_due in enumerate(found) if is_due]
    assert [round(time - times[0]) for time in times] == [0, 1, 2, 4, 7]
    assert not any(sender.send(20, 60)) and not sender.watch.is_recent


def test_what_a_view_and_a_progress_bar_send_is_no_flood() -> None:
    sender = Sender()
    assert not any(sender.send(100, 5))
    assert not sender.watch.is_on and not sender.watch.is_recent


def test_a_short_burst_is_a_flood() -> None:
    sender = Sender()
    sender.send(5000, 0.1)
    assert sender.watch.is_on and any(sender.send(0, 3))


def test_a_flood_before_the_view_is_taken_for_one_that_has_just_ended() -> None:
    sender = Sender(n_unseen=1500)
    assert sender.watch.is_recent
    found = sender.send(20, 12)
    assert [number // 10 for number, is_due in enumerate(found, 1) if is_due] == [3, 7]
    assert not FloodWatch(lambda: int(sender.n_sent), lambda: sender.now_s).is_recent


def test_another_flood_postpones_it() -> None:
    sender = Sender()
    sender.send(1000, 5)
    assert any(sender.send(20, 2)) and not sender.watch.is_over
    assert not any(sender.send(1000, 10)[10:]) and sender.watch.is_on
    assert sender.send(20, 12).count(True) == 5
