"""Observation of the main thread: exceptions that are still unwinding, and blocked collectives.

A rank whose clean-up takes seconds reports its failure after its peers have complained of the closed
connection. The reporter's thread notices the exception while the ``finally`` block runs, so that the gang
names the rank that failed first.
"""

from __future__ import annotations

import ast
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from hydrogen_magic.core import address_space, syntax
from hydrogen_magic.core import events as ev
from hydrogen_magic.core.rank_gpu import gpu_note
from hydrogen_magic.node.worker.reporting.training_progress import Collective

_IN_FLIGHT_S = 0.1
"""Handlers that recover from an exception usually take less."""

_COLLECTIVE_S = 1.0
"""An all_reduce of a step takes milliseconds; users perceive a second as waiting."""

_NO_FAILURES = (KeyboardInterrupt, GeneratorExit, StopIteration, StopAsyncIteration)
"""Exceptions for stopping or control flow, not failures."""

_MAX_CAUSES = 10
_MAX_FRAMES = 100
"""A RecursionError has a thousand identical frames."""
_MAX_MESSAGE = 1 << 16
"""64 k characters; assertions on arrays can print megabytes."""
_MAX_NOTES = 20

_PACKAGE = f"{Path(__file__).resolve().parents[2]}{os.sep}"
_STANDARD_LIBRARY = f"{Path(os.__file__).parent}{os.sep}"
_RUN_BY_TESTS = f"{_PACKAGE}testing{os.sep}"
"""Functions that ranks run in tests of plug-in authors: to a rank, they are user code."""


class Watch:
    """Observations of the reporter's thread on ``rank``."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # The identity, not the exception: holding it would keep its frames and their tensors alive.
        self._seen = id(None)
        self._seen_since_s = 0.0
        self._is_judged = True
        self._has_reported = False
        self._waiting: Collective | None = None

    def poll(self, now_s: float, phase: str, collective: Collective | None) -> Iterator[ev.Event]:
        """Yield news: an exception in flight or handled, or a collective that blocks or no longer does."""
        if phase == "running":
            yield from self._look_at_exception(now_s, phase)
        yield from self._look_at_collective(now_s, collective)

    def _look_at_exception(self, now_s: float, phase: str) -> Iterator[ev.Event]:
        error = _failure_in_main_thread()
        if id(error) != self._seen:
            self._seen, self._seen_since_s, self._is_judged = id(error), now_s, False
        elif not self._is_judged and now_s - self._seen_since_s > _IN_FLIGHT_S:
            self._is_judged = True
            if error is None and self._has_reported:
                self._has_reported = False
                yield ev.ExceptionHandled(now_s, self._rank)
            elif error is not None and not _is_swallowed(error):
                self._has_reported = True
                report = report_exception(error)
                yield ev.RankFailed(self._seen_since_s, self._rank, report, phase, in_flight=True)

    def _look_at_collective(
        self, now_s: float, collective: Collective | None
    ) -> Iterator[ev.Event]:
        blocked, self._waiting = self._waiting, None
        if blocked is not None and collective != blocked:
            yield self._wait_event(now_s, blocked, "")
        elif blocked is not None:
            self._waiting = blocked
        elif collective is not None and now_s - collective.start_ns / 1e9 > _COLLECTIVE_S:
            self._waiting = collective
            yield self._wait_event(now_s, collective, collective.name)

    def _wait_event(self, now_s: float, collective: Collective, name: str) -> ev.CollectiveWait:
        start_s = collective.start_ns / 1e9
        number, n_joins = collective.number, collective.n_joins
        return ev.CollectiveWait(now_s, self._rank, name, number, start_s, n_joins)


def _failure_in_main_thread() -> BaseException | None:
    """Return the exception for which an ``except``, ``finally`` or ``__exit__`` runs, if it is a failure."""
    found: Any = sys._current_exceptions().get(threading.main_thread().ident or 0)
    if isinstance(found, tuple):  # Python 3.11 and older: (type, value, traceback)
        found = found[1]
    if not isinstance(found, BaseException) or isinstance(found, _NO_FAILURES):
        return None
    return None if isinstance(found, SystemExit) and found.code in (None, 0) else found


def _is_swallowed(error: BaseException) -> bool:
    """True if the running handler is an ``except`` block without any ``raise``.

    ``try: fast() except ImportError: slow()`` is not a failure, however long ``slow`` takes.
    """
    if error.__traceback__ is None:
        return False
    frame = error.__traceback__.tb_frame  # the outermost frame unwound so far: that of the handler
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        # Hiding warnings would change the filters of the whole process, beside the user's code.
        tree = syntax.parse(source, warns=True)
    except (SyntaxError, ValueError, RecursionError):
        return False
    line = frame.f_lineno or 0
    around = [block for block in _handling_blocks(tree) if block[0] <= line <= block[1]]
    return max(around)[2] if around else False  # the one that begins last is the innermost


def _handling_blocks(tree: ast.AST) -> Iterator[tuple[int, int, bool]]:
    """Yield first line, last line and "ends the exception" of all handlers that run with an exception."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            yield node.lineno, node.end_lineno or node.lineno, not raises
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            yield node.lineno, node.body[0].lineno - 1, False  # __exit__ runs on the head's lines
        elif finalbody := getattr(node, "finalbody", None):
            yield finalbody[0].lineno, finalbody[-1].end_lineno, False


# ── exceptions as text ───────────────────────────────────────────────────────────────────────────


