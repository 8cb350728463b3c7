"""Records of runs, as tests write them."""

from __future__ import annotations

import contextlib
import math
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import run_log


def launched(gang: str, wall_time: float = 0.0, owner: str | None = None) -> ev.GangLaunched:
    owner = run_log.owner_of_this_process() if owner is None else owner
    return ev.GangLaunched(0.0, gang, "%%distributed", 2, "local", "torch", wall_time, owner, {})


def write(gang: str, *events: ev.Event) -> Path:
    made = run_log.Record.create(gang, pytest.fail)
    for event in events:
        made.append(event)
    made.close()
    return made.path


@contextlib.contextmanager
def disk_full_at(n_bytes: int) -> Iterator[None]:
    """Files of this process cannot become longer, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


DEAD = f"{run_log.owner_of_this_process().rsplit(':', 2)[0]}:1:{2**62}"
"""An owner on this machine that has ended: no process starts that late."""
ENDED = ev.GangEnded(9.0, "SUCCEEDED", "")
METRICS = ev.Metrics(1.0, 0, (0,), (0.5,), {"loss": (math.inf,), "ü\ud800": (None,)})
