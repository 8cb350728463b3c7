"""What is to be run and where: frozen values that every layer shares.

A :class:`JobSpec` is what the user asked for, a :class:`Plan` is what a placement makes of it
without any effect, a :class:`Slot` is the place of one rank in it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

__all__ = [
    "DEFAULT_MAX_CLOSURE_BYTES",
    "DYNAMIC",
    "HOROVOD_TIMELINE",
    "JobSpec",
    "LOOPBACK",
    "PLACEMENTS",
    "Plan",
    "RENDEZVOUS",
    "RENDEZVOUS_VARIABLES",
    "Slot",
]

PLACEMENTS = ("local", "spark", "inline")
"""Where ranks may run; each is a room in ``placements/``."""
RENDEZVOUS = ("torch", "horovod")
"""How ranks may find each other; each is a file in ``rendezvous/``."""

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
"""Interface that keeps ranks of one machine off the network."""

RENDEZVOUS_VARIABLES = frozenset(
    (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_CROSS_RANK",
        "HOROVOD_CROSS_SIZE",
        "HOROVOD_HOSTNAME",
        "HOROVOD_CONTROLLER",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR",
        "HOROVOD_GLOO_RENDEZVOUS_PORT",
    )
)
"""Of torchrun's variables and Horovod's those by which ranks find each other; nobody else may set them."""

HOROVOD_TIMELINE = "HOROVOD_TIMELINE"
"""Variable with the path to which Horovod's rank 0 writes its timeline."""
DYNAMIC = "DYNAMIC"
"""Its value where a timeline may begin later."""

DEFAULT_MAX_CLOSURE_BYTES = 1 << 30
"""1 GiB: what one machine copies to its ranks in about a second; more is most likely a mistake."""


@dataclass(frozen=True)
class JobSpec:
    """What the user asked for, after arguments were checked."""

    np: int = 2
    """Number of ranks, 1 or more."""
    placement: str = "local"
    """One of :data:`PLACEMENTS`."""
    rendezvous: str = "torch"
    """``torch`` or ``horovod``."""
    gpu: bool | None = None
    """True: every rank needs a GPU of its own. False: none. None: GPUs if every rank can have one."""
    env: tuple[tuple[str, str], ...] = ()
    """Environment of every rank, on top of the notebook's; wins over everything we set."""
    out: tuple[str, ...] = ()
    """Names of rank 0's variables to bring back."""
    retries: int = 0
    """How often the whole gang is started again after a failure."""
    timeout_s: float | None = None
    """Wall time after which the gang is stopped, all attempts together."""
    start_timeout_s: float = 120.0
    """How long a rank may take from its launch to the first line of the cell."""
    grace_s: float = 3.0
    """How long a rank that reacted to a stop may clean up before it is killed."""
    timeline: str | None = None
    """Record spans: ``""`` to show them only, a path to write a Chrome trace there too."""
    detach: bool = False
    """Return a handle at once instead of waiting."""
    quiet: bool = False
    """No live view; output and result only."""
    max_closure_bytes: int = DEFAULT_MAX_CLOSURE_BYTES
    """Upper bound of everything captured, in bytes."""

    def __post_init__(self) -> None:
        """Refuse what no gang could run by: TypeError or ValueError with what was given."""
        for name, least in (("np", 1), ("retries", 0), ("max_closure_bytes", 1)):
            _check(name, getattr(self, name), (int,), least)
        for name in ("start_timeout_s", "grace_s"):
            _check(name, getattr(self, name), (int, float), 0)
        if self.timeout_s is not None:
            _check("timeout_s", self.timeout_s, (int, float), 0)
        for name, value in self.env:
            if not isinstance(value, str):
                kind = type(value).__name__
                raise TypeError(f"env[{name!r}] should be a str, got {value!r}, a {kind}")
            if name in RENDEZVOUS_VARIABLES:
                text = "tells a rank its place in the gang or where its peers are"
                raise ValueError(f"env sets {name}, which {text}: remove it")


def _check(name: str, value: object, kinds: tuple[type, ...], least: int) -> None:
    name = name.removesuffix("_s").removesuffix("_bytes")  # users know them without units
    if isinstance(value, bool) or not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{name} should be {wanted}, got {value!r}, a {type(value).__name__}")
    if not value >= least:  # type: ignore[operator]
        raise ValueError(f"{name} should be at least {least}, got {value!r}")


@dataclass(frozen=True)
class Slot:
    """The place of one rank, in torchrun's words."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    local_world_size: int
    n_nodes: int
    host: str
    gpu: str | None = None
    """Index or UUID of the rank's own GPU on its host, None without one."""
    address: str = "127.0.0.1"
    """IPv4 address of the host among the gang's hosts; empty while it is not decided which it is."""
    interface: str = ""
    """Network interface by which its ranks talk to the others; empty: whatever libraries choose."""


@dataclass(frozen=True)
class Plan:
    """Who runs where. Slots are in rank order, grouped by host and contiguous."""

    slots: tuple[Slot, ...]
    notes: tuple[str, ...] = field(default=())
    """What the user should know of how this plan came about ("no GPU found: ranks use the CPU")."""
    forwarded: tuple[tuple[str, str], ...] = ()
    """Variables of the notebook's environment that ranks on other machines get too."""

    @property
    def uses_gpu(self) -> bool:
        return any(slot.gpu is not None for slot in self.slots)

    def gpus_of(self, slot: Slot) -> tuple[str, ...]:
        """The gang's GPUs on the slot's host in local_rank order: its ``CUDA_VISIBLE_DEVICES``."""
        same_host = (other for other in self.slots if other.node_rank == slot.node_rank)
        return tuple(other.gpu for other in same_host if other.gpu is not None)
