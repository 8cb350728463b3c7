"""The process that owns a gang, as records name it, and whether it still runs."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from hydrogen_magic.core import processes


def owner_of_this_process() -> str:
    """Return ``machine:pid:start time``, which is unique to this process.

    ``machine`` is the boot id and the pid namespace: pids are only valid within their namespace.
    """
    return _owner(os.getpid())


@functools.cache
def _owner(pid: int) -> str:
    return f"{this_machine()}:{pid}:{_start_time(pid)}"


def is_alive(owner: str) -> bool:
    """True if ``owner`` (as made by :func:`owner_of_this_process`) runs on this machine."""
    machine, _, process = owner.rpartition(":")[0].rpartition(":")
    if machine != this_machine() or not process.isdigit():
        return False
    return _start_time(int(process)) == owner.rpartition(":")[2]


def is_stopped(owner: str) -> bool:
    """Whether ``owner`` runs on this machine and is stopped (SIGSTOP)."""
    found = next(processes.processes([pid_of(owner)]), None) if is_alive(owner) else None
    return found is not None and found.state == "T"


def pid_of(owner: str) -> int:
    """Return the pid of ``owner`` on its machine."""
    return int(owner.rsplit(":", 2)[1])


def machine_of(owner: str) -> str:
    """Return the machine of ``owner``; compare it with :func:`this_machine`."""
    return owner.rpartition(":")[0].rpartition(":")[0]


def this_machine() -> str:
    """Return the id of this boot of the machine, and of the pid namespace."""
    return f"{_boot_id()}/{os.stat('/proc/self/ns/pid').st_ino}"


def _boot_id() -> str:
    """Return the id of this boot of the machine; some sandboxes hide ``/proc/sys``."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        lines = Path("/proc/stat").read_text().splitlines()
        booted_at = next((line.split()[1] for line in lines if line.startswith("btime ")), "")
        return f"{os.uname().nodename}@{booted_at}"


def _start_time(pid: int) -> str:
    """Return the start time of the process, in ticks since the boot; empty if it has exited."""
    found = next(processes.processes([pid]), None)
    return "" if found is None or found.has_exited else str(found.start_ticks)
