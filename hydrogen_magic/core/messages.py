"""Every message between the processes of a gang, as a closed set of frozen values.

::

    kernel ──── AgentCommand ────► agent ──── ForkserverRequest ──► forkserver
           ◄─── AgentReport ──────       ◄─── ForkserverAnswer ────
           ◄─── RankFile ─────────       ──── WorkerCommand ──────► worker (a rank, or a service)
                                         ◄─── WorkerReport ────────

A message crosses the boundary as JSON, ``[kind, fields]``, where the kind is the name of its class. The
receiver names the base class that it expects, and :func:`decode` checks kind, direction and every field.
To add a field, add it to the class: mypy then reports each place that builds the message.

Memory files and logs travel beside some messages, as descriptors or as a second ZeroMQ frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any, TypeVar

from hydrogen_magic.core.validation import EventError, checked, plain

__all__ = [
    "LaunchRequest",
    "Message",
    "MessageError",
    "RankLaunch",
    "ServiceSpec",
    "decode",
    "encode",
]


class MessageError(ValueError):
    """A message that is not of the expected kind, or has a missing, unknown or mistyped field."""


class Message:
    """Base class of all messages."""


class AgentCommand(Message):
    """From the kernel to an agent."""


# ── launch ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ServiceSpec:
    """A function that one agent runs beside the ranks, such as the store of a rendezvous."""

    function: str
    """``module:function``, called with the listening socket's descriptor and the options."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments, as JSON."""


@dataclass(frozen=True)
class RankLaunch:
    """One rank that an agent starts."""

    rank: int
    device: str
    """``cpu`` or ``cuda:<local_rank>``."""
    gpu: str | None
    """Index or UUID of the rank's own GPU on its host, None without one."""
    env: Mapping[str, str]
    """Variables of this rank, on top of :attr:`LaunchRequest.env`."""
    partition: int | None = None
    """The Spark task that waits for the rank, None without Spark."""


@dataclass(frozen=True)
class LaunchRequest(AgentCommand):
    """Start the ranks of one attempt on one host."""

    gang: str
    attempt: int
    ranks: tuple[RankLaunch, ...]
    service: ServiceSpec | None
    """What this agent serves for the rendezvous, None if nothing."""
    env: Mapping[str, str] = field(repr=False)
    """Environment of every process of the gang; a remote agent adds its own variables below it."""
    cwd: str
    """The notebook's working directory; a remote agent uses another one if this one is missing."""
    sys_path: tuple[str, ...]
    """The notebook's module path; a remote agent uses its own."""
    preload: tuple[str, ...]
    """Modules that the forkserver imports first."""
    fingerprint: str
    """What a forkserver must have been started with to serve this gang."""
    record_dir: str
    """Directory of the run's record; a remote agent uses its own."""
    clock_zero_s: float
    """The sender's ``time.monotonic()`` at which the gang's clock is 0."""
    grace_s: float
    is_recording: bool
    """Ranks record what they do as spans."""
    secrets: tuple[str, ...] = field(repr=False)
    """Values that agents mask in output and errors."""
    checkpoint_dir: str | None = None
    """Directory of checkpoints that the kernel and all hosts share, None if they share none."""
    infer_options: Mapping[str, object] | None = None
    """Options of ``%%infer``, None for an ordinary cell."""
    worker_key: str = ""
    """Equal keys may use the same workers one after the other; empty: new workers."""


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────

_M = TypeVar("_M", bound=Message)


def _subclasses(cls: type[Message]) -> Iterator[type[Message]]:
    for below in cls.__subclasses__():
        yield below
        yield from _subclasses(below)


MESSAGE_TYPES: Mapping[str, type[Message]] = {
    cls.__name__: cls for cls in _subclasses(Message) if is_dataclass(cls)
}


def encode(message: Message) -> list[Any]:
    """Return ``[kind, fields]``, ready for ``json.dumps``."""
    return [type(message).__name__, plain(message)]


def decode(raw: object, expected: type[_M]) -> _M:
    """Return the message in ``raw``, made by :func:`encode`; raise MessageError if it is malformed.

    ``expected``: the base class of the messages that the caller accepts.
    """
    if not (isinstance(raw, list) and len(raw) == 2 and isinstance(raw[0], str)):
        raise MessageError(f"expected a message [kind, fields], got {type(raw).__name__}")
    kind, fields = raw
    cls = MESSAGE_TYPES.get(kind)
    if cls is None or not issubclass(cls, expected):
        raise MessageError(f"expected a kind of {expected.__name__}, got {kind[:80]!r}")
    try:
        message: _M = checked(cls, fields, kind)
    except EventError as error:
        raise MessageError(str(error)) from None
    return message
