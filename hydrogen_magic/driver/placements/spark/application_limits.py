"""The maximum size of an application on its cluster, if it is configured or can be determined.

Executors start one by one, over seconds or minutes. A gang that is too large even for all of them is
refused without waiting for the last one.
"""

from __future__ import annotations

import re

from hydrogen_magic.driver.placements.spark import private_calls
from hydrogen_magic.driver.placements.spark.session import Session
from hydrogen_magic.driver.placements.spark.session_settings import SessionSettings

_PARALLELISM = ("spark.default.parallelism", "spark.sql.leafNodeDefaultParallelism")
_SPLITS = re.compile(r"\bRange\b.*\bsplits=(?:Some\()?(\d+)")
_GUESS = 2
"""Spark's number of cores if there are fewer."""


def most_cores(session: Session, settings: SessionSettings) -> int | None:
    """Return the maximum number of cores of the application's executors; None if unknown."""
    known = [settings.most_cores]
    if not session.is_connect and settings.master.startswith("spark://"):
        known.append(private_calls.cores_of_workers(session, settings.master))
    return min((cores for cores in known if cores is not None), default=None)


def registered_cores(session: Session) -> int | None:
    """Return the current number of cores of all executors, by the number of partitions of a range.

    Every session provides this number, even if the UI is off or not reachable: it is in a query plan,
    without running a job (``CoarseGrainedSchedulerBackend.defaultParallelism``). None if a setting
    overrides it.
    """
    settings = (session.spark.conf.get(name, None) for name in _PARALLELISM)
    if any(value is not None for value in settings):
        return None
    (plan,) = session.spark.sql("EXPLAIN SELECT id FROM range(1)").collect()
    found = _SPLITS.search(plan[0])
    return int(found[1]) if found and int(found[1]) > _GUESS else None
