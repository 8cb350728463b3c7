"""Gangs of tests that outlive their kernel: what they run, and what their record says."""

from __future__ import annotations

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import run_log

TRAINING = """
import pathlib, time
import hydrogen_magic as hm
print("begins", flush=True)
for step in hm.track(range(10_000), desc="epoch"):
    with hm.span("forward"):
        hm.log(step=step, loss=1 / (step + 1))
    if pathlib.Path({go!r}).exists():
        break
    time.sleep(0.02)
class Model:
    weights = [step] * 3
model = Model()
hm.rank() + 41
"""
"""Trains until there is a file ``go``."""


def owner_of(gang_id: str) -> int:
    """Return the pid of the gang's owner."""
    found = run_log.summary(gang_id)
    assert found is not None
    return int(found.launched.owner.split(":")[1])


def spans(gang_id: str) -> list[float]:
    """Return the times at which the record has spans of steps, in seconds since the launch."""
    found = (event for event in run_log.read(gang_id) if isinstance(event, ev.Spans))
    return [event.at_s for event in found if "forward" in event.names]


def losses(gang_id: str, rank: int = 0) -> list[int]:
    """Return the steps that the rank's record has."""
    logged = (event for event in run_log.read(gang_id) if isinstance(event, ev.Metrics))
    return [step for event in logged if event.rank == rank for step in event.steps]
