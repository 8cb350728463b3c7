"""Commands of pages, see ``protocol.ts``: carried out once, and always answered.

Pages repeat a command until it is acknowledged, so it may arrive several times, and late: after the gang
has ended, when the cell that delayed it is over.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.errors import HydrogenError

PageCommand = Mapping[str, Any]
"""A command as a page sent it, with the fields that ``protocol.ts`` names."""
PageSender = Callable[[Mapping[str, Any], Sequence[bytes]], None]
"""Sends a message to the pages."""

_REMEMBERED = 256
"""Commands remembered by their id: many more than pages repeat at a time."""
_LONGEST_NAME = 200


class CommandHandler:
    """Handles commands of pages, in any thread, and returns at once.

    Actions on the gang are carried out at once. Requests for data go to ``later``; those for files are
    acknowledged as pending, and answered by :meth:`answer` when they are complete.
    """

    def __init__(self, gang: Gang, send: PageSender, later: Callable[[PageCommand], None]) -> None:
        self._gang = gang
        self._send = send
        self._later = later
        self._answers: OrderedDict[str, Mapping[str, Any] | None] = OrderedDict()
        """Command -> its answer, None while it is in progress."""
        self._lock = threading.Lock()

    def take(self, content: Any) -> None:
        """Handle a message of a page; malformed ones without an id are ignored."""
        if not isinstance(content, Mapping):
            return
        command_id, client = content.get("id"), content.get("client")
        if not _is_name(command_id) or not _is_name(client):
            return
        if not self._is_new(command_id):
            return
        try:
            self._do(content)
        except (KeyError, TypeError, ValueError) as error:
            self.refuse_unknown(content, error)
        except HydrogenError as error:
            self.answer(content, ok=False, text=str(error))

    def answer(
        self, command: PageCommand, *, ok: bool, text: str = "", pending: bool = False
    ) -> None:
        """Acknowledge a command; ``pending``: another answer follows."""
        ack = {"kind": "ack", "to": command["client"], "id": command["id"], "ok": ok}
        ack |= {"text": text} if text else {}
        ack |= {"pending": True} if pending else {}
        with self._lock:
            self._answers[command["id"]] = ack
        self._send(ack, ())

    def refuse_unknown(self, command: PageCommand, error: Exception) -> None:
        """Answer a command that this version does not know, or not in this form."""
        text = f"this kernel does not understand the request {command.get('do')!r:.40}"
        self.answer(command, ok=False, text=f"{text} ({error!s:.200}); reload the page")

    def _is_new(self, command_id: str) -> bool:
        """Return whether a command arrives for the first time; otherwise repeat its answer."""
        with self._lock:
            is_new = command_id not in self._answers
            known = self._answers.setdefault(command_id, None)
            while len(self._answers) > _REMEMBERED:
                self._answers.popitem(last=False)
        if known is not None:
            self._send(known, ())
        return is_new

    def _do(self, command: PageCommand) -> None:
        what = command["do"]
        if what in _ACTIONS:
            state = self._gang.snapshot()
            if state.is_terminal:
                text = f"gang {self._gang.id} has already ended: {state.state.lower()}"
                self.answer(command, ok=False, text=text)
                return
            _ACTIONS[what](self._gang, command)
            self.answer(command, ok=True)
        elif what in _REQUESTS:
            # Without an answer, a page assumes after a while that the kernel is busy with other things.
            self.answer(command, ok=True, pending=what in _ANSWERED_LATER)
            self._later(command)
        else:
            raise ValueError("it is unknown")


def _is_name(name: object) -> TypeGuard[str]:
    """Return whether it can be repeated in an answer, to all pages."""
    return isinstance(name, str) and len(name) <= _LONGEST_NAME and name.isascii()


_ACTIONS: Mapping[str, Callable[[Gang, PageCommand], None]] = {
    "stop": lambda gang, command: gang.stop(),
    "kill": lambda gang, command: gang.stop(kill=True),
    "stacks": lambda gang, command: gang.ask_stacks(),
    "profile": lambda gang, command: gang.profile(command["steps"]),
    "record": lambda gang, command: gang.record(command["on"]),
}
_REQUESTS = frozenset(("hello", "detail", "rows", "tracks", "csv", "trace", "log"))
_ANSWERED_LATER = ("csv", "trace", "log")