def report_exception(exc: BaseException) -> ev.ErrorReport:
    """Return ``exc`` and its causes as text, without internal frames. Never raises.

    Frames of hydrogen_magic, ``runpy`` and the import machinery are left out. At most ten causes are
    followed, and none twice.
    """
    chain: list[tuple[BaseException, bool]] = []
    link: tuple[BaseException, bool] | None = (exc, False)
    while link is not None and len(chain) <= _MAX_CAUSES:
        if any(link[0] is known for known, _ in chain):
            break
        chain.append(link)
        link = _cause(link[0])
    report: ev.ErrorReport | None = None
    is_direct = False
    for error, was_raised_from in reversed(chain):
        message = _message(error)
        report = ev.ErrorReport(
            type=_type_name(error),
            message=message,
            frames=_frames(error),
            cause=report,
            is_direct_cause=is_direct,
            notes=_notes(error, message),
        )
        is_direct = was_raised_from
    assert report is not None  # the chain has at least exc
    return report


def _cause(error: BaseException) -> tuple[BaseException, bool] | None:
    """Return the exception that ``error`` was raised from and whether by ``raise … from``."""
    if (cause := _attribute(error, "__cause__")) is not None:
        return cause, True
    context = _attribute(error, "__context__")
    if context is not None and not _attribute(error, "__suppress_context__"):
        return context, False
    return None


def _attribute(error: BaseException, name: str) -> Any:
    """Return an attribute of an exception, None without it; a ``__getattr__`` of the user's is not called."""
    try:
        return object.__getattribute__(error, name)
    except Exception:  # a property of the user's may fail in any way
        return None


def _type_name(error: BaseException) -> str:
    kind = type(error)
    if kind.__module__ in ("builtins", "__main__", "hydrogen_magic.errors"):
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException as broken:  # a user's __str__ may fail in any way
        text = f"<no message: {_type_name(error)}.__str__ raised {_type_name(broken)}>"
    return _printable(text)


def _printable(text: str) -> str:
    """Return ``text`` without lone surrogates, which cannot be encoded, and with limited length."""
    return ev.without_middle(text, _MAX_MESSAGE).encode("utf-8", "backslashreplace").decode("utf-8")


def _notes(error: BaseException, message: str) -> tuple[str, ...]:
    notes = _attribute(error, "__notes__")
    notes = notes if isinstance(notes, (list, tuple)) else ()  # any object may have been assigned
    own = [_printable(note) for note in notes if isinstance(note, str)]
    own += filter(None, [address_space.limit_note(error, message), gpu_note(message)])
    parts = _attribute(error, "exceptions")
    if isinstance(parts, tuple):
        own += [
            f"sub-exception {number}: {_one_line(part)}"
            for number, part in enumerate(parts[:_MAX_NOTES], 1)
            if isinstance(part, BaseException)
        ]
    return tuple(own[:_MAX_NOTES])


def _one_line(error: BaseException) -> str:
    frames = _frames(error)
    place = f" ({frames[-1].file}, line {frames[-1].line})" if frames else ""
    return f"{_type_name(error)}: {_message(error)}{place}"


def users_part(found: TracebackType | None) -> TracebackType | None:
    """Return a traceback without frames of ours."""
    users: list[TracebackType] = []
    while found is not None:
        if not _is_machinery(found.tb_frame.f_code.co_filename):
            users.append(found)
        found = found.tb_next
    last = None
    for one in reversed(users):
        last = TracebackType(last, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return last


def users_stack() -> list[traceback.FrameSummary]:
    """Return the current stack of the caller without frames of ours."""
    frames = traceback.extract_stack()[:-2]
    is_rank = len(frames) > 1 and _is_machinery(frames[1].filename)  # and frames[0] is `python -c`
    return [frame for frame in frames[is_rank:] if not _is_machinery(frame.filename)]


def hide_our_frames() -> None:
    """Leave them out where Python prints an exception that cannot be raised, as in exit handlers.

    A library's handler that a stop interrupts prints nothing: torch and ``logging`` have one.
    """
    show = sys.unraisablehook

    def show_users_part(args: Any) -> None:
        kind, error, found, *rest = args
        if kind is KeyboardInterrupt and _is_of_library(found):
            return
        part = users_part(found)
        if error is not None:
            error.__traceback__ = part  # which Python 3.15 prints
        show(type(args)((kind, error, part, *rest)))

    sys.unraisablehook = show_users_part


def _is_of_library(found: TracebackType | None) -> bool:
    """Whether the function that Python called is of a library."""
    file = "" if found is None else found.tb_frame.f_code.co_filename
    return "-packages" in file or file.startswith(_STANDARD_LIBRARY)


def _frames(error: BaseException) -> tuple[ev.Frame, ...]:
    frames = [
        ev.Frame(s.filename, s.lineno or 0, s.name, _printable(s.line or ""))
        for s in traceback.extract_tb(_attribute(error, "__traceback__"))
        if not _is_machinery(s.filename)
    ]
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        # Python prints the offending line of source that did not compile here.
        text = _printable((error.text or "").strip())
        frames.append(ev.Frame(error.filename, error.lineno, "<module>", text))
    if len(frames) > _MAX_FRAMES:
        half = _MAX_FRAMES // 2
        frames[half:-half] = [ev.Frame("", 0, "", "", n_left_out=len(frames) - 2 * half)]
    return tuple(frames)


def _is_machinery(filename: str) -> bool:
    if filename.startswith(_RUN_BY_TESTS):
        return False
    return filename.startswith((_PACKAGE, "<frozen runpy>", "<frozen importlib")) or (
        filename.endswith(("/runpy.py", "/importlib/__init__.py", "/importlib/_bootstrap.py"))
    )
