"""``input()`` on a rank: the notebook asks its user. The debugger reads its commands by it.

Other ranks wait for this one meanwhile, in a collective for example: see
:mod:`~hydrogen_magic.node.worker.session.peer_timeouts`.
"""

from __future__ import annotations

import builtins
import re
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partialmethod
from queue import Empty, SimpleQueue
from typing import Any

from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.events import DebuggerRequested, Event, InputRequested, RecordAwaited
from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.node.worker import main_thread, process_setup, standard_streams
from hydrogen_magic.node.worker.import_hooks import hooks
from hydrogen_magic.node.worker.interactive import post_mortem
from hydrogen_magic.node.worker.reporting import reporter

_ASKS = re.compile(r"(?<!\.)\binput\s*\(|\b(breakpoint|getpass|post_mortem|set_trace)\s*\(")
_LONGEST_PROMPT = 1000
_RECORD_S = 1.0
"""How long a checkpoint waits for a kernel that does not respond."""


class StopRequestedError(SystemExit):
    """The debugger asks again after an interrupt, although the rank has to end."""


class UserInput:
    """Requests of this rank that the kernel answers: above all for lines that the user types."""

    def __init__(self, rank_reporter: reporter.Reporter) -> None:
        self._reporter = rank_reporter
        self._number = 0
        self._lines: SimpleQueue[msg.AnswerInput] = SimpleQueue()
        self._asking = threading.Lock()

    def install(self, *, has_debugger: bool = True) -> None:
        """Replace ``input`` and ``getpass.getpass`` in this process, by which debuggers read.

        Without ``has_debugger``, ``breakpoint()`` has no effect.
        """
        builtins.input = self.ask
        hooks.add("getpass", lambda module: setattr(module, "getpass", self.ask_password))
        hooks.add("pdb", _leave_interrupts if has_debugger else _pass_breakpoints)
        sys.breakpointhook = sys.__breakpointhook__ if has_debugger else _do_not_break

    def ask(self, prompt: object = "", /) -> str:
        """Return a line of the user.

        Raises EOFError at the end of the input, HydrogenError if there is no input line.
        """
        return self._line(str(prompt), is_password=False)

    def ask_password(self, prompt: str = "Password: ", stream: Any = None, **_: Any) -> str:
        """Return a line of the user, which is not shown. Raises the errors of :meth:`ask`."""
        return self._line(prompt, is_password=True)

    def debug(self, error: Exception) -> None:
        """Debug ``error`` until the user leaves the debugger; wait before that while a peer is debugged."""
        report, rank = main_thread.report_exception(error), self._reporter.rank
        self._asked(lambda now_s, number: DebuggerRequested(now_s, rank, number, report))
        found = main_thread.users_part(error.__traceback__) or error.__traceback__
        post_mortem.examine(error, found, "--pdb")

    def wait_until_recorded(self) -> None:
        """Wait until the kernel has recorded what this rank has reported, for a second at most."""
        is_rank = reporter.current() is self._reporter  # not a child
        if not is_rank or not self._asking.acquire(timeout=_RECORD_S):
            return
        try:
            self._number += 1
            now_s, rank = self._reporter.now_s(), self._reporter.rank
            event = RecordAwaited(now_s, rank, self._number)
            self._reporter.ask(event, self._has_answer, _RECORD_S)
        finally:
            self._asking.release()

    def _has_answer(self, within_s: float) -> bool:
        with suppress(Empty):
            return self._lines.get(timeout=within_s).number == self._number
        return False

    def answer(self, line: msg.AnswerInput) -> None:
        """Pass on an answer; called by the reporter's thread."""
        self._lines.put(line)

    def _line(self, prompt: str, *, is_password: bool) -> str:
        text = prompt[-_LONGEST_PROMPT:]
        return self._asked(
            lambda now_s, number: InputRequested(
                now_s, self._reporter.rank, number, text, is_password
            )
        )

    def _asked(self, request: Callable[[float, int], Event]) -> str:
        """Return the answer to a request, which is made of the time and its number."""
        standard_streams.flush()
        if reporter.current() is not self._reporter:
            raise EOFError("a process that a rank has started has no input")
        if process_setup.asked_to_stop.is_set():
            raise StopRequestedError
        with self._asking:
            self._number += 1
            self._reporter.post(request(self._reporter.now_s(), self._number))
            return self._answer()

    def _answer(self) -> str:
        line = self._lines.get()
        while line.number != self._number:  # of a request that was interrupted
            line = self._lines.get()
        if line.error == msg.END_OF_INPUT:
            raise EOFError("EOF when reading a line")
        if line.error:
            raise HydrogenError(line.error)
        return line.text


def _leave_interrupts(pdb: Any) -> None:
    """Keep the debugger from taking over SIGINT, which stops a rank."""
    if isinstance(vars(pdb.Pdb)["__init__"], partialmethod):
        return  # by an earlier cell of the session
    pdb.Pdb.__init__ = partialmethod(pdb.Pdb.__init__, nosigint=True)


def _pass_breakpoints(pdb: Any) -> None:
    pdb.set_trace = _do_not_break


def _do_not_break(*args: Any, **kwargs: Any) -> None:
    """Stand in for ``breakpoint()`` on a rank that ``--ranks`` leaves out."""


def may_ask(sources: Iterable[str]) -> bool:
    """Whether code with these sources may ask the user."""
    return any(_ASKS.search(source) for source in sources)
