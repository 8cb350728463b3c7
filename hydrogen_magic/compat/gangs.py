"""Common code of the classes in this package: runs a call or a script as a gang, shows it and waits."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from hydrogen_magic import capture
from hydrogen_magic.core import events as ev
from hydrogen_magic.core.event_history import EventHistory
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver import attending, launcher
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.interrupts import interrupts_held

_HIDDEN = (
    "only messages of log_to_driver and LogCallback are shown here; driver_log_verbosity='all' "
    "also shows the ranks' output, and %gang logs prints all of it"
)


def call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    spec: JobSpec,
    *,
    caller: str,
    driver_log_only: bool = False,
) -> Any:
    """Call ``function`` on every rank and return rank 0's value; ``caller`` names the class.

    Unlike :func:`hydrogen_magic.run`, it passes every keyword to the function. ``driver_log_only`` shows
    only the ranks' messages by ``log_to_driver``, not their output. Raises the same errors as ``run``.
    """
    captured = capture.capture_call(
        function,
        args,
        kwargs,
        max_closure_bytes=spec.max_closure_bytes,
        ranks_have_gpu=launcher.plan(spec).uses_gpu,
    )
    if driver_log_only:
        captured = replace(captured, warnings=(*captured.warnings, _HIDDEN))
    name = getattr(function, "__qualname__", repr(function))
    return _attended(captured, spec, f"{caller}.run({name})", driver_log_only=driver_log_only)


def run_script(path: str, args: Sequence[str], spec: JobSpec, *, caller: str) -> None:
    """Run a script with these arguments on every rank. Raises the same errors as :func:`call`."""
    captured = capture.capture_script(path, args, as_module=False)
    _attended(captured, spec, f"{caller}.run({os.path.basename(path)})")


def _attended(
    captured: capture.Captured, spec: JobSpec, title: str, *, driver_log_only: bool = False
) -> Any:
    with interrupts_held():
        gang = launcher.launch_captured(captured, spec, title=title)
        shown = cast("Gang", _DriverLog(gang)) if driver_log_only else gang
        attending.attend(shown, quiet=spec.quiet)
    return gang.result


class _DriverLog:
    """A gang as seen by its view: without the output of its ranks."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._events = EventHistory()
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gang, name)

    def events(self, start: int = 0) -> Sequence[ev.Event]:
        """Return as many events as the gang has, since views count them."""
        with self._lock:
            for event in self._gang.events(len(self._events)):
                self._events.append(_unprinted(event))
        return self._events[start:]


def _unprinted(event: ev.Event) -> ev.Event:
    if isinstance(event, ev.Output) and event.stream != ev.DRIVER:
        return replace(event, text="", skipped_bytes=0, skipped_lines=0)
    if isinstance(event, ev.Display):
        return replace(event, data={}, metadata="")
    return event
