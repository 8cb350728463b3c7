"""Every message between the processes of a gang, as a closed set of frozen values.

::

    kernel ──── AgentCommand ────► agent ──── ForkserverRequest ──► forkserver
           ◄─── AgentReport ──────       ◄─── ForkserverAnswer ────
           ◄─── RankFile ─────────       ──── WorkerCommand ──────► worker (a rank, or a service)
                                         ◄─── WorkerReport ────────

A message crosses the boundary as JSON, ``[kind, fields]``, where the kind is the name of its class. The
receiver names the base class that it expects, and ``decode`` checks kind, direction and every field.
To add a field, add it to the class: mypy then reports each place that builds the message.

A launch: ``driver/placements/launch_request.py`` builds a :class:`LaunchRequest`, which
``node/agent/server.py`` takes. Its :class:`RankOptions` are for all ranks, a :class:`RankLaunch` for one.
``node/agent/rank_group.py`` sends both to the rank in a :class:`RankStart`, which ``node/worker/main.py``
takes. The name of another message, or of its base class, finds its sender and its receiver.

Memory files and logs travel beside some messages, as descriptors or as a second ZeroMQ frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.core.network import PortRange
from hydrogen_magic.core.timeline_files import LibraryTimeline
from hydrogen_magic.core.validation import MessageError as MessageError
from hydrogen_magic.core.validation import decode as decode
from hydrogen_magic.core.validation import encode as encode


class Message:
    """Base class of all messages."""


class AgentCommand(Message):
    """From the kernel to an agent."""


class AgentReport(Message):
    """From an agent to the kernel."""


class TaskCommand(Message):
    """From the kernel to a Spark task of ``%%infer``."""


class WorkerCommand(Message):
    """From an agent to one of its workers."""


class OwnerCommand(Message):
    """From a kernel or a terminal to the owner of a gang that outlives its kernel."""


class OwnerReport(Message):
    """From such an owner to a kernel or a terminal."""


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    host: str
    port: int


# ── start of an agent ────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class AgentConfig(Message):
    """What a new agent reads from the socket that it inherits."""

    endpoint: str
    """Where the kernel listens."""
    server_key: str
    secret: str = field(repr=False)
    """Of the agent's own key pair."""
    bind: str
    """Address for the rendezvous service."""
    env: Mapping[str, str] = field(repr=False)
    """Environment of the forkserver."""
    sys_path: tuple[str, ...]
    fingerprint: str
    """As in :class:`LaunchRequest`."""
    preload: tuple[str, ...]
    """Modules that the forkserver imports at once."""


@dataclass(frozen=True)
class LocalAgentConfig(AgentConfig):
    """For an agent on the kernel's machine."""

    kernel_pid: int


@dataclass(frozen=True)
class RemoteAgentConfig(AgentConfig):
    """For an agent that a task on its host starts; the listening socket for tasks comes with it."""

    gang: str
    attempt: int
    """It serves this attempt before any other: the task has keys for one agent only."""
    folder: str
    """The agent's own directory."""
    idle_s: float
    """How long it waits for another gang."""
    parent_pid: int | None
    """:attr:`TaskHello.parent_pid` of that task."""
    ports: PortRange | None
    """Where the rendezvous service, agents that fetch a closure here, and ranks whose ports their agent holds
    listen; None: any."""


# ── launch ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ServiceSpec:
    """A function that one agent runs beside the ranks, such as the store of a rendezvous."""

    function: str
    """``module:function``, called with the descriptor of a blocking socket that listens, and the options.

    It serves until its process is killed: when it raises or returns before, the gang fails. What it prints is
    dropped.
    """
    options: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments, as JSON."""


@dataclass(frozen=True)
class ObserverSpec:
    """A function that ranks call with a module, right after its import."""

    module: str
    function: str
    """``module:function``."""


@dataclass(frozen=True)
class RankLaunch:
    """One rank that an agent starts, by a :class:`RankStart` to its worker."""

    rank: int
    device: str
    """``cpu`` or ``cuda:<local_rank>``."""
    gpu: str | None
    """Index or UUID of the rank's own GPU on its host, None without one."""
    env: Mapping[str, str] = field(repr=False)
    """Variables of this rank, on top of :attr:`LaunchRequest.env`."""
    task: int | None = None
    """:attr:`TaskHello.number` of the task that waits for the rank, None on the kernel's machine."""


