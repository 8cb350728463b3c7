"""The notebook's input line: what ranks request of the user, one request at a time.

The cell asks in its own thread, as ``input()`` of any cell does; another thread updates the view meanwhile.
"""

from __future__ import annotations

import getpass
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context

from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.events import InputRequested
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.driver.state.output_lines import without_colour

_NEXT_RANK_S = 0.5
"""A rank in the debugger asks again within this time: it keeps the line until it goes on."""
_NO_LINE = (
    "input() needs a front end with an input line, and this one has none ({error}): run the notebook in "
    "Jupyter, or pass the value as a variable"
)


class NotebookInputLine:
    """Asks the user on behalf of ranks.

    ``while_asking`` makes SIGINT raise; its result raises it here. ``withdraw`` is called when a question has
    ended without an answer of the user: the gang has ended, or the cell was interrupted.
    """

    def __init__(
        self,
        gang: Gang,
        while_asking: Callable[[], AbstractContextManager[Callable[[], None]]],
        withdraw: Callable[[], None],
    ) -> None:
        self._gang = gang
        self._while_asking = while_asking
        self._withdraw = withdraw
        self._rank = -1
        """The rank that asked last."""
        self._answered_at = -math.inf
        self._answered: dict[int, InputRequested] = {}
        """The last answered request of each rank, which the gang's state may still have for a moment."""

    def serve(self, update: Callable[[], bool]) -> None:
        """Ask for one line, if a rank requests one.

        ``update`` is called in another thread meanwhile; it returns whether the gang has ended.
        """
        request = self._next(self._gang.snapshot())
        if request is None:
            return
        answer = None
        with self._while_asking() as give_up, _repeating(update, give_up):
            answer = _ask(request, len(self._gang.ranks))
        if answer is None:
            self._withdraw()
        text, error = answer or ("", "the user interrupted the input")
        self._rank, self._answered_at = request.rank, time.monotonic()
        self._answered[request.rank] = request
        self._gang.answer_input(request.rank, request.number, text, error)

    def _next(self, state: GangState) -> InputRequested | None:
        """Return the request to serve now: of the rank that asked last, otherwise of the lowest one."""
        requests = (rank.input_request for rank in state.ranks)
        waiting = [each for each in requests if each and self._answered.get(each.rank) is not each]
        same = [each for each in waiting if each.rank == self._rank]
        if not same and time.monotonic() - self._answered_at < _NEXT_RANK_S:
            return None
        return next(iter(same or waiting), None)


def _ask(request: InputRequested, n_ranks: int) -> tuple[str, str]:
    """Return a line of the user, or why there is none."""
    label = f"[{request.rank}] " if n_ranks > 1 else ""
    prompt = f"{label}{without_colour(request.prompt)}"
    try:
        return (getpass.getpass if request.is_password else input)(prompt), ""
    except EOFError:
        return "", msg.END_OF_INPUT
    except Exception as error:  # ipykernel's, where the client has no input line
        return "", _NO_LINE.format(error=type(error).__name__)


@contextmanager
def _repeating(update: Callable[[], bool], at_end: Callable[[], None]) -> Iterator[None]:
    """Call ``update`` in another thread until the block ends; call ``at_end`` if it returns True."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.is_set():
            if update():
                at_end()
                return

    run = copy_context().run
    thread = threading.Thread(target=run, args=(repeat,), name="hydrogen_magic view", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
