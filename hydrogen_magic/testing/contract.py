"""The contract suite: tests of the guarantees for every gang, with any placement and rendezvous.

A plug-in's tests have a subclass, whose name begins with ``Test``::

    class TestMyPlacement(GangContract):
        placement = "mine"

pytest then runs every guarantee as a test of that class. A subclass of :class:`SessionContract` runs them for
cells of a session. Nothing is asserted about how long things take.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hydrogen_magic import plugins
from hydrogen_magic.core import events as ev
from hydrogen_magic.core import processes
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver import calls
from hydrogen_magic.driver import session as sessions
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.placements import Placement
from hydrogen_magic.driver.state.formatting import ranks_text
from hydrogen_magic.errors import (
    GangStoppedError,
    OptionValueError,
    PlacementError,
    RankFailedError,
)
from hydrogen_magic.testing import ranks

__all__ = ["GangContract", "SessionContract"]


class GangContract:
    """The guarantees. Attributes of a subclass set the plug-in under test."""

    placement: ClassVar[str] = "local"
    """Name of the placement, as ``--on`` takes it."""
    rendezvous: ClassVar[str] = "torch"
    """Name of the rendezvous, as ``--with`` takes it."""
    library: ClassVar[ranks.Library] = ranks.TORCH
    """How ranks use the library of the rendezvous."""
    np: ClassVar[int] = 2
    """Number of ranks. With one rank the guarantees about peers are skipped."""
    absent: ClassVar[Sequence[int]] = (1,)
    """Ranks that stay away in the test of that: several where the rendezvous has an ``init_collective``."""
    short_limit: ClassVar[Mapping[str, str]] = {}
    """Variables by which the library's collectives fail after ten seconds, if ``Library.join`` cannot."""
    sees_processes: ClassVar[bool | None] = None
    """The ranks' processes are on this machine, so that a test can see their end; None: as the placement's
    ``on_this_machine`` says."""
    timeout_s: ClassVar[float] = 120.0
    """Bound of every wait."""

    def test_a_plan_has_every_rank_and_no_effect(self) -> None:
        """Ranks are in order, those of a host are neighbours, and a second plan is the same."""
        spec = JobSpec(np=self.np, placement=self.placement, rendezvous=self.rendezvous)
        placement = plugins.placement(self.placement)
        plan = placement.plan(spec)
        assert [slot.rank for slot in plan.slots] == list(range(self.np))
        nodes = [slot.node_rank for slot in plan.slots]
        assert nodes == sorted(nodes)
        assert placement.plan(spec) == plan

    def test_an_impossible_number_of_ranks_is_refused(self) -> None:
        """As PlacementError before anything starts; a placement without a limit skips this."""
        spec = JobSpec(np=10**4, placement=self.placement, rendezvous=self.rendezvous)
        try:
            plugins.placement(self.placement).plan(spec)
        except PlacementError:
            return
        pytest.skip(f"{self.placement} has no limit")

    def test_every_rank_has_its_value(self) -> None:
        gang = self.ended(self.launch(ranks.gather))
        assert gang.results == [list(range(self.np))] * self.np

    @pytest.mark.parametrize(("of", "clean_up_s", "leaves"), [(0, 0.0, False), (-1, 1.0, True)])
    def test_the_rank_that_raises_is_named_with_the_line(
        self, of: int, clean_up_s: float, leaves: bool
    ) -> None:
        """Its peers wait in a collective, which breaks under them while the rank cleans up."""
        culprit = range(self.np)[of]
        error = self.failure_of(self.launch(ranks.raise_on, culprit, clean_up_s, leaves))
        assert error.rank == culprit
        assert "ValueError: bad batch 17" in error.report
        assert 'raise ValueError("bad batch 17")' in error.report
        others = set(range(self.np)) - {culprit}
        assert not [rank for rank in others if f"rank {rank} failed" in error.report]

    @pytest.mark.parametrize(
        ("of", "how", "found"),
        [
            (-1, "SIGKILL", "killed by SIGKILL"),
            (0, "SIGSEGV", "killed by SIGSEGV"),
            (0, "_exit(0)", "exited with status 0 without finishing"),
            (-1, "exit(3)", "SystemExit: 3"),
        ],
    )
    def test_the_rank_that_ends_silently_is_named(self, of: int, how: str, found: str) -> None:
        self.needs_processes()
        culprit = range(self.np)[of]
        gang = self.launch(ranks.end_one, culprit, how)
        error = self.failure_of(gang)
        assert (error.rank, found in str(error)) == (culprit, True), str(error)
        notices = [event.text for event in gang.events() if isinstance(event, ev.Notice)]
        assert "disagree" not in "\n".join([error.report, *notices]), "no rank waits elsewhere"
        if how == "exit(3)":
            assert "sys.exit(3)" in error.report, "the line that ended it"

    def test_the_rank_that_stands_still_is_named(self) -> None:
        """Once the library's time limit has passed."""
        self.needs_processes()
        gang = self.launch(ranks.end_one, self.np - 1, "SIGSTOP", env=self.short_limit)
        error = self.failure_of(gang)
        assert (error.rank, "SIGSTOP" in str(error)) == (self.np - 1, True), str(error)

    def test_ranks_that_do_not_join_are_named(self) -> None:
        self.needs_processes()
        collective = plugins.rendezvous(self.rendezvous).init_collective
        limit = {"start_timeout": ranks.JOIN_S} if collective else {}  # else the library has one
        np = max(self.np, self.absent[-1] + 1)
        error = self.failure_of(self.launch(ranks.stay_away, self.absent, np=np, **limit))
        assert error.rank == self.absent[0], str(error)
        if collective:
            missing = f"{ranks_text(self.absent)} did not enter {collective} within"
            assert f"{missing} {ranks.JOIN_S:g} s" in str(error)
        elif self.library.is_observed:
            never = rf"{ranks_text(self.absent)} never entered the \w+ (its|their) peers were waiting in"
            assert re.match(never, str(error)), str(error)

    def test_the_rank_that_finishes_before_a_collective_of_the_others_is_named(self) -> None:
        self.needs_processes()
        error = str(self.failure_of(self.launch(ranks.finish_early)))
        if self.library.is_observed:
            early = r"(ranks? [\d, and]+)"
            never = rf"{early} never entered the [\w.]+ (its|their) peers were waiting in"
            assert re.match(rf"{never} \(\1 had already finished\)", error), error

    def test_all_ranks_are_started_again_after_a_failure(self) -> None:
        """The ranks of the second attempt find each other again, and load the checkpoint of the first."""
        gang = self.ended(self.launch(ranks.fail_once, retries=1))
        assert (gang.result, gang.snapshot().attempt) == (list(range(self.np)), 1)

    @pytest.mark.parametrize("where", ["collective", "rendezvous"])
    def test_a_stop_interrupts_a_wait_for_other_ranks(self, where: str) -> None:
        """All that the ranks have started ends, also processes in sessions of their own."""
        sees_all = self.can_see_processes and self.np > 1
        gang = self.launch(ranks.wait, where, sees_all)
        self.until(gang, lambda: all(rank.phase == "running" for rank in gang.ranks))
        self.until(gang, lambda: all("waiting" in gang.logs[n] for n in range(self.np)))
        if where == "collective" and self.library.is_observed and self.np > 1:
            self.until(gang, lambda: bool(gang.ranks[0].waiting_in))
        family = self.family(gang) if sees_all else []
        assert not sees_all or len(family) >= 3 * self.np
        gang.stop()
        with pytest.raises(GangStoppedError, match="stopped by you"):
            self.ended(gang).raise_for_state()
        self.release()
        self.until_gone(family)

    # ── what the tests are made of ──

    def launch(self, function: Callable[..., Any], *args: Any, **options: Any) -> Gang:
        """Start a gang that calls ``function`` with the library and ``args``."""
        where = {"on": self.placement, "rendezvous": self.rendezvous, "np": self.np}
        return calls.launch(function, self.library, *args, **{**where, **options})

    def release(self) -> None:
        """End what may stay after a gang: nothing, but the ranks of a session."""

    @property
    def can_see_processes(self) -> bool:
        """Whether the ranks' processes are on this machine."""
        on_this_machine = plugins.placement(self.placement).on_this_machine
        return on_this_machine if self.sees_processes is None else self.sees_processes

    def ended(self, gang: Gang) -> Gang:
        """Wait for the gang's end; fail, and kill it, when it takes too long."""
        if not gang.wait(self.timeout_s):
            gang.stop(kill=True)
            pytest.fail(f"still running after {self.timeout_s} s: {gang.snapshot()}")
        return gang

    def failure_of(self, gang: Gang) -> RankFailedError:
        """Wait for the gang's end; return the error that names the failed rank."""
        with pytest.raises(RankFailedError) as caught:
            self.ended(gang).raise_for_state()
        return caught.value

    def until(self, gang: Gang, holds: Callable[[], object]) -> None:
        """Wait for a condition that must hold while the gang runs."""
        deadline = time.monotonic() + self.timeout_s
        while not holds():
            assert not gang.wait(0.01), f"it ended early: {gang.snapshot().reason}"
            if time.monotonic() > deadline:
                gang.stop(kill=True)
                pytest.fail(f"not within {self.timeout_s} s: {gang.snapshot()}")

    def until_gone(self, pids: Iterable[int]) -> None:
        """Wait for the end of processes."""
        pids, deadline = list(pids), time.monotonic() + self.timeout_s
        while left := [one.pid for one in processes.processes(pids) if not one.has_exited]:
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.01)

    def family(self, gang: Gang) -> list[int]:
        """Return the pids of the ranks and of all their descendants."""
        pids = [rank.pid for rank in gang.ranks if rank.pid is not None]
        return [*pids, *(child.pid for pid in pids for child in processes.descendants(pid))]

    def needs_processes(self) -> None:
        """Skip a test that ends ranks as processes."""
        if self.np == 1:
            pytest.skip("needs several ranks, each in a process of its own")