@dataclass(frozen=True)
class SessionCell:
    """A gang that is one cell of a session: its ranks stay, with their variables, for the next cell."""

    number: int
    """Of the cell; 0 starts the ranks."""
    epoch: int
    """How often the ranks' process groups have been given up; a new epoch has a rendezvous of its own."""
    is_whole: bool
    """All ranks of the session take part."""
    is_joined: bool
    """No rank has left the default process group by itself, or has never joined it."""


@dataclass(frozen=True)
class RankOptions:
    """The part of a launch request that goes to all ranks of the gang."""

    spec: JobSpec
    """The user's options."""
    join_advice: str
    """:attr:`~hydrogen_magic.driver.rendezvous.Rendezvous.join_advice`."""
    infer_options: Mapping[str, object] | None
    """Options of ``%%infer``, None for an ordinary cell."""
    session: SessionCell | None
    """Set for a cell of a session, which :attr:`LaunchRequest.worker_key` identifies."""
    group_recovery: str
    """:attr:`~hydrogen_magic.driver.rendezvous.Rendezvous.group_recovery`."""


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
    is_recording: bool
    """Ranks record spans."""
    secrets: tuple[str, ...] = field(repr=False)
    """Values that agents mask in output and errors."""
    observers: tuple[ObserverSpec, ...]
    """What the ranks attach."""
    timeline: LibraryTimeline | None
    """The timeline that the library of the rendezvous writes, None if it writes none."""
    options: RankOptions
    checkpoint_dir: str | None = None
    """Directory of checkpoints that the kernel and all hosts share, None if they share none."""
    worker_key: str = ""
    """Equal keys may use the same workers one after the other; empty: new workers."""


# ── other commands to an agent ───────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class RanksCommand(AgentCommand):
    """A command for the ranks of one gang; ignored by an agent that runs another one."""

    gang: str


@dataclass(frozen=True)
class StopRanks(RanksCommand):
    """Ask the ranks to end, then make them."""


@dataclass(frozen=True)
class KillRanks(RanksCommand):
    """End the ranks at once."""

    rank: int | None = None
    """Only this one; None: all."""


@dataclass(frozen=True)
class RecordSpans(RanksCommand, WorkerCommand):
    """Start or stop recording spans on the ranks."""

    on: bool


@dataclass(frozen=True)
class ProfileSteps(RanksCommand):
    """Have the ranks profile their next steps."""

    number: int
    """Identifies the profile in :class:`ProfileTrace`."""
    steps: int
    """0 cancels the profile."""


@dataclass(frozen=True)
class HoldPorts(AgentCommand):
    """Hold ports for the ranks of the next attempt; answer with :class:`PortsHeld`."""

    count: int


END_OF_INPUT = "EOF"
"""Error of an answer if the user ended the input (Ctrl-D)."""


@dataclass(frozen=True)
class AnswerInput(RanksCommand, WorkerCommand):
    """Answer an input request of one rank."""

    rank: int
    number: int
    """:attr:`~hydrogen_magic.core.events.InputRequested.number`."""
    text: str = field(repr=False)
    error: str
    """Why there is no line: :data:`END_OF_INPUT`, or a sentence; empty if there is one."""


@dataclass(frozen=True)
class EndSession(AgentCommand):
    """End the ranks that wait for another launch with this key."""

    worker_key: str


@dataclass(frozen=True)
class ReportStacks(AgentCommand, TaskCommand):
    """Send the stacks of all ranks as events, those of a task in its next report."""


@dataclass(frozen=True)
class Ping(AgentCommand):
    """Answer with :class:`Pong`."""


@dataclass(frozen=True)
class Quit(AgentCommand, TaskCommand):
    """End, with all ranks; tasks continue without reports."""


@dataclass(frozen=True)
class ClockReading(AgentCommand):
    """The answer to :class:`Heartbeat`."""

    sent_s: float
    """:attr:`Heartbeat.sent_s`."""
    kernel_s: float
    """``time.monotonic()`` of the kernel."""


@dataclass(frozen=True)
class KeepFolder(AgentCommand):
    """All files of the folder have been sent: ranks may read it; answer with :class:`TransferKept`."""

    kind: str
    name: str
    transfer: int
    """All three as in :class:`FolderFile`."""


