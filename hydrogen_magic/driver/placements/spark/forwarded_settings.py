"""Settings of libraries, forwarded from the notebook to executors; Horovod's timeline, copied back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hydrogen_magic.core.job import DYNAMIC, HOROVOD_TIMELINE, RENDEZVOUS_VARIABLES
from hydrogen_magic.driver.placements import Attempt, Job
from hydrogen_magic.horovod.node.timeline_follower import GIVEN, path_prefix
from hydrogen_magic.node.worker import sparkdl

__all__ = ["environment", "forwarded", "leave_timeline"]

_PREFIXES = ("GLOO_", "HOROVOD_", "NCCL_", "OMP_", "TORCH_", sparkdl.VARIABLE)


def forwarded(environ: Mapping[str, str] = os.environ) -> tuple[tuple[str, str], ...]:
    """Return the notebook's variables that ranks on executors get too."""
    names = (name for name in environ if name.startswith(_PREFIXES))
    return tuple(
        (name, environ[name]) for name in sorted(names) if name not in RENDEZVOUS_VARIABLES
    )


def environment(job: Job) -> dict[str, str]:
    """Return the variables for a job's ranks: of the notebook, and of ``--env``, which takes precedence."""
    return {**dict(job.plan.forwarded), **dict(job.spec.env)}


def leave_timeline(attempt: Attempt) -> str:
    """Copy the timeline of an attempt to the path in ``HOROVOD_TIMELINE``, relative to the notebook.

    It was written on rank 0's host and is in the gang's record. Returns an error message, or an empty text.
    """
    path = environment(attempt.job).get(HOROVOD_TIMELINE, DYNAMIC)
    written = Path(f"{path_prefix(str(attempt.job.record_dir), attempt.number)}{GIVEN}.json")
    if path == DYNAMIC or not written.exists():
        return ""
    try:
        shutil.copyfile(written, path)
    except OSError as error:
        return (
            f"Horovod's timeline cannot be copied to HOROVOD_TIMELINE: {error}; it is in {written}"
        )
    return ""
