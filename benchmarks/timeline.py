"""Timeline: what Horovod's timeline costs a training step of some milliseconds, two ranks on the CPU.

    python benchmarks/timeline.py --rounds 10

none: Horovod without a timeline. ready: with one that may begin at any time
(``HOROVOD_TIMELINE=DYNAMIC``, what every gang has), and nothing written. file: a timeline's file, which
nobody reads. live: ours, followed, converted and sent to the kernel while it is written, and with it
what ranks record of themselves. released: a file again, written by Horovod as it was released, whose
writer is what our build changes; a Horovod of its own, compiled the first time (two minutes).

A round has three gangs: one without a timeline, one with, and one with the released Horovod. In the
second, blocks of steps take turns, ready, file and live and back again, so that a ratio of two is one
of neighbours, in the same processes, a second apart. The third is another process, seconds apart.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import _released
from _common import in_turn, lacks
from _results import Cell, Table, parse_arguments, report

NP = 2
WARM_UP_STEPS = 60
STEPS = 150
"""Of a block: half a second."""
WIDTH = 160
"""Of the hidden layers, as in step.py."""
TURN = ("ready", "file", "live", "live", "file", "ready")
TURNS, QUICK_TURNS = 3, 1


RELEASED = "released"
N_RELEASED = 6
"""Blocks of it in a round."""
Block = tuple[str, float, float]
"""Mode, seconds a step, and processor seconds a step of this rank, Horovod's threads included."""


