"""Commands of pages, see ``protocol.ts``: validated, carried out once, and always answered.

Pages repeat a command until it is acknowledged, so it may arrive several times, and late: after the gang
has ended, when the cell that delayed it is over.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

from hydrogen_magic.driver.profile_merge import MAX_STEPS
from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.views import Actions

__all__ = ["CommandHandler", "Order"]

Order = Mapping[str, Any]

_REMEMBERED = 256
"""Commands remembered by their id: many more than pages repeat at a time."""
_LONGEST_NAME = 200
_MOST_BUCKETS = 100_000
_MOST_RANKS_ASKED = 1024


class PageSender(Protocol):
    """Sends a message to the pages."""

    def __call__(self, content: Mapping[str, Any], buffers: Sequence[bytes] = (), /) -> None: ...


class CommandHandler:
    """Handles commands of pages, in any thread, and returns at once.

    What acts on the gang is done here and now. What asks for data is checked and handed to ``later``,
    in the same form; files and outputs are acknowledged when they are made (:meth:`answer`).
    """

    def __init__(self, actions: Actions, send: PageSender, later: Callable[[Order], None]) -> None:
        self._actions: Actions | None = actions
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
        order_id, client = content.get("id"), content.get("client")
        if not _is_name(order_id) or not _is_name(client):
            return
        if not self._is_new(order_id):
            return
        try:
            self._do(content)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            text = f"this kernel does not understand the request {content.get('do')!r:.40}"
            self.answer(content, ok=False, text=f"{text} ({error!s:.200}); reload the page")
        except HydrogenError as error:
            self.answer(content, ok=False, text=str(error))

    def answer(self, order: Order, *, ok: bool, text: str = "") -> None:
        """Acknowledge a command."""
        ack = {"kind": "ack", "to": order["client"], "id": order["id"], "ok": ok}
        if text:
            ack["text"] = text
        with self._lock:
            self._answers[order["id"]] = ack
        self._send(ack)

    def forget(self) -> None:
        """Release the gang; from now on its commands are refused."""
        self._actions = None

    def _is_new(self, order_id: str) -> bool:
        """Tell whether a command arrives for the first time; otherwise repeat its answer."""
        with self._lock:
            is_new = order_id not in self._answers
            known = self._answers.setdefault(order_id, None)
            while len(self._answers) > _REMEMBERED:
                self._answers.popitem(last=False)
        if known is not None:
            self._send(known)
        return is_new

    def _do(self, order: Order) -> None:
        what = order["do"]
        actions = self._actions
        if actions is None:
            self.answer(order, ok=False, text=_gone(self._gang))
        elif what in _ACTS:
            state = actions.snapshot()
            if state.is_terminal:
                text = f"gang {self._gang} has already ended: {state.state.lower()}"
                self.answer(order, ok=False, text=text)
                return
            _ACTS[what](actions, order)
            self.answer(order, ok=True)
        else:
            self._ask(_ASKED[what](order))

    def _ask(self, order: Order) -> None:
        if order["do"] not in _ANSWERED_LATER:
            self.answer(order, ok=True)
        self._later(order)


def _is_name(name: object) -> TypeGuard[str]:
    """Tell whether it can be repeated in an answer, to all pages."""
    return isinstance(name, str) and len(name) <= _LONGEST_NAME and name.isascii()


def _gone(gang: str) -> str:
    return (
        f"the data of gang {gang} are no longer in memory, since newer gangs have replaced it; "
        f"%gang show {gang} displays it again"
    )


# ── actions ──────────────────────────────────────────────────────────────────────────────────────


def _profile(actions: Actions, order: Order) -> None:
    actions.profile(_whole(order, "steps", 1, MAX_STEPS))


def _record(actions: Actions, order: Order) -> None:
    on = order["on"]
    if not isinstance(on, bool):
        raise TypeError(f"on: {on!r}")
    actions.record(on)


_ACTS: Mapping[str, Callable[[Actions, Order], None]] = {
    "stop": lambda actions, order: actions.stop(),
    "kill": lambda actions, order: actions.stop(kill=True),
    "stacks": lambda actions, order: actions.ask_stacks(),
    "profile": _profile,
    "record": _record,
}

# ── requests ─────────────────────────────────────────────────────────────────────────────────────


def _plain(order: Order) -> Order:
    return {key: order[key] for key in ("do", "id", "client")}


def _detail(order: Order) -> Order:
    metric, start, until = order["metric"], order["from"], order["until"]
    if not isinstance(metric, str):
        raise TypeError(f"metric: {metric!r}")
    buckets = _whole(order, "buckets", 1, _MOST_BUCKETS)
    start, until = float(start), float(until)
    if not (math.isfinite(start) and math.isfinite(until)):
        raise ValueError(f"steps from {start!r} until {until!r}")
    return {**_plain(order), "metric": metric, "from": start, "until": until, "buckets": buckets}


def _rows(order: Order) -> Order:
    ranks = order["ranks"]
    if not isinstance(ranks, list) or not all(type(rank) is int for rank in ranks):
        raise TypeError(f"ranks: {ranks!r:.80}")
    return {**_plain(order), "ranks": ranks[:_MOST_RANKS_ASKED]}


def _show(order: Order) -> Order:
    what = order["what"]
    if what not in ("output", "content"):
        raise ValueError(f"what: {what!r:.80}")
    return {**_plain(order), "what": what}


def _log(order: Order) -> Order:
    rank = order["rank"]
    if rank is not None and type(rank) is not int:
        raise TypeError(f"rank: {rank!r}")
    return {**_plain(order), "rank": rank}


_ASKED: Mapping[str, Callable[[Order], Order]] = {
    "hello": _plain,
    "detail": _detail,
    "rows": _rows,
    "lanes": _rows,
    "show": _show,
    "csv": _plain,
    "trace": _plain,
    "log": _log,
}
_ANSWERED_LATER = ("show", "csv", "trace", "log")


def _whole(order: Order, name: str, least: int, most: int) -> int:
    number = order[name]
    if not isinstance(number, (int, float)) or not least <= number <= most:
        raise ValueError(f"{name}: {number!r} is not between {least} and {most}")
    return int(number)
