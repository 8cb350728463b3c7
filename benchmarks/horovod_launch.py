"""Launch with Horovod: from the call to rank 0's result after one allreduce, two ranks on this machine.

    python benchmarks/horovod_launch.py --rounds 5

The caller has imported torch and Horovod, as a notebook has. ``warm`` is the second and every later
launch of a kernel. ``horovod.run`` is Horovod's own launcher, which starts interpreters every time.
(This file cannot be called after Horovod: the ranks of ``horovod.run`` would import it instead.)
"""

from __future__ import annotations

from _common import (
    Peer,
    checked,
    chosen,
    lacks,
    on_standard_error,
    peer_table,
    round_robin,
    shown_elsewhere,
)
from _results import parse_arguments, report

NP = 2


def allreduce_once() -> float:
    """What every rank runs. Returns the number of ranks."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    return float(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())


def product_warm() -> float:
    import hydrogen_magic as hm

    with shown_elsewhere():
        return checked(lambda: hm.run(allreduce_once, np=NP, rendezvous="horovod"), NP)


def horovod_run() -> float:
    import horovod

    with on_standard_error():
        return checked(lambda: horovod.run(allreduce_once, np=NP, use_gloo=True)[0], NP)


def main() -> None:
    packages = ("torch", "horovod")
    run = parse_arguments(__doc__.splitlines()[0], rounds=5, quick_rounds=2, packages=packages)
    missing = lacks("horovod.torch")
    if not missing:
        import horovod.torch  # noqa: F401 - as a notebook has
    peers = [
        Peer("hydrogen_magic, warm", product_warm, missing),
        Peer("horovod.run", horovod_run, missing),
    ]
    peers = chosen(peers, run.only)
    print(f"launch with Horovod: np {NP}, {run.machine}", flush=True)
    if any(peer.measure is product_warm for peer in peers):
        product_warm()  # the launch that makes it warm
    round_robin(peers, run.rounds, pause_s=1.0)
    title = "call to rank 0's result after one allreduce"
    report(run, peer_table("horovod_launch", title, peers, "hydrogen_magic, warm"))


if __name__ == "__main__":
    main()