@dataclass(frozen=True)
class ForgetFolders(AgentCommand):
    """Delete these folders on this host: datasets that the notebook has deleted, or old checkpoints."""

    kind: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class ServeClosure(AgentCommand):
    """Listen for other agents that fetch the gang's closure here; answer with :class:`ClosureServed`."""

    gang: str
    clients: tuple[str, ...]
    """Public keys of these agents."""


@dataclass(frozen=True)
class FetchClosure(AgentCommand):
    """Fetch the gang's closure from another agent; what that does not send, from the kernel."""

    gang: str
    endpoint: str
    server_key: str


@dataclass(frozen=True)
class ReleaseTasks(AgentCommand):
    """Let the tasks of an attempt return."""

    gang: str
    attempt: int


# ── reports of an agent ──────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Hello(AgentReport):
    """The agent has started."""

    host: str
    held: Address
    """Reserved for the rendezvous of the next gang."""
    interface: str = ""
    """The network interface that faces the other hosts; empty on the kernel's machine."""


@dataclass(frozen=True)
class Pong(AgentReport):
    """The answer to :class:`Ping`."""


@dataclass(frozen=True)
class PortsHeld(AgentReport):
    """The answer to :class:`HoldPorts`."""

    ports: tuple[int, ...]
    problem: str = ""
    """Why there are none."""


@dataclass(frozen=True)
class EventBatch(AgentReport):
    """Events of the ranks and the agent."""

    gang: str
    attempt: int
    events: tuple[object, ...]
    """Each as :func:`hydrogen_magic.core.events.encode` returns it."""


@dataclass(frozen=True)
class CleanedUp(AgentReport):
    """Nothing of the attempt is left on the agent's host."""

    gang: str
    attempt: int
    held: Address | None
    """As in :class:`Hello`; None if no port is free: the agent ends."""
    is_retained: bool = False
    """The ranks wait for another launch with the same key."""


@dataclass(frozen=True)
class SessionLost(AgentReport):
    """A rank that waited for the next cell of a session has exited: its peers were ended."""

    worker_key: str
    why: str
    """Such as "rank 1 was killed by SIGKILL"."""


@dataclass(frozen=True)
class Heartbeat(AgentReport):
    """Sent every few seconds by agents on other hosts."""

    sent_s: float
    """``time.monotonic()`` of the agent."""


@dataclass(frozen=True)
class ClosureServed(AgentReport):
    """Other agents can connect."""

    gang: str
    endpoint: str
    """Empty: the agent cannot listen."""
    server_key: str


@dataclass(frozen=True)
class SendClosure(AgentReport):
    """From an agent to another agent or to the kernel: send the gang's closure from this byte on."""

    gang: str
    offset: int


@dataclass(frozen=True)
class ClosureArriving(AgentReport):
    """How much of the gang's closure the agent has."""

    gang: str
    arrived: int
    """Bytes."""
    size: int
    """Bytes of the whole closure."""


@dataclass(frozen=True)
class Leaving(AgentReport):
    """The agent ends: no gang came for a while, or the parent of its task has ended."""


# ── tasks that hold the places of ranks on other machines ────────────────────────────────────────
#
# A task runs the text of node/agent/host_task.py, which imports nothing of this package: it writes
# and reads the JSON of these classes itself.


class TaskMessage(Message):
    """From a task to the agent on its machine."""


class TaskAnswer(Message):
    """From the agent to a task."""


@dataclass(frozen=True)
class TaskHello(TaskMessage):
    """The task waits for its rank."""

    gang: str
    attempt: int
    number: int
    """Of the attempt's tasks, from 0."""
    machine: str
    """Tells machines apart, and kernels on one machine."""
    shares_disk: bool
    """The directory of the kernel's record is visible there."""
    gpus_visible: str | None
    """``CUDA_VISIBLE_DEVICES`` of the task."""
    versions: Mapping[str, str]
    """Of the libraries whose pickles depend on them."""
    sys_path: tuple[str, ...] = ()
    """Where the task imports modules from, as absolute paths: also what ``addPyFile`` has sent there."""
    kind: str = "task"
    """What the task is called in messages: ``Spark task``."""
    place: str = ""
    """Where it runs on its host, in messages: ``executor 3``; empty: nothing more precise is known."""
    host: str = ""
    """The host's name or address for its provider, which may choose others when this one is lost; empty: the
    provider does not choose."""
    parent: str = ""
    """What :attr:`parent_pid` is called in messages: ``Spark executor``."""
    parent_pid: int | None = None
    """The process with which the task and the agent's folder go; None if there is none."""
    gpus: tuple[str, ...] = ()
    """Addresses of the GPUs that the task was given."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables for the ranks beside those of the task's process."""


