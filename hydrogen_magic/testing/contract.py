"""The contract suite: tests of the guarantees for every gang, with any placement and rendezvous.

A plug-in's tests have a subclass, whose name begins with ``Test``::

    class TestMyPlacement(GangContract):
        placement = "mine"

pytest then runs every guarantee as a test of that class. Nothing is asserted about how long things take.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import pytest

from hydrogen_magic import plugins
from hydrogen_magic.core import processes
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver import launcher
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.errors import GangStoppedError, PlacementError, RankFailedError
from hydrogen_magic.testing import ranks

__all__ = ["GangContract"]


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
    captures_output: ClassVar[bool] = True
    """Output of the ranks reaches the gang's logs."""
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
        spec = JobSpec(np=10**6, placement=self.placement, rendezvous=self.rendezvous)
        try:
            plugins.placement(self.placement).plan(spec)
        except PlacementError:
            return
        pytest.skip(f"{self.placement} has no limit")

    def test_every_rank_has_its_value(self) -> None:
        gang = self.ended(self.launch(ranks.gather))
        assert gang.results == [list(range(self.np))] * self.np

    def test_the_rank_that_raises_is_named_with_the_line(self) -> None:
        """Its peers wait in a collective, which breaks under them."""
        culprit = self.np - 1
        error = self.failure_of(self.launch(ranks.raise_on, culprit))
        assert error.rank == culprit
        assert "ValueError: bad batch 17" in error.report
        assert 'raise ValueError("bad batch 17")' in error.report

    def test_the_rank_that_is_killed_is_named(self) -> None:
        self.needs_processes()
        culprit = self.np - 1
        error = self.failure_of(self.launch(ranks.kill_one, culprit))
        assert (error.rank, "SIGKILL" in str(error)) == (culprit, True), str(error)

    def test_all_ranks_are_started_again_after_a_failure(self) -> None:
        """The ranks of the second attempt find each other again, and load the checkpoint of the first."""
        gang = self.ended(self.launch(ranks.fail_once, retries=1))
        assert (gang.result, gang.snapshot().attempt) == (list(range(self.np)), 1)

    def test_a_stop_interrupts_a_wait_for_other_ranks(self) -> None:
        gang = self.launch(ranks.wait)
        self.until(gang, lambda: all(rank.phase == "running" for rank in gang.ranks))
        if self.captures_output:
            self.until(gang, lambda: all("waiting" in gang.logs[n] for n in range(self.np)))
        gang.stop()
        with pytest.raises(GangStoppedError):
            self.ended(gang).raise_for_state()

    def test_a_stop_ends_what_ranks_have_started(self) -> None:
        """Also processes in sessions of their own. Only where the ranks are on this machine."""
        self.needs_processes()
        if not plugins.placement(self.placement).on_this_machine:
            pytest.skip("the ranks are on other machines")
        gang = self.launch(ranks.start_helper_and_wait)
        self.until(gang, lambda: len(self._helpers(gang)) == self.np)
        started = [*self._helpers(gang), *(rank.pid for rank in gang.ranks if rank.pid)]
        gang.stop()
        self.ended(gang)
        self.until_gone(started)

    # ── what the tests are made of ──

    def launch(self, function: Callable[..., Any], *args: Any, **options: Any) -> Gang:
        """Start a gang that calls ``function`` with the library and ``args``."""
        where = {"on": self.placement, "rendezvous": self.rendezvous, "np": self.np}
        return launcher.launch(function, self.library, *args, **{**where, **options})

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
        while left := [one.pid for one in processes.processes(pids) if one.state != "Z"]:
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.01)

    def needs_processes(self) -> None:
        """Skip a test that ends ranks as processes."""
        if self.np == 1:
            pytest.skip("needs several ranks, each in a process of its own")

    def _helpers(self, gang: Gang) -> list[int]:
        text = "".join(gang.logs[rank] for rank in range(self.np))
        return [int(pid) for pid in re.findall(r"helper (\d+)\.", text)]
