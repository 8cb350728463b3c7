"""How large an application can become on its cluster, where somebody has said so or can be asked.

Executors come one by one, over seconds or minutes. A gang that is too large even for all of them
need not wait for the last to be refused.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from hydrogen_magic.driver.placements.spark.session import Session
from hydrogen_magic.driver.placements.spark.session_settings import SessionSettings

__all__ = ["most_cores", "registered_cores"]

_SPLITS = re.compile(r"\bRange\b.*\bsplits=(?:Some\()?(\d+)")
_MASTER = "org.apache.spark.deploy.DeployMessages"
_GUESS = 2
"""What Spark takes for the number of cores where there are fewer."""


def most_cores(session: Session, settings: SessionSettings) -> int | None:
    """Return how many cores the application's executors can have at most; None where unknown."""
    known = [settings.most_cores]
    if not session.is_connect and settings.master.startswith("spark://"):
        known.append(_cores_of_workers(session, settings.master))
    return min((cores for cores in known if cores is not None), default=None)


def registered_cores(session: Session, settings: SessionSettings) -> int | None:
    """Return how many cores all executors have now, by the number of parts that Spark cuts a range in.

    It is the one thing about them that every session tells, the UI out of reach or off: a plan shows
    it, and no job runs (``CoarseGrainedSchedulerBackend.defaultParallelism``). None where a setting
    says another number.
    """
    if settings.has_own_parallelism:
        return None
    (plan,) = session.spark.sql("EXPLAIN SELECT id FROM range(1)").collect()
    found = _SPLITS.search(plan[0])
    return int(found[1]) if found and int(found[1]) > _GUESS else None


# ── a standalone master ──────────────────────────────────────────────────────────────────────────


def _cores_of_workers(session: Session, master: str) -> int | None:
    """Return the cores of a standalone cluster's living workers, as its master tells the driver.

    By Spark's own messages, which are no public interface: None where they are not what they were.
    """
    try:
        workers = _ask_master(session, master)
        return sum(int(w.cores()) for w in workers if w.state().toString() == "ALIVE")
    except Exception:  # Py4J's, and those of Java that pyspark translates, have no base in common
        return None


def _ask_master(session: Session, master: str) -> Any:
    """Return the master's ``WorkerInfo`` objects. What others use of them it does not tell."""
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

    Py4J would look at all of the class's methods, one of which names a class that pyspark's jars have
    under another name only; that ends Py4J's connection.
    """
    java, handles = jvm.java.lang.Class.forName, jvm.java.lang.invoke
    kind = handles.MethodType.methodType(java("org.apache.spark.rpc.RpcEnv"))
    environment = java("org.apache.spark.SparkEnv")
    method = handles.MethodHandles.publicLookup().findVirtual(environment, "rpcEnv", kind)
    receiver = jvm.java.util.ArrayList()
    receiver.add(session.context().env())
    return method.invokeWithArguments(receiver)
