"""Frameworks: from the call to rank 0's result after one collective of two ranks, on this machine.

    python benchmarks/frameworks.py --rounds 5

Horovod beside ``horovod.run``, its own launcher. The others beside two interpreters with the arguments or
variables that their documentation gives: less than any launcher, such as those of ``launch``. Keras has no
collective of its own; its ranks ``fit`` one batch by ``hydrogen_magic.compat.keras`` on PyTorch, in either
way. ``warm`` is the second and every later launch of a kernel; either call returns when its ranks have
ended. The caller has imported torch, Horovod, DeepSpeed and Keras, as a notebook has. JAX and TensorFlow
start threads on import, so that each rank imports them itself, in either way.

TensorFlow is in an environment of its own, which ``make test-all`` makes: ``.venv/tensorflow/bin/python``
runs this file with all frameworks. (Ranks of ``horovod.run`` import this file: no framework has its name.)
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from _common import (
    Peer,
    checked,
    chosen,
    free_port,
    lacks,
    on_standard_error,
    peer_table,
    round_robin,
    warm_up,
)
from _results import parse_arguments, report

NP = 2
PRODUCT = "hydrogen_magic, warm"
INTERPRETERS = "two interpreters"
IMPORTED = ("horovod.torch", "deepspeed", "keras")
"""Modules that a notebook has imported, beside torch."""


# ── what every rank runs: it returns the number of ranks ─────────────────────────────────────────


def by_torch() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    dist.destroy_process_group()
    return float(ones.item())


def by_horovod() -> float:
    import horovod.torch as hvd
    import torch

    hvd.init()
    return float(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())


def by_jax(**address: object) -> float:
    """``address``: what ``jax.distributed.initialize`` needs outside of a gang."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    jax.distributed.initialize(**address)
    return float(multihost_utils.process_allgather(np.ones(1)).sum())


def by_tensorflow() -> float:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    ones = strategy.experimental_distribute_values_from_function(lambda _: tf.ones([]))
    return float(strategy.reduce("SUM", ones, axis=None))


def by_keras() -> float:
    import keras
    import numpy as np

    import hydrogen_magic.compat.keras as hvd

    hvd.init()
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), loss="mse")
    model.fit(np.ones((1, 1)), np.ones((1, 1)), verbose=0)
    hvd.shutdown()
    return float(hvd.size())


def by_deepspeed() -> float:
    import deepspeed
    import torch

    deepspeed.init_distributed("gloo", verbose=False)
    ones = torch.ones(1)
    deepspeed.comm.all_reduce(ones)
    torch.distributed.destroy_process_group()
    return float(ones.item())


# ── the ways ─────────────────────────────────────────────────────────────────────────────────────


def product(module: str, rendezvous: str, function: Callable[[], float]) -> float:
    import hydrogen_magic as hm

    if module in IMPORTED:
        importlib.import_module(module)
    with on_standard_error():
        return checked(lambda: hm.run(function, np=NP, rendezvous=rendezvous), NP)


def horovod_run() -> float:
    import horovod

    with on_standard_error():
        return checked(lambda: horovod.run(by_horovod, np=NP, use_gloo=True)[0], NP)


def interpreters(calls: Sequence[str], variables: Sequence[dict[str, str]]) -> float:
    """Start one interpreter for each rank, which evaluates its call; return what rank 0's printed last."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"from frameworks import *\nprint({call})"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            cwd=Path(__file__).parent, env={**os.environ, "OMP_NUM_THREADS": "1", **more},
        )
        for call, more in zip(calls, variables, strict=True)
    ]  # fmt: skip
    try:
        found = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError("".join(errors for _, errors in found))
    return float(found[0][0].splitlines()[-1])


def torch_interpreters(call: str) -> float:
    gang = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(NP)}
    variables = [{**gang, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(NP)]
    return checked(lambda: interpreters([call] * NP, variables), NP)


def jax_interpreters() -> float:
    address = f"coordinator_address='127.0.0.1:{free_port()}', num_processes={NP}"
    calls = [f"by_jax({address}, process_id={rank})" for rank in range(NP)]
    return checked(lambda: interpreters(calls, [{}] * NP), NP)


def tensorflow_interpreters() -> float:
    workers = [f"127.0.0.1:{free_port()}" for _ in range(NP)]
    tasks = [{"type": "worker", "index": rank} for rank in range(NP)]
    configs = [json.dumps({"cluster": {"worker": workers}, "task": task}) for task in tasks]
    variables = [{"TF_CONFIG": config} for config in configs]
    return checked(lambda: interpreters(["by_tensorflow()"] * NP, variables), NP)


Framework = tuple[str, str, Callable[[], float], Callable[[], float]]
"""Module, rendezvous, what ranks run, and the other way."""
FRAMEWORKS: dict[str, Framework] = {
    "PyTorch": ("torch", "torch", by_torch, partial(torch_interpreters, "by_torch()")),
    "Horovod": ("horovod.torch", "horovod", by_horovod, horovod_run),
    "JAX": ("jax", "jax", by_jax, jax_interpreters),
    "TensorFlow": ("tensorflow", "tensorflow", by_tensorflow, tensorflow_interpreters),
    "Keras": ("keras", "torch", by_keras, partial(torch_interpreters, "by_keras()")),
    "DeepSpeed": (
        "deepspeed",
        "torch",
        by_deepspeed,
        partial(torch_interpreters, "by_deepspeed()"),
    ),
}


def main() -> None:
    packages = ("torch", "horovod", "jax", "tensorflow-cpu", "keras", "deepspeed")
    run = parse_arguments(__doc__.splitlines()[0], rounds=5, quick_rounds=2, packages=packages)
    print(f"frameworks: np {NP}, {run.machine}", flush=True)
    os.environ["KERAS_BACKEND"] = "torch"  # read when Keras is imported
    for name in chosen(FRAMEWORKS, run.only):
        module, rendezvous, function, by_other = FRAMEWORKS[name]
        missing = lacks(module)
        ours = partial(product, module, rendezvous, function)
        other = "horovod.run" if by_other is horovod_run else INTERPRETERS
        peers = [Peer(PRODUCT, ours, missing), Peer(other, by_other, missing)]
        warm_up(peers)
        round_robin(peers, run.rounds, pause_s=1.0)
        report(run, peer_table(f"frameworks_{name.lower()}", name, peers, PRODUCT))


if __name__ == "__main__":
    main()
