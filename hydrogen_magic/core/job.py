"""Description of a run: frozen values that every layer shares.

A :class:`JobSpec` is the user's request. A :class:`Plan` is a placement's answer to it, made
without side effects. A :class:`Slot` is the place of one rank in a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from hydrogen_magic.core.network import PortRange
from hydrogen_magic.errors import OptionTypeError, OptionValueError

LOOPBACK = "lo"
"""Network interface that keeps the traffic of ranks on one machine off the network."""

DEFAULT_MAX_CLOSURE_BYTES = 1 << 30
"""1 GiB: one machine copies this to its ranks in about a second; more is most likely a mistake."""


DEFAULT_SESSION = "main"
"""Name of the session of ``--session`` without a name."""


_LONGEST_S = 1e8
"""Three years: a time may be given as infinite, a message has no such number."""


@dataclass(frozen=True)
class JobSpec:
    """The user's request, with validated arguments."""

    np: int = 2
    """Number of ranks, 1 or more."""
    placement: str = "local"
    """Name of a placement, see :mod:`hydrogen_magic.plugins`."""
    rendezvous: str = "torch"
    """Name of a rendezvous, see :mod:`hydrogen_magic.plugins`."""
    gpu: bool | None = None
    """True: every rank needs its own GPU. False: no GPUs. None: GPUs if there are enough for all ranks."""
    pack: bool | None = None
    """Hosts of a cluster. True: as few as possible. False: as many as possible. None: as few as possible for
    ranks with GPUs of their own, otherwise the cluster's choice."""
    env: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Environment of every rank, on top of the notebook's; takes precedence over our own variables."""
    out: tuple[str, ...] = ()
    """Names of rank 0's variables to bring back."""
    seed: int | None = None
    """Rank r seeds Python, NumPy and torch with ``seed + r``; None: they draw different random numbers."""
    retries: int = 0
    """How often the whole gang is restarted after a failure."""
    timeout_s: float | None = None
    """Wall time after which the gang is stopped, for all attempts together."""
    wait_s: float | None = None
    """How long to wait for hosts and slots of a cluster. None: a gang that is larger than the cluster is
    refused, and slots that other jobs hold are awaited without limit."""
    start_timeout_s: float = 120.0
    """How long a rank may take from its launch to the first line of the cell."""
    grace_s: float = 3.0
    """How long a rank that reacted to a stop may clean up before it is killed."""
    timeline: str | None = None
    """Record spans: ``""`` only displays them, a path also writes a Chrome trace."""
    detach: bool = False
    """Return a handle at once instead of waiting."""
    outlive: bool = False
    """The gang continues when its kernel ends; implies ``detach``."""
    quiet: bool = False
    """No live view; only output and result."""
    display: tuple[int, ...] = (0,)
    """Ranks whose displays are shown below the cell; empty: all."""
    pdb: bool = False
    """A rank that fails waits in the debugger, where the exception was raised."""
    ports: PortRange | None = None
    """Ports for what the kernel and agents on other machines listen on; None: any."""
    max_closure_bytes: int = DEFAULT_MAX_CLOSURE_BYTES
    """Size limit of all captured data, in bytes."""
    name: str = ""
    """Name of the run in lists; empty: of its notebook and cell."""
    track: str | None = None
    """Name of a tracker, see :mod:`hydrogen_magic.plugins`."""
    session: str | None = None
    """Name of the session whose ranks run the cell; None: the ranks end with the cell."""
    on_ranks: tuple[int, ...] = ()
    """Ranks of the session that run the cell; otherwise those that may open the debugger. Empty: all."""
    push: tuple[str, ...] = ()
    """Names whose value in the notebook replaces that of the session's ranks."""
    idle_s: float = 3600.0
    """Time without a cell after which the session ends."""
    n_at_once: int = 1
    """How many gangs like this one run beside each other: those of a sweep."""

    @property
    def first_rank(self) -> int:
        """The rank whose value and variables are the results: the first one that runs the cell."""
        return 0 if self.session is None else min(self.on_ranks, default=0)

    @property
    def displaying(self) -> tuple[int, ...]:
        """:attr:`display`; the first rank that runs the cell if none of those does. Empty: all."""
        takes_part = {*self.on_ranks} if self.session is not None else set()
        if not takes_part or not self.display or takes_part & {*self.display}:
            return self.display
        return (self.first_rank,)

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for values that no gang can run with."""
        for name, least in (("np", 1), ("retries", 0), ("max_closure_bytes", 1)):
            object.__setattr__(self, name, _as_int(getattr(self, name)))
            _check(name, getattr(self, name), (int,), least)
        for name in ("start_timeout_s", "grace_s", "idle_s", "timeout_s", "wait_s"):
            if (value := getattr(self, name)) is not None or name not in ("timeout_s", "wait_s"):
                _check(name, value, (int, float), 0)
                object.__setattr__(self, name, min(value, _LONGEST_S))
        for name, ranks in (("display", self.display), ("ranks", self.on_ranks)):
            # A later cell of a session takes np from its first one.
            if self.session is None and not all(0 <= rank < self.np for rank in ranks):
                shown = ",".join(map(str, ranks))
                raise OptionValueError(f"{name} {shown}: the ranks are 0 to {self.np - 1}")
        for name, value in self.env:
            if not isinstance(value, str):
                kind = type(value).__name__
                raise OptionTypeError(f"env[{name!r}] should be a str, got {value!r}, a {kind}")


def variables(env: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    """Return the names and values of ``JobSpec.env``. Raises TypeError if ``env`` is no dict."""
    if env is not None and not isinstance(env, Mapping):
        raise OptionTypeError(
            f"env should be a dict like {{'NAME': 'value'}}, got a {type(env).__name__}"
        )
    return tuple((env or {}).items())


def _as_int(value: Any) -> Any:
    """Return an integer of any type, such as NumPy's, as an int; another value unchanged."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    return int(value) if is_integer else value


