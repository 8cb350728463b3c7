"""Horovod's own timeline, started and stopped with the gang's recording: ``hvd.start_timeline``.

Horovod's coordinator, rank 0, writes it to a new file each time, and the agent reads that. Horovod can
start a timeline during a run only if ``HOROVOD_TIMELINE`` was set on every rank at ``hvd.init``. If the
user sets it to a path, or starts a timeline in code, that one is kept and read at its own path.

Horovod reports the start or end of a timeline only after its writer thread has reacted, which may be
blocked by a disk: so a separate thread calls it, and nothing waits long for that thread.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hydrogen_magic.core import messages as msg
from hydrogen_magic.frameworks.horovod.node import DYNAMIC, TIMELINE
from hydrogen_magic.node.worker.reporting import reporter as _reporter
from hydrogen_magic.node.wrapping import wraps

_SWITCH_S = 1.0
"""How long the user's thread waits until a timeline has started or stopped, which takes milliseconds."""
_LEAST_FREE_BYTES = 1 << 30
_LOOK_S = 2.0
"""How often is looked whether the disk has room: a busy timeline writes a few megabytes a second."""
_Send = Callable[[msg.TimelineFile], None]


def install(prefix: str, send: _Send) -> Callable[[bool], None]:
    """Write timelines to ``<prefix><number>.json``, and report them to the agent with ``send``.

    Returns what begins or ends a timeline where that is due; it never waits.
    """
    before, timeline = _process.timeline, _Timeline(prefix, send)
    _process.timeline = timeline
    if before is not None:  # of an earlier cell of the session, in which Horovod was initialized
        before.hand_over(timeline)
    return timeline.follow


def attach(module: ModuleType, replace: Callable[[Any, Callable[..., Any]], None]) -> None:
    """Observe timelines of the user in ``module``, which is ``horovod.torch``.

    ``replace``: installs a wrapped function wherever Horovod has the original.
    """
    observed = _ObservedCalls(module)
    for name in ("init", "shutdown", "start_timeline", "stop_timeline"):
        original = getattr(module, name)
        replace(original, _wrapped(original, getattr(observed, name)))


