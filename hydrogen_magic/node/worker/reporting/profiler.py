"""The torch profiler over the next few optimizer steps of a running rank, on request.

The stepping thread turns it on and off, since the profiler records only that thread. Another thread writes
the trace while the training continues. Every request gets exactly one answer: a file with the trace, or
with ``{"error": why}``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hydrogen_magic.core import events as ev
from hydrogen_magic.node.worker.reporting.reporter import Reporter
from hydrogen_magic.serialization.payload import memory_file, write_at

_MARKS = 3
"""The first one includes one-time work of the profiler; readers use the best one."""

_NO_TORCH = "its cell has not imported torch, and a profile covers steps of torch.optim"

_QUIET = "KINETO_LOG_LEVEL"
_SILENT = "99"
"""Kineto would print its start and stop into the rank's own output."""

_WRITE_S = 10.0
"""How long a rank waits after its cell until its trace has been written."""


class Profiler:
    """Profiles on request. ``answer`` takes the number of the request, and a file."""

    def __init__(self, reporter: Reporter, answer: Callable[[int, int], None]) -> None:
        self._reporter = reporter
        self._answer = answer
        self._lock = threading.Lock()
        """Held while a request is made or withdrawn, or its answer begins."""
        self._number: int | None = None
        """Number of the request that has not been answered yet."""
        self._has_begun = False
        """The stepping thread has started on it: from then on it can only be ended early."""
        self._steps = 0
        self._until = 0
        self._path = ""
        self._profile: Any = None
        self._thread = 0
        """The thread that turned the profiler on."""
        self._writing: threading.Thread | None = None

    # ── on the reporter's thread ──

    def start(self, number: int, steps: int, path: str) -> None:
        """Profile the next ``steps`` steps; 0 withdraws the request, or ends it early.

        ``path``: where the trace is written, and removed at once.
        """
        if steps <= 0:
            self._withdraw()
        elif "torch" not in sys.modules:
            self._send(number, _file({"error": _NO_TORCH}))
        elif not self._accept(number, steps, path):
            self._send(number, _file({"error": "it is already being profiled"}))

    def _accept(self, number: int, steps: int, path: str) -> bool:
        with self._lock:
            if self._number is not None:
                return False
            self._number, self._steps, self._path = number, steps, path
            self._has_begun = False
            self._reporter.steps.on_step = self._begin
            return True

    def _withdraw(self) -> None:
        with self._lock:
            self._steps = self._until = 0
            if not self._has_begun:
                self._reporter.steps.on_step = self._number = None

    # ── on the stepping thread ──

    def _begin(self) -> None:
        with self._lock:
            number = self._number
            if number is None or self._has_begun:
                return  # withdrawn just now, or another thread steps too
            self._has_begun = True
            self._reporter.steps.on_step = None
        try:
            self._profile = _started(self._reporter)
        except Exception as error:  # the user's own profiler is on, or a requirement fails
            self._refuse(number, error)
            return
        self._thread = threading.get_ident()
        with self._lock:  # it may have been withdrawn meanwhile: starting takes seconds
            self._until = self._reporter.steps.count + self._steps
        self._reporter.steps.on_step = self._count
        self._reporter.report(ev.Profiling(self._reporter.now_s(), "recording"))

    def _count(self) -> None:
        if self._reporter.steps.count >= self._until and threading.get_ident() == self._thread:
            self._end()

    def _end(self) -> None:
        self._reporter.steps.on_step = None
        number, profile, self._profile = self._number, self._profile, None
        assert number is not None
        try:
            profile.__exit__(None, None, None)
            writing = threading.Thread(
                target=self._write,
                args=(number, profile),
                name="hydrogen_magic.profiler",
                daemon=True,
            )
            writing.start()
        except Exception as error:  # the user's optimizer steps in any case
            self._refuse(number, error)
        else:
            self._writing = writing

    def finish(self) -> None:
        """The cell is over: the recording so far is the profile."""
        if self._profile is not None and threading.get_ident() == self._thread:
            self._end()
        self._reporter.steps.on_step = None
        if self._writing is not None:
            self._writing.join(_WRITE_S)

    def discard(self) -> None:
        """The cell has failed: end the recording, whose trace would take seconds to write."""
        self._reporter.steps.on_step = None
        profile, self._profile = self._profile, None
        if profile is not None and threading.get_ident() == self._thread:
            with suppress(Exception):  # of torch
                profile.__exit__(None, None, None)
        is_writing = self._writing is not None and self._writing.is_alive()
        if self._number is not None and not is_writing:
            self._refuse(self._number, RuntimeError("the cell did not run to its end"))

    # ── answers ──

    def _write(self, number: int, profile: Any) -> None:
        try:
            profile.export_chrome_trace(self._path)
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            os.unlink(self._path)
        except Exception as error:
            self._refuse(number, error)
        else:
            self._number = None  # first: after the answer, the next request may follow at once
            self._send(number, fd)

    def _refuse(self, number: int, error: Exception) -> None:
        self._number = None
        self._send(number, _file({"error": f"{type(error).__name__}: {error}"}))

    def _send(self, number: int, fd: int) -> None:
        try:
            self._answer(number, fd)
        except OSError:
            pass  # the agent has exited, and this process exits with it
        finally:
            os.close(fd)


def _started(reporter: Reporter) -> Any:
    """Return an active profiler, with marks of the gang's clock.

    That of ``torch.autograd.profiler``: ``torch.profiler`` would first import the compiler, for seconds.
    """
    from torch.autograd import _profiler_enabled, profiler
    from torch.cuda import is_available

    if _profiler_enabled():  # starting another one would discard its data
        raise RuntimeError("the cell's own profiler is active")
    is_ours = _QUIET not in os.environ
    if is_ours:
        os.environ[_QUIET] = _SILENT
    try:
        profile = profiler.profile(use_device="cuda" if is_available() else None, use_kineto=True)
        profile.__enter__()
    finally:
        if is_ours:
            os.environ.pop(_QUIET, None)
    for _ in range(_MARKS):
        with profiler.record_function(f"{ev.PROFILE_CLOCK}{reporter.now_s():.9f}"):
            pass
    return profile


def _file(content: Any) -> int:
    fd = memory_file("profile")
    write_at(fd, 0, memoryview(json.dumps(content).encode()))
    return fd
