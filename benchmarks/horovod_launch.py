"""Launch with Horovod: from the call to rank 0's result after one allreduce, two ranks on this machine.

    python benchmarks/horovod_launch.py --rounds 5

The caller has imported torch and Horovod, as a notebook has. ``warm`` is the second and every later
launch of a kernel. ``horovod.run`` is Horovod's own launcher, which starts interpreters every time.
(This file cannot be called after Horovod: the ranks of ``horovod.run`` would import it instead.)
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from _common import (
    Peer,
    chosen,
    lacks,
    machine,
    parse_arguments,
    print_table,
    round_robin,
    shown_elsewhere,
    timed,
)

NP = 2


def allreduce_once() -> float:
    """What every rank runs. Returns the number of ranks."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    return float(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())


def checked(call: Callable[[], Any]) -> float:
    """Time ``call``, which must return the number of ranks."""
    answers: list[Any] = []
    seconds = timed(lambda: answers.append(call()))
    assert answers == [NP], answers
    return seconds


def product_warm() -> float:
    import hydrogen_magic as hm

    with shown_elsewhere():
        return checked(lambda: hm.run(allreduce_once, np=NP, rendezvous="horovod"))


def horovod_run() -> float:
    import horovod

    with _on_standard_error():
        return checked(lambda: horovod.run(allreduce_once, np=NP, use_gloo=True)[0])


@contextlib.contextmanager
def _on_standard_error() -> Iterator[None]:
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


def main() -> None:
    arguments = parse_arguments(__doc__.splitlines()[0], rounds=5, quick_rounds=2)
    missing = lacks("horovod.torch")
    if not missing:
        import horovod.torch  # noqa: F401 - as a notebook has
    peers = [
        Peer("--with horovod, warm", product_warm, missing),
        Peer("horovod.run", horovod_run, missing),
    ]
    peers = chosen(peers, arguments.only)
    print(f"launch with Horovod: np {NP}, {machine()}", flush=True)
    if any(peer.measure is product_warm for peer in peers):
        product_warm()  # the launch that makes it warm
    round_robin(peers, arguments.rounds, pause_s=1.0)
    print_table("call to rank 0's result after one allreduce", peers, "--with horovod, warm")


if __name__ == "__main__":
    main()