def _check(name: str, value: object, kinds: tuple[type, ...], least: int) -> None:
    name = name.removesuffix("_s").removesuffix("_bytes")  # users know them without units
    if isinstance(value, bool) or not isinstance(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise OptionTypeError(f"{name} should be {wanted}, got {value!r}, a {type(value).__name__}")
    if not value >= least:  # type: ignore[operator]
        raise OptionValueError(f"{name} should be at least {least}, got {value!r}")


@dataclass(frozen=True)
class Slot:
    """The place of one rank, in torchrun's terms."""

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
    """Address of the host among the gang's hosts; empty until the host is chosen."""
    interface: str = ""
    """Network interface for traffic to other ranks; empty: the libraries' own choice."""
    port: int = 0
    """Port that the host's agent holds for this rank; 0: its rendezvous needs none."""


@dataclass(frozen=True)
class Plan:
    """The host of every rank. Slots are in rank order, grouped by host and contiguous."""

    slots: tuple[Slot, ...]
    notes: tuple[str, ...] = field(default=())
    """Information for the user about this plan ("no GPU found: ranks use the CPU")."""
    forwarded: tuple[tuple[str, str], ...] = ()
    """Variables of the notebook's environment that are forwarded to ranks on other machines."""
    hosts_note: str = ""
    """Why ranks have these hosts, where there is a choice."""

    @property
    def uses_gpu(self) -> bool:
        return any(slot.gpu is not None for slot in self.slots)

    def gpus_of(self, slot: Slot) -> tuple[str, ...]:
        """The gang's GPUs on the slot's host in local_rank order: its ``CUDA_VISIBLE_DEVICES``.

        Fewer than the host's ranks if these share them in turn.
        """
        same_host = (other for other in self.slots if other.node_rank == slot.node_rank)
        return tuple(dict.fromkeys(other.gpu for other in same_host if other.gpu is not None))
