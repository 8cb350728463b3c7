"""The notebook's Spark session, classic or Spark Connect, with the operations that a gang needs.

The same call launches a gang on both: a barrier ``mapInArrow`` that is collected. The few differences are
all in this module: how jobs are cancelled from another thread (job tags of the SparkContext, since
``interruptTag`` of a classic session only covers its own thread; operation tags on Connect), and the
address by which executors reach this process.
"""

from __future__ import annotations

import importlib
import re
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from hydrogen_magic.core.network import family_of
from hydrogen_magic.driver.placements.remote.addresses import own_addresses
from hydrogen_magic.driver.placements.spark import private_calls
from hydrogen_magic.driver.placements.spark.job_errors import STOPPED, SparkJobError, explained
from hydrogen_magic.errors import PlacementError

T = TypeVar("T")

_CONNECT = "pyspark.sql.connect.session"
_INSIST_EVERY_S = 0.1
_HOW = (
    "create one first, `spark = SparkSession.builder.master('spark://HOST:7077').getOrCreate()` "
    "for a cluster or `SparkSession.builder.remote('sc://HOST').getOrCreate()` for Spark Connect"
)

_ENDS_IDLE = (
    "spark.sql.execution.pyspark.udf.killOnIdleTimeout",
    "spark.python.worker.killOnIdleTimeout",
)
_DESCRIPTION = "spark.job.description"
_TAGS = "spark.job.tags"
"""Local properties of a thread."""
_OLDEST = (4, 0)
"""The first version with resource profiles for a barrier stage of ``mapInArrow``."""

_versions: dict[str, str] = {}
"""Application -> its version of Spark, which is a request on Connect."""
_running: dict[tuple[str, str], threading.Event] = {}
"""(application, tag) -> set when that call of :meth:`Session.run`, which may be still to come, has ended."""
_insisting: dict[tuple[str, str], threading.Thread] = {}
"""Threads that cancel them; one each, however often a cancel is requested."""
_environment_lock = threading.Lock()
"""Guards a context's ``environment``, which functions copy when they are created."""


