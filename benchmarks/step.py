"""Step: what watching costs a training step of about 2 ms, two ranks with DDP on the CPU.

    python benchmarks/step.py --rounds 10

Plain: the loop by torchrun, nothing in it but the training. Not watched: the same loop as a gang. Watched:
with ``hm.log`` at every step and tqdm around it, too. A round runs all of them, one after the other, the
order changing from round to round; ratios are taken within the round, so that what else the machine does
weighs on all alike.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from _common import answer_file, in_turn, on_standard_error, torchrun
from _results import Table, parse_arguments, report

NP = 2
WARM_UP_STEPS = 50
STEPS = 1000
QUICK_STEPS = 200
WIDTH = 160
"""Of the hidden layers: chosen for a step of about 2 ms on one core a rank."""


def train(steps: int, *, is_watched: bool) -> float:
    """Train for ``steps`` after a warm-up; return seconds per step as rank 0 saw them."""
    import time

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(WIDTH, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(128, 64), torch.randint(0, 10, (128,))

    def step() -> Any:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(WARM_UP_STEPS):
        step()
    dist.barrier()
    start = time.perf_counter()
    if is_watched:
        from tqdm import tqdm

        import hydrogen_magic as hm

        for _ in tqdm(range(steps)):
            hm.log(loss=step().detach())
    else:
        for _ in range(steps):
            step()
    dist.barrier()
    seconds = (time.perf_counter() - start) / steps
    dist.destroy_process_group()
    return seconds


def plain(steps: int) -> float:
    with answer_file() as path:
        torchrun(__file__, "--rank", str(steps), str(path))
        return float(json.loads(path.read_text()))


def be_torchrun_rank(steps: int, path: Path) -> None:
    import os

    seconds = train(steps, is_watched=False)
    if os.environ["RANK"] == "0":
        path.write_text(json.dumps(seconds))


def gang(steps: int, *, is_watched: bool) -> float:
    import hydrogen_magic as hm

    with on_standard_error():
        return float(hm.run(train, steps, is_watched=is_watched, np=NP))


PLAIN, UNWATCHED, WATCHED = "plain torchrun", "gang, not watched", "gang, watched"
WAYS: dict[str, Callable[[int], float]] = {
    PLAIN: plain,
    UNWATCHED: partial(gang, is_watched=False),
    WATCHED: partial(gang, is_watched=True),
}
"""Each takes the number of steps, and returns the seconds of one."""


def one_round(number: int, steps: int) -> dict[str, float]:
    seconds = {}
    for name in in_turn([*WAYS], number):
        seconds[name] = WAYS[name](steps)
        time.sleep(0.5)  # what the last run leaves behind settles outside the next one's clock
    print(f"  round {number + 1}", file=sys.stderr, flush=True)
    return seconds


def main() -> None:
    run = parse_arguments(__doc__.splitlines()[0], rounds=10, quick_rounds=3)
    steps = QUICK_STEPS if run.quick else STEPS
    print(f"step: np {NP}, {steps} steps a run, {run.machine}\n", flush=True)
    rounds = [one_round(number, steps) for number in range(run.rounds)]
    rows: list[list[Any]] = []
    for name in WAYS:
        median_ms = 1e3 * statistics.median(each[name] for each in rounds)
        to_plain = [each[name] / each[PLAIN] for each in rounds]
        to_gang = statistics.median(each[name] / each[UNWATCHED] for each in rounds)
        spread = [statistics.median(to_plain), min(to_plain), max(to_plain)]
        rows.append([name, run.rounds, median_ms, *spread, to_gang])
    columns = {"": "", "n": "", "median": "ms", "x plain": "", "min x": "", "max x": ""}
    columns["x not watched"] = ""
    report(run, Table("step", "a training step; ratios within each round", columns, rows))


if __name__ == "__main__":
    if "--rank" in sys.argv:
        be_torchrun_rank(int(sys.argv[-2]), Path(sys.argv[-1]))
    else:
        main()
