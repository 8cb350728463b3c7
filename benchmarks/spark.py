"""Spark: how fast a standalone cluster starts a gang, refuses one that cannot fit, and stops one.

    python benchmarks/spark.py --rounds 5
    python benchmarks/spark.py --only session     # a call in a live session alone

Start: from the call to rank 0's result after one all_reduce of two ranks, beside pyspark's TorchDistributor.
Cell to cell: the same for a gang that is called as soon as the one before it has returned, and the median of
20 calls in a session, whose ranks stay.
Refusal: from the call with more ranks than slots to its PlacementError; once in a session that has just
started, where more executors might still register, and in each round. Stop: as in ``benchmarks/stop.py``,
to the end of the last rank on the executors.

All run in turn in the same session: two executors with two cores each, on this machine. The session is up
and each way was taken once before anything is counted, except the first refusal.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path

from _common import (
    Peer,
    checked,
    chosen_peers,
    lacks_spark,
    on_standard_error,
    peer_table,
    round_robin,
    timed,
    warm_up,
)
from _results import parse_arguments, report
from launch import NP, product_session
from stop import GOAL_S, WAYS
from stop import product as stopped

PRODUCT = "hydrogen_magic"
PEER = "TorchDistributor"
GOAL = 20
"""How many times faster than its peer this should be."""
CELL_TO_CELL = "cell to cell"
CELL_TO_CELL_GOAL_S = 0.25
SESSION_GOAL_S = 0.1
N_CELLS = 20
REFUSAL_GOAL_S = 1.0
N_SLOTS = 4

PAUSE_S = 4.0
"""Trainers of the peer take a second to end after it has returned."""


def all_reduce_once() -> float:
    """What every rank runs. Returns the number of ranks; executors get it by value."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    dist.destroy_process_group()
    return float(ones.item())


def product() -> float:
    import hydrogen_magic as hm

    with on_standard_error():
        return checked(lambda: hm.run(all_reduce_once, np=NP, on="spark"), NP)


def cell_to_cell() -> float:
    """Return the median of gangs that follow one another without a pause, as ``Run All`` starts cells."""
    product()
    return statistics.median(product() for _ in range(N_CELLS))


def session_call() -> float:
    """Return the median of calls that follow one another in a session."""
    return statistics.median(product_session("spark") for _ in range(N_CELLS))


def torch_distributor() -> float:
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=NP, local_mode=False, use_gpu=False)
    with on_standard_error():
        return checked(lambda: distributor.run(all_reduce_once), NP)


def refused() -> float:
    """Return the seconds until a gang with one rank more than there are slots is refused."""
    import hydrogen_magic as hm

    def call() -> None:
        try:
            hm.launch(all_reduce_once, np=N_SLOTS + 1, on="spark").stop()
        except hm.errors.PlacementError:
            return
        raise RuntimeError(f"np {N_SLOTS + 1} was not refused")

    return timed(call)


def main() -> None:
    packages = ("torch", "pyspark")
    run = parse_arguments(__doc__.splitlines()[0], rounds=5, quick_rounds=2, packages=packages)
    missing = lacks_spark()
    starts = [Peer(PRODUCT, product, missing), Peer(PEER, torch_distributor, missing)]
    series = [Peer(CELL_TO_CELL, cell_to_cell, missing)]
    calls = [Peer("the next cell of a session", session_call, missing)]
    early = [Peer("refusal, just started", refused, missing)]
    later = [Peer("refusal, later", refused, missing)]
    stops = [Peer(f"stop, {way}", partial(stopped, way, "spark"), missing) for way in WAYS]
    starts, series, calls, early, later, stops = (
        chosen_peers(peers, run.only) for peers in (starts, series, calls, early, later, stops)
    )
    print(f"spark: np {NP}, {run.machine}", flush=True)
    if not missing:
        # The session first: it keeps its agents, and the next gang starts others.
        measure(early, [*calls, *starts, *series, *later, *stops], run.rounds)
    title = f"call to rank 0's result after one all_reduce (goal: {GOAL} times faster than {PEER})"
    report(run, peer_table("spark_start", title, starts, PRODUCT))
    title = f"the next gang at once (goal: {CELL_TO_CELL_GOAL_S} s)"
    report(run, peer_table("spark_next", title, series))
    title = f"a call in a session (goal: {SESSION_GOAL_S} s)"
    report(run, peer_table("spark_session", title, calls))
    title = f"call to the refusal (goal: {REFUSAL_GOAL_S:.0f} s)"
    report(run, peer_table("spark_refusal", title, [*early, *later]))
    title = f"Stop to the end of the last rank (goal: {GOAL_S:.0f} s)"
    report(run, peer_table("spark_stop", title, stops))


def measure(early: list[Peer], peers: list[Peer], rounds: int) -> None:
    """Measure ``early`` once in a new session, then the others in rounds."""
    from tests import spark_rig

    with tempfile.TemporaryDirectory(prefix="hydrogen-bench-") as folder:
        site = spark_rig.Site.create(Path(folder) / "site")
        with (
            closing(spark_rig.Standalone(site)) as cluster,
            spark_rig.session(site, cluster.url) as spark,
        ):
            vars(sys.modules["__main__"])["spark"] = spark  # where a notebook has its session
            round_robin(early, 1)
            warm_up(peers)  # processes, and code of the JVM
            round_robin(peers, rounds, PAUSE_S)


if __name__ == "__main__":
    main()
