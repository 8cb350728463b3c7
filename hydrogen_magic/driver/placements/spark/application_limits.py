"""The maximum size of an application on its cluster, if it is configured or can be determined.

Executors start one by one, over seconds or minutes. A gang that is too large even for all of them is
refused without waiting for the last one.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from hydrogen_magic.driver.placements.spark.session import Session
from hydrogen_magic.driver.placements.spark.session_settings import SessionSettings

_SPLITS = re.compile(r"\bRange\b.*\bsplits=(?:Some\()?(\d+)")
_MASTER = "org.apache.spark.deploy.DeployMessages"
_GUESS = 2
"""Spark's number of cores if there are fewer."""


def most_cores(session: Session, settings: SessionSettings) -> int | None:
    """Return the maximum number of cores of the application's executors; None if unknown."""
    known = [settings.most_cores]
    if not session.is_connect and settings.master.startswith("spark://"):
        known.append(_cores_of_workers(session, settings.master))
    return min((cores for cores in known if cores is not None), default=None)


def registered_cores(session: Session, settings: SessionSettings) -> int | None:
    """Return the current number of cores of all executors, by the number of partitions of a range.

    Every session provides this number, even if the UI is off or not reachable: it is in a query plan,
    without running a job (``CoarseGrainedSchedulerBackend.defaultParallelism``). None if a setting
    overrides it.
    """
    if settings.has_own_parallelism:
        return None
    (plan,) = session.spark.sql("EXPLAIN SELECT id FROM range(1)").collect()
    found = _SPLITS.search(plan[0])
    return int(found[1]) if found and int(found[1]) > _GUESS else None


# ── a standalone master ──────────────────────────────────────────────────────────────────────────


def _cores_of_workers(session: Session, master: str) -> int | None:
    """Return the cores of a standalone cluster's living workers, as its master reports them to the driver.

    Uses Spark's own messages, which are not a public interface: None if they have changed.
    """
    try:
        workers = _ask_master(session, master)
        return sum(int(w.cores()) for w in workers if w.state().toString() == "ALIVE")
    except Exception:  # Py4J's exceptions, and Java's that pyspark translates, have no common base
        return None


def _ask_master(session: Session, master: str) -> Any:
    """Return the master's ``WorkerInfo`` objects. It does not report usage by other applications."""
    jvm = session.spark.sparkContext._jvm
    java = jvm.java.lang.Class.forName
    first = urlsplit(master.partition(",")[0])
    address = jvm.org.apache.spark.rpc.RpcAddress(first.hostname, first.port)
    question = java(f"{_MASTER}$RequestMasterState$").getField("MODULE$").get(None)
    answer = jvm.scala.reflect.ClassTag.apply(java(f"{_MASTER}$MasterStateResponse"))
    return (
        _rpc(session, jvm).setupEndpointRef(address, "Master").askSync(question, answer).workers()
    )


def _rpc(session: Session, jvm: Any) -> Any:
    """Return ``SparkEnv.rpcEnv``, by a handle to this one method.

    Py4J would inspect all methods of the class, one of which refers to a class that pyspark's jars contain
    only under another name; that breaks Py4J's connection.
    """
    java, handles = jvm.java.lang.Class.forName, jvm.java.lang.invoke
    kind = handles.MethodType.methodType(java("org.apache.spark.rpc.RpcEnv"))
    environment = java("org.apache.spark.SparkEnv")
    method = handles.MethodHandles.publicLookup().findVirtual(environment, "rpcEnv", kind)
    receiver = jvm.java.util.ArrayList()
    receiver.add(session.context().env())
    return method.invokeWithArguments(receiver)
