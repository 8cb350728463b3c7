"""Runs a long command: its output goes to a log, its progress to a line, and it ends with this process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TextIO

_GRACE_S = 5.0
_STEP_PERCENT = 20
"""How often progress is printed if a line cannot be overwritten."""


class CompilerProgress:
    """The progress of the compiler: one changing line on a terminal, a few lines elsewhere."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._clock = out, clock
        self._is_live = out.isatty()
        self._started = clock()
        self._said = -_STEP_PERCENT

    def feed(self, line: str) -> None:
        """Process a line of the build's output: make's ``[ 25%]``, or ninja's ``[1/4]``."""
        found = re.match(r"\s*\[\s*(\d+)(?:%|/(\d+))\]", line)
        if found is None:
            return
        percent = int(found[1]) if found[2] is None else 100 * int(found[1]) // int(found[2])
        minutes, seconds = divmod(int(self._clock() - self._started), 60)
        text = f"· compiling: {percent} % after {minutes}:{seconds:02d}"
        if self._is_live:
            print(f"\r{text}\033[K", end="", file=self._out, flush=True)
        elif percent >= self._said + _STEP_PERCENT:
            self._said = percent - percent % _STEP_PERCENT
            print(text, file=self._out, flush=True)

    def close(self) -> None:
        """End the line."""
        if self._is_live:
            print("\r\033[K", end="", file=self._out, flush=True)


def exit_on_signals() -> None:
    """Raise SystemExit on SIGTERM and SIGHUP, so that what was started is ended.

    A signal that is ignored stays ignored: under ``nohup`` a build outlives its terminal.
    """
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, _exit)


def _exit(signum: int, frame: object) -> NoReturn:
    raise SystemExit(128 + signum)


def run(
    command: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    log: Path,
    on_line: Callable[[str], None] = lambda line: None,
) -> int:
    """Run a command to its end and return its exit code; its output is appended to ``log``.

    If this process ends, by Ctrl-C or otherwise, the command and all its processes end too.
    """
    with log.open("a") as file:
        print("$", *command, file=file, flush=True)
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # its own group, which can be ended as a whole
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                on_line(line)
            return process.wait()
        finally:
            _end(process)
            process.stdout.close()


def _end(process: subprocess.Popen[str]) -> None:
    """End the group of a process that may have exited; ``make`` ends its compilers on SIGTERM."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            pass  # the signal below cannot be ignored
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # the group is empty
    process.wait()


_TELLING = re.compile(
    r"\berror:|undefined reference|CMake Error|No space left|\bKilled\b|: not found$|^\s*[\w.]*Error:"
)
_N_BELOW = 4
"""Number of lines in CMake's message after the line with its location."""
_MOST_LINES = 12


def relevant(text: str) -> list[str]:
    """Return the lines of a build's output with the cause of its failure.

    The first errors, since they cause the others; the last lines if there are none.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    telling: set[int] = set()
    for n, line in enumerate(lines):
        if _TELLING.search(line):
            telling.update(range(n, n + (_N_BELOW if "CMake Error" in line else 1)))
    found = [lines[n] for n in sorted(telling) if n < len(lines)]
    return found[:_MOST_LINES] or lines[-_MOST_LINES:]
