"""Finished partitions in Spark's cache, so that ``--resume`` continues a run without a shared disk.

See :mod:`~hydrogen_magic.inference.spark.kept_partitions` for the usual way. Spark has cached every
partition that was done when a run failed or was stopped. A resumed run counts the same cached DataFrame, for
which Spark predicts only the other partitions. The cache ends with the Spark application: with a classic
session, when its kernel ends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hydrogen_magic.capture.values import Captured
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver.placements.spark.spark_session import plan_hash
from hydrogen_magic.errors import InferError
from hydrogen_magic.inference import fingerprints
from hydrogen_magic.node.prediction.options import InferOptions

PLAN = "the DataFrame's plan"
"""Entry of a fingerprint that only holds for one Spark application."""
_ZONE = "spark.sql.session.timeZone"
"""In which ``predict`` gets the times of a frame."""
_WITH_ZONE = re.compile("timestamp(?!_ntz)")
_MAX_RUNS = 4
"""They use the memory and the disks of executors."""


@dataclass(frozen=True)
class CachedRun:
    """A run that has not finished."""

    gang: str
    prints: Mapping[str, str]
    frame: Any
    """Its result, of which Spark has cached some partitions."""
    application: str


_runs: list[CachedRun] = []
"""Oldest first."""


def fingerprint(
    frame: Any, captured: Captured, spec: JobSpec, options: InferOptions
) -> dict[str, str]:
    """Return what the result depends on, by its name for the user."""
    columns = [(field.name, field.dataType.simpleString()) for field in frame.schema.fields]
    return {
        **fingerprints.of_cell(captured),
        **fingerprints.of_options(options, spec.env),
        **fingerprints.of_columns(columns),
        **_time_zone(frame, columns),
        PLAN: str(plan_hash(frame)),
        "--columns": ",".join(options.kept(frame.columns)),
    }


def _time_zone(frame: Any, columns: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the zone in which ``predict`` gets times, if the frame has any."""
    if not any(_WITH_ZONE.search(kind) for _, kind in columns):
        return {}
    return {_ZONE: str(frame.sparkSession.conf.get(_ZONE))}


def find(
    prints: Mapping[str, str], application: str, *, refuses_changes: bool = True
) -> CachedRun | None:
    """Return the run to resume, None if there is none.

    If there are only changed runs, raises InferError with what changed, or returns None without
    ``refuses_changes``.
    """
    runs = [run for run in reversed(_runs) if run.application == application]
    try:
        return fingerprints.matching(prints, [(run.gang, run, run.prints) for run in runs])
    except InferError:
        if refuses_changes:
            raise
        return None


def keep(run: CachedRun) -> None:
    """Keep a run that has failed or was stopped; forget the oldest one if there are many."""
    _runs[:] = [other for other in _runs if other.frame is not run.frame]
    _runs.append(run)
    for old in _runs[:-_MAX_RUNS]:
        _release(old)


def forget(prints: Mapping[str, str], *, result: Any = None) -> None:
    """Release the runs with this fingerprint, except the DataFrame that is the user's ``result`` now."""
    for run in [run for run in _runs if run.prints == prints]:
        if run.frame is result:
            _runs.remove(run)
        else:
            _release(run)


def _release(run: CachedRun) -> None:
    _runs.remove(run)
    with suppress(Exception):  # the application has ended
        run.frame.unpersist()
