"""Spark: from the call to rank 0's result after one all_reduce, two ranks on a standalone cluster.

    python benchmarks/spark.py --rounds 5

Beside pyspark's TorchDistributor, in turn, in the same session: a master and two workers of two cores
each on this machine. The session is up and each way was taken once before anything is counted.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import closing
from pathlib import Path

from _common import (
    Peer,
    chosen,
    lacks,
    machine,
    parse_arguments,
    print_table,
    round_robin,
    shown_elsewhere,
)
from launch import NP, checked

PRODUCT = "hydrogen_magic"
PEER = "TorchDistributor"
GOAL = 15
"""How many times faster than its peer this should be."""

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
    return ones.item()


def product() -> float:
    import hydrogen_magic as hm

    with shown_elsewhere():
        return checked(lambda: hm.run(all_reduce_once, np=NP, on="spark"))


def torch_distributor() -> float:
    from pyspark.ml.torch.distributor import TorchDistributor

    distributor = TorchDistributor(num_processes=NP, local_mode=False, use_gpu=False)
    with shown_elsewhere():
        return checked(lambda: distributor.run(all_reduce_once))


def main() -> None:
    arguments = parse_arguments(__doc__.splitlines()[0], rounds=5, quick_rounds=2)
    missing = lacks("pyspark") or ("" if shutil.which("java") else "no Java runtime")
    peers = [Peer(PRODUCT, product, missing), Peer(PEER, torch_distributor, missing)]
    peers = chosen(peers, arguments.only)
    print(f"spark: np {NP}, {machine()}", flush=True)
    if not missing:
        measure(peers, arguments.rounds)
    print_table("on Spark, warm: call to rank 0's result after one all_reduce", peers, PRODUCT)
    by_name = {peer.name: peer for peer in peers if peer.seconds}
    if len(by_name) == 2:
        ratio = by_name[PEER].median_s / by_name[PRODUCT].median_s
        print(f"\n{ratio:.1f} times faster than {PEER} (goal: {GOAL})")


def measure(peers: list[Peer], rounds: int) -> None:
    from tests import spark_rig

    with tempfile.TemporaryDirectory(prefix="hydrogen-bench-") as folder:
        site = spark_rig.Site.create(Path(folder) / "site")
        with (
            closing(spark_rig.Standalone(site)) as cluster,
            spark_rig.session(site, cluster.url),
        ):
            for peer in peers:
                peer.measure()  # what starts processes and JVM code that stay warm
            round_robin(peers, rounds, PAUSE_S)


if __name__ == "__main__":
    main()
