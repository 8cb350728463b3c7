"""Everything that can happen to a gang, as a closed set of frozen values.

Ranks and agents send events, the kernel folds them into a
:class:`~hydrogen_magic.driver.state.gang_state.GangState`,
and the run's record on disk is nothing but their list. They cross process borders as JSON and are
checked against the types declared here when they arrive: never as pickles.

Times (``at_s`` and every other ``*_s`` point in time) are seconds since the gang was launched, by a
monotonic clock, so a jump of the wall clock moves nothing. Those of spans, thousands a second, are whole
nanoseconds (``*_ns``): to write a float as JSON takes several times as long as an integer.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hydrogen_magic.core.validation import EventError, checked

__all__ = [
    "COLLECTIVES",
    "DRIVER",
    "EVENT_TYPES",
    "GRADIENTS",
    "PROFILER",
    "PROFILE_CLOCK",
    "SPANS",
    "TRACKS",
    "AttemptFailed",
    "AttemptStarted",
    "CollectiveWait",
    "ErrorReport",
    "Event",
    "EventError",
    "Frame",
    "HOROVOD",
    "GangEnded",
    "GangLaunched",
    "KERNEL_ENDED",
    "Metrics",
    "Notice",
    "Output",
    "Profiling",
    "Progress",
    "Queued",
    "RankExited",
    "RankFailed",
    "RankHealth",
    "RankPhase",
    "RankResult",
    "RankStacks",
    "RankStarted",
    "Recording",
    "Spans",
    "Steps",
    "StopRequested",
    "decode",
    "encode",
    "without_middle",
]


KERNEL_ENDED = "the kernel ended"
"""Why a gang ended whose agent outlived the kernel for a moment: nobody has been told of it yet."""


# ── parts of events ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Frame:
    """One line of a traceback, formatted where the source is known: on the rank."""

    file: str
    line: int
    function: str
    text: str
    """The source line, stripped; empty when unknown."""


@dataclass(frozen=True)
class ErrorReport:
    """An exception as text, with its chain."""

    type: str
    """Qualified name without ``builtins.``: ``ValueError``, ``torch.cuda.OutOfMemoryError``."""
    message: str
    frames: tuple[Frame, ...] = ()
    """Outermost first; frames of hydrogen_magic itself are left out."""
    cause: ErrorReport | None = None
    """What it was raised from (``__cause__``, or ``__context__`` where not suppressed)."""
    is_direct_cause: bool = False
    """True when :attr:`cause` came by ``raise … from``."""
    notes: tuple[str, ...] = ()


def without_middle(text: str, limit: int) -> str:
    """Return at most ``limit`` characters of ``text``: its beginning, its end, and how many are missing.

    A message that is too long has the kind of error at its beginning and often the reason at its end.
    """
    if len(text) <= limit:
        return text
    tail = limit // 4
    head = limit - tail
    return f"{text[:head]} … ({len(text) - limit:,} characters left out) … {text[-tail:]}"


# ── events of the gang, made by the kernel ───────────────────────────────────────────────────────


@dataclass(frozen=True)
class GangLaunched:
    """First event of every record."""

    at_s: float
    gang: str
    title: str
    """What the user typed (the magic's line), for lists."""
    np: int
    placement: str
    rendezvous: str
    wall_time: float
    """Unix time of the launch, the one wall-clock time in a record."""
    owner: str
    """``boot id:pid:start time`` of the kernel: tells after a restart whether it still lives."""
    cells: Mapping[str, str]
    """File name in tracebacks -> what the user calls it ("Cell In[5]")."""


@dataclass(frozen=True)
class AttemptStarted:
    """All ranks start afresh; what earlier attempts still say is dropped."""

    at_s: float
    attempt: int


@dataclass(frozen=True)
class AttemptFailed:
    """The attempt cannot go on and no rank is to blame: a process that serves the ranks has died."""

    at_s: float
    error: ErrorReport


@dataclass(frozen=True)
class Queued:
    """The attempt waits for room: a cluster gives slots one by one, and ranks start together."""

    at_s: float
    have: int
    """Slots that are there already."""
    wanted: int
    """Slots that it takes; once ``have`` is as many, it waits no longer."""


@dataclass(frozen=True)
class StopRequested:
    at_s: float
    reason: str
    """``"user"``, ``"timeout"``, ``"failure"`` or ``"kernel"`` (it ended)."""
    kill: bool = False
    """True: at once, without asking."""


@dataclass(frozen=True)
class RowsDone:
    """How far a run of ``%%infer`` is, all ranks together."""

    at_s: float
    began_s: float
    """When the first rows went out; nothing can be told from it before that."""
    done: int
    total: int | None
    """None where only reading to the end would tell."""
    in_flight: int
    """Chunks that ranks have in hand."""
    failed: int
    """Rows that got no prediction."""
    is_estimate: bool = False
    """Whether ``total`` is only what those parts of the frame suggest that are done."""
    tasks_done: int | None = None
    """Of Spark; None elsewhere, or where that is not known."""
    tasks: int | None = None


@dataclass(frozen=True)
class Notice:
    """Something a person should read; also how agents report what concerns no single rank."""

    at_s: float
    level: str
    """``info``, ``warning`` or ``error``."""
    text: str


@dataclass(frozen=True)
class Recording:
    """Ranks were told to record what they do (forward, backward, ...) as spans, or to leave it."""

    at_s: float
    on: bool


@dataclass(frozen=True)
class Profiling:
    """Where the torch profiler is, which somebody asked for."""

    at_s: float
    phase: str
    """``waiting`` (for the ranks' next step), ``recording``, ``reading`` (the ranks' traces are
    merged), empty when it is over."""
    path: str = ""
    """Set at the end: the merged trace of all ranks."""


@dataclass(frozen=True)
class GangEnded:
    """Last event of every record of a gang that ended in order: no process of it is left."""

    at_s: float
    state: str
    """``SUCCEEDED``, ``FAILED`` or ``STOPPED``."""
    reason: str
    """One line: why."""
    culprit: int | None = None
    """Rank that failed first, when it failed."""


# ── events of one rank ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class RankStarted:
    """A process exists for the rank."""

    at_s: float
    rank: int
    pid: int
    host: str
    device: str
    """``cpu`` or ``cuda:<local_rank>``."""


@dataclass(frozen=True)
class RankPhase:
    at_s: float
    rank: int
    phase: str
    """``starting`` (process, imports of the forkserver), ``loading`` (closure), ``running`` (the cell's
    own lines), ``finishing`` (result sent, exit handlers run)."""
    detail: str = ""
    """What it is busy with: ``importing torch``."""


DRIVER = "driver"
"""Stream of what :func:`hydrogen_magic.compat.log_to_driver` says: shown also where no output is."""


@dataclass(frozen=True)
class Output:
    """Text a rank wrote to a file descriptor, as decoded by its agent, or said by itself."""

    at_s: float
    rank: int
    stream: str
    """``stdout`` or ``stderr``; :data:`DRIVER`: meant for whoever started the gang."""
    text: str
    skipped_bytes: int = 0
    """Bytes left out of the live view just before ``text``; the rank's log file has them."""
    skipped_lines: int = 0
    """Line ends among these bytes."""


@dataclass(frozen=True)
class Metrics:
    """What ``hm.log`` said since the last such event, by column: a batch costs little to check."""

    at_s: float
    rank: int
    steps: tuple[int, ...]
    times_s: tuple[float, ...]
    """When each point was logged; as long as ``steps``, as every column of ``values`` is."""
    values: Mapping[str, tuple[float | None, ...]]
    """Metric -> its value at each point, None where that call did not name it."""
    skipped: int = 0
    """Older points dropped because the rank logged faster than they could be sent."""


@dataclass(frozen=True)
class Progress:
    """State of one progress bar (``hm.track``, tqdm)."""

    at_s: float
    rank: int
    bar: int
    """Identifies the bar on its rank."""
    desc: str
    n: float
    total: float | None
    unit: str = "it"
    closed: bool = False


@dataclass(frozen=True)
class Steps:
    """Optimizer steps so far."""

    at_s: float
    rank: int
    count: int


SPANS, HOROVOD, COLLECTIVES, PROFILER = "spans", "horovod", "collectives", "profiler"
"""Tracks of a rank: what the user's code names or does, what Horovod's coordinator does for all ranks, what
the rank waits for, what was profiled."""
TRACKS = (SPANS, HOROVOD, COLLECTIVES, PROFILER)
"""Those with a place of their own, in the order in which they are shown; others come after them."""
PROFILE_CLOCK = "hydrogen_magic.clock "
"""Name of a mark in a rank's profile, followed by the gang's time at which it was set."""
GRADIENTS = "gradient all_reduce"
"""Span at the end of a backward pass in which a rank waits until DDP has reduced all gradients: it waits for
ranks that still compute theirs, and for the reduction itself."""


@dataclass(frozen=True)
class Spans:
    """Named stretches of time, by column; all columns are of one length."""

    at_s: float
    rank: int
    names: tuple[str, ...]
    starts_ns: tuple[int, ...]
    ends_ns: tuple[int, ...]
    depths: tuple[int, ...]
    """How many spans of the same thread enclose it."""
    skipped: int = 0
    track: str = SPANS
    """Which lane of the rank it belongs to: one of :data:`TRACKS`, or any other name."""


@dataclass(frozen=True)
class CollectiveWait:
    """The rank has been inside a collective for a while (or has left it: ``name`` empty)."""

    at_s: float
    rank: int
    name: str
    seq: int
    """How many collectives this rank has entered, this one included."""
    since_s: float


@dataclass(frozen=True)
class RankHealth:
    """What the operating system says of the rank's process and its children, about once a second."""

    at_s: float
    rank: int
    rss_bytes: int
    cpu_percent: float
    process_state: str
    """Letter of ``/proc/<pid>/stat``: R running, S sleeping, T stopped, D uninterruptible."""
    gpu_percent: float | None = None
    """How busy the rank's GPU was; None without one."""
    gpu_memory_bytes: int | None = None
    """What the rank holds of its GPU's memory."""


@dataclass(frozen=True)
class RankFailed:
    """An exception on the rank."""

    at_s: float
    rank: int
    error: ErrorReport
    phase: str
    """Phase in which it was raised."""
    in_flight: bool = False
    """True: still unwinding (a ``finally`` block runs); evidence for who failed first, not an end."""
    exit_code: int | None = None
    """Set for a script that ended by ``sys.exit(n)``."""


@dataclass(frozen=True)
class RankStacks:
    """Where every thread of the rank is, as ``faulthandler`` prints it."""

    at_s: float
    rank: int
    text: str


@dataclass(frozen=True)
class RankResult:
    """The rank's value arrived; its bytes travel beside the events."""

    at_s: float
    rank: int
    result_bytes: int


@dataclass(frozen=True)
class RankExited:
    """The rank's process is gone. What follows from that is the fold's to say."""

    at_s: float
    rank: int
    exit_code: int | None
    """None when a signal ended it."""
    signal_name: str = ""
    """``SIGKILL``, …; empty when it exited."""
    asked: bool = False
    """True: after the agent had asked it to stop."""
    hint: str = ""
    """What the agent knows beyond the status: ``the kernel's OOM killer ended it``."""
    crash_stack: str = ""
    """Python stack at a fatal signal, as ``faulthandler`` wrote it."""


Event = (
    GangLaunched
    | AttemptStarted
    | AttemptFailed
    | Queued
    | RowsDone
    | StopRequested
    | Notice
    | Recording
    | Profiling
    | GangEnded
    | RankStarted
    | RankPhase
    | Output
    | Metrics
    | Progress
    | Steps
    | Spans
    | CollectiveWait
    | RankHealth
    | RankFailed
    | RankStacks
    | RankResult
    | RankExited
)

EVENT_TYPES: Mapping[str, type[Any]] = {cls.__name__: cls for cls in typing.get_args(Event)}


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────


def encode(event: Event) -> list[Any]:
    """Return ``[kind, fields]``, ready for ``json.dumps``."""
    return [type(event).__name__, _plain(event)]


def decode(message: object) -> Event:
    """Return the event in ``message`` (as :func:`encode` made it), or raise :class:`EventError`."""
    if not (isinstance(message, list) and len(message) == 2 and isinstance(message[0], str)):
        raise EventError(f"an event should be [kind, fields], got {str(message)[:80]!r}")
    cls = EVENT_TYPES.get(message[0])
    if cls is None:
        raise EventError(f"unknown kind of event: {message[0][:80]!r}")
    event: Event = checked(cls, message[1], message[0])
    _check_lengths(event)
    return event


def _plain(value: Any) -> Any:
    if hasattr(type(value), "__dataclass_fields__"):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        # Columns of a type: where the first is a plain value all are, thousands of them perhaps.
        is_nested = bool(value) and hasattr(type(value[0]), "__dataclass_fields__")
        return [_plain(item) for item in value] if is_nested else list(value)
    return value


def _check_lengths(event: Event) -> None:
    """Raise EventError where columns that are one table differ in length."""
    if isinstance(event, Metrics):
        columns: Sequence[Sequence[Any]] = (event.times_s, *event.values.values(), event.steps)
    elif isinstance(event, Spans):
        columns = (event.names, event.starts_ns, event.ends_ns, event.depths)
    else:
        return
    if len(set(map(len, columns))) > 1:
        raise EventError(f"the columns of {type(event).__name__} differ in length")
