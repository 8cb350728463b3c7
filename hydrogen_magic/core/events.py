"""All events of a gang, as a closed set of frozen values.

Ranks and agents send events. The kernel folds them into a
:class:`~hydrogen_magic.driver.state.gang_state.GangState`, and the run's record on disk is the list
of them. Events cross process boundaries as JSON, never as pickles, and are validated on arrival
against the types declared here.

Times (``at_s`` and every other ``*_s`` point in time) are seconds since the gang was launched, by a
monotonic clock, so changes of the wall clock do not affect them. Times of spans, of which there are
thousands a second, are whole nanoseconds (``*_ns``): writing a float as JSON takes several times as
long as writing an integer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from hydrogen_magic.core import validation
from hydrogen_magic.core.validation import MessageError as MessageError
from hydrogen_magic.core.validation import encode as encode

KERNEL_ENDED = "the kernel ended"
"""Reason of a gang whose agent outlived the kernel for a moment: the user has not seen it yet."""
OWNER_ENDED = "the owner process ended"
"""The same for a gang with an owner of its own (``--outlive``)."""


# ── parts of events ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Frame:
    """One line of a traceback, formatted on the rank, where the source is available."""

    file: str
    line: int
    function: str
    text: str
    """The source line, stripped; empty when unknown."""
    n_left_out: int = 0
    """Number of frames that it stands for, if it is no frame itself: its file is empty then."""


@dataclass(frozen=True)
class ErrorReport:
    """An exception as text, with its chain."""

    type: str
    """Qualified name without ``builtins.``: ``ValueError``, ``torch.cuda.OutOfMemoryError``."""
    message: str
    frames: tuple[Frame, ...] = ()
    """Outermost first; frames of hydrogen_magic itself are left out."""
    cause: ErrorReport | None = None
    """The exception that it was raised from (``__cause__``, or ``__context__`` if not suppressed)."""
    is_direct_cause: bool = False
    """True if :attr:`cause` was set by ``raise … from``."""
    notes: tuple[str, ...] = ()


MOST_METRICS = 1000
"""Metrics whose last values are kept: names created at run time must not grow a state without limit."""
_GAP = re.compile(r" … \((\d[\d,]{0,20}) characters left out\) … ")


def of_first_ranks(logged: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the value of each name, of the first rank that has it; at most :data:`MOST_METRICS`.

    ``logged``: values by name, for each rank in their order.
    """
    found: dict[str, float] = {}
    for values in logged:
        for name, value in values.items():
            found.setdefault(name, value)
    return dict(islice(found.items(), MOST_METRICS))


def without_middle(text: str, limit: int) -> str:
    """Return the beginning and the end of ``text``, and how many characters are missing between them.

    Together they have up to ``limit`` characters and end and begin at a space, if there is one nearby. A
    message that is too long names the error at its beginning and often the reason at its end. ``text`` is
    returned unchanged if that would not make it shorter. Characters that an earlier call has left out are
    counted, too.
    """
    tail, nearby = limit // 4, min(40, limit // 8)
    until, since = limit - tail, len(text) - tail
    space = text.rfind(" ", until - nearby, until)
    until = until if space < 0 else space
    since = text.find(" ", since, since + nearby) + 1 or since
    middle = text[until:since]
    earlier = sum(int(each[1].replace(",", "")) - len(each[0]) for each in _GAP.finditer(middle))
    marker = f" … ({len(middle) + earlier:,} characters left out) … "
    if len(text) <= limit + len(marker):
        return text
    return f"{text[:until]}{marker}{text[since:]}"


@dataclass(frozen=True)
class Event:
    """Something that happened in a gang."""

    at_s: float


@dataclass(frozen=True)
class RankEvent(Event):
    """Something that happened on one rank."""

    rank: int


# ── events of the gang, made by the kernel ───────────────────────────────────────────────────────


@dataclass(frozen=True)
class GangLaunched(Event):
    """First event of every record."""

    gang: str
    title: str
    """The line of the magic as the user typed it, for lists."""
    np: int
    placement: str
    rendezvous: str
    wall_time: float
    """Unix time of the launch, the one wall-clock time in a record."""
    owner: str
    """``boot id:pid:start time`` of the kernel or other owner: shows later whether it is still alive."""
    cells: Mapping[str, str]
    """File name in tracebacks -> the label shown to the user ("Cell In[5]")."""
    name: str = ""
    """Name of the run: of ``--name``, or of its notebook and cell."""
    params: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Plain values that the cell captured, such as ``lr``, by name."""
    host: str = ""
    """Machine of the owner."""
    outlives: bool = False
    """The owner is a process of its own, which outlives the kernel."""
    session: str = ""
    """Name of the session whose ranks run the cell, empty without one."""
    gpus: tuple[str, ...] = ()
    """UUIDs of GPUs on the owner's machine, one for each rank that uses one; unknown names as they are."""


