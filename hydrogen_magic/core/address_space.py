"""The limit on the address space of a process, which Spark may set and loading a library may exceed."""

from __future__ import annotations

import resource

from hydrogen_magic.core.units import size_text

_SIGNS = (
    "failed to map segment",
    "cannot allocate memory",
    "can't allocate memory",
    "std::bad_alloc",
)
"""Parts of what the dynamic loader, the system, torch and C++ say when they get no memory."""


def limit_note(error: BaseException, message: str) -> str | None:
    """Return a sentence about the limit of this process if ``error`` with this message may be due to it.

    pyspark's ``worker.py`` sets RLIMIT_AS from ``spark.executor.pyspark.memory``. It limits mapped, not
    used memory: ``import torch`` maps several gigabytes.
    """
    text = message.lower()
    if not isinstance(error, MemoryError) and not any(sign in text for sign in _SIGNS):
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return (
        f"this process may map at most {size_text(limit)}, libraries included (RLIMIT_AS); on Spark, "
        "spark.executor.pyspark.memory sets this limit"
    )