@dataclass(frozen=True)
class TaskPing(TaskMessage):
    """Answer with :class:`TaskPong`."""


@dataclass(frozen=True)
class TaskPong(TaskAnswer):
    """The answer to :class:`TaskPing`."""


@dataclass(frozen=True)
class TaskAccepted(TaskAnswer):
    """The agent serves the task's gang; the task waits for :class:`TaskReleased`."""

    mark: str
    """Value of a variable that every process of the agent has."""
    folder: str
    pid: int


@dataclass(frozen=True)
class AgentBusy(TaskAnswer):
    """The agent serves another gang."""


@dataclass(frozen=True)
class TaskReleased(TaskAnswer):
    """The task may return: its rank is over, or lost."""


@dataclass(frozen=True)
class TaskProblem(Message):
    """Why a task ends its stage: for the kernel, in the message of the task's exception."""

    kind: str
    """``python``, ``system``, ``library``, ``missing``, ``unreachable``, ``agent`` or ``agent_ended``."""
    text: str
    host: str
    task: int = -1
    """Number of the task whose agent has ended: hosts may have equal names. -1 for other problems."""


@dataclass(frozen=True)
class TaskAttached(AgentReport):
    """A task has come to the agent."""

    task: TaskHello


@dataclass(frozen=True)
class TaskDetached(AgentReport):
    """A task has exited while its rank was not running."""

    task: TaskHello
    why: str


# ── files of ranks ───────────────────────────────────────────────────────────────────────────────


class WorkerReport(Message):
    """From a worker to its agent."""


@dataclass(frozen=True)
class RankEvents(WorkerReport):
    """What happened on the rank."""

    events: tuple[object, ...]
    """Each as :func:`hydrogen_magic.core.events.encode` returns it; one that is malformed is reported."""


@dataclass(frozen=True)
class PackingResult(WorkerReport):
    """The rank begins a step with its results, in which it may crash."""

    step: str
    """Such as "packing `model`"."""


@dataclass(frozen=True)
class ResultsDelivered(WorkerReport):
    """All results of the rank have been sent: its process should exit now."""

    result_bytes: int


@dataclass(frozen=True)
class ThreadsRunning(WorkerReport):
    """The process cannot exit yet: these threads of the user's code still run."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class WorkerRetained(WorkerReport):
    """The process waits for another gang instead of exiting."""

    files: Mapping[str, int]
    """Files that its cell read, with their modification times in ns at that moment."""
    exit_code: int = 0
    """Exit code that the process would have had."""


@dataclass(frozen=True)
class TimelineFile(WorkerReport):
    """A library on the rank begins to write a timeline of its own, or has ended one."""

    path: str
    """Empty: none is written any more."""
    is_kept: bool
    """It belongs to the gang's record."""
    wall_ahead: float
    """Seconds by which the wall clock was ahead of the monotonic one at the timeline's origin."""


@dataclass(frozen=True)
class ResultPart(WorkerReport):
    """One named result of one rank: the label that travels with its bytes."""

    name: str
    """A variable of ``--out``, or :data:`~hydrogen_magic.serialization.result_stream.CELL_VALUE`."""
    error: str = ""
    """Why the object could not be sent; the part then has no bytes."""
    is_partial: bool = False
    """Some of its objects could not be pickled and were replaced: for the run log only."""


@dataclass(frozen=True)
class ProfileTrace(WorkerReport):
    """A rank's trace; its file is empty if the rank recorded nothing."""

    number: int
    """:attr:`ProfileSteps.number`."""


@dataclass(frozen=True)
class SavedCheckpoint(WorkerReport):
    """Rank 0 has saved a checkpoint."""

    file_name: str
    """In the directory of the gang's checkpoints on its host."""


FileContent = ResultPart | ProfileTrace | SavedCheckpoint


@dataclass(frozen=True)
class RankFile(Message):
    """A file of a rank, for the kernel: travels with a descriptor, or as the label of a file's parts."""

    gang: str
    attempt: int
    rank: int
    content: FileContent


