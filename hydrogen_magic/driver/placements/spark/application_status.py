"""The executors and jobs of a Spark application, according to Spark's own UI, in one call.

A classic session asks its JVM: the status store, which the UI reads too, and the scheduler. Through Spark
Connect, the same JSON comes from the UI's REST interface on the driver, if it can be reached.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from hydrogen_magic.driver.placements.spark import private_calls
from hydrogen_magic.driver.placements.spark.spark_session import Session

GLANCE_S = 0.5
"""How long a query may take that is repeated while a gang waits."""
_FIRST_UI_PORT = 4040
"""Default of ``spark.ui.port``."""
_N_PORTS = 16
"""Default of ``spark.port.maxRetries``: the next free port is taken."""
_ADDED = "%Y-%m-%dT%H:%M:%S.%fGMT"

_ui_ports: dict[str, int] = {}
"""Application -> address of its UI."""


@dataclass(frozen=True)
class Executor:
    """One executor that Spark may assign tasks to."""

    id: str
    """``driver`` for the single executor of a local master."""
    host: str
    cores: int
    active_tasks: int
    gpus: tuple[str, ...]
    """Addresses of the resource ``gpu``."""

    def slots(self, cpus: int, n_gpus: int) -> int:
        """Return how many tasks of this many cores and GPUs can run here at once."""
        by_cores = self.cores // cpus
        return min(by_cores, len(self.gpus) // n_gpus) if n_gpus else by_cores


@dataclass(frozen=True)
class ExecutorList:
    """All executors at one time."""

    executors: tuple[Executor, ...]
    changed_at_s: float
    """When the last executor was added or lost, initially when the application started: in seconds since
    1970 by the driver's clock."""
    at_s: float
    """Time of this query, likewise."""
    has_lost: bool = False
    """That executor was lost, and Spark may replace it."""

    @property
    def n_gpus(self) -> int:
        return sum(len(executor.gpus) for executor in self.executors)

    def slots(self, cpus: int, n_gpus: int) -> int:
        return sum(executor.slots(cpus, n_gpus) for executor in self.executors)

    def free_slots(self, cpus: int, n_gpus: int) -> int:
        """Like :meth:`slots`, without those that tasks of any job hold."""
        return sum(max(0, e.slots(cpus, n_gpus) - e.active_tasks) for e in self.executors)


def roster(session: Session, within_s: float) -> ExecutorList | None:
    """Return the executors; None if unknown (without the JVM, with the UI off or not reachable)."""
    text = None if session.is_connect else private_calls.executors(session)
    if text is not None:
        return _parsed(json.loads(text), time.time())
    found = _from_ui(session, "allexecutors", time.monotonic() + within_s)
    return None if found is None else _parsed(*found)


def _parsed(rows: Any, at_s: float) -> ExecutorList:
    alive = [row for row in rows if row["isActive"] and not row.get("isExcluded")]
    # The driver is the first one and without cores, unless it runs the tasks.
    found = tuple(_executor(row) for row in alive if row["totalCores"] > 0)
    times = [(_seconds(row[k]), k) for row in rows for k in ("addTime", "removeTime") if row.get(k)]
    changed_at_s, change = max(times, default=(at_s, ""))
    return ExecutorList(found, changed_at_s, at_s, has_lost=change == "removeTime")


def _executor(row: dict[str, Any]) -> Executor:
    gpu = row.get("resources", {}).get("gpu", {})
    return Executor(
        id=row["id"],
        host=row["hostPort"].rpartition(":")[0],
        cores=row["totalCores"],
        active_tasks=row["activeTasks"],
        gpus=tuple(gpu.get("addresses", ())),
    )


def _seconds(text: str) -> float:
    return datetime.strptime(text, _ADDED).replace(tzinfo=timezone.utc).timestamp()


# ── jobs and their tasks ─────────────────────────────────────────────────────────────────────────


def running_tasks(session: Session, tag: str) -> int | None:
    """Return how many tasks of the jobs under a tag hold slots; None if unknown.

    Through Spark Connect the number may be ten seconds old.
    """
    if not session.is_connect:
        return private_calls.running_tasks_of(session, tag)
    jobs = _jobs(session)
    return None if jobs is None else sum(job["numActiveTasks"] for job in jobs if _has(job, tag))


def other_jobs(session: Session, *tags: str) -> Mapping[str, int]:
    """Return how many tasks hold slots, by the name of their job, without the jobs under these tags.

    Empty if unknown.
    """
    if not session.is_connect:
        return private_calls.other_jobs(session, *tags) or {}
    others = [job for job in _jobs(session) or () if not any(_has(job, tag) for tag in tags)]
    return {_job_name(job): job["numActiveTasks"] for job in others if job["numActiveTasks"]}


def executors_of_tasks(session: Session, tag: str) -> Mapping[int, tuple[str, str]]:
    """Return host and id of the executor of each task under a tag that holds a slot; empty if unknown."""
    if not session.is_connect:
        text = private_calls.tasks_of(session, tag)
        tasks = [] if text is None else json.loads(text)
    else:
        jobs = [job for job in _jobs(session) or () if _has(job, tag)]
        stages = {stage for job in jobs for stage in job["stageIds"]}
        lists = (f"stages/{stage}/0/taskList?length={private_calls.MOST_TASKS}" for stage in stages)
        found = (_from_ui(session, path, time.monotonic() + GLANCE_S) for path in lists)
        tasks = [task for answer in found if answer is not None for task in answer[0]]
    running = (task for task in tasks if task["status"] == "RUNNING")
    return {task["index"]: (task["host"], task["executorId"]) for task in running}


def _jobs(session: Session) -> list[dict[str, Any]] | None:
    found = _from_ui(session, "jobs?status=running", time.monotonic() + GLANCE_S)
    return None if found is None else found[0]


def _has(job: Mapping[str, Any], tag: str) -> bool:
    """Return whether the tag is one of the job's: Connect puts user and session before it."""
    return bool(tag) and any(each.endswith(tag) for each in job.get("jobTags", ()))


def _job_name(job: Mapping[str, Any]) -> str:
    return f"job {job['jobId']} ({job.get('description') or job['name']})"


# ── the UI ────────────────────────────────────────────────────────────────────


def _from_ui(session: Session, path: str, deadline_s: float) -> tuple[Any, float] | None:
    """Return the JSON at a path below the application's, and its time by the driver's clock."""
    conf = session.spark.conf
    if conf.get("spark.ui.enabled", "true") == "false":
        return None
    first = int(conf.get("spark.ui.port", str(_FIRST_UI_PORT)))
    known = _ui_ports.get(session.application)
    ports = [known] if known is not None else range(first, first + _N_PORTS)
    hosts = dict.fromkeys((session.server_host(), conf.get("spark.driver.host", "")))
    for host in filter(None, hosts):
        for port in ports:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            try:
                found = _ask(host, port, f"{session.application}/{path}", left_s)
            except (ConnectionRefusedError, http.client.HTTPException, ValueError):
                continue  # no server, or not a UI
            except OSError:
                break  # no route to this host
            if found is not None:
                _ui_ports[session.application] = port
                return found
    return None


def _ask(host: str, port: int, path: str, timeout_s: float) -> tuple[Any, float] | None:
    """Return the answer of the UI there; None if it belongs to another application."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", f"/api/v1/applications/{path}")
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != http.HTTPStatus.OK:
            return None
        date = answer.headers.get("Date")
        at_s = parsedate_to_datetime(date).timestamp() if date else time.time()
        return json.loads(body), at_s
    finally:
        connection.close()