@dataclass(frozen=True)
class Session:
    """One Spark session. Any method may be called from any thread."""

    spark: Any
    """``pyspark.sql.SparkSession``, classic or Connect."""
    is_connect: bool
    application: str
    """``spark.app.id``."""
    where: str
    """For messages: ``spark://host:7077``, ``local[4]``, ``sc://host:15002``."""
    properties: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Of the jobs of the thread that :meth:`of_this_thread` was called in, such as their pool and group; none
    on Connect."""
    tags: frozenset[str] = field(default=frozenset(), compare=False)
    """Of that thread's operations on Connect, by which ``interruptTag`` ends them. Those of a classic session
    do not reach jobs of other threads."""

    def run_tasks(
        self,
        task: Callable[[Any], Any],
        n: int,
        profile: Any,
        tag: str,
        description: str = "",
        hosts: Sequence[str] = (),
    ) -> list[bytes]:
        """Run a barrier stage of ``n`` tasks; return the values of its one binary column, ``o``.

        ``task`` takes and yields Arrow batches as in ``mapInArrow``. ``hosts``: the preferred host of each
        task, for classic sessions; empty: none. See :meth:`run` for the rest.
        """
        rows = self.run(lambda: self._stage(task, n, profile, hosts).collect(), tag, description)
        return [bytes(row[0]) for row in rows]

    def run(self, action: Callable[[], T], tag: str, description: str = "") -> T:
        """Return the value of ``action``, which makes Spark run a job.

        Blocks until the job has ended; raises :class:`SparkJobError`. ``tag`` is the argument of
        :meth:`cancel`, without commas; ``description`` is shown in Spark's UI, except on Connect.
        """
        if self.is_stopped():
            raise SparkJobError("stopped", STOPPED)
        forget = self.expect(tag)
        try:
            if not self.is_connect:
                private_calls.hide_progress_bar(self)
            with self._tagged(tag, description):
                return action()
        except KeyboardInterrupt:
            self.cancel(tag)
            raise
        except Exception as error:  # exceptions of Java, gRPC and pyspark have no common base
            raise self.explain(error) from error
        finally:
            forget()

    def expect(self, tag: str) -> Callable[[], None]:
        """Let :meth:`cancel` reach a call of :meth:`run` that is still to come in another thread.

        Returns a function to call when that has ended, or will not come.
        """
        key = self.application, tag
        ended = _running.setdefault(key, threading.Event())

        def forget() -> None:
            ended.set()
            if _running.get(key) is ended:
                del _running[key]
                _insisting.pop(key, None)

        return forget

    def explain(self, error: Exception) -> SparkJobError:
        """Return the error for one of Spark. A job that ends because its session does may raise anything."""
        found = explained(error)
        return SparkJobError("stopped", STOPPED, found.details) if self.has_ended() else found

    def has_ended(self) -> bool:
        """Return whether the session was stopped, or has stopped by itself; False if that is unknown."""
        try:
            return self.is_stopped() or (not self.is_connect and private_calls.is_ending(self))
        except Exception:  # the server no longer answers
            return False

    def cancel(self, tag: str) -> None:
        """Cancel the job that :meth:`run` runs under this tag, or will run; does nothing after its end.

        Returns at once. A job that is about to reach Spark is cancelled as soon as it does.
        """
        ended = _running.get((self.application, tag))
        insisting = _insisting.get((self.application, tag))
        if ended is None or (insisting is not None and insisting.is_alive()):
            return
        insisting = _insisting[(self.application, tag)] = threading.Thread(
            target=self._insist, args=(tag, ended), name="spark-cancel", daemon=True
        )
        insisting.start()

    def of_this_thread(self) -> Session:
        """Return the session for jobs that run in other threads as if in this one.

        Spark knows the pool, the group and the tags of a job by its thread.
        """
        if self.is_connect:
            return replace(self, tags=frozenset(self.spark.getTags()))
        return replace(self, properties=private_calls.local_properties(self) or {})

    def is_at_least(self, version: tuple[int, int]) -> bool:
        """Return whether both Spark and pyspark, which may differ on Connect, have this version."""
        import pyspark

        return min(_numbers(_version(self)), _numbers(pyspark.__version__)) >= version

    def ends_idle_workers(self) -> bool:
        """Return whether Spark may end a Python worker that sends nothing, as a task of a gang does."""
        try:
            found = [str(self.spark.conf.get(name, "false")) for name in _ENDS_IDLE]
        except Exception:  # the session has ended: the error of the job itself says it
            return False
        return "true" in map(str.lower, found)

    def is_stopped(self) -> bool:
        """Return whether this process has stopped the session."""
        return _is_stopped(self.spark)

    def refuse_if_stopped(self) -> None:
        """Raise PlacementError with instructions if this process has stopped the session."""
        if self.is_stopped():
            raise PlacementError(
                f"the Spark session of this DataFrame was stopped: {_HOW}; then create the DataFrame again"
            )

    def sql_module(self, name: str) -> Any:
        """Return ``pyspark.sql.NAME`` for this kind of session.

        Spark's own choice between the kinds is for the process, which may have sessions of both.
        """
        home = "pyspark.sql.connect" if self.is_connect else "pyspark.sql"
        return importlib.import_module(f"{home}.{name}")

    def addresses(self) -> tuple[str, ...]:
        """Return addresses where executors may reach this process, best first.

        Classic: ``spark.driver.host``, by which executors reach the driver, our JVM. Connect: our address
        on the route to the server. Then the others of this machine, which may have several.
        """
        first = self.server_host() if not self.is_connect else _route_to(self.server_host())
        return tuple(dict.fromkeys((*((first,) if first else ()), *own_addresses())))

    def server_host(self) -> str:
        """Return the driver's host: of ``sc://host:port``, or ``spark.driver.host``."""
        if self.is_connect:
            return str(self.spark.client.host)
        return str(self.spark.conf.get("spark.driver.host")).strip("[]")

    def bind_address(self) -> str:
        """Return ``spark.driver.bindAddress`` of a classic session; empty if it is not set.

        Executors reach the driver at ``spark.driver.host``, which may be the address of a container's
        host or of a service.
        """
        if self.is_connect:
            return ""
        return str(self.spark.conf.get("spark.driver.bindAddress", "")).strip("[]")

    def says_of_python(self) -> str:
        """Return which Python executors run, or where it is set, for the end of a message."""
        if self.is_connect:
            return " (in the environment of the Spark Connect server)"
        return f" (it is now {self.python})"

    @property
    def python(self) -> str:
        """The interpreter that executors run; empty if unknown (Connect)."""
        return "" if self.is_connect else str(self.spark.sparkContext.pythonExec)

    @contextmanager
    def python_workers(self, environment: Mapping[str, str]) -> Iterator[None]:
        """Run functions that are created meanwhile in Python workers that start with these variables.

        These are separate workers, beside those of the session's other functions. Variables that the
        session sets for all of them (``spark.executorEnv``) stay. The Connect server accepts none for a
        single function: there this does nothing.
        """
        if self.is_connect:
            yield
            return
        context = self.spark.sparkContext
        with _environment_lock:
            before = private_calls.worker_environment(self)
            if before is None:
                yield
                return
            context.environment = {**environment, **before}
            try:
                yield
            finally:
                context.environment = before

    # ── one stage ────────────────────────────────────────────────────────────────────────────────

    def _stage(self, task: Callable[[Any], Any], n: int, profile: Any, hosts: Sequence[str]) -> Any:
        from pyspark.sql.types import BinaryType, StructField, StructType

        schema = StructType([StructField("o", BinaryType())])  # as text, the JVM would parse it
        with without_pandas_warning():
            rows = private_calls.rows_at(self, hosts) if hosts else None
            if rows is None:
                rows = self.spark.range(0, n, 1, n)
            return rows.mapInArrow(task, schema, barrier=True, profile=profile)

    @contextmanager
    def _tagged(self, tag: str, description: str) -> Iterator[None]:
        """Give this thread's jobs ``tag``, ``description``, and the session's properties and tags.

        Restores the thread's own afterwards.
        """
        if not self.is_connect:
            with self._described(tag, description):
                yield
            return
        tags = {tag, *self.tags} - self.spark.getTags()
        for each in tags:
            self.spark.addTag(each)
        try:
            yield
        finally:
            for each in tags:
                self.spark.removeTag(each)

    @contextmanager
    def _described(self, tag: str, description: str) -> Iterator[None]:
        context = self.spark.sparkContext
        properties = {**self.properties, **({_DESCRIPTION: description} if description else {})}
        before = {name: context.getLocalProperty(name) for name in {*properties, _TAGS}}
        for name, value in properties.items():
            context.setLocalProperty(name, value)
        context.addJobTag(tag)
        try:
            yield
        finally:
            for name, value in before.items() if not self.is_stopped() else ():
                context.setLocalProperty(name, value)

    # ── cancel ───────────────────────────────────────────────────────────────────────────────────

    def _insist(self, tag: str, ended: threading.Event) -> None:
        """Cancel the job until it has ended.

        Spark does nothing about a job that it does not have yet, or that it holds back for some time because
        slots are missing. A failed call is repeated, too.
        """
        is_over = False
        while not is_over:
            try:
                self._interrupt(tag)
            except Exception as error:  # of Py4J, Java or gRPC
                if explained(error).kind in ("stopped", "forbidden"):
                    return  # its jobs end with a session
            is_over = ended.wait(_INSIST_EVERY_S)

    def _interrupt(self, tag: str) -> None:
        if self.is_connect:
            self.spark.interruptTag(tag)
        else:
            self.spark.sparkContext.cancelJobsWithTag(tag)


