"""What the benchmarks share: peers that may be missing, rounds in turn, their table at the end."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from _results import Table

T = TypeVar("T")
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


def lacks_spark() -> str:
    """Return why Spark cannot be used, empty when it can."""
    return lacks("pyspark") or ("" if shutil.which("java") else "no Java runtime")


def chosen(names: Iterable[str], only: Sequence[str]) -> list[str]:
    """Return the names that were asked for: by a whole name, or by a part of names; without ``only`` all."""
    names = list(names)

    def is_meant(name: str, word: str) -> bool:
        return name == word if word in names else word in name

    return [name for name in names if not only or any(is_meant(name, word) for word in only)]


def chosen_peers(peers: Sequence[Peer], only: Sequence[str]) -> list[Peer]:
    """Return the peers whose names are :func:`chosen`."""
    names = chosen([peer.name for peer in peers], only)
    return [peer for peer in peers if peer.name in names]


def in_turn(ways: Sequence[T], number: int) -> Sequence[T]:
    """Return the ways in the order of a round, which is reversed in every other one."""
    return ways if number % 2 == 0 else ways[::-1]


def warm_up(peers: Sequence[Peer]) -> None:
    """Let each peer start what stays warm; it is not counted. A peer that fails is out."""
    for peer in peers:
        if not peer.missing:
            _measure_once(peer)
            peer.seconds.clear()


def round_robin(peers: Sequence[Peer], rounds: int, pause_s: float = 0.0) -> None:
    """Measure every peer once in each round, so that a busy minute of the machine hits all alike.

    The order is reversed in every other round. A peer that fails is out: it has no time, and the reason is
    in the table.
    ``pause_s``: before each, for what the one before leaves running in the background.
    """
    for number in range(rounds):
        for peer in in_turn(peers, number):
            if not peer.missing:
                time.sleep(pause_s)
                _measure_once(peer)
        print(f"  round {number + 1} of {rounds}", file=sys.stderr, flush=True)


def _measure_once(peer: Peer) -> None:
    # Not at the top: the ranks of torchrun import this file, too.
    from hydrogen_magic.errors import GangStoppedError

    environment = dict(os.environ)  # some launchers leave theirs behind, and the next would pay
    try:
        peer.seconds.append(peer.measure())
    except GangStoppedError as error:
        raise KeyboardInterrupt from error  # Ctrl-C, which had stopped the gang
    except Exception as error:  # a peer's failure is a result of the comparison, not its end
        last = (str(error).strip().splitlines() or [""])[-1]
        peer.missing = f"failed after {len(peer.seconds)} rounds: {type(error).__name__}: {last}"
        peer.seconds.clear()
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


def torchrun_command(script: str, *arguments: str) -> list[str]:
    """Return the command that runs ``script`` on two ranks of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node=2", script, *arguments]


def torchrun(script: str, *arguments: str) -> None:
    """Run ``script`` by torchrun on this machine and wait for it."""
    command = torchrun_command(script, *arguments)
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])


def local_spark(settings: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Start a session of Spark on two cores of this machine, or return the one there is."""
    from pyspark.sql import SparkSession

    ours = {"spark.ui.enabled": "false", "spark.driver.bindAddress": "127.0.0.1"}
    builder = SparkSession.builder.master("local[2]")
    return builder.config(map={**ours, **settings}).getOrCreate()


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