@dataclass(frozen=True)
class AttemptStarted(Event):
    """All ranks start again; later events of earlier attempts are dropped."""

    attempt: int


@dataclass(frozen=True)
class AttemptFailed(Event):
    """The attempt cannot continue although no rank failed: a process that serves the ranks has died."""

    error: ErrorReport


@dataclass(frozen=True)
class Queued(Event):
    """The attempt waits for slots: a cluster provides them one by one, and ranks start together."""

    have: int
    """Slots that are available already."""
    wanted: int
    """Slots that it needs; the wait ends when ``have`` reaches this number."""
    waits_for: str = ""
    """What is there and what holds the other slots, for the user; empty if unknown."""


DATA = "data of hm.dataset()"


@dataclass(frozen=True)
class ClosureSent(Event):
    """How much of the closure, or of data that precedes it, has reached other machines.

    The last one of each reports that all hosts are done.
    """

    sent_bytes: int
    """To all hosts together: of a closure what has arrived, of data what has been sent."""
    total_bytes: int
    hosts_done: int
    """Hosts on which it is complete."""
    hosts: int
    what: str = "closure"
    """``"closure"`` or ``"data of hm.dataset()"``."""


@dataclass(frozen=True)
class StopRequested(Event):
    reason: str
    """A key of :data:`STOP_REASONS`."""
    kill: bool = False
    """True: at once, without SIGINT first."""


STOP_REASONS = {
    "user": ("you asked", "stopped by you"),
    "timeout": ("time is up", "stopped: it ran longer than its timeout of {timeout:g} s"),
    "failure": ("a rank failed", ""),
    "kernel": ("the kernel ended", KERNEL_ENDED),
    "owner": (
        "its owner process was terminated",
        "stopped: its owner process was terminated (SIGTERM)",
    ),
    "session": ("its session was ended", "stopped by %gang end"),
    "cell": (
        "the cell or script that waited for it failed",
        "stopped: the cell or script that waited for it failed",
    ),
}
"""Why gangs are stopped -> the reason that views show meanwhile, and that of the end; after a failure the
latter is the failure. A cell fails while it waits by its view, for example."""
QUEUED_TIMEOUT = "stopped: it waited for slots longer than its timeout of {timeout:g} s: {why}"
"""The reason of the end for ``timeout``, while the attempt had not enough slots."""


@dataclass(frozen=True)
class RowsDone(Event):
    """The progress of a run of ``%%infer``, all ranks together."""

    began_s: float
    """When the first rows were sent; before that no rate can be derived."""
    done: int
    total: int | None
    """None if the number is only known after reading everything."""
    in_flight: int
    """Chunks that ranks are working on."""
    failed: int
    """Rows without a prediction."""
    is_estimate: bool = False
    """Whether ``total`` is only an estimate from the parts of the frame that are done."""
    tasks_done: int | None = None
    """Tasks of Spark; None elsewhere, or if unknown."""
    tasks: int | None = None
    resumed: int = 0
    """Rows of ``done`` that an earlier run finished."""


@dataclass(frozen=True)
class Notice(Event):
    """A message for the user; agents also use it to report problems of no particular rank."""

    level: str
    """``info``, ``warning`` or ``error``."""
    text: str


@dataclass(frozen=True)
class Recording(Event):
    """Ranks were asked to start or stop recording spans (forward, backward, ...)."""

    on: bool


@dataclass(frozen=True)
class Profiling(Event):
    """The state of the torch profiler, after the user requested a profile."""

    phase: str
    """``waiting`` (for the ranks' next step), ``recording``, ``reading`` (the ranks' traces are
    merged), empty at the end."""
    path: str = ""
    """Set at the end: the merged trace of all ranks."""


@dataclass(frozen=True)
class GangEnded(Event):
    """The last event of every gang that ended in order: none of its processes is left."""

    state: str
    """``SUCCEEDED``, ``FAILED`` or ``STOPPED``."""
    reason: str
    """The reason, in one line."""
    culprit: int | None = None
    """Rank that failed first, when it failed."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Last value of each metric, of the first rank that logged it: lists of runs need no other event."""


# ── events of one rank ───────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class RankStarted(RankEvent):
    """The rank has a process."""

    pid: int
    host: str
    device: str
    """``cpu`` or ``cuda:<local_rank>``."""


@dataclass(frozen=True)
class RankPhase(RankEvent):
    phase: str
    """``starting`` (process, imports of the forkserver), ``loading`` (closure), ``running`` (the cell's
    own lines), ``finishing`` (its result is being sent, and exit handlers run); ``idle``: the cell leaves
    the rank out."""
    detail: str = ""
    """Its current activity: ``importing torch``."""