# ── finding the session ──────────────────────────────────────────────────────────────────────────


def find() -> Session:
    """Return the notebook's session: ``spark`` in its namespace, otherwise the active one.

    Raises PlacementError with instructions if there is none or it was stopped.
    """
    named = getattr(sys.modules.get("__main__"), "spark", None)
    is_named = isinstance(named, _session_classes())
    if is_named and not _is_stopped(named):
        return _session(named)
    active = _active()
    if active is None:
        why = "the one in `spark` was stopped" if is_named else "there is none"
        raise PlacementError(f"`--on spark` needs a Spark session, but {why}: {_HOW}")
    return _session(active)


def use(spark: Any) -> None:
    """Let :func:`find` return this session in a process that has no notebook."""
    sys.modules["__main__"].spark = spark  # type: ignore[attr-defined]


@contextmanager
def without_pandas_warning() -> Iterator[None]:
    """Hide what pyspark says about the version of pandas on its first use: this package does not need it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")
        yield


def wait_for_jobs(timeout_s: float) -> None:
    """Return when all calls of :meth:`Session.run` have ended, or after ``timeout_s`` seconds."""
    deadline_s = time.monotonic() + timeout_s
    for ended in list(_running.values()):
        ended.wait(max(0.0, deadline_s - time.monotonic()))


def of(frame: Any) -> Session:
    """Return the session of a Spark DataFrame."""
    return _session(frame.sparkSession)


def numbered(frame: Any) -> Any:
    """Return the DataFrame with other names of its columns, for ``mapInArrow``.

    pyspark looks up each column by its name there, where a dot means a field of a struct.
    """
    return frame.toDF(*(f"column_{number}" for number in range(len(frame.columns))))


def plan_hash(frame: Any) -> int:
    """Return the hash of a DataFrame's plan as it is now.

    Through Spark Connect a DataFrame is analysed again at each use, with the views and the globals of its
    functions as they are then; its own ``semanticHash()`` is that of the first call.
    """
    return int(frame.alias("rows").semanticHash())


def _session(spark: Any) -> Session:
    """Raises PlacementError if the session has ended or its version is too old."""
    is_connect = _is_connect(spark)
    try:
        where = f"sc://{_endpoint(spark)}" if is_connect else str(spark.sparkContext.master)
        found = Session(spark, is_connect, str(spark.conf.get("spark.app.id")), where)
        version = _version(found)
    except Exception as error:  # the server closes an idle session; the client does not know
        raise PlacementError(str(explained(error))) from error
    if _numbers(version) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise PlacementError(f"this session has Spark {version}; Spark {oldest} or newer is needed")
    return found


def _version(session: Session) -> str:
    if session.application not in _versions:
        _versions[session.application] = str(session.spark.version)
    return _versions[session.application]


def _numbers(version: str) -> tuple[int, ...]:
    """Return major and minor version of ``4.3.0``, ``4.0.1-amzn-0`` or ``4.1.0.dev0``."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _endpoint(spark: Any) -> str:
    builder = getattr(spark.client, "_builder", None)  # private, and different in other versions
    return str(getattr(builder, "endpoint", None) or spark.client.host)


