"""What Linux offers to own processes whole: subreaper, parent-death signal, and the tree in ``/proc``.

Never by name and never a pid that was not started here: everything that descends from an agent is
its gang's, because orphans of the gang are re-parented to the agent (``PR_SET_CHILD_SUBREAPER``).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "AGENT",
    "COOKIE",
    "OWNER",
    "Process",
    "become_subreaper",
    "descendants",
    "die_with_parent",
    "end_descendants",
    "end_marked",
    "family",
    "use_batch_scheduling",
    "is_sending",
    "is_tracker",
    "oom_kills",
    "processes",
    "send_signal",
    "sweep_orphans",
    "unlink_shared_memory",
]

COOKIE = "HYDROGEN_MAGIC_RUN"
"""Environment variable of everything a gang starts: the gang's id. Identifies, proves nothing."""
OWNER = "HYDROGEN_MAGIC_OWNER"
"""The kernel behind it all, as ``record.owner_of_this_process`` names it; agents start with it."""
AGENT = "HYDROGEN_MAGIC_AGENT"
"""The agent behind it; agents start with it. What they fork shows the environment they started with."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return  # elsewhere the agent's own watch is all there is
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def become_subreaper() -> None:
    """Make orphans among this process's descendants its own children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def use_batch_scheduling() -> None:
    """Have this thread, and what it starts, wait for its turn when it wakes up (``SCHED_BATCH``).

    It gets its share of a core all the same, somewhat later. Ranks wait for each other in every step, so
    whatever interrupts one holds up all. With two ranks on two cores a training step of 3.5 ms took 0.75
    of the time; with agents alone it took as long as before. Nothing happens where the system has no
    such thing, or somebody decided otherwise.
    """
    if sys.platform == "linux":
        with suppress(OSError):  # musl has neither call, a sandbox may forbid them
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def die_with_parent() -> None:
    """Have the system kill this process when the thread that is its parent ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True)
class Process:
    """A line of ``/proc/<pid>/stat``."""

    pid: int
    ppid: int
    state: str
    """R running, S sleeping, D uninterruptible, T stopped, Z zombie."""
    cpu_ticks: int
    """User and system time, children not included."""
    rss_bytes: int


_PAGE = os.sysconf("SC_PAGE_SIZE")


def _read_stat(pid: int) -> Process | None:
    """Return the process, or None when it is gone (or there is no ``/proc``)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may hold spaces and parentheses itself: what follows it does not.
    rest = text[text.rindex(")") + 2 :].split()
    cpu_ticks = int(rest[11]) + int(rest[12])
    return Process(pid, int(rest[1]), rest[0], cpu_ticks, int(rest[21]) * _PAGE)


def processes(pids: Collection[int] | None = None) -> Iterator[Process]:
    """Yield the processes of this machine that can be seen, or those of ``pids`` that still exist."""
    if pids is None:
        try:
            pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        except FileNotFoundError:
            pids = []
    for pid in pids:
        found = _read_stat(pid)
        if found is not None:
            yield found


def descendants(root: int, spare: Collection[int] = ()) -> list[Process]:
    """Return what descends from ``root``, zombies left out; ``spare`` and what is below it too."""
    children: dict[int, list[Process]] = {}
    for process in processes():
        children.setdefault(process.ppid, []).append(process)
    found: list[Process] = []
    queue = [root]
    while queue:
        for process in children.get(queue.pop(), ()):
            if process.pid not in spare:
                queue.append(process.pid)
                if process.state != "Z":
                    found.append(process)
    return found


_TRACKER_S = 2.0
"""Shared-memory trackers end by themselves when their clients are gone; longer means they hang."""


async def end_descendants(
    root: int, within_s: float, spare: Callable[[], Collection[int]] = tuple
) -> tuple[set[int], list[Process]]:
    """Kill what descends from ``root`` until nothing is left; ``spare`` as for :func:`descendants`.

    Returns the pids of all processes that were seen, and the processes left after ``within_s``.
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
    """True for the helpers that unlink shared memory once their clients are gone.

    Killed together with their clients they leave files in ``/dev/shm``; left alone they end by
    themselves within moments.
    """
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"multiprocessing.resource_tracker" in command or b"torch_shm_manager" in command


def family(root: int) -> set[int]:
    """Return ``root`` and what descends from it now, quickly: one file read for each.

    May miss a process that is being born or re-parented; :func:`descendants` misses none.
    """
    found: set[int] = set()
    queue = [root]
    while queue:
        pid = queue.pop()
        found.add(pid)
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            continue  # gone, or a system that does not tell
        queue += [int(child) for child in children]
    return found


_TORCH_SHARED = re.compile(r"torch_(\d+)_\d+_\d+")


def unlink_shared_memory(pids: Collection[int], since: float) -> None:
    """Remove what torch left in ``/dev/shm`` when these processes, all dead, were killed.

    torch tells its manager of a file after it has made it, so a process killed in between leaves it
    for good. The name holds the pid of the maker; ``since`` (Unix time) guards against older files
    of another process that had that pid.
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
            if status.st_uid == os.geteuid() and status.st_mtime >= since:
                os.unlink(entry.path)
        except FileNotFoundError:
            continue  # its manager was faster


def send_signal(pid: int, signum: int) -> None:
    """Send ``signum`` unless the process has gone meanwhile."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass


def is_sending(pids: Collection[int]) -> bool:
    """Whether a TCP socket of these processes holds data that its peer has not acknowledged."""
    waiting = {f"socket:[{inode}]" for inode in _unacknowledged()}
    return bool(waiting) and any(link in waiting for pid in pids for link in _open_files(pid))


def _unacknowledged() -> Iterator[str]:
    """Yield the inodes of TCP sockets with a transmit queue (proc_net_tcp.rst)."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for row in Path(table).read_text().splitlines()[1:]:
                fields = row.split()
                if not fields[4].startswith("00000000:"):
                    yield fields[9]


def _open_files(pid: int) -> Iterator[str]:
    with suppress(OSError):  # it has ended
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{name}")


def oom_kills() -> int:
    """Return how many processes this machine's out-of-memory killer has ended since it started."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _environment(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}  # another user's, or gone
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0") if b"=" in entry)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


async def end_marked(variable: str, value: str, within_s: float) -> None:
    """Repeat :func:`sweep_orphans` until nothing is left: a process may fork while it is looked for."""
    deadline_s = time.monotonic() + within_s
    while sweep_orphans(variable, {value}) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.01)


def sweep_orphans(variable: str, values: Collection[str]) -> int:
    """Kill this user's processes whose environment has one of ``values``; return how many.

    For what an agent could not end because it was killed itself. ``variable`` is :data:`OWNER`
    (boot id, pid and start time) or :data:`AGENT` (a random name): neither can mean a process of
    somebody else.
    """
    killed = 0
    for process in processes():
        if process.state != "Z" and _environment(process.pid).get(variable) in values:
            send_signal(process.pid, signal.SIGKILL)
            killed += 1
    return killed
