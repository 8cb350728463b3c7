"""The limit on the address space of a process, which Spark may set and loading a library may exceed."""

from __future__ import annotations

import resource
from collections.abc import Mapping

from hydrogen_magic.core.units import size_text

_SIGNS = (
    "failed to map segment",
    "cannot allocate memory",
    "can't allocate memory",
    "can't start new thread",
    "std::bad_alloc",
)
"""Parts of what the dynamic loader, the system, Python, torch and C++ say when they get no memory."""
_SPARK_LIMIT = "PYSPARK_EXECUTOR_MEMORY_MB"
"""Environment variable of Python workers whose limit pyspark's ``worker.py`` has set."""
_LOADER_FAILED = 127
"""Exit status by which glibc's loader ends a process if it cannot load all of a library."""


def raise_limit_of_workers(environment: Mapping[str, str]) -> None:
    """Remove the limit of a Python worker of Spark from this process, or raise it to its hard limit.

    pyspark's ``worker.py`` sets the soft and the hard limit from ``spark.executor.pyspark.memory``. Only a
    process with CAP_SYS_RESOURCE may raise the hard limit. Other limits are those of a user or an
    administrator, and stay. ``environment``: of the worker.
    """
    if _SPARK_LIMIT not in environment:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    for limit in (resource.RLIM_INFINITY, hard):
        try:
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        except (OSError, ValueError):  # Python raises ValueError where the system says EPERM
            continue
        return


def limit_note(error: BaseException, message: str) -> str | None:
    """Return a sentence about the limit of this process if ``error`` with this message may be due to it.

    It limits mapped, not used memory: ``import torch`` maps up to several gigabytes.
    """
    text = message.lower()
    if isinstance(error, MemoryError) or any(sign in text for sign in _SIGNS):
        return _limit_text()
    return None


def exit_note(exit_code: int | None, signal_name: str) -> str | None:
    """Return the same for a rank of this agent, which has its limit, that ended in this way."""
    if exit_code == _LOADER_FAILED or signal_name in ("SIGABRT", "SIGBUS", "SIGSEGV"):
        return _limit_text()
    return None


def _limit_text() -> str | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return (
        f"the address space of this process is limited to {size_text(limit)}, libraries included "
        "(RLIMIT_AS), which may be the cause; on Spark, spark.executor.pyspark.memory sets this limit: "
        "start the session without it, or with a larger value"
    )
