"""How a gang looks: every view takes its state, and new events for the output in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hydrogen_magic.events import Event
from hydrogen_magic.gang.state import GangState

__all__ = ["View", "pick_view"]


class View(Protocol):
    """Shows one gang from its launch to its end."""

    def update(self, state: GangState, fresh: Sequence[Event]) -> None:
        """Show ``state``; ``fresh``: the events since the last call. At most 10 calls a second."""

    def close(self, state: GangState) -> None:
        """Show the last state, which stays, and release what the view holds. Never called twice."""


def pick_view(*, quiet: bool = False, detached: bool = False) -> View:
    """Return the view that suits where this process writes to.

    ``quiet`` shows output only. A ``detached`` view is updated by a thread while the user types on.
    The choice of a live widget, where a front end is there to draw it, belongs here.
    """
    from hydrogen_magic.views.text import TextView, pick_surface

    return TextView(pick_surface(detached=detached), quiet=quiet)
