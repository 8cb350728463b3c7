"""The limit of open files of a process (RLIMIT_NOFILE), looked at before a launch would reach it.

Libraries that reach it during a launch fail in many ways; libzmq ends the process.
"""

from __future__ import annotations

import errno
import os
import resource


class LimitError(OSError):
    """This process cannot open as many files as it needs."""


def check(needed: int, what: str) -> None:
    """Raise LimitError unless this process may open ``needed`` more files for ``what``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    n_open = _n_open(soft)
    if soft == resource.RLIM_INFINITY or soft - n_open >= needed:
        return
    # A process may raise its soft limit to the hard one by itself.
    is_raisable = hard == resource.RLIM_INFINITY or hard > soft
    by_itself = f"`resource.setrlimit(resource.RLIMIT_NOFILE, ({hard}, {hard}))`"
    remedy = by_itself if is_raisable else "`ulimit -n` before the notebook server starts"
    raise LimitError(
        errno.EMFILE,
        f"{what} needs {needed} more open files; this process has {n_open} of at most {soft} "
        f"(RLIMIT_NOFILE): close files, or raise the limit with {remedy}",
    )


def are_scarce() -> bool:
    """Return whether this process has more than half of the files open that it may."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft != resource.RLIM_INFINITY and _n_open(soft) > soft // 2


def explained(error: BaseException) -> str:
    """Return the message of ``error``, with the name of the limit where it was reached."""
    if isinstance(error, LimitError):
        return str(error.strerror)
    if not isinstance(error, OSError) or error.errno != errno.EMFILE:
        return str(error)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"{error}: the process has reached its limit of {soft} open files (RLIMIT_NOFILE)"


def _n_open(if_full: int) -> int:
    """Return how many files this process has open."""
    try:
        n_open = os.stat("/proc/self/fd").st_size  # since Linux 6.2, see proc_pid_fd(5)
        return n_open or len(os.listdir("/proc/self/fd")) - 1  # without the directory itself
    except OSError:  # not even the directory can be opened
        return if_full
