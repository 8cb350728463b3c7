"""The executors of a Spark application, according to Spark's own UI, in one call.

A classic session asks the status store of its JVM, which the UI reads too. Through Spark Connect, the same
JSON comes from the UI's REST interface on the driver, if it can be reached.
"""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any

from hydrogen_magic.driver.placements.spark import private_calls
from hydrogen_magic.driver.placements.spark.session import Session

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
        return _parsed(text, time.time())
    return _from_ui(session, time.monotonic() + within_s)


def _parsed(text: str, at_s: float) -> ExecutorList:
    rows = json.loads(text)
    alive = [row for row in rows if row["isActive"] and not row.get("isExcluded")]
    # The driver is the first one and without cores, unless it runs the tasks.
    found = tuple(_executor(row) for row in alive if row["totalCores"] > 0)
    changes = [row[key] for row in rows for key in ("addTime", "removeTime") if row.get(key)]
    return ExecutorList(found, max(map(_seconds, changes), default=at_s), at_s)


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


# ── the UI ────────────────────────────────────────────────────────────────────


def _from_ui(session: Session, deadline_s: float) -> ExecutorList | None:
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
                found = _ask(host, port, session.application, left_s)
            except (ConnectionRefusedError, http.client.HTTPException, ValueError):
                continue  # no server, or not a UI
            except OSError:
                break  # no route to this host
            if found is not None:
                _ui_ports[session.application] = port
                return found
    return None


def _ask(host: str, port: int, application: str, timeout_s: float) -> ExecutorList | None:
    """Return the answer of the UI there; None if it belongs to another application."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", f"/api/v1/applications/{application}/allexecutors")
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != http.HTTPStatus.OK:
            return None
        date = answer.headers.get("Date")
        at_s = parsedate_to_datetime(date).timestamp() if date else time.time()
        return _parsed(body.decode(), at_s)
    finally:
        connection.close()
