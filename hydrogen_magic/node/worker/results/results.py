"""The results of a rank: its value and the variables of ``--out`` are sent to the kernel in parts.

    variables, value ── gather ─► full tensors ── pack ─► a part ── send ─► agent

The first rank of the cell sends the variables and its value, every other rank its value alone. Each part is
sent before the next one is packed: a process that crashes while it packs loses none of those before.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.units import size_text
from hydrogen_magic.node.worker.namespace import LoadedClosure
from hydrogen_magic.node.worker.plain_values import is_plain
from hydrogen_magic.node.worker.reporting import reporter
from hydrogen_magic.node.worker.results import rank_parts
from hydrogen_magic.node.worker.results.result_pickler import ResultPickler
from hydrogen_magic.node.worker.results.unsharding import Gathering
from hydrogen_magic.serialization import pickling_errors
from hydrogen_magic.serialization.object_paths import describe
from hydrogen_magic.serialization.payload import Payload
from hydrogen_magic.serialization.result_stream import CELL_VALUE, Packer, label
from hydrogen_magic.serialization.tolerant_unpickling import MissingObject

_REPORT_S = 0.5
"""Results that are sent within this time need no progress report; later, one report each interval."""
_MAX_LEFT_OUT = 100
"""Unpicklable objects that a partial result may lack; each one takes another attempt."""


PartSender = Callable[[msg.ResultPart, Payload, Callable[[int], None]], None]
"""Returns when the part has been sent; takes what is called with the bytes of each piece. Raises OSError."""


def deliver(
    loaded: LoadedClosure,
    value: Any,
    is_first: bool,
    send: PartSender,
    report: Callable[[str], None] = lambda text: None,
    begin: Callable[[str], None] = lambda text: None,
    session: msg.SessionCell | None = None,
) -> int:
    """Send the results of this rank; return their size in bytes.

    A result that cannot be sent is reported as a part with an error. Gathering sharded tensors is a
    collective operation: all ranks call this function. ``is_first``: this rank sends the variables, too.
    ``report``: called with a line about the progress.
    ``begin``: called with the next operation, such as "packing `model`": methods of users' classes may
    crash the process.
    ``session``: set for a cell of a session.
    """
    with loaded.as_main():
        delivery = _Delivery(loaded, send, _PackingProgress(report), begin, session)
        try:
            return delivery.run(value, is_first)
        finally:
            delivery.release()


class _Delivery:
    """The results of one rank while they are sent."""

    def __init__(
        self,
        loaded: LoadedClosure,
        send: PartSender,
        progress: _PackingProgress,
        begin: Callable[[str], None],
        session: msg.SessionCell | None,
    ) -> None:
        self._loaded = loaded
        self._send = send
        self._progress = progress
        self._begin_step = begin
        self._step = ""
        self._gathering = Gathering(loaded.result_pickler, progress.report, session)
        self._parts = functools.cache(rank_parts.of_process)
        self._packer = Packer(self._pickler, progress.packed)
        self._nbytes = 0
        self._is_first = False
        self._unwrapped = set[tuple[str, str]]()

    def run(self, value: Any, is_first: bool) -> int:
        self._is_first = is_first
        variables, missing = self._loaded.variables()
        results = {**variables, CELL_VALUE: value}
        later = {}
        for name, obj in results.items():
            self._begin_packing(name, obj)
            # The value is the last: objects shared with variables belong to the notebook.
            if self._gathering.concerns(name, obj) or name == CELL_VALUE:
                later[name] = obj
            elif is_first:
                self._pack(name, obj)
        if self._gathering.is_needed:
            self._begin("gathering sharded tensors")
        refused = self._gathering.gather()
        for name, obj in later.items():
            if name not in refused and (is_first or name == CELL_VALUE):
                self._pack(name, obj)
        for name, why in {**missing, **refused}.items():
            if is_first or name == CELL_VALUE:
                self._fail(name, why)
        return self._nbytes

    def release(self) -> None:
        """Let the results go: a session would keep those of earlier cells until a garbage collection."""
        self._packer.release()

    def _begin_packing(self, name: str, obj: Any) -> None:
        if not is_plain(obj):  # a number can neither take long nor crash the process
            self._begin(f"packing {label(name)}")

    def _begin(self, step: str) -> None:
        if step != self._step:
            self._step = step
            self._begin_step(step)

    def _pack(self, name: str, obj: Any) -> None:
        self._begin_packing(name, obj)
        self._progress.begin(name)
        try:
            section = self._packer.pack(name, obj)
        except KeyboardInterrupt:  # a stop: the cell ends
            raise
        except BaseException as error:  # pickling runs methods of the user's classes
            last = self._packer.last
            self._fail(name, _explain(self._loaded, name, obj, error, last))
            self._send_partial(name, obj, last)
            return
        if not self._send_part(msg.ResultPart(name), section):
            self._packer.take_back()

    def _send_part(self, part: msg.ResultPart, section: Payload) -> bool:
        self._progress.begin(part.name, section.nbytes)
        try:
            self._send(part, section, self._progress.written)
        except Exception as error:
            self._fail(part.name, f"{label(part.name)} cannot be sent: {error}")
            return False
        self._nbytes += section.nbytes
        return True

    def _fail(self, name: str, why: str) -> None:
        self._send(msg.ResultPart(name, error=why), Payload(b""), lambda nbytes: None)

    def _send_partial(self, name: str, obj: Any, last: Any) -> None:
        """Send for the run log what an object holds beside the objects that cannot be pickled."""
        left_out: dict[int, MissingObject] = {}
        while last is not obj and id(last) not in left_out and len(left_out) < _MAX_LEFT_OUT:
            left_out[id(last)] = MissingObject(describe(last), "it cannot be pickled")
            packer = Packer(functools.partial(self._pickler, left_out=left_out))
            try:
                section = packer.pack(name, obj)
            except KeyboardInterrupt:
                raise
            except BaseException:
                last = packer.last
            else:
                self._send_part(msg.ResultPart(name, is_partial=True), section)
                return
            finally:
                packer.release()

    def _pickler(
        self, *args: Any, left_out: Mapping[int, MissingObject] | None = None
    ) -> ResultPickler:
        made = self._loaded.result_pickler(*args)
        made.full_tensors, made.left_out = self._gathering.tensors, left_out or {}
        made.parts, made.on_unwrapped = self._parts, self._note_unwrapped
        return made

    def _note_unwrapped(self, name: str, what: str) -> None:
        if self._is_first and (name, what) not in self._unwrapped:
            self._unwrapped.add((name, what))
            reporter.notice("info", f"{label(name)} comes back without its {what}")


def _explain(loaded: LoadedClosure, name: str, obj: Any, error: BaseException, last: Any) -> str:
    """Return why a result cannot be sent. Never raises, even if objects do so on inspection."""
    try:
        message = pickling_errors.explain(name, obj, error, last, pickling_errors.TO_NOTEBOOK)
    except Exception:
        message = f"{label(name)} cannot be sent: {type(error).__name__}"
    if name != CELL_VALUE:
        return message
    if loaded.is_cell:
        why = f"the cell's last expression cannot be sent to the notebook: {message}"
        return f"{why}; or end the cell with `None`"
    return f"the returned value cannot be sent to the notebook: {message}"


class _PackingProgress:
    """Reports the progress of results that take long: sizes first, since views cut the end."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._next_s = time.monotonic() + _REPORT_S
        self._name = CELL_VALUE
        self._written = self._total = 0

    def begin(self, name: str, total: int = 0) -> None:
        self._name, self._written, self._total = name, 0, total

    def packed(self, nbytes: int) -> None:
        self.report(f"packing {size_text(nbytes)}: {label(self._name)}")

    def written(self, nbytes: int) -> None:
        self._written += nbytes
        done = f"{size_text(self._written)} of {size_text(self._total)}"
        self.report(f"sending {done}: {label(self._name)}")

    def report(self, text: str) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _REPORT_S
            self._report(text)
