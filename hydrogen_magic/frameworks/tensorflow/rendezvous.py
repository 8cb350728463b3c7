"""TensorFlow's rendezvous: the environment that ``tf.distribute.MultiWorkerMirroredStrategy()`` reads.

Every rank serves TensorFlow's gRPC on a port of its own, and ``TF_CONFIG`` lists all of them. Agents hold
these ports until the attempt is over: ``TF_GRPC_REUSE_PORT`` makes TensorFlow share a port with them. Names
and meanings of the variables: https://www.tensorflow.org/guide/distributed_training#TF_CONFIG, and
``tensorflow/core/distributed_runtime/rpc/grpc_server_lib.cc`` of TensorFlow 2.21.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import metadata

from hydrogen_magic.core import network
from hydrogen_magic.core.job import JobSpec, Plan
from hydrogen_magic.driver.rendezvous import Diagnosis, Rendezvous, RendezvousInfo, VictimErrors
from hydrogen_magic.driver.rendezvous.torchrun import RANK_VARIABLES, interface, place
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.frameworks.tensorflow.node import COLLECTIVES, CONFIG, STRATEGY

_DEFAULTS = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "TF_CPP_MIN_LOG_LEVEL": "1"}
"""What a user may set otherwise. TensorFlow would reserve the memory of a GPU for itself; at its level 0 it
prints several lines of information on every rank."""
_VICTIM_MESSAGES = (
    "Collective ops is aborted by",
    "Connection reset by peer",
    "Connection refused",
    "Socket closed",
    "failed to connect to all addresses",
    "stopped sending heartbeats",
    r"[Cc]oordination ?[Ss]ervice",
    "NCCL operation",
)
_VICTIM_TYPES = (
    "AbortedError",
    "CancelledError",
    "DeadlineExceededError",
    "FailedPreconditionError",
    "InternalError",
    "UnavailableError",
    "UnknownError",
)
_DISTRIBUTIONS = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly")


class TensorFlowRendezvous(Rendezvous):
    """``tf.distribute``, on CPUs by gRPC and on GPUs by NCCL."""

    library = "hydrogen_magic.frameworks.tensorflow.installation"
    variables = RANK_VARIABLES | {CONFIG}
    forwarded = ("TF_", "NCCL_", "XLA_")
    # It starts threads when it is imported.
    not_preloaded = (
        "tensorflow",
        "keras",
        "tensorflow_datasets",
        "tensorflow_probability",
        "tf_keras",
    )
    needs_rank_ports = True
    init_collective = STRATEGY
    joining = (STRATEGY,)
    collectives = COLLECTIVES
    shipped = ("hydrogen_magic.frameworks.tensorflow.node",)
    join_advice = f"create tf.distribute.{STRATEGY}() and the model in its scope"
    victims = VictimErrors(
        messages=_VICTIM_MESSAGES,
        message_types=_VICTIM_TYPES,
        files=("/tensorflow/python/distribute/",),
    )

    def diagnose(self) -> Diagnosis:
        """TensorFlow need not be installed."""
        return Diagnosis(
            "TensorFlow", True, self.fault() or f"{_version()}, for `--with tensorflow`"
        )

    def prepare(
        self, plan: Plan, address: str, port: int, *, spec: JobSpec, gang: str, attempt: int
    ) -> RendezvousInfo:
        given = {name: value for name, value in os.environ.items() if name in _DEFAULTS}
        shared = {"TF_GRPC_REUSE_PORT": "true", **_DEFAULTS, **given}
        workers = _workers(plan, spec)
        environments = tuple(
            {
                **place(slot),
                **shared,
                **_config(workers, slot.rank),
                **interface(slot, "NCCL_SOCKET_IFNAME"),
            }
            for slot in plan.slots
        )
        return RendezvousInfo(environments)


def _workers(plan: Plan, spec: JobSpec) -> list[str]:
    """Return the address of every rank; empty for a rank that needs no others."""
    if not all(slot.port for slot in plan.slots):
        if spec.np == 1:
            return []
        raise PlacementError(
            "`--with tensorflow` needs a port for every rank, which "
            f"`--on {spec.placement}` does not provide; use `--on local` or `--on spark`"
        )
    return [network.endpoint(slot.address, slot.port).removeprefix("tcp://") for slot in plan.slots]


def _config(workers: list[str], rank: int) -> Mapping[str, str]:
    task = {"type": "worker", "index": rank}
    return {CONFIG: json.dumps({"cluster": {"worker": workers}, "task": task})} if workers else {}


def _version() -> str:
    """Return the installed version, by the name of any of its builds."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "installed"
