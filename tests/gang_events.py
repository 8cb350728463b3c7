"""The events with which a gang's run begins."""

from __future__ import annotations

from hydrogen_magic.core import events as ev

CELLS = {"<cell 7>": "Cell In[7]", "/tmp/ipykernel_1/22.py": "Cell In[3]"}


def launched(np: int = 2, title: str = "--np 2", rendezvous: str = "torch") -> list[ev.Event]:
    """Return the events of a gang whose processes have started."""
    return [
        ev.GangLaunched(0.0, "3f2a", title, np, "local", rendezvous, 1.0, "b:1:1", CELLS),
        ev.AttemptStarted(0.0, 0),
        *(ev.RankStarted(0.1, rank, 100 + rank, "here", "cpu") for rank in range(np)),
    ]


def running(np: int = 2, title: str = "--np 2", rendezvous: str = "torch") -> list[ev.Event]:
    """Return the events of a gang whose ranks run the cell."""
    phases = (ev.RankPhase(0.2, rank, "running") for rank in range(np))
    return [*launched(np, title, rendezvous), *phases]
