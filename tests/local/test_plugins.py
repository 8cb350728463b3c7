"""A plug-in's placement, rendezvous and observer, found by entry points, in gangs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from hydrogen_magic.driver import calls
from hydrogen_magic.errors import RendezvousError
from hydrogen_magic.testing.contract import GangContract
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
def installed(tmp_path_factory: pytest.TempPathFactory, warm_agents: None) -> Iterator[None]:
    with plug_in.installed(tmp_path_factory.mktemp("plug_in")):
        yield


@rarely(SILENT_END, STANDS_STILL, DOES_NOT_JOIN, FINISHES_EARLY, STARTS_AGAIN, STOPS, FIRST_RAISES)
class TestPlugIn(GangContract):
    placement = "mine"
    rendezvous = "mine"
    library = replace(TORCH, join=ranks.meet_by_file)


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
