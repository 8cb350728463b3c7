"""Linux process management: subreaper, parent-death signal, and the process tree in ``/proc``.

A process is never ended by its name, nor by a pid that was not started here. All descendants of an
agent belong to its gang, because orphans of the gang are re-parented to the agent
(``PR_SET_CHILD_SUBREAPER``).
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import re
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

COOKIE = "HYDROGEN_MAGIC_RUN"
"""Environment variable of every process of a gang: the gang's id. It identifies, but proves nothing."""
OWNER = "HYDROGEN_MAGIC_OWNER"
"""The kernel that started it all, as named by ``run_log.owner_of_this_process``; set for agents."""
AGENT = "HYDROGEN_MAGIC_AGENT"
"""The agent that started it; set for agents. Processes forked by the agent show the agent's environment."""
STACKS_SIGNAL = signal.SIGRTMAX - 3
"""Makes a rank write its stacks. Not SIGUSR1, by which Slurm tells training code to save and exit."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def become_subreaper() -> None:
    """Make this process the parent of orphans among its descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def use_batch_scheduling() -> None:
    """Make this thread, and those it starts, yield to others when it wakes up (``SCHED_BATCH``).

    It still gets its share of a core, slightly later. Ranks wait for each other in every step, so an
    interruption of one delays all of them. With two ranks on two cores, a training step of 3.5 ms took 0.75
    of the time; with agents alone it took as long as before. Does nothing if the system lacks this policy,
    or if another policy is set.
    """
    with suppress(OSError):  # musl has neither call, a sandbox may forbid them
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def reset_signals() -> None:
    """Undo what a process inherits if the notebook blocks signals or ignores the end of children."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def die_with_parent() -> None:
    """Make the system kill this process when the thread that is its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def pidfd_fault() -> str:
    """Return why this system has no descriptors of processes, which agents need; empty if it has them.

    A Python that knows the system call may run on Linux before 5.3, or in a sandbox that forbids it.
    """
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        if getattr(error, "errno", None) not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            return f"no pidfd_open ({error})"
    return ""


@dataclass(frozen=True)
class Process:
    """A line of ``/proc/<pid>/stat``."""

    pid: int
    ppid: int
    state: str
    """R running, S sleeping, D uninterruptible, T stopped, Z zombie, X being removed."""
    cpu_ticks: int
    """User and system time, children not included."""
    rss_bytes: int
    start_ticks: int
    """Start time, in ticks since the boot."""

    @property
    def has_exited(self) -> bool:
        """True for a zombie, and for a process that is being removed after its parent has waited for it."""
        return self.state in "ZX"


_PAGE = os.sysconf("SC_PAGE_SIZE")


def read(path: str) -> bytes:
    """Return the contents of a file of ``/proc``; empty if it cannot be read: its process has exited."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _read_stat(pid: int) -> Process | None:
    """Return the process, or None if it does not exist."""
    # The name, in parentheses, may contain spaces, parentheses and any bytes; the fields after it do not.
    rest = read(f"/proc/{pid}/stat").rpartition(b") ")[2].split()
    if not rest:
        return None
    cpu_ticks = int(rest[11]) + int(rest[12])
    rss_bytes = int(rest[21]) * _PAGE
    return Process(pid, int(rest[1]), rest[0].decode(), cpu_ticks, rss_bytes, int(rest[19]))


def processes(pids: Collection[int] | None = None) -> Iterator[Process]:
    """Yield the visible processes of this machine, or those of ``pids`` that still exist."""
    if pids is None:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    for pid in pids:
        found = _read_stat(pid)
        if found is not None:
            yield found


def own_rss_bytes() -> int:
    """Return the memory of this process: its own file has it without the times of all threads."""
    return int(read("/proc/self/statm").split()[1]) * _PAGE


def descendants(root: int, spare: Collection[int] = ()) -> list[Process]:
    """Return the descendants of ``root`` without zombies, and without ``spare`` and their descendants."""
    children: dict[int, list[Process]] = {}
    for process in processes():
        children.setdefault(process.ppid, []).append(process)
    found: list[Process] = []
    queue = [root]
    while queue:
        for process in children.get(queue.pop(), ()):
            if process.pid not in spare:
                queue.append(process.pid)
                if not process.has_exited:
                    found.append(process)
    return found


_TRACKER_S = 2.0
"""Shared-memory trackers exit on their own when their clients have; later than this, they hang."""


async def end_descendants(
    root: int, within_s: float, spare: Callable[[], Collection[int]] = tuple
) -> tuple[set[int], list[Process]]:
    """Kill the descendants of ``root`` until none is left; ``spare`` as for :func:`descendants`.

    Returns the pids of all processes that were seen, and the processes that are left after
    ``within_s``.
    """
    seen: set[int] = set()
    begun = time.monotonic()
    while left := descendants(root, spare()):
        waited = time.monotonic() - begun
        if waited > within_s:
            break
        seen.update(process.pid for process in left)
        for process in left:
            if waited > _TRACKER_S or not is_tracker(process.pid):
                send_signal(process.pid, signal.SIGKILL)
        await asyncio.sleep(0.002 if waited < 0.1 else 0.02)
    return seen, left


def is_tracker(pid: int) -> bool:
    """True for helper processes that unlink shared memory after their clients have exited.

    If killed together with their clients, they leave files in ``/dev/shm``; otherwise they exit on
    their own within moments.
    """
    command = read(f"/proc/{pid}/cmdline")
    return b"multiprocessing.resource_tracker" in command or b"torch_shm_manager" in command


def family(root: int) -> set[int]:
    """Return ``root`` and its current descendants quickly, by reading one file for each thread of them.

    May miss a process that is being created or re-parented; :func:`descendants` does not.
    """
    found: set[int] = set()
    queue = [root]
    while queue:
        pid = queue.pop()
        found.add(pid)
        for thread in _threads(pid):  # each has the children that it has started
            queue += map(int, read(f"/proc/{pid}/task/{thread}/children").split())
    return found


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:  # it has ended
        return []


def ended(pids: Collection[int]) -> set[int]:
    """Return those of ``pids`` that do not run any more; some may be zombies."""
    return {*pids} - {process.pid for process in processes(pids) if not process.has_exited}


_CLOCK_SLACK_S = 1.0
"""File times may lag behind the clock by a tick; a second is enough."""
_TORCH_SHARED = re.compile(r"torch_(\d+)_\d+_\d+")


def unlink_shared_memory(pids: Collection[int], since: float) -> None:
    """Remove files that torch left in ``/dev/shm`` when these processes, all dead, were killed.

    torch registers a file with its manager after creating it, so a process killed in between leaves
    it behind. The name contains the pid of the creator; ``since`` (Unix time) protects older files
    of another process with the same pid.
    """
    try:
        entries = list(os.scandir("/dev/shm"))
    except OSError:
        return
    for entry in entries:
        match = _TORCH_SHARED.fullmatch(entry.name)
        if match is None or int(match[1]) not in pids:
            continue
        try:
            status = entry.stat(follow_symlinks=False)
            if status.st_uid == os.geteuid() and status.st_mtime >= since - _CLOCK_SLACK_S:
                os.unlink(entry.path)
        except FileNotFoundError:
            continue  # its manager removed it first


def send_signal(pid: int, signum: int) -> None:
    """Send ``signum`` unless the process has exited."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass


