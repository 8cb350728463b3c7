"""Views of a gang: each one gets the gang's state, and new events for output."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hydrogen_magic.core.events import Event
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.state.gang_state import GangState

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from hydrogen_magic.views.output_stream import OutputStream

ATTENDED_S = 0.1
"""Interval between updates of text while a cell waits: output appears to be immediate."""
DETACHED_S = 0.25
"""Interval between updates of text while no cell waits: a flood of output is thinned out meanwhile."""


class View(Protocol):
    """Shows one gang from its launch to its end."""

    @property
    def interval_s(self) -> float:
        """Seconds between two updates, at most."""

    def update(self, state: GangState, fresh: Sequence[Event]) -> None:
        """Show ``state``; ``fresh``: the events since the last call."""

    def withdraw_input(self) -> None:
        """The user was asked for a line, and none is needed any more: a front end may still wait for it."""

    def close(self, state: GangState) -> None:
        """Show the last state, which stays, and release the view's resources. Never called twice."""


def shell_here() -> InteractiveShell | None:
    """Return this process's IPython shell, None without one."""
    if "IPython" not in sys.modules:  # a script should not spend time on its import
        return None
    from IPython.core.getipython import get_ipython

    return get_ipython()


def kernel_here() -> Any:
    """Return the Jupyter kernel that this process is, None if it is none."""
    return getattr(shell_here(), "kernel", None)


def pick_view(
    gang: Gang,
    *,
    quiet: bool = False,
    detached: bool = False,
    stdout: OutputStream | None = None,
) -> View:
    """Return the view of a gang for the output of this process.

    ``quiet`` shows only output. A ``detached`` view is updated by a thread while the user continues.
    ``stdout``: see :func:`~hydrogen_magic.views.text_view.pick_surface`.
    """
    from hydrogen_magic.views.outputs import NotebookOutput
    from hydrogen_magic.views.text_view import TextView, pick_surface

    surface = pick_surface(detached=detached, stdout=stdout)
    if quiet and detached and isinstance(surface, NotebookOutput):
        from hydrogen_magic.views.widget.display import cell_of_threads  # takes time
        from hydrogen_magic.views.widget.rank_displays import RankDisplays

        # Found in the gang's cell: in another thread, ipykernel 6 returns the newest cell.
        surface = NotebookOutput(displays=RankDisplays(), cell=cell_of_threads())
    if quiet or not isinstance(surface, NotebookOutput):
        return TextView(surface, quiet=quiet, interval_s=DETACHED_S if detached else ATTENDED_S)
    from hydrogen_magic.views.widget import WidgetView

    return WidgetView(gang, blocking=not detached)


def draws_html() -> bool:
    """Return whether output of this process may be HTML: it is a Jupyter kernel."""
    from hydrogen_magic.views.outputs import NotebookOutput
    from hydrogen_magic.views.text_view import pick_surface

    return isinstance(pick_surface(), NotebookOutput)


def draws_widgets() -> bool:
    """Return whether :func:`pick_view` picks a live widget here."""
    if not draws_html():
        return False
    from hydrogen_magic.views.widget.display import is_widget_expected

    return is_widget_expected()


def report_fault(what: str, error: Exception) -> None:
    """Print which view has failed by an ``error`` of ours.

    Not a warning: notebooks often ignore or raise them.
    """
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{place.filename}, line {place.lineno}"
    print(f"{what}; please report {type(error).__name__}: {error} ({where})", file=sys.stderr)


def static_picture(state: GangState, events: Sequence[Event]) -> str:
    """Return a gang as HTML that needs no kernel and no network."""
    from hydrogen_magic.views.widget.static_html import static_html

    return static_html(state, events)
