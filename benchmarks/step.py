"""Step: what watching costs a training step of about 2 ms, two ranks with DDP on the CPU.

    python benchmarks/step.py --rounds 10

Plain: the loop by torchrun, nothing in it but the training. Watched: the same loop as a gang, with
``hm.log`` at every step and tqdm around it. A round runs both, one after the other, the order
changing from round to round; the ratio is taken within the round, so that what else the machine
does weighs on both halves alike.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from _common import answer_file, shown_elsewhere, torchrun
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
        torchrun(Path(__file__), "--rank", str(steps), str(path))
        return float(json.loads(path.read_text()))


def be_torchrun_rank(steps: int, path: Path) -> None:
    import os

    seconds = train(steps, is_watched=False)
    if os.environ["RANK"] == "0":
        path.write_text(json.dumps(seconds))


def watched(steps: int) -> float:
    import hydrogen_magic as hm

    with shown_elsewhere():
        return float(hm.run(train, steps, is_watched=True, np=NP))


def main() -> None:
    run = parse_arguments(__doc__.splitlines()[0], rounds=10, quick_rounds=3)
    steps = QUICK_STEPS if run.quick else STEPS
    print(f"step: np {NP}, {steps} steps a run, {run.machine}\n", flush=True)
    pairs = [one_pair(number, steps) for number in range(run.rounds)]
    ratios = [watched_s / plain_s for plain_s, watched_s in pairs]
    plain_ms, watched_ms = (1e3 * statistics.median(each) for each in zip(*pairs, strict=True))
    columns = {"": "", "n": "", "median": "ms", "x plain": "", "min x": "", "max x": ""}
    rows = [
        ["plain torchrun", run.rounds, plain_ms, 1.0, None, None],
        ["watched", run.rounds, watched_ms, statistics.median(ratios), min(ratios), max(ratios)],
    ]
    report(run, Table("step", "a training step; ratios within each pair", columns, rows))


def one_pair(number: int, steps: int) -> tuple[float, float]:
    """Run both halves of a round; return the seconds of a step, plain and watched."""
    seconds = {}
    for way in (plain, watched) if number % 2 == 0 else (watched, plain):
        seconds[way] = way(steps)
        time.sleep(0.5)  # what the last run leaves behind settles outside the next one's clock
    print(f"  pair {number + 1}", file=sys.stderr, flush=True)
    return seconds[plain], seconds[watched]


if __name__ == "__main__":
    if "--rank" in sys.argv:
        be_torchrun_rank(int(sys.argv[-2]), Path(sys.argv[-1]))
    else:
        main()
