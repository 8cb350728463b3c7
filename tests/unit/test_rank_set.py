"""The ranks of one attempt on a host."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hydrogen_magic.core.messages import WorkerCommand
from hydrogen_magic.node.agent import rank_set
from hydrogen_magic.node.agent.rank_set import RankSet


class DeafRank:
    """Takes the place of a rank that only SIGKILL ends."""

    rank = 0
    exited = False
    on_retained: Callable[[], None]

    def __init__(self, has_reacted: bool) -> None:
        self.has_reacted = has_reacted
        self.signals: list[int] = []

    def send(self, command: WorkerCommand) -> None:
        """It reads nothing."""

    def signal(self, signum: int) -> None:
        self.signals.append(signum)
        self.exited = signum == signal.SIGKILL


@pytest.mark.parametrize("has_reacted", [False, True])
def test_a_rank_that_handles_signals_is_killed_in_the_end(
    has_reacted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 0.1)
    monkeypatch.setattr(rank_set, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    deaf: Any = DeafRank(has_reacted)
    ranks = RankSet()
    ranks.add(deaf)
    asyncio.run(ranks.terminate(grace_s=2.0))
    assert deaf.signals == [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]


def test_a_rank_of_a_session_that_does_not_return_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_REACTION_S", "GIVE_UP_S"):
        monkeypatch.setattr(rank_set, name, 0.0)
    deaf: Any = DeafRank(has_reacted=True)
    ranks = RankSet()
    ranks.add(deaf)
    asyncio.run(ranks.interrupt(grace_s=0.0))
    assert deaf.signals == [signal.SIGINT, signal.SIGKILL]


def test_interrupting_no_ranks_takes_no_grace() -> None:
    """A Stop may come before the first rank of a session's cell has started."""
    asyncio.run(asyncio.wait_for(RankSet().interrupt(grace_s=1000.0), 20.0))
