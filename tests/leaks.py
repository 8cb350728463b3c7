"""What a test may not leave behind: processes, threads, descriptors, sockets, memory, run records.

A :class:`Snapshot` is taken before a test and compared after it. Only what belongs to this process
of pytest is judged, be it the only one or one of pytest-xdist's workers: everything it starts inherits
:data:`SESSION` in its environment. So the processes of another worker, or of another user, are never
taken for its own, and its own are found even when nothing else connects them with it.

A snapshot reads ``/proc`` once. What costs more (which process listens on a socket, who maps a file in
``/dev/shm``) is looked up only for what is new since the snapshot before.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing import resource_tracker
from pathlib import Path

from hydrogen_magic.core import processes

LENT = "HYDROGEN_MAGIC_TEST_CLUSTER"
"""Environment variable of the processes of a cluster that is lent to tests; not what a gang left."""
SESSION = "HYDROGEN_MAGIC_TEST_SESSION"
"""Environment variable that marks everything this process of pytest starts."""

_COOKIES = (processes.COOKIE, processes.OWNER)
_PREFIX = b"HYDROGEN_MAGIC_"
"""Of the names of all variables that are read here."""
_FORKSERVER = "hydrogen_magic.node.agent.forkserver"
_PRELOADED = ("torch",)
"""By the agent that is kept: otherwise each rank with an optimizer imports ``torch._dynamo``."""
_KTHREADD = 2
"""Parent of the system's own threads."""
_FIRST_POLL_S, _LAST_POLL_S = 0.02, 0.2
SETTLE_S = 30.0
"""What is on its way out gets this long: tens of milliseconds where nothing else runs, seconds where
all workers start JVMs."""
_START_S = 60.0
"""For an agent on a machine under load."""
_SHM = Path("/dev/shm")
_LISTEN = "0A"
"""State of a listening TCP socket in ``/proc/net/tcp``."""
_SOCKET = "socket:["
_ACCEPTS = 0x10000
"""Flag of a listening Unix socket in ``/proc/net/unix`` (``__SO_ACCEPTCON``)."""


def mark_session() -> None:
    """Give this process a mark of its own; what it starts inherits it."""
    # Python starts one tracker per process, on first use, and keeps its pipe: not a test's leak.
    resource_tracker.ensure_running()
    os.environ[SESSION] = f"{_boot_id()}:{os.getpid()}:{time.monotonic_ns()}"


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# ── processes ────────────────────────────────────────────────────────────────────────────────────


def tree(root: int) -> set[int]:
    """Return the pids of what descends from ``root``, without it and without zombies."""
    return {process.pid for process in _below(processes.processes(), root)}


def _below(everything: Iterable[processes.Process], root: int) -> list[processes.Process]:
    children: dict[int, list[processes.Process]] = {}
    for process in everything:
        children.setdefault(process.ppid, []).append(process)
    found: list[processes.Process] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += [process.pid for process in below]
    return [process for process in found if not process.has_exited]


def _environ(pid: int) -> dict[str, str]:
    return _own_variables(environment(pid))