DRIVER = "driver"
"""Stream of :func:`hydrogen_magic.compat.log_to_driver`: displayed even where output is not."""


@dataclass(frozen=True)
class Output(RankEvent):
    """Text that a rank wrote to a file descriptor, decoded by its agent, or a message of the rank itself."""

    stream: str
    """``stdout`` or ``stderr``; ``driver``: a message of :func:`hydrogen_magic.compat.log_to_driver`."""
    text: str
    skipped_bytes: int = 0
    """Bytes omitted from the live view just before ``text``; the rank's log file has them."""
    skipped_lines: int = 0
    """Line ends among the omitted bytes."""
    is_logged: bool = True
    """False: the log could not be written any more, and may lack the omitted bytes."""


SHOW, UPDATE, CLEAR, CLEAR_LATER = "show", "update", "clear", "clear later"
"""Actions of a :class:`Display`: a new output; other data for outputs of the same id; and the end of all
outputs of the rank, at once or when its next one is shown."""


@dataclass(frozen=True)
class Display(RankEvent):
    """An action of ``display``, ``update_display`` or ``clear_output``, for the outputs below the cell.

    Its data is not recorded: the notebook has it.
    """

    mark: int
    """Number of the last place that the rank had marked in its output: a new output belongs there."""
    action: str
    """``show``, ``update``, ``clear`` or ``clear later``."""
    data: Mapping[str, str] = field(default_factory=dict)
    """MIME type -> content: base64 for binary types, JSON text for types of JSON."""
    metadata: str = ""
    """JSON of the metadata of Jupyter's message; empty if there is none."""
    display_id: str = ""
    """Identifies outputs of this rank for updates."""
    label: str = ""
    """Text above the output, if the rank has to be named."""

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.data.values())) + len(self.metadata)


@dataclass(frozen=True)
class InputRequested(RankEvent):
    """The rank waits in ``input()``, in the debugger for example, for a line of the user."""

    number: int
    """Counts the requests of the rank in this attempt, from 1."""
    prompt: str
    is_password: bool = False


@dataclass(frozen=True)
class DebuggerRequested(RankEvent):
    """The rank waits until it may open the debugger (``--pdb``): not while another rank is the culprit."""

    number: int
    """As :attr:`InputRequested.number`."""
    error: ErrorReport
    """What it would debug."""


@dataclass(frozen=True)
class CollectivesEntered(RankEvent):
    """How many collectives of the default group a rank of a session has entered in this cell.

    Reported while it is stuck, and when it has ended the cell.
    """

    count: int
    is_final: bool = False
    """The rank has ended the cell and enters no further collective."""


@dataclass(frozen=True)
class RecordAwaited(RankEvent):
    """The rank waits until its earlier events are recorded. Is not recorded itself."""

    number: int
    """As :attr:`InputRequested.number`."""


@dataclass(frozen=True)
class InputAnswered(RankEvent):
    """The rank continues: with a line, which is not recorded, with an error, or in the debugger."""

    number: int
    """Of the request."""


@dataclass(frozen=True)
class Metrics(RankEvent):
    """Values of ``hm.log`` since the last such event, by column: a batch is cheap to validate."""

    steps: tuple[int, ...]
    times_s: tuple[float, ...]
    """When each point was logged; ``steps`` and every column of ``values`` have the same length."""
    values: Mapping[str, tuple[float | None, ...]]
    """Metric -> its value at each point, None where the call did not include it."""
    skipped: int = 0
    """Older points that were dropped because the rank logged faster than they could be sent."""


@dataclass(frozen=True)
class Progress(RankEvent):
    """State of one progress bar (``hm.track``, tqdm)."""

    bar: int
    """Identifies the bar on its rank."""
    desc: str
    n: float
    total: float | None
    unit: str = "it"
    closed: bool = False


@dataclass(frozen=True)
class Steps(RankEvent):
    """Optimizer steps so far."""

    count: int


SPANS, COORDINATOR, COLLECTIVES, PROFILER = "spans", "coordinator", "collectives", "profiler"
"""Tracks of a rank: activities of the user's code, activities of a library's coordinator for all ranks,
waiting times of the rank, and profiled operators."""
TRACKS = (SPANS, COORDINATOR, COLLECTIVES, PROFILER)
"""Those with a place of their own, in the order in which they are shown; others come after them."""
PROFILE_CLOCK = "hydrogen_magic.clock "
"""Name of a mark in a rank's profile, followed by the gang's time at which it was set."""
GRADIENTS = "gradient all_reduce"
"""Span at the end of a backward pass, while a rank waits until DDP has reduced all gradients: it
covers the wait for slower ranks and the reduction itself."""