@dataclass(frozen=True)
class LaunchFiles(Message):
    """Travels with the descriptors of the closure and of each rank's channel, before the launch."""

    gang: str
    attempt: int


# ── files over the network, in parts ─────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ClosureLabel(Message):
    """What the ranks of a gang run, for their agent."""

    closure_of: str


DATASETS, CHECKPOINTS = "datasets", "checkpoints"
"""Kinds of folders: data of ``hm.dataset``, and what the earlier attempts of a gang have saved."""


@dataclass(frozen=True)
class FolderFile(Message):
    """A file of a folder that only the notebook's machine has, for the ranks of a host."""

    kind: str
    """:data:`DATASETS` or :data:`CHECKPOINTS`."""
    name: str
    """Of the folder: :attr:`~hydrogen_magic.node.dataset_handle.DatasetHandle.name`, or the gang's id."""
    transfer: int
    """The kernel's number of this transfer to the host; later ones have higher numbers."""
    file_name: str


@dataclass(frozen=True)
class ChannelFrame(Message):
    """A frame of a channel by which a rank is fed, with what it refers to in shared memory as the content."""

    gang: str
    attempt: int
    rank: int
    frame: Mapping[str, object] | None
    """None: the channel was closed."""


FileLabel = RankFile | ClosureLabel | FolderFile | ChannelFrame


@dataclass(frozen=True)
class FilePart(AgentCommand, AgentReport):
    """Bytes of a file, which is taken once it is complete."""

    label: FileLabel
    file: int
    """The sender's number of the file."""
    size: int
    """Bytes of the whole file."""
    offset: int


@dataclass(frozen=True)
class TransferKept(AgentReport):
    """A folder is complete on the host, or, with an error, cannot be stored there."""

    transfer: int
    """As in :class:`FolderFile`."""
    error: str = ""


@dataclass(frozen=True)
class RecordPart(AgentReport):
    """New bytes of a rank's log, or of a library's own timeline."""

    gang: str
    name: str
    """Of the file in the gang's record."""
    offset: int
    end: str = ""
    """What closes a timeline behind these bytes: the next ones replace it. A log has none."""


@dataclass(frozen=True)
class PartTaken(AgentCommand, AgentReport):
    """Acknowledges one part of any kind."""


# ── workers ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class WorkerStart(WorkerCommand):
    """Become a process of the notebook: the first message to a worker."""

    env: Mapping[str, str] = field(repr=False)
    """The whole environment."""
    cwd: str
    sys_path: tuple[str, ...]


@dataclass(frozen=True)
class RankStart(WorkerStart):
    """Be a rank. The closure comes with it, and a channel where the rank is fed."""

    rank: int
    clock_zero_s: float
    is_recording: bool
    options: RankOptions
    timeline_recorder: str
    """:attr:`LibraryTimeline.recorder`; empty if the library writes none."""
    timeline_prefix: str
    """What the paths of the attempt's timelines begin with."""
    speaks_for_host: bool
    """It reports what all ranks of its host would report."""


@dataclass(frozen=True)
class ServiceStart(WorkerStart):
    """Run a service on the listening socket that comes with it."""

    service: ServiceSpec


@dataclass(frozen=True)
class ReleaseRank(WorkerCommand):
    """Leave the collective that the rank waits in: its process groups are given up."""

    is_forced: bool
    """Also if no collective is observed."""


@dataclass(frozen=True)
class StartProfile(WorkerCommand):
    """Profile the next steps."""

    number: int
    """:attr:`ProfileSteps.number`."""
    steps: int
    path: str
    """Where the trace may be written until it is sent."""


# ── the forkserver ───────────────────────────────────────────────────────────────────────────────


class ForkserverRequest(Message):
    """From an agent to its forkserver."""


class ForkserverAnswer(Message):
    """From a forkserver to its agent: one for each request, in their order."""


@dataclass(frozen=True)
class PreloadModules(ForkserverRequest):
    """Import modules now."""

    modules: tuple[str, ...]


@dataclass(frozen=True)
class ForkWorkers(ForkserverRequest):
    """Fork a worker for every five of the descriptors that come with it."""

    observers: tuple[ObserverSpec, ...]
    """What the workers attach."""


