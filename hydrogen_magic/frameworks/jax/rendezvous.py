"""JAX's rendezvous: ``jax.distributed.initialize()`` needs no arguments.

Rank 0 serves JAX's coordination service, a gRPC server without authentication, in its own process. JAX would
make it listen on every interface. Here it listens on a Unix socket in a private directory of rank 0's host,
and a process beside the ranks forwards connections to it: those of this user, and of the gang's hosts
(:mod:`~hydrogen_magic.node.rendezvous.connection_guard`). JAX reads both addresses from variables; it has
none for the number of processes and for that of this process, so an observer adds those to the call.
Names and meanings of the variables: ``jax/_src/distributed.py`` and ``jax/_src/xla_bridge.py`` of JAX 0.10.2.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Mapping
from importlib.metadata import version

from hydrogen_magic.core.job import JobSpec, Plan, Slot
from hydrogen_magic.driver.rendezvous import (
    Diagnosis,
    Rendezvous,
    RendezvousInfo,
    ServiceSpec,
    VictimErrors,
)
from hydrogen_magic.driver.rendezvous.torchrun import RANK_VARIABLES, interface, place
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.frameworks.jax.node import (
    ADDRESS,
    BIND_ADDRESS,
    INITIALIZE,
    INTERFACE,
    MULTIHOST_COLLECTIVES,
)
from hydrogen_magic.frameworks.jax.node.coordinator import socket_path

_INTERFACES = (INTERFACE, "NCCL_SOCKET_IFNAME")
_VICTIM_MESSAGES = (
    r"Gloo [\w-]+ failed",
    r"[Cc]oordination ?[Ss]ervice",
    "heartbeat timeout",
    "NCCL operation",
)


class JaxRendezvous(Rendezvous):
    """``jax.distributed``, on CPUs by Gloo and on GPUs by NCCL."""

    library = "hydrogen_magic.frameworks.jax.installation"
    variables = RANK_VARIABLES | {ADDRESS, BIND_ADDRESS}
    forwarded = ("GLOO_", "JAX_", "NCCL_", "XLA_")
    # JAX reads variables when it is imported, of which each rank has its own.
    not_preloaded = (
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "orbax",
        "chex",
        "equinox",
        "haiku",
        "keras",
        "numpyro",
    )
    init_collective = INITIALIZE
    joining = (INITIALIZE,)
    collectives = MULTIHOST_COLLECTIVES
    shipped = ("hydrogen_magic.frameworks.jax.node",)
    join_advice = "call jax.distributed.initialize()"
    victims = VictimErrors(
        messages=_VICTIM_MESSAGES,
        # Gloo's errors are raised as ValueError where the result of a computation is ready at once.
        message_types=("JaxRuntimeError", "XlaRuntimeError", "ValueError"),
        files=("/jax/experimental/multihost_utils",),
        aborts=True,
    )

    def diagnose(self) -> Diagnosis:
        """JAX need not be installed."""
        missing = self.fault()
        return Diagnosis("JAX", True, missing or f"{version('jax')}, for `--with jax`")

    def prepare(
        self, plan: Plan, address: str, port: int, *, spec: JobSpec, gang: str, attempt: int
    ) -> RendezvousInfo:
        if spec.placement == "inline":
            raise PlacementError(
                "`--with jax --on inline`: the notebook's process cannot join a gang once JAX has "
                "started in it; use `--on local`, or leave out `--with jax`"
            )
        shared = {
            ADDRESS: f"{address}:{port}",
            BIND_ADDRESS: f"unix:{socket_path(_token(), port)}",
        }
        environments = tuple(
            {**place(slot), **shared, **_devices(plan, slot), **interface(slot, *_INTERFACES)}
            for slot in plan.slots
        )
        hosts = sorted({slot.address for slot in plan.slots}) if plan.slots[0].n_nodes > 1 else []
        options = {"token": _token(), "hosts": hosts}
        service = ServiceSpec("hydrogen_magic.frameworks.jax.node.coordinator:forward", options)
        return RendezvousInfo(environments, service)


def _devices(plan: Plan, slot: Slot) -> Mapping[str, str]:
    """Return the variables by which a rank uses its own GPU alone; every rank sees those of its host."""
    gpus = plan.gpus_of(slot)
    # The first also where another module has imported JAX too early, the others without initialize().
    names = ("JAX_LOCAL_DEVICE_IDS", "JAX_CUDA_VISIBLE_DEVICES", "JAX_ROCM_VISIBLE_DEVICES")
    return dict.fromkeys(names, str(slot.local_rank % len(gpus))) if gpus else {}


@functools.cache
def _token() -> str:
    """Return this kernel's part of the socket's name. One for all its gangs: the process that forwards
    connections may start before its gang.
    """
    return secrets.token_hex(8)