def _own_variables(environment: bytes) -> dict[str, str]:
    """Return our own of a process's variables: it may have hundreds."""
    if _PREFIX not in environment:
        return {}
    pairs = (e.partition(b"=") for e in environment.split(b"\0") if e.startswith(_PREFIX))
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def command(pid: int) -> str:
    """Return the command line of a process, empty when it is gone."""
    return os.fsdecode(processes.read(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()


def marked(variable: str, value: str) -> list[int]:
    """Return the pids of live processes that have this in their environment."""
    wanted = f"{variable}={value}".encode()
    living = [process.pid for process in processes.processes() if not process.has_exited]
    return [pid for pid in living if wanted in environment(pid).split(b"\0")]


def environment(pid: int) -> bytes:
    """Return what a process was started with, empty when it is gone."""
    return processes.read(f"/proc/{pid}/environ")


def _is_ours(environment: dict[str, str]) -> bool:
    owner = environment.get(processes.OWNER, "").split(":")
    return environment.get(SESSION) == os.environ.get(SESSION) or owner[:2] == [
        _boot_id(),
        str(os.getpid()),
    ]


def is_agent(pid: int) -> bool:
    """True for a process that runs the agent (or was forked from one), or owns a gang."""
    run = command(pid)
    return "hydrogen_magic.node.agent" in run or "hydrogen_magic.driver.owner" in run


_foreign: dict[int, tuple[int, str | None]] = {}
"""Pid -> start, and this session's mark, of processes that others have started. Every test looks at all
processes, and what one was started with stays as it is."""


def gang_processes(everything: Iterable[processes.Process]) -> dict[int, str]:
    """Of these processes, return what gangs of this session left running, orphans included."""
    below = {process.pid for process in _below(everything, os.getpid())}
    found = {}
    for process in everything:
        seen = process.start_ticks, os.environ.get(SESSION)
        is_known = process.pid not in below and _foreign.get(process.pid) == seen
        if process.pid == os.getpid() or process.ppid == _KTHREADD or is_known:
            continue
        raw = environment(process.pid)
        own = _own_variables(raw)
        if process.pid not in below and not _is_ours(own):
            if raw:  # not of one that exits, or is about to run another program
                _foreign[process.pid] = seen
        elif any(name in own for name in _COOKIES) or is_agent(process.pid):
            found[process.pid] = (
                f"{command(process.pid)} (state {process.state}, of {process.ppid})"
            )
    return found


# ── threads and descriptors ──────────────────────────────────────────────────────────────────────


def suspicious_threads() -> set[threading.Thread]:
    """Return the live threads that keep the process alive or are the package's own."""
    mine = threading.current_thread()
    return {t for t in threading.enumerate() if t is not mine and (not t.daemon or _is_package(t))}


def _is_package(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)
    modules = (type(thread).__module__, getattr(target, "__module__", None) or "")
    return thread.name.startswith("hydrogen") or any(
        m.startswith("hydrogen_magic") for m in modules
    )


def _links(pid: int) -> Iterator[str]:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/{pid}/fd/{name}")


def _kind(link: str) -> str | None:
    if link.startswith("/memfd:"):
        return "memfd"
    if link == "anon_inode:[pidfd]":
        return "pidfd"
    return next((kind for kind in ("socket", "pipe") if link.startswith(kind + ":[")), None)


def descriptors() -> Counter[str]:
    """Return how many sockets, pipes, memory files and pidfds this process has open."""
    return Counter(kind for link in _links(os.getpid()) if (kind := _kind(link)) is not None)


def is_lent(pid: int) -> bool:
    """True for a process of a lent cluster; False for what a gang started on it."""
    environment = _environ(pid)
    return LENT in environment and not any(name in environment for name in _COOKIES)


def listening() -> dict[str, str]:
    """Return inode -> name of all sockets of this machine that are listened on.

    Slow: the system walks through its whole table of connections.
    """
    found = {}
    for table in ("tcp", "tcp6"):
        for fields in _rows(table):
            if fields[3] == _LISTEN:
                found[fields[9]] = f"{table} port {int(fields[1].rpartition(':')[2], 16)}"
    for fields in _rows("unix"):
        if int(fields[3], 16) & _ACCEPTS:
            found[fields[6]] = f"unix socket {' '.join(fields[7:]) or fields[6]}"
    return found


def sockets(everything: Iterable[processes.Process]) -> set[str]:
    """Return the inodes of the sockets of this process and its descendants, without lent clusters."""
    below = (process.pid for process in _below(everything, os.getpid()))
    ours = {os.getpid(), *(pid for pid in below if not is_lent(pid))}
    links = (link for pid in ours for link in _links(pid))
    return {link[len(_SOCKET) : -1] for link in links if link.startswith(_SOCKET)}


def _rows(table: str) -> list[list[str]]:
    return [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def shared_memory() -> set[str]:
    """Return the names of this user's files in ``/dev/shm``."""
    found = set()
    for entry in os.scandir(_SHM):
        with contextlib.suppress(OSError):
            if entry.stat(follow_symlinks=False).st_uid == os.getuid():
                found.add(entry.name)
    return found


def _held_by_others(names: Collection[str]) -> set[str]:
    """Of these names in ``/dev/shm``, return those that another session's process has mapped.

    By inode: ``sem_open`` maps a semaphore before it has its name.
    """
    wanted: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(OSError):
            wanted[str((_SHM / name).stat().st_ino)] = name
    held: set[str] = set()
    if not wanted:
        return held
    ours = {os.getpid()} | tree(os.getpid())
    for process in processes.processes():
        if process.pid not in ours and not _is_ours(_environ(process.pid)):
            held.update(wanted[inode] for inode in _mapped(process.pid) & wanted.keys())
    return held


def _mapped(pid: int) -> set[str]:
    """Return the inodes of what a process has mapped of ``/dev/shm``."""
    lines = os.fsdecode(processes.read(f"/proc/{pid}/maps")).splitlines()
    return {line.split()[4] for line in lines if f" {_SHM}/" in line}


def default_runs_dir() -> Path:
    """Return where run records go by default: no test may write there."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "hydrogen_magic" / "runs"


def run_records() -> set[str]:
    """Return the names of the records in the default directory."""
    with contextlib.suppress(FileNotFoundError):
        return set(os.listdir(default_runs_dir()))
    return set()


# ── before and after ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Snapshot:
    """What there was at one moment, but for an agent that waits for a gang and its forks."""

    processes: dict[int, str]
    """Pid -> description: a process may be gone when the report is written."""
    threads: frozenset[threading.Thread]
    descriptors: Counter[str]
    sockets: frozenset[str]
    """Inodes."""
    shared_memory: frozenset[str]
    records: frozenset[str]

    @classmethod
    def take(cls) -> Snapshot:
        everything = [
            process
            for process in processes.processes()
            if not process.has_exited and not _is_warm(process)
        ]
        return cls(
            processes=gang_processes(everything),
            threads=frozenset(suspicious_threads()),
            descriptors=descriptors(),
            sockets=frozenset(sockets(everything)),
            shared_memory=frozenset(shared_memory()),
            records=frozenset(run_records()),
        )


def leaks(before: Snapshot) -> list[str]:
    """Return one line for each thing that is there now and was not there before.

    What an idle agent is connected to is not: two of these would have more descriptors than one.
    """
    now, (thread, socket) = Snapshot.take(), _hub_of_warm_agents()
    new = sorted(now.processes.keys() - before.processes.keys())
    found = [f"process {pid}: {now.processes[pid]}" for pid in new]
    found += [
        f"thread {t.name} (daemon={t.daemon})" for t in now.threads - before.threads - {thread}
    ]
    for kind, count in sorted((now.descriptors - before.descriptors).items()):
        found.append(f"{count} more open descriptor(s) of kind {kind}")
    if opened := now.sockets - before.sockets:
        names = listening()
        new_names = {names[inode] for inode in opened & names.keys()}
        found += sorted(f"listening: {name}" for name in new_names - {socket})
    files = now.shared_memory - before.shared_memory
    found += [f"/dev/shm/{name}" for name in sorted(files - _held_by_others(files))]
    found += [f"run record {name} in the default place" for name in now.records - before.records]
    return found


def leaks_after(before: Snapshot, within_s: float = SETTLE_S) -> list[str]:
    """Give what is on its way out ``within_s`` seconds to go, then return what is still there."""
    return settle(lambda: leaks(before), within_s)


def settle(check: Callable[[], list[str]], within_s: float) -> list[str]:
    """Repeat ``check`` until it finds nothing or the time is up; return its last findings."""
    deadline = time.monotonic() + within_s
    found = check()
    pause_s = _FIRST_POLL_S
    while found and time.monotonic() < deadline:
        # A socket in a reference cycle is rubbish, not a leak, also if another thread has just let go of it.
        gc.collect()
        time.sleep(pause_s)
        pause_s = min(_LAST_POLL_S, 1.5 * pause_s)
        found = check()
    return found


# ── the package's own doors, without importing what a test did not import ────────────────────────


def keep_agent_warm() -> None:
    """Have an idle agent, so that a gang that leaves one behind changes nothing."""
    from hydrogen_magic.driver.placements import local_agents

    if not _idle_agents():
        local_agents.close()  # one that was killed while it was idle
        local_agents.warm_up(_PRELOADED)
        assert settle(lambda: [] if _idle_agents() else ["no agent"], _START_S) == []


def _is_warm(process: processes.Process) -> bool:
    """True for an agent that waits for a gang, its forkserver, and the workers forked in advance."""
    warm = _idle_agents()
    is_fork = process.ppid in warm and _FORKSERVER in command(process.pid)
    return process.pid in warm or is_fork


def _hub_of_warm_agents() -> tuple[threading.Thread | None, str]:
    """Return the thread that listens to idle agents, and the name of its socket; neither without one."""
    agents = sys.modules.get("hydrogen_magic.driver.placements.local_agents")
    hub = agents._kernel._hub if agents is not None and _idle_agents() else None
    return (None, "") if hub is None else (hub._thread, f"unix socket {hub._directory}/hub")


def _idle_agents() -> set[int]:
    """Return the pids of the agents that wait for a gang."""
    agents = sys.modules.get("hydrogen_magic.driver.placements.local_agents")
    idle = [] if agents is None else agents.pool().idle
    return {agent.process.pid for agent in idle if agent.is_usable and agent.is_ready}


def end_kept_ranks() -> None:
    """End the ranks that ``%%infer`` keeps for its next run."""
    sessions = sys.modules.get("hydrogen_magic.driver.session")
    kept = sessions.live(sessions.UNNAMED) if sessions is not None else None
    if kept is not None and not kept.is_running:
        kept.end()


def end_warm_agents() -> None:
    """End the agents that are kept warm, if the package was ever asked for one."""
    agents = sys.modules.get("hydrogen_magic.driver.placements.local_agents")
    if agents is not None:
        agents.close()


def running_gangs() -> list[str]:
    """Return one line for each gang of this process that has not ended."""
    run = sys.modules.get("hydrogen_magic.driver.known_gangs")
    if run is None:
        return []
    over = ("SUCCEEDED", "FAILED", "STOPPED")
    found = [gang.snapshot() for gang in run.gangs().values()]
    return [
        f"gang {each.gang} ({each.title}) is {each.state}"
        for each in found
        if each.state not in over
    ]