@dataclass(frozen=True)
class ModulesPreloaded(ForkserverAnswer):
    """The modules were imported, apart from those that raise."""

    files: tuple[str, ...]
    is_unsafe: bool
    """The process should not be forked any more."""


@dataclass(frozen=True)
class WorkersForked(ForkserverAnswer):
    """The workers are running; fewer than asked for if the machine refused."""

    pids: tuple[int, ...]


# ── tasks of %%infer on Spark ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class EndTask(TaskCommand):
    """End the task, which Spark has cancelled."""


@dataclass(frozen=True)
class FailureReceived(TaskCommand):
    """The kernel has the report of a failed task; Spark may end its process."""


@dataclass(frozen=True)
class TaskProgress:
    """One attempt at one partition, so far."""

    stage: int
    partition: int
    attempt: int
    """Spark's number of the attempt, unique in the application."""
    is_trial: bool
    """It only finds the columns that ``predict`` returns; its rows are processed again."""
    phase: str = "loading"
    """``loading`` (the cell runs), ``running``, then ``done``, ``failed`` or ``left`` (the rest is not
    wanted)."""
    rows: int = 0
    """Rows done."""
    failed: int = 0
    """Of these, the ones without a prediction."""
    error: str = ""
    """Why it failed."""
    failures: tuple[str, ...] = ()
    """Texts about the first rows without a prediction."""


@dataclass(frozen=True)
class TaskStatus(Message):
    """From a Python worker of Spark to the kernel, a few times a second."""

    worker: str
    """Tells it from all others."""
    host: str
    pid: int
    device: str
    tasks: tuple[TaskProgress, ...]
    """The one under way, and those that ended since the last report."""
    stacks: str = ""
    """The stacks of its threads, after :class:`ReportStacks`."""


# ── gangs that outlive their kernel ──────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class OwnGang(Message):
    """To a new owner: what it launches. The closure comes with it, as a memory file."""

    spec: JobSpec
    title: str
    source: str = field(repr=False)
    cells: Mapping[str, str]
    params: Mapping[str, bool | int | float | str] = field(repr=False)
    preload: tuple[str, ...]
    required_modules: tuple[str, ...]
    datasets: Mapping[str, str]
    data_places: tuple[str, ...]
    warnings: tuple[str, ...]
    """As in :class:`~hydrogen_magic.capture.values.Captured`."""
    env: Mapping[str, str] = field(repr=False)
    """Environment of the kernel."""
    cwd: str
    sys_path: tuple[str, ...]
    shadowed: tuple[str, ...]
    """Modules of the standard library that :attr:`sys_path` hides."""
    placement_setup: Mapping[str, object] = field(repr=False)
    """Values that only the placement reads, tokens included."""


@dataclass(frozen=True)
class Attach(OwnerCommand):
    """First message of every connection; answered by :class:`Attached`."""

    wants: str
    """``status`` (the answer alone), ``watch`` (never control), ``control`` (if no other one has it) or
    ``take`` (in any case).
    """
    name: str
    """What other connections are shown of this one: ``train.ipynb (process 4242)``."""


@dataclass(frozen=True)
class TakeControl(OwnerCommand):
    """From now on this connection controls the gang."""


@dataclass(frozen=True)
class AskGang(OwnerCommand):
    """As a method of :class:`hydrogen_magic.Gang` that does not wait."""

    do: str
    """``stop``, ``ask_stacks``, ``record`` or ``profile``."""
    argument: int = 0
    """Whether to kill, whether to record, or the steps to profile."""


@dataclass(frozen=True)
class LaunchRefused(OwnerReport):
    """There is no gang: its launch raised an error."""

    error: str
    """Name of its class."""
    text: str


@dataclass(frozen=True)
class Control(OwnerReport):
    """Which connection controls the gang."""

    is_yours: bool
    holder: str
    """Name of the connection that has control; empty for none."""


@dataclass(frozen=True)
class Attached(OwnerReport):
    """The gang at the time of :class:`Attach`; all its events follow."""

    gang: str
    control: Control
    n_events: int
    progress: float | None
    """0 to 1 if a rank shows how far it is."""


@dataclass(frozen=True)
class OwnerEvents(OwnerReport):
    """The gang's next events."""

    events: tuple[object, ...]
    """As :func:`hydrogen_magic.core.events.encode` returns them."""
