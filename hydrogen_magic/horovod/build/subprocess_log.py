"""Running a long command: its output in a log, its progress in a line, its end when we end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

__all__ = ["CompilerProgress", "relevant", "run"]

_GRACE_S = 5.0
_STEP_PERCENT = 20
"""How often it says how far it is where a line cannot be written over."""


class CompilerProgress:
    """How far the compiler is: one line that changes on a terminal, a few lines elsewhere."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._clock = out, clock
        self._is_live = out.isatty()
        self._started = clock()
        self._said = -_STEP_PERCENT

    def feed(self, line: str) -> None:
        """Take a line of the build's output."""
        found = re.match(r"\s*\[\s*(\d+)%\]", line)
        if found is None:
            return
        percent = int(found[1])
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


def run(
    command: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    log: Path,
    on_line: Callable[[str], None] = lambda line: None,
) -> int:
    """Run a command to its end and return its exit code; all it says is added to ``log``.

    Whatever ends us, Ctrl-C included, ends it and everything it started.
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
            start_new_session=True,  # its own group, which can be ended whole
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
    """End the group of a process that may have ended; ``make`` ends its compilers on SIGTERM."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            pass  # the signal below cannot be ignored
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nobody is left in it
    process.wait()


_TELLING = re.compile(
    r"\berror:|undefined reference|CMake Error|No space left|\bKilled\b|^\s*\w*Error:"
)
_N_BELOW = 4
"""Lines that CMake's message takes below the line that says where it is from."""


def relevant(text: str, n_lines: int = 12) -> list[str]:
    """Return the lines of a build's output that say why it failed.

    The first ones, from which the others follow; the last lines where none tells.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    telling: set[int] = set()
    for n, line in enumerate(lines):
        if _TELLING.search(line):
            telling.update(range(n, n + (_N_BELOW if "CMake Error" in line else 1)))
    return [lines[n] for n in sorted(telling) if n < len(lines)][:n_lines] or lines[-n_lines:]