def _session_classes() -> tuple[Any, ...]:
    """Return the session classes that this process has imported."""
    modules = (sys.modules.get(name) for name in ("pyspark.sql.session", _CONNECT))
    found = (getattr(module, "SparkSession", None) for module in modules)
    return tuple(kind for kind in found if isinstance(kind, type))


def _is_connect(spark: Any) -> bool:
    connect = getattr(sys.modules.get(_CONNECT), "SparkSession", None)
    return connect is not None and isinstance(spark, connect)


def _is_stopped(spark: Any) -> bool:
    if _is_connect(spark):
        return bool(spark.is_stopped)
    return private_calls.is_stopped(spark)


def _active() -> Any:
    """Return this thread's active session or the process's default one, None if there is none."""
    for kind in _session_classes():
        # The last two are private: getActiveSession() only knows its own thread's session.
        names = ("_instantiatedSession", "_default_session")
        for spark in (kind.getActiveSession(), *(getattr(kind, name, None) for name in names)):
            if spark is not None and not _is_stopped(spark):
                return spark
    return None


# ── addresses ────────────────────────────────────────────────────────────────────────────────────


def _route_to(host: str) -> str | None:
    """Return this machine's address on the route to a host, None without a route."""
    try:
        with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
            probe.connect((host.strip("[]"), 9))  # no packet is sent
            return str(probe.getsockname()[0])
    except OSError:
        return None
