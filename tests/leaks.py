"""What a test may not leave behind: processes, threads, descriptors, sockets, memory, run records.

A :class:`Snapshot` is taken before a test and compared after it. Only what belongs to this test
session is judged: everything it starts inherits :data:`SESSION` in its environment, so that a
neighbour's processes on a shared machine are never taken for ours, and ours are found even when
nothing else connects them with us.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path

LENT = "HYDROGEN_MAGIC_TEST_CLUSTER"
"""Environment variable of the processes of a cluster that is lent to tests; not what a gang left."""
SESSION = "HYDROGEN_MAGIC_TEST_SESSION"
"""Environment variable that marks everything this test session starts."""

_COOKIES = ("HYDROGEN_MAGIC_RUN", "HYDROGEN_MAGIC_OWNER")
_POLL_S = 0.02
_SHM = Path("/dev/shm")
_LISTEN = "0A"
"""State of a listening TCP socket in ``/proc/net/tcp``."""
_ACCEPTS = 0x10000
"""Flag of a listening Unix socket in ``/proc/net/unix`` (``__SO_ACCEPTCON``)."""


def mark_session() -> None:
    """Mark this process's environment; what it starts inherits the mark."""
    # Python starts one tracker per process, on first use, and keeps its pipe: not a test's leak.
    resource_tracker.ensure_running()
    os.environ.setdefault(SESSION, f"{_boot_id()}:{os.getpid()}:{time.monotonic_ns()}")


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# ── processes ────────────────────────────────────────────────────────────────────────────────────


def _stat(pid: int) -> tuple[int, str] | None:
    """Return parent and state of a process, None when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    rest = text[text.rindex(")") + 2 :].split()
    return int(rest[1]), rest[0]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def tree(root: int) -> set[int]:
    """Return what descends from ``root``, without it and without zombies."""
    children: dict[int, list[int]] = {}
    zombies = set()
    for pid in _pids():
        stat = _stat(pid)
        if stat is not None:
            children.setdefault(stat[0], []).append(pid)
            if stat[1] == "Z":
                zombies.add(pid)
    found: set[int] = set()
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found.update(below)
        queue.extend(below)
    return found - zombies


def _environ(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in raw.split(b"\0"))
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def command(pid: int) -> str:
    """Return the command line of a process, empty when it is gone."""
    try:
        return os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).replace("\0", " ").strip()
    except OSError:
        return ""


def _is_ours(environment: dict[str, str]) -> bool:
    owner = environment.get("HYDROGEN_MAGIC_OWNER", "").split(":")
    return environment.get(SESSION) == os.environ.get(SESSION) or owner[:2] == [
        _boot_id(),
        str(os.getpid()),
    ]


def is_agent(pid: int) -> bool:
    """True for a process that runs the agent (or was forked from one)."""
    return "hydrogen_magic.agent" in command(pid)


def gang_processes() -> set[int]:
    """Return what gangs of this session left running, orphans included, zombies not."""
    below = tree(os.getpid())
    found = set()
    for pid in _pids():
        stat = _stat(pid)
        if pid == os.getpid() or stat is None or stat[1] == "Z":
            continue
        environment = _environ(pid)
        belongs = pid in below or _is_ours(environment)
        if belongs and (is_agent(pid) or any(name in environment for name in _COOKIES)):
            found.add(pid)
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


def listening() -> set[str]:
    """Return the sockets that this process and its descendants listen on, without lent clusters."""
    ours = {os.getpid()} | {pid for pid in tree(os.getpid()) if not is_lent(pid)}
    inodes = {
        link[len("socket:[") : -1]
        for pid in ours
        for link in _links(pid)
        if link.startswith("socket:[")
    }
    found = set()
    for table in ("tcp", "tcp6"):
        for fields in _rows(table):
            if fields[3] == _LISTEN and fields[9] in inodes:
                found.add(f"{table} port {int(fields[1].rpartition(':')[2], 16)}")
    for fields in _rows("unix"):
        if int(fields[3], 16) & _ACCEPTS and fields[6] in inodes:
            found.add(f"unix socket {' '.join(fields[7:]) or fields[6]}")
    return found


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


def _held_by_others(names: Iterable[str]) -> set[str]:
    """Of these names in ``/dev/shm``, return those that a process of somebody else has mapped."""
    wanted = {f"{_SHM}/{name}": name for name in names}
    held: set[str] = set()
    if not wanted:
        return held
    ours = {os.getpid()} | tree(os.getpid())
    for pid in set(_pids()) - ours:
        if _is_ours(_environ(pid)):
            continue
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            held.update(name for path, name in wanted.items() if path in maps)
    return held


def default_runs_dir() -> Path:
    """Return where run records go when nobody says otherwise: not a place for tests."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "hydrogen_magic" / "runs"


def run_records() -> set[str]:
    """Return the records in the user's own runs directory that this process owns."""
    mine = f"{_boot_id()}:{os.getpid()}:"
    return {
        path.parent.name
        for path in default_runs_dir().glob("*/events.jsonl")
        if mine in _head(path)
    }


def _head(path: Path) -> str:
    with contextlib.suppress(OSError), path.open() as lines:
        return lines.readline()
    return ""


# ── before and after ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Snapshot:
    """What there was at one moment."""

    processes: frozenset[int]
    threads: frozenset[threading.Thread]
    descriptors: Counter[str]
    listening: frozenset[str]
    shared_memory: frozenset[str]
    records: frozenset[str]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(
            processes=frozenset(gang_processes()),
            threads=frozenset(suspicious_threads()),
            descriptors=descriptors(),
            listening=frozenset(listening()),
            shared_memory=frozenset(shared_memory()),
            records=frozenset(run_records()),
        )


def leaks(before: Snapshot) -> list[str]:
    """Return one line for each thing that is there now and was not there before."""
    now = Snapshot.take()
    found = [f"process {pid}: {command(pid)}" for pid in sorted(now.processes - before.processes)]
    found += [f"thread {t.name} (daemon={t.daemon})" for t in now.threads - before.threads]
    for kind, count in sorted((now.descriptors - before.descriptors).items()):
        found.append(f"{count} more open descriptor(s) of kind {kind}")
    found += [f"listening: {name}" for name in sorted(now.listening - before.listening)]
    new = now.shared_memory - before.shared_memory
    found += [f"/dev/shm/{name}" for name in sorted(new - _held_by_others(new))]
    found += [f"run record {name} in the user's own state" for name in now.records - before.records]
    return found


def leaks_after(before: Snapshot, within_s: float = 2.0) -> list[str]:
    """Give what is on its way out ``within_s`` seconds to go, then return what is still there."""
    return settle(lambda: leaks(before), within_s)


def settle(check: Callable[[], list[str]], within_s: float) -> list[str]:
    """Repeat ``check`` until it finds nothing or the time is up; return its last findings."""
    deadline = time.monotonic() + within_s
    found = check()
    if found:
        gc.collect()  # a socket in a reference cycle is rubbish, not a leak
    while found and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        found = check()
    return found


# ── the package's own doors, without importing what a test did not import ────────────────────────


def end_warm_agents() -> None:
    """End the agents that are kept warm, if the package was ever asked for one."""
    agents = sys.modules.get("hydrogen_magic.placements.agents")
    if agents is not None:
        agents.close()


def running_gangs() -> list[str]:
    """Return one line for each gang of this process that has not ended."""
    run = sys.modules.get("hydrogen_magic.runner")
    if run is None:
        return []
    over = ("SUCCEEDED", "FAILED", "STOPPED")
    return [f"gang {g.id} is {g.state}" for g in run.gangs().values() if g.state not in over]
