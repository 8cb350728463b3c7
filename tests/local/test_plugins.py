"""A plug-in's placement, rendezvous and observer, found by entry points, in gangs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver import calls
from hydrogen_magic.driver.placements.inline import InlinePlacement
from hydrogen_magic.errors import RendezvousError
from hydrogen_magic.testing.contract import GangContract
from hydrogen_magic.testing.in_process import InProcessPlacement
from hydrogen_magic.testing.ranks import TORCH
from tests import plain_ranks, plug_in, ranks
from tests.contracts import (
    DOES_NOT_JOIN,
    FINISHES_EARLY,
    FIRST_RAISES,
    SILENT_END,
    STANDS_STILL,
    STARTS_AGAIN,
    STOPS,
    rarely,
)
from tests.gangs import ended, notices_of

pytestmark = pytest.mark.usefixtures("installed")


@pytest.fixture(scope="module")
def torch_in_this_process() -> None:
    """Have this process a group once: torch keeps pipes for ever then."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def installed(
    tmp_path_factory: pytest.TempPathFactory, torch_in_this_process: None, warm_agents: None
) -> Iterator[None]:
    with plug_in.installed(tmp_path_factory.mktemp("plug_in")):
        yield


@rarely(SILENT_END, STANDS_STILL, DOES_NOT_JOIN, FINISHES_EARLY, STARTS_AGAIN, STOPS, FIRST_RAISES)
class TestPlugIn(GangContract):
    placement = "mine"
    rendezvous = "mine"
    library = replace(TORCH, join=ranks.meet_by_file)


class TestInProcess(GangContract):
    placement = "in-process"
    np = 1
    captures_output = False


def test_an_interrupt_after_the_end_of_a_rank_leaves_the_gang_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stop may come that late, and then hits what the rank's thread does last."""

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "call_soon_threadsafe":
            sys.setprofile(None)
            raise KeyboardInterrupt

    monkeypatch.setattr(InlinePlacement, "run_here", lambda *_: sys.setprofile(interrupt))
    anything: Any = None
    launch = InProcessPlacement().open(JobSpec()).launch(anything, anything)
    asyncio.run(asyncio.wait_for(launch, 30))


def test_a_service_that_fails_ends_the_gang_with_its_error() -> None:
    ended(
        calls.launch(ranks.meet, np=2)
    )  # then torch's store waits for another gang on the same socket
    gang = ended(calls.launch(ranks.hang, "sleep", np=2, rendezvous="serving"))
    how = r"failed: ValueError: no server, blocking: True \(my_plug_in.py, line \d+\)"
    with pytest.raises(
        RendezvousError, match=rf"the service of the rendezvous \(my_plug_in:serve\) {how}"
    ):
        gang.raise_for_state()


def test_ranks_attach_observers_of_plug_ins() -> None:
    """One observer cannot be imported: a warning says so, and the rank goes on."""
    gang = ended(calls.launch(plain_ranks.observed, np=1, on="mine", rendezvous="mine"))
    assert gang.result == (True, True)
    assert "planned by the plug-in" in notices_of(gang)
    assert "watched_library runs, but cannot be observed" in notices_of(gang)
    assert "No module named 'no_such_module'" in notices_of(gang)
