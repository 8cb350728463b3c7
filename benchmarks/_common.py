"""What the benchmarks share: peers that may be missing, rounds in turn, their table at the end."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from _results import Table

FORK_FLOOR = Path(__file__).with_name("_fork_floor.py")


@dataclass
class Peer:
    """One way to do what is measured."""

    name: str
    measure: Callable[[], float]
    """Does it once and returns seconds by a monotonic clock."""
    missing: str = ""
    """Why it cannot run here; empty when it can."""
    seconds: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def lacks(module: str) -> str:
    """Return why ``module`` cannot be used, empty when it is installed."""
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of its parent package
        found = None
    return "" if found else f"{module} is not installed"


def chosen(peers: Sequence[Peer], only: Sequence[str]) -> list[Peer]:
    """Return the peers that were asked for, all without ``only``."""
    return [peer for peer in peers if not only or any(word in peer.name for word in only)]


def round_robin(peers: Sequence[Peer], rounds: int, pause_s: float = 0.0) -> None:
    """Measure every peer once in each round, so that a busy minute of the machine hits all alike.

    The order is reversed in every other round. A peer that fails is out from then on, and says why.
    ``pause_s``: before each, for what the one before leaves running in the background.
    """
    for number in range(rounds):
        for peer in peers if number % 2 == 0 else list(reversed(peers)):
            if not peer.missing:
                time.sleep(pause_s)
                _measure_once(peer)
        print(f"  round {number + 1} of {rounds}", file=sys.stderr, flush=True)


def _measure_once(peer: Peer) -> None:
    environment = dict(os.environ)  # some launchers leave theirs behind, and the next would pay
    try:
        peer.seconds.append(peer.measure())
    except Exception as error:  # a peer's failure is a result of the comparison, not its end
        peer.missing = f"failed: {type(error).__name__}: {str(error).strip().splitlines()[-1:]}"
    finally:
        os.environ.clear()
        os.environ.update(environment)


def peer_table(
    name: str,
    title: str,
    peers: Sequence[Peer],
    floor: str = "",
    more: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Table:
    """Return medians, spreads, and ratios to the peer named ``floor`` if one is given.

    ``more``: columns of other numbers, of which each has a value for some of the peers.
    """
    base = next((peer.median_s for peer in peers if peer.name == floor and peer.seconds), None)
    columns = {"": "", "n": "", "median": "s", "min": "s", "max": "s"}
    columns |= {f"x {floor}": ""} if floor else {}
    columns |= dict.fromkeys(more, "")
    rows: list[list[Any]] = []
    for peer in sorted((peer for peer in peers if peer.seconds), key=lambda peer: peer.median_s):
        spread = [peer.median_s, min(peer.seconds), max(peer.seconds)]
        ratio = [peer.median_s / base if base else None] if floor else []
        others = [values.get(peer.name) for values in more.values()]
        rows.append([peer.name, len(peer.seconds), *spread, *ratio, *others])
    left_out = {peer.name: peer.missing or "no round" for peer in peers if not peer.seconds}
    return Table(name, title, columns, rows, left_out)


def shown_elsewhere() -> contextlib.AbstractContextManager[Any]:
    """Let the product's view draw as ever, but on standard error: the table stays clean."""
    return contextlib.redirect_stdout(sys.stderr)


# ── pieces that several peers need ───────────────────────────────────────────────────────────────


def free_port() -> int:
    """Return a port that was free a moment ago: what peers that want a fixed one are given."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def answer_file() -> Iterator[Path]:
    """Give a path for rank 0's answer, for launchers that return no value."""
    with tempfile.TemporaryDirectory(prefix="hydrogen-bench-") as folder:
        yield Path(folder) / "answer.json"


def torchrun(script: Path, *arguments: str, np: int = 2) -> None:
    """Run ``script`` by torchrun on this machine and wait for it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={np}", str(script), *arguments]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])


class ForkFloor:
    """A server that has imported torch and forks ranks on request: nothing can launch much faster.

    It has no supervision, no output, no capture and no way to end a rank.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(FORK_FLOOR)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def all_reduce(self, np: int) -> float:
        """Fork ``np`` ranks, all_reduce once, and return the sum that rank 0 has."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"np": np, "port": free_port()}) + "\n")
        self._process.stdin.flush()
        return float(self._read()["sum"])

    def settled(self) -> None:
        """Wait until the ranks of the last request have exited."""
        self._read()

    def close(self) -> None:
        self._process.communicate(timeout=10)


def timed(call: Callable[[], Any]) -> float:
    """Return how long ``call`` takes, in seconds."""
    start = time.monotonic()
    call()
    return time.monotonic() - start


def checked(call: Callable[[], Any], expected: float) -> float:
    """Time ``call``, which must return what is expected."""
    answers: list[Any] = []
    seconds = timed(lambda: answers.append(call()))
    assert answers == [expected], answers
    return seconds


@contextlib.contextmanager
def on_standard_error() -> Iterator[None]:
    """Send there what processes write to standard output."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