def _wrapped(original: Callable[..., Any], observed: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return observed(original, *args, **kwargs)

    return call


class _ObservedCalls:
    """Calls of the user to Horovod, each with the original function.

    The owner of the timeline is determined at the call: the forkserver, from which all ranks are forked, has
    already attached the observers if the notebook imports Horovod.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._start, self._stop = module.start_timeline, module.stop_timeline
        # Horovod aborts the process if one thread starts a timeline while another shuts it down.
        self._one_at_a_time = threading.Lock()

    def init(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        timeline = _process.timeline
        if timeline is None:
            return original(*args, **kwargs)
        os.environ[TIMELINE] = _variable()
        result = original(*args, **kwargs)
        if self._module.rank() == 0:
            timeline.begin(self._module.is_initialized, self._start, self._stop)
        return result

    def shutdown(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _process.timeline is not None:
            _process.timeline.end()
        with self._one_at_a_time:
            return original(*args, **kwargs)

    def start_timeline(
        self, original: Callable[..., Any], file_path: str, *args: Any, **kwargs: Any
    ) -> Any:
        def start() -> Any:
            with self._one_at_a_time:
                return original(file_path, *args, **kwargs)

        return _as_user(os.path.abspath(file_path), start)

    def stop_timeline(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return _as_user("", lambda: original(*args, **kwargs))


def _variable() -> str:
    return os.environ.get(TIMELINE) or DYNAMIC


def _as_user(path: str, call: Callable[[], Any]) -> Any:
    return call() if _process.timeline is None else _process.timeline.call_as_user(path, call)


class _Timeline:
    """The timelines of a gang's rank 0, and their state."""

    def __init__(self, prefix: str, send: _Send) -> None:
        self._prefix = prefix
        self._send = send
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._is_initialized: Callable[[], bool] | None = None
        """Horovod's own functions, once this is known to be its coordinator."""
        self._start: Callable[[str], None]
        self._stop: Callable[[], None]
        self._wall_ahead_s = 0.0
        self._path = ""
        """The path of the current timeline; empty: none."""
        self._their_path = ""
        """The path of a timeline that the user has started, in code or by the environment; empty: none."""
        self._is_theirs = False
        """There is such a timeline, or the user is about to start or stop one."""
        self._is_refused = False
        """It could not be started, or was stopped; not tried again until the next request."""
        self._switching: threading.Thread | None = None
        self._next_look_s = 0.0

    def begin(
        self,
        is_initialized: Callable[[], bool],
        start: Callable[[str], None],
        stop: Callable[[], None],
        their_path: str | None = None,
    ) -> None:
        """``hvd.init`` has returned on the coordinator. A second call has no effect.

        ``their_path``: of the user's current timeline; None: that of the environment.
        """
        if self._is_initialized is not None:
            return
        # The value when Horovod read its clocks: the wall clock may be changed later.
        self._wall_ahead_s = time.time() - time.monotonic()
        self._start, self._stop = start, stop
        self._path, self._is_refused = "", False
        if their_path is None:
            their_path = "" if _variable() == DYNAMIC else os.path.abspath(_variable())
        self._their_path, self._is_theirs = their_path, bool(their_path)
        if their_path:
            self._report(their_path, is_kept=their_path.startswith(self._prefix))
        self._is_initialized = is_initialized
        atexit.register(self.end)  # before Horovod's own handler, which was registered before
        reporter = _reporter.current()
        if reporter is not None:
            self.follow(reporter.is_recording)
        self._wait()

    def hand_over(self, other: _Timeline) -> None:
        """End, and begin ``other`` if Horovod is initialized; a timeline of the user continues."""
        is_initialized = self._is_initialized
        self.end()
        if is_initialized is not None:
            other.begin(is_initialized, self._start, self._stop, self._their_path)

    def end(self) -> None:
        """Horovod is about to be shut down: data that its writer has not written by then would be lost.

        It would also block the next timeline if there is another ``hvd.init``.
        """
        atexit.unregister(self.end)
        with self._lock:
            self._is_initialized = None
        self._wait()
        if self._path and not self._is_theirs:
            self._switch(self._end)
            self._wait()

    def call_as_user(self, path: str, call: Callable[[], Any]) -> Any:
        """Start the user's timeline at ``path``, or stop one (empty path), by ``call``."""
        if self._is_initialized is None:
            return call()
        with self._lock:
            self._is_theirs = True  # from here on, none of ours is started
        self._wait()
        try:
            result = call()
            self._path, self._their_path = "", path
            self._report(path, is_kept=False)  # only now: the agent closes the brackets of a file
        finally:  # a call that fails changes nothing
            self._is_theirs = bool(self._their_path)
        return result

    def follow(self, is_recording: bool) -> None:
        """Begin or end a timeline where that is due; never waits. Called over and over."""
        if self._is_initialized is None:
            return
        with self._lock:
            if self._switching is not None and self._switching.is_alive():
                return
            if not self._is_initialized():  # shut down, which has closed the file
                self._is_initialized = None
                self._forget()
                return
            self._is_refused = self._is_refused and is_recording
            is_wanted = is_recording and not self._is_theirs and not self._is_refused
            if is_wanted and self._path:
                self._look_for_room()
            elif is_wanted or (self._path and not self._is_theirs):
                self._switch(self._begin if is_wanted else self._end)

    def _switch(self, work: Callable[[], None]) -> None:
        name = "hydrogen_magic.timeline"
        self._switching = threading.Thread(target=work, name=name, daemon=True)
        self._switching.start()

    def _wait(self) -> None:
        if self._switching is not None:
            self._switching.join(_SWITCH_S)

    def _begin(self) -> None:
        path = f"{self._prefix}{next(self._numbers)}.json"
        try:
            # Created by us first: Horovod does not report write errors, and would make it readable
            # by others.
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            self._report(path, is_kept=True)
            self._start(path)
        except ValueError as error:
            self._refuse("info", f"Horovod's timeline cannot start: {error}")
            self._report("", is_kept=False)
        except OSError as error:
            self._refuse("warning", f"Horovod's timeline cannot be written: {error}")
        else:
            self._path = path

    def _end(self) -> None:
        try:
            self._stop()
        except ValueError:
            pass  # it was shut down meanwhile
        self._forget()

    def _forget(self) -> None:
        if self._path:
            self._path = ""
            self._report("", is_kept=False)

    def _look_for_room(self) -> None:
        """Stop the timeline before it fills the disk."""
        if time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + _LOOK_S
        folder = os.path.dirname(self._path)
        try:
            has_room = shutil.disk_usage(folder).free >= _LEAST_FREE_BYTES
        except OSError:
            return  # unknown; Horovod stops by itself if it cannot write
        if not has_room:
            text = f"Horovod's timeline was stopped: less than 1 GB is free in {folder}"
            self._refuse("warning", text)

    def _refuse(self, level: str, text: str) -> None:
        self._is_refused = True
        _reporter.notice(level, text)

    def _report(self, path: str, *, is_kept: bool) -> None:
        try:
            self._send(msg.TimelineFile(path, is_kept, self._wall_ahead_s))
        except OSError:
            pass  # the agent has exited, and this rank exits with it


class _ProcessTimelines:
    """The timelines of this process: ``hvd`` is called by the user, who does not pass them."""

    timeline: _Timeline | None = None


_process = _ProcessTimelines()