class SessionContract(GangContract):
    """The guarantees for a cell of a session whose ranks have run an earlier cell.

    After each test, either the session has ended, or its ranks run a next cell and have their variables;
    no process is left when it has ended.
    """

    pids: Sequence[int] = ()
    """Of the session's ranks, since its first cell."""

    @pytest.fixture(autouse=True)
    def _session(self) -> Iterator[None]:
        """Skip the tests if the placement has no sessions; check and end the session of the test."""
        spec = JobSpec(np=self.np, placement=self.placement, rendezvous=self.rendezvous)
        placement = plugins.placement(self.placement)
        assert isinstance(placement, Placement), "its rank is in this process"
        if not placement.open(spec).has_sessions:
            pytest.skip(f"{self.placement} has no sessions")
        yield
        self.release()

    @property
    def session(self) -> str:
        """Name of the session."""
        return f"contract of {type(self).__name__}"

    def launch(self, function: Callable[..., Any], *args: Any, **options: Any) -> Gang:
        options["session"] = self.session
        if sessions.live(self.session) is None:
            first = {**options, "retries": 0, "env": None}
            self.pids = self.ended(super().launch(ranks.hold, **first)).results
        return super().launch(function, *args, **options)

    def release(self) -> None:
        """Check and end the session; wait until its ranks have ended."""
        if (running := sessions.live(self.session)) is not None:
            try:
                held = self.ended(self.launch(ranks.held, np=len(self.pids))).results
                assert held == [(pid, rank) for rank, pid in enumerate(self.pids)]
            finally:
                running.end()
        if self.can_see_processes:
            self.until_gone(self.pids)

    def test_all_ranks_are_started_again_after_a_failure(self) -> None:
        """Refused: ranks that have changed cannot repeat a cell."""
        with pytest.raises(OptionValueError, match="a session's cells are not retried"):
            self.launch(ranks.fail_once, retries=1)

    def test_ranks_of_a_session_join_after_the_notebook_has_changed_its_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A notebook's module path begins with its directory."""
        self.ended(self.launch(ranks.held)).raise_for_state()
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend("")
        assert self.ended(self.launch(ranks.gather)).result == list(range(self.np))

    def test_a_session_keeps_its_ranks_until_it_ends(self) -> None:
        """Through a stopped cell, and, if the rendezvous can recover, a cell that fails on one rank."""
        self.needs_processes()
        self.ended(self.launch(ranks.join)).raise_for_state()
        gang = self.launch(ranks.sleep)
        self.until(gang, lambda: all(rank.phase == "running" for rank in gang.ranks))
        gang.stop()
        assert self.ended(gang).state == "STOPPED"
        culprit = self.np - 1
        error = self.failure_of(self.launch(ranks.raise_in_session, culprit))
        assert (error.rank, "bad batch 17" in str(error)) == (culprit, True)
        can_recover = bool(plugins.rendezvous(self.rendezvous).group_recovery)
        assert (sessions.live(self.session) is not None) == can_recover
        if can_recover:
            gathered = self.ended(self.launch(ranks.gather_held)).results
            assert gathered == [list(range(self.np))] * self.np
