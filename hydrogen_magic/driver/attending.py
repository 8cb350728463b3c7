"""Shows a gang until it has ended: while its cell waits, or in a thread beside other cells."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from functools import partial

from hydrogen_magic.driver import tracking
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.input_line import NotebookInputLine
from hydrogen_magic.driver.interrupts import interrupts_held
from hydrogen_magic.views import View, draws_html, pick_view


def attend(gang: Gang, *, quiet: bool = False) -> None:
    """Show the gang, with ``quiet`` only its output, until it has ended.

    The first interrupt stops the gang, the second kills it. A view that fails, or cannot be made, ends it.
    """
    with interrupts_held() as interrupts, ExitStack() as endings:
        endings.callback(tracking.finish, [gang])
        endings.callback(_end, gang)  # while there is no view
        view = pick_view(gang, quiet=quiet)
        endings.callback(lambda: view.close(gang.snapshot()))
        endings.callback(_end, gang)  # the first of them
        interrupts.take(gang)
        gang.attend()
        line = NotebookInputLine(gang, interrupts.while_asking, view.withdraw_input)
        # A terminal shows the typed line where the view would be drawn.
        wait = partial(gang.wait, view.interval_s)
        ask = line.serve if draws_html() else lambda update: line.serve(wait)
        show(gang, view, ask=ask)


def _end(gang: Gang) -> None:
    """End a gang that would continue unseen, since its view failed."""
    if not gang.wait(0):
        gang.stop_for("cell")
        gang.wait()


def show(
    gang: Gang,
    view: View,
    seen: int = 0,
    ask: Callable[[Callable[[], bool]], None] = lambda update: None,
) -> None:
    """Update ``view``, which has ``seen`` so many events, until the gang has ended.

    ``ask`` is called after each update with a function that makes the next one, and returns whether the
    gang has ended; it may make several.
    """

    def update() -> bool:
        nonlocal seen
        ended = gang.wait(view.interval_s)
        fresh = gang.events(seen)
        seen += len(fresh)
        view.update(gang.snapshot(), fresh)
        return ended

    while not update():
        ask(update)


def follow(gang: Gang, view: View, and_then: Callable[[], None] = lambda: None) -> None:
    """Show the gang in a thread while other cells run, and call ``and_then`` when it has ended."""
    # Its display belongs under the requesting cell, so it is created here.
    seen = gang.events()
    view.update(gang.snapshot(), seen)

    def going_on() -> None:
        try:
            show(gang, view, len(seen))
            view.close(gang.snapshot())
        finally:  # the view may fail; the gang continues
            gang.wait()
            and_then()

    # In this context, ipykernel knows the cell of the thread's output.
    run, name = copy_context().run, f"hydrogen_magic view of gang {gang.id}"
    threading.Thread(target=run, args=(going_on,), name=name, daemon=True).start()
