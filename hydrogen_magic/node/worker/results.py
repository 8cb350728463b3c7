"""The results of a rank: its value and the variables of ``--out`` are sent to the kernel in parts.

    variables, value ── unshard ─► full tensors ── pack ─► one part each ── send ─► agent

Rank 0 sends the variables and its value, every other rank only its value.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from hydrogen_magic.core.units import size_text
from hydrogen_magic.node.worker.namespace import LoadedClosure
from hydrogen_magic.node.worker.result_pickler import ResultPickler
from hydrogen_magic.node.worker.unsharding import unshard
from hydrogen_magic.serialization import pickling_errors
from hydrogen_magic.serialization.payload import Payload
from hydrogen_magic.serialization.result_stream import (
    CELL_VALUE,
    MissingObject,
    ResultPart,
    label,
    pack,
)

__all__ = ["PartSender", "deliver"]

_REPORT_S = 0.5
"""Results that are sent within this time need no progress report; later, one report each interval."""
_ADVICE = "bring back its data instead, or leave it out with __getstate__"
_MAX_LEFT_OUT = 100
"""Unpicklable objects that a partial result may lack; each one takes another attempt."""


class PartSender(Protocol):
    """Sends a part to the kernel."""

    def __call__(self, part: ResultPart, section: Payload, on_write: Callable[[int], None]) -> None:
        """Return when the part has been sent; raises OSError on failure."""
        ...


def deliver(
    loaded: LoadedClosure,
    value: Any,
    rank: int,
    send: PartSender,
    report: Callable[[str], None] = lambda text: None,
) -> int:
    """Send the results of this rank; return their size in bytes.

    A result that cannot be sent is reported as a part with an error. Gathering sharded tensors is a
    collective operation: all ranks call this function. ``report``: called with a line about the progress.
    """
    with loaded.as_main():
        return _Delivery(loaded, send, _PackingProgress(report)).run(value, rank)


class _Delivery:
    """The results of one rank while they are sent."""

    def __init__(self, loaded: LoadedClosure, send: PartSender, progress: _PackingProgress) -> None:
        self._loaded = loaded
        self._send = send
        self._progress = progress
        self._streams = 0
        self._nbytes = 0

    def run(self, value: Any, rank: int) -> int:
        variables, missing = self._loaded.variables()
        results = {**variables, CELL_VALUE: value}
        full = unshard(results, self._loaded.result_pickler, self._progress.say)
        if rank > 0:
            results, missing = {CELL_VALUE: value}, {}
        for name, why in {**missing, **full.refused}.items():
            if name in results or name in missing:
                self._fail(name, why)
        self._send_all(
            {name: obj for name, obj in results.items() if name not in full.refused},
            functools.partial(_pickler, self._loaded, full.tensors),
        )
        return self._nbytes

    def _send_all(self, results: Mapping[str, Any], pickler: Callable[..., ResultPickler]) -> None:
        """Send the picklable results. After a part that cannot be sent, the rest is packed again."""
        todo = dict(results)
        while todo:
            packed = pack(todo, pickler, self._progress.packed)
            for name, (error, last) in packed.failures.items():
                self._fail(name, _explain(self._loaded, name, todo.pop(name), error, last))
                self._send_partial(name, results[name], last, pickler)
            self._progress.begin(sum(section.nbytes for section in packed.sections.values()))
            for name, section in packed.sections.items():
                del todo[name]
                if not self._send_part(ResultPart(name, self._streams), section):
                    break
            self._streams += 1

    def _send_part(self, part: ResultPart, section: Payload) -> bool:
        try:
            self._send(part, section, self._progress.written)
        except (OSError, MemoryError) as error:
            self._fail(part.name, f"{label(part.name)} cannot be sent: {error}")
            return False
        self._nbytes += section.nbytes
        return True

    def _fail(self, name: str, why: str) -> None:
        self._send(ResultPart(name, error=why), Payload(b""), lambda nbytes: None)

    def _send_partial(
        self, name: str, obj: Any, last: Any, pickler: Callable[..., ResultPickler]
    ) -> None:
        """Send a partial object for the run log, without its unpicklable parts."""
        left_out: dict[int, MissingObject] = {}
        while last is not obj and id(last) not in left_out and len(left_out) < _MAX_LEFT_OUT:
            left_out[id(last)] = MissingObject(
                pickling_errors.describe(last), "it cannot be pickled"
            )
            packed = pack({name: obj}, functools.partial(pickler, left_out=left_out))
            if name in packed.sections:
                self._streams += 1
                part = ResultPart(name, self._streams, is_partial=True)
                self._send_part(part, packed.sections[name])
                self._streams += 1
                return
            last = packed.failures[name][1]


def _pickler(
    loaded: LoadedClosure,
    tensors: Mapping[int, Any],
    *args: Any,
    left_out: Mapping[int, MissingObject] | None = None,
) -> ResultPickler:
    made = loaded.result_pickler(*args)
    made.full_tensors, made.left_out = tensors, left_out or {}
    return made


def _explain(loaded: LoadedClosure, name: str, obj: Any, error: BaseException, last: Any) -> str:
    """Return why a result cannot be sent. Never raises, even if objects do so on inspection."""
    try:
        message = pickling_errors.explain(name or "value", obj, error, last, _ADVICE)
    except Exception:
        message = f"{label(name)} cannot be sent: {type(error).__name__}"
    if name != CELL_VALUE:
        return message
    if loaded.is_cell:
        why = f"the cell's last expression cannot be sent to the notebook: {message}"
        return f"{why}; or end the cell with `None`"
    return f"the returned value cannot be sent to the notebook: {message}"


class _PackingProgress:
    """Reports the progress of results that take long."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._next_s = time.monotonic() + _REPORT_S
        self._written = self._total = 0

    def packed(self, name: str, nbytes: int) -> None:
        self.say(f"packing {label(name)}: {size_text(nbytes)}")

    def begin(self, total: int) -> None:
        self._written, self._total = 0, total

    def written(self, nbytes: int) -> None:
        self._written += nbytes
        self.say(f"sending {size_text(self._written)} of {size_text(self._total)}")

    def say(self, text: str) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _REPORT_S
            self._report(text)