def train(modes: Sequence[str], steps: int) -> list[Block]:
    """Train a block of ``steps`` in each mode."""
    import inspect
    import os
    import tempfile
    import time

    import horovod.torch as hvd
    import torch
    from torch import nn

    import hydrogen_magic as hm
    from hydrogen_magic.node.worker.reporting import reporter

    torch.set_num_threads(1)
    (inspect.unwrap(hvd.init) if modes[0] == "none" else hvd.init)()
    assert ("HOROVOD_TIMELINE" in os.environ) == (modes[0] != "none")
    folder = tempfile.TemporaryDirectory(prefix="hydrogen-bench-")
    torch.manual_seed(0)
    layers = [nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    x, y = torch.randn(128, 64), torch.randint(0, 10, (128,))

    def run(n_steps: int) -> None:
        for _ in range(n_steps):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    def settle(is_live: bool) -> None:
        """Wait until the kernel has turned recording on or off on all ranks."""
        ours = reporter.current()
        while ours is not None:
            is_set = torch.tensor(float(ours.is_recording == is_live))
            if float(hvd.allreduce(is_set, name="set")) == 1.0:
                return
            time.sleep(0.01)

    start, stop = (inspect.unwrap(f) for f in (hvd.start_timeline, hvd.stop_timeline))
    found: list[Block] = []
    for number, mode in enumerate(modes):
        hm.log(block=number)
        settle(mode == "live")
        time.sleep(0.15)  # Horovod's writer is told by a thread of ours
        is_file = mode in ("file", "released")
        if is_file and hvd.rank() == 0:
            start(f"{folder.name}/{number}.json")
        run(WARM_UP_STEPS if number == 0 else WARM_UP_STEPS // 4)
        begun, spent = time.perf_counter(), time.process_time()
        run(steps)
        took = time.perf_counter() - begun
        found.append((mode, took / steps, (time.process_time() - spent) / steps))
        if is_file and hvd.rank() == 0:
            stop()
    hvd.shutdown()
    folder.cleanup()
    return found


def blocks(modes: Sequence[str], steps: int) -> list[Block]:
    """Run a gang through ``modes``, turning recording on and off for it; return what rank 0 saw."""
    import hydrogen_magic as hm

    gang = hm.launch(train, modes, steps, np=NP, rendezvous="horovod", timeout=280)
    told = -1
    while not gang.wait(0.02):
        number = int(gang.ranks[0].last_metrics.get("block", -1))
        if number > told:
            told = number
            gang.record(modes[number] == "live")
    result: list[Block] = gang.result
    return result


def released_blocks(python: Path) -> list[Block]:
    """Run a gang with the Horovod of ``python``."""
    command = [str(python), __file__, RELEASED]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=300)
    return [tuple(block) for block in json.loads(done.stdout.splitlines()[-1])]


class Findings:
    """Ratios of all rounds, and medians of each."""

    def __init__(self) -> None:
        self.ratios: dict[str, list[float]] = {}
        self.seconds: dict[str, list[float]] = {}

    def add(self, found: Sequence[Block]) -> None:
        """Take the blocks of a round; neighbours are compared, and each mode with none."""
        for one, other in itertools.pairwise(found):
            if {one[0], other[0]} == {"file", "live"}:
                live, file = (one, other) if one[0] == "live" else (other, one)
                self._note("live / file", live, file)
        modes = dict.fromkeys(mode for mode, *_ in found)
        medians = {mode: _median([block for block in found if block[0] == mode]) for mode in modes}
        self._note("live / released", medians["live"], medians[RELEASED])
        for mode, block in medians.items():
            self.seconds.setdefault(mode, []).append(block[1])
            if mode != "none":
                self._note(f"{mode} / none", block, medians["none"])

    def _note(self, what: str, one: Block, other: Block) -> None:
        self.ratios.setdefault(what, []).append(one[1] / other[1])
        self.ratios.setdefault(f"{what}, processor", []).append(one[2] / other[2])

    def tables(self) -> list[Table]:
        """Return the ratios, and the seconds of a step in each mode."""
        ratios: list[list[Cell]] = [
            [what, *_spread(found)] for what, found in sorted(self.ratios.items())
        ]
        modes: list[list[Cell]] = [
            [mode, *_spread([1e3 * s for s in found])] for mode, found in self.seconds.items()
        ]
        return [
            Table("timeline_steps", "a step", _columns("ms"), modes),
            Table("timeline", "a step with a timeline, as a ratio", _columns("x"), ratios),
        ]


def _columns(unit: str) -> dict[str, str]:
    return {"": "", "n": "", "median": unit, "min": unit, "max": unit}


def _spread(found: Sequence[float]) -> list[float]:
    return [len(found), statistics.median(found), min(found), max(found)]


def _median(found: Sequence[Block]) -> Block:
    seconds = statistics.median(block[1] for block in found)
    return found[0][0], seconds, statistics.median(block[2] for block in found)


def main() -> None:
    packages = ("torch", "horovod")
    run = parse_arguments(__doc__.splitlines()[0], rounds=10, quick_rounds=2, packages=packages)
    missing = lacks("horovod.torch")
    print(f"timeline: np {NP}, blocks of {STEPS} steps, {run.machine}\n", flush=True)
    if missing:
        print(missing)
        return
    turns = QUICK_TURNS if run.quick else TURNS
    findings = Findings()
    with _released.python() as python:
        gangs: list[Callable[[], list[Block]]] = [
            lambda: blocks(["none"] * len(TURN), STEPS),
            lambda: blocks(list(TURN) * turns, STEPS),
            lambda: released_blocks(python),
        ]
        for number in range(run.rounds):
            found: list[Block] = []
            for gang in in_turn(gangs, number):
                found += gang()
                time.sleep(0.5)  # what a gang leaves behind settles outside the next one's clock
            findings.add(found)
            line = ", ".join(f"{m} {v[-1] * 1e3:.3f} ms" for m, v in findings.seconds.items())
            print(f"round {number + 1}: {line}", file=sys.stderr, flush=True)
    for table in findings.tables():
        report(run, table)


if __name__ == "__main__":
    if sys.argv[1:] == [RELEASED]:
        print(json.dumps(blocks([RELEASED] * N_RELEASED, STEPS)))
    else:
        main()
