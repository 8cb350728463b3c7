"""How children of the agent end."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import suppress
from dataclasses import dataclass

from hydrogen_magic.core import processes

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PRECISION = 0.9
"""Linux compares another measure of the time with the limit, which differs by a few percent."""


@dataclass(frozen=True)
class ChildExit:
    """How a child has ended."""

    status: int
    """As of ``waitpid``."""
    max_rss_bytes: int = 0
    has_reached_cpu_limit: bool = False
    """Linux ended it because its CPU time had reached its limit."""


def reap() -> tuple[int, ChildExit] | None:
    """Reap a child that has exited and return its pid and how it ended; None if there is none."""
    try:
        # A process that is not reaped still has its limits, which it may have set itself.
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if found is None:
        return None
    pid, signum = found.si_pid, 0 if found.si_code == os.CLD_EXITED else found.si_status
    has_reached = signum == signal.SIGXCPU or (signum == signal.SIGKILL and _is_at_limit(pid))
    _, status, usage = os.wait4(pid, 0)
    # Linux gives ru_maxrss in KiB (getrusage(2)).
    return pid, ChildExit(status, usage.ru_maxrss << 10, has_reached)


def _is_at_limit(pid: int) -> bool:
    """Return whether the CPU time of a process has reached the hard limit, at which Linux sends SIGKILL."""
    with suppress(OSError):  # a sandbox may refuse it
        _, limit = resource.prlimit(pid, resource.RLIMIT_CPU)
        used = sum(found.cpu_ticks for found in processes.processes([pid])) / _TICKS_PER_S
        return limit != resource.RLIM_INFINITY and used >= limit * _PRECISION
    return False
