"""Commands of pages, see ``protocol.ts``: validated, carried out once, and always answered.

Pages repeat a command until it is acknowledged, so it may arrive several times, and late: after the gang
has ended, when the cell that delayed it is over.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.profile_merge import MAX_STEPS
from hydrogen_magic.errors import HydrogenError

PageCommand = Mapping[str, Any]
"""A command as a page sent it; validated ones have the fields that ``protocol.ts`` names."""

_REMEMBERED = 256
"""Commands remembered by their id: many more than pages repeat at a time."""
_LONGEST_NAME = 200
_MOST_BUCKETS = 100_000
_LARGEST_STEP = 1e300
"""Larger widths of buckets would overflow."""
_MOST_RANKS_REQUESTS = 1024


class PageSender(Protocol):
    """Sends a message to the pages."""

    def __call__(self, content: Mapping[str, Any], buffers: Sequence[bytes] = (), /) -> None: ...


class CommandHandler:
    """Handles commands of pages, in any thread, and returns at once.

    What acts on the gang is done here and now. What asks for data is checked and handed to ``later``,
    in the same form; that files and outputs are being made is said at once, and that they are, by
    :meth:`answer`.
    """

    def __init__(
        self, actions: Gang, send: PageSender, later: Callable[[PageCommand], None]
    ) -> None:
        self._actions: Gang | None = actions
        self._gang = actions.id
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
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            text = f"this kernel does not understand the request {content.get('do')!r:.40}"
            self.answer(content, ok=False, text=f"{text} ({error!s:.200}); reload the page")
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
        self._send(ack)

    def refuse_released(self, command: PageCommand) -> None:
        """Answer a command that came too late: :meth:`release` was called."""
        text = (
            f"the data of gang {self._gang} are no longer in memory, since newer gangs have replaced "
            f"it; %gang show {self._gang} displays it again"
        )
        self.answer(command, ok=False, text=text)

    def release(self) -> None:
        """Release the gang; from now on its commands are refused."""
        self._actions = None

    def _is_new(self, command_id: str) -> bool:
        """Return whether a command arrives for the first time; otherwise repeat its answer."""
        with self._lock:
            is_new = command_id not in self._answers
            known = self._answers.setdefault(command_id, None)
            while len(self._answers) > _REMEMBERED:
                self._answers.popitem(last=False)
        if known is not None:
            self._send(known)
        return is_new

    def _do(self, command: PageCommand) -> None:
        what = command["do"]
        actions = self._actions
        if actions is None:
            self.refuse_released(command)
        elif what in _ACTIONS:
            state = actions.snapshot()
            if state.is_terminal:
                text = f"gang {self._gang} has already ended: {state.state.lower()}"
                self.answer(command, ok=False, text=text)
                return
            _ACTIONS[what](actions, command)
            self.answer(command, ok=True)
        else:
            self._forward(_REQUESTS[what](command))

    def _forward(self, command: PageCommand) -> None:
        # Without an answer, a page assumes after a while that the kernel is busy with other things.
        self.answer(command, ok=True, pending=command["do"] in _ANSWERED_LATER)
        self._later(command)


def _is_name(name: object) -> TypeGuard[str]:
    """Return whether it can be repeated in an answer, to all pages."""
    return isinstance(name, str) and len(name) <= _LONGEST_NAME and name.isascii()


# ── actions ──────────────────────────────────────────────────────────────────────────────────────


def _profile(actions: Gang, command: PageCommand) -> None:
    actions.profile(_integer(command, "steps", MAX_STEPS))


def _record(actions: Gang, command: PageCommand) -> None:
    on = command["on"]
    if not isinstance(on, bool):
        raise TypeError(f"on: {on!r}")
    actions.record(on)


_ACTIONS: Mapping[str, Callable[[Gang, PageCommand], None]] = {
    "stop": lambda actions, command: actions.stop(),
    "kill": lambda actions, command: actions.stop(kill=True),
    "stacks": lambda actions, command: actions.ask_stacks(),
    "profile": _profile,
    "record": _record,
}

# ── requests ─────────────────────────────────────────────────────────────────────────────────────


def _plain(command: PageCommand) -> PageCommand:
    return {key: command[key] for key in ("do", "id", "client")}


def _detail(command: PageCommand) -> PageCommand:
    metric, start, until = command["metric"], command["from"], command["until"]
    if not isinstance(metric, str):
        raise TypeError(f"metric: {metric!r}")
    buckets = _integer(command, "buckets", _MOST_BUCKETS)
    start, until = float(start), float(until)
    if not all(abs(step) < _LARGEST_STEP for step in (start, until)):
        raise ValueError(f"steps from {start!r} until {until!r}")
    return {**_plain(command), "metric": metric, "from": start, "until": until, "buckets": buckets}


def _rows(command: PageCommand) -> PageCommand:
    ranks = command["ranks"]
    if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
        raise TypeError(f"ranks: {ranks!r:.80}")
    return {**_plain(command), "ranks": ranks[:_MOST_RANKS_REQUESTS]}


def _show(command: PageCommand) -> PageCommand:
    what = command["what"]
    if what not in ("output", "content"):
        raise ValueError(f"what: {what!r:.80}")
    return {**_plain(command), "what": what}


def _log(command: PageCommand) -> PageCommand:
    rank = command["rank"]
    if rank is not None and type(rank) is not int:
        raise TypeError(f"rank: {rank!r}")
    return {**_plain(command), "rank": rank}


_REQUESTS: Mapping[str, Callable[[PageCommand], PageCommand]] = {
    "hello": _plain,
    "detail": _detail,
    "rows": _rows,
    "tracks": _rows,
    "show": _show,
    "csv": _plain,
    "trace": _plain,
    "log": _log,
}
_ANSWERED_LATER = ("show", "csv", "trace", "log")


def _integer(command: PageCommand, name: str, most: int) -> int:
    number = command[name]
    if not isinstance(number, (int, float)) or not 1 <= number <= most:
        raise ValueError(f"{name}: {number!r} is not between 1 and {most}")
    return int(number)