def is_in_storage(pids: Collection[int]) -> bool:
    """Whether a thread of these processes waits for a disk or a file server (state D), as in ``fsync``."""
    paths = (f"/proc/{pid}/task/{thread}/stat" for pid in pids for thread in _threads(pid))
    return any(read(path).rpartition(b") ")[2].startswith(b"D") for path in paths)


def is_sending(pids: Collection[int]) -> bool:
    """Whether a TCP socket of these processes has data that its peer has not acknowledged."""
    waiting = {one.inode for one in _tcp_sockets() if one.is_sending}
    return bool(waiting) and not waiting.isdisjoint(_inodes(pids))


def are_connected(pids: Collection[int], spare: Collection[int]) -> bool:
    """Whether a TCP connection of these processes leads to a process other than ``spare``."""
    own = _inodes(pids)
    connected = [one for one in _tcp_sockets() if one.is_established]
    mine = [one for one in connected if one.inode in own]
    if not mine:
        return False
    theirs = _inodes(spare)
    ends = {one.ports for one in connected if one.inode in theirs}
    return any(one.ports[::-1] not in ends for one in mine)


@dataclass(frozen=True)
class _TcpSocket:
    """A line of ``/proc/net/tcp`` (proc_net_tcp.rst)."""

    ports: tuple[str, str]
    """Its own and its peer's."""
    is_established: bool
    is_sending: bool
    inode: str


def _tcp_sockets() -> Iterator[_TcpSocket]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for row in Path(table).read_text().splitlines()[1:]:
                _, local, remote, state, queues, *_, inode = row.split()[:10]
                ports = local.rpartition(":")[2], remote.rpartition(":")[2]
                is_sending = not queues.startswith("00000000:")
                yield _TcpSocket(ports, state == "01", is_sending, inode)


def _inodes(pids: Collection[int]) -> set[str]:
    """Return the inodes of the sockets that these processes have open."""
    links = (link for pid in pids for link in _open_files(pid))
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def _open_files(pid: int) -> Iterator[str]:
    with suppress(OSError):  # it has exited
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{name}")


def name_of_signal(signum: int) -> str:
    """Return ``SIGKILL`` and so on; most real-time signals have no name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def oom_kills() -> int:
    """Return how many processes this machine's out-of-memory killer has killed since boot."""
    lines = read("/proc/vmstat").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(b"oom_kill ")), 0)


def _environment(pid: int) -> dict[str, str]:
    entries = read(f"/proc/{pid}/environ").split(b"\0")  # none of another user's process
    pairs = (entry.partition(b"=") for entry in entries if b"=" in entry)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


async def end_marked(variable: str, value: str, within_s: float) -> None:
    """Repeat :func:`kill_marked` until none is left: a process may fork during the scan."""
    deadline_s = time.monotonic() + within_s
    while kill_marked(variable, {value}) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.01)


def kill_marked(variable: str, values: Collection[str]) -> int:
    """Kill this user's processes whose environment has one of ``values``; return how many.

    For processes that an agent could not end because it was killed itself. ``variable`` is
    :data:`OWNER` (boot id, pid and start time) or :data:`AGENT` (a random name): neither can match
    a process of another user or gang.
    """
    killed = 0
    for process in processes():
        if not process.has_exited and _environment(process.pid).get(variable) in values:
            send_signal(process.pid, signal.SIGKILL)
            killed += 1
    return killed
