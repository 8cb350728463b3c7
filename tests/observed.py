"""A process that observes libraries as a rank does, with all that it printed and reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import astuple
from pathlib import Path
from typing import Any

from hydrogen_magic import plugins
from hydrogen_magic.core import events as ev

TIMEOUT_S = 240.0
"""For a process that imports torch and its compiler on a machine that is busy with other tests."""

Curves = dict[str, dict[int, float]]

RANK = """
import atexit, json, os, sys, time, types
exec(os.environ.pop("IMPORTED_BEFORE", ""))  # as a forkserver may do
from hydrogen_magic.core import events as ev
from hydrogen_magic.core.messages import ObserverSpec
from hydrogen_magic.node.worker import observe
from hydrogen_magic.node.worker.reporting import reporter
sent = []
rank = reporter.Reporter(int(os.environ.get("RANK", 0)), time.monotonic(), sent.extend)
reporter.install(rank)
observe.install(ObserverSpec(*one) for one in json.loads(os.environ.pop("OBSERVERS")))
rank.start()
def flush():
    rank.post(ev.Notice(0.0, "info", "flush"))
def finish():
    rank.close()
    with open(os.environ["EVENTS"], "w") as file:
        json.dump([ev.encode(event) for event in sent], file)
atexit.register(finish)
"""


def curves(events: Iterable[ev.Event]) -> Curves:
    """Return each metric's value by step; a step that one metric has twice is an error."""
    found: Curves = defaultdict(dict)
    for event in events:
        if isinstance(event, ev.Metrics):
            for name, values in event.values.items():
                for step, value in zip(event.steps, values, strict=True):
                    if value is not None:
                        assert step not in found[name], f"{name} is there twice at step {step}"
                        found[name][step] = value
    return found


class Ended:
    """A process that has ended, with all that it printed and reported."""

    def __init__(
        self, process: subprocess.Popen[str], events: Path, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.stdout, self.stderr = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, self.stderr
        self.events = [ev.decode(message) for message in json.loads(events.read_text())]

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def curves(self) -> Curves:
        """Each metric's value by step; a step that one metric has twice is an error."""
        return curves(self.events)

    @property
    def bars(self) -> list[tuple[str, float, float | None, bool]]:
        """The last state of each bar, in the order of their numbers."""
        last = {bar.bar: bar for bar in self.of(ev.Progress)}
        return [(b.desc, b.n, b.total, b.closed) for _, b in sorted(last.items())]


def start(code: str, events: Path, **env: str) -> subprocess.Popen[str]:
    observers = json.dumps([astuple(one) for one in plugins.observers()])
    return subprocess.Popen(
        [sys.executable, "-c", RANK + textwrap.dedent(code)],
        env={**os.environ, "EVENTS": str(events), "OBSERVERS": observers, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(code: str, tmp_path: Path, **env: str) -> Ended:
    events = tmp_path / "events.json"
    return Ended(start(code, events, **env), events)