@dataclass(frozen=True)
class Spans(RankEvent):
    """Named intervals, by column; all columns have the same length."""

    names: tuple[str, ...]
    starts_ns: tuple[int, ...]
    ends_ns: tuple[int, ...]
    depths: tuple[int, ...]
    """How many spans of the same thread enclose it."""
    skipped: int = 0
    track: str = SPANS
    """The track of the rank: ``spans``, ``coordinator``, ``collectives``, ``profiler``, or any other name."""


@dataclass(frozen=True)
class CollectiveWait(RankEvent):
    """The rank has been inside a collective for a while, or has left it (``name`` is empty).

    A rank that has entered any also reports the last one at its end.
    """

    name: str
    seq: int
    """How many collectives this rank has entered, this one included; 0 if ranks join or leave by it."""
    since_s: float
    n_joins: int = 0
    """How often this rank has joined all ranks of its gang, a join in which it waits included."""


@dataclass(frozen=True)
class RankHealth(RankEvent):
    """Statistics of the operating system about the rank's process and its children, once a second."""

    rss_bytes: int
    cpu_percent: float
    process_state: str
    """Letter of ``/proc/<pid>/stat``: R running, S sleeping, T stopped, D uninterruptible."""
    gpu_percent: float | None = None
    """Utilization of the rank's GPU; None without one."""
    gpu_memory_bytes: int | None = None
    """The rank's share of its GPU's memory."""


@dataclass(frozen=True)
class RankFailed(RankEvent):
    """An exception on the rank."""

    error: ErrorReport
    phase: str
    """The phase in which it was raised."""
    in_flight: bool = False
    """True: still unwinding (a ``finally`` block runs); evidence of which rank failed first, not an end."""
    exit_code: int | None = None
    """Set for a script that exited by ``sys.exit(n)``."""


@dataclass(frozen=True)
class ExceptionHandled(RankEvent):
    """The rank goes on: a :class:`RankFailed` with ``in_flight`` is withdrawn."""


@dataclass(frozen=True)
class RankStacks(RankEvent):
    """The stack of every thread of the rank, as printed by ``faulthandler``."""

    text: str


@dataclass(frozen=True)
class HeldName:
    """A variable in the namespace of a session's rank."""

    kind: str
    """``value``, ``function``, ``class`` or ``module``."""
    type: str
    """Name of its type, without the module."""
    nbytes: int | None = None
    """Bytes of an array or tensor; None for other objects."""


@dataclass(frozen=True)
class NamesChanged(RankEvent):
    """What a cell of a session has left on the rank, which waits for the next cell."""

    received: Mapping[str, HeldName]
    """Names that the closure has bound."""
    assigned: Mapping[str, HeldName]
    """Names that the cell has assigned."""
    deleted: tuple[str, ...]
    """Names that the cell has deleted."""
    changed: tuple[str, ...]
    """Names whose values the cell has changed in place, of those that the notebook has too."""
    uncertain: tuple[str, ...]
    """Those whose values cannot be compared."""
    rss_bytes: int
    """Memory of the process."""
    gpu_memory_bytes: int | None
    """GPU memory that torch holds for the process; None without a GPU in use."""
    n_collectives: int
    """Collectives of the default process group that the rank has entered in the cell, 0 without one."""
    has_left_groups: bool = False
    """Its process groups were given up to release it from a collective."""
    is_joined: bool = False
    """It has joined the default process group, and has not left it by itself."""


@dataclass(frozen=True)
class RankResult(RankEvent):
    """The rank's value has arrived; its bytes travel beside the events."""

    result_bytes: int


@dataclass(frozen=True)
class RankExited(RankEvent):
    """The rank's process has exited. The fold derives the consequences."""

    exit_code: int | None
    """None if a signal ended it."""
    signal_name: str = ""
    """``SIGKILL``, …; empty for a regular exit."""
    asked: bool = False
    """True: the agent had asked it to stop."""
    hint: str = ""
    """Additional information of the agent: ``the kernel's OOM killer ended it``."""
    crash_stack: str = ""
    """Python stack at a fatal signal, as written by ``faulthandler``."""


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────


def decode(message: object) -> Event:
    """Return the event in ``message`` (as made by :func:`encode`), or raise :class:`MessageError`."""
    event = validation.decode(message, Event)
    _check_lengths(event)
    return event


def _check_lengths(event: Event) -> None:
    """Raise MessageError if columns of one table differ in length."""
    if isinstance(event, Metrics):
        columns: Sequence[Sequence[Any]] = (event.times_s, *event.values.values(), event.steps)
    elif isinstance(event, Spans):
        columns = (event.names, event.starts_ns, event.ends_ns, event.depths)
    else:
        return
    if len(set(map(len, columns))) > 1:
        raise MessageError(f"the columns of {type(event).__name__} differ in length")
