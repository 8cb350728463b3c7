"""Calls of Spark's JVM and of pyspark that are not part of the public interface.

Other distributions and versions of Spark may lack them, or forbid them: a driver with Py4J's security
raises ``Py4JSecurityException`` for methods of the JVM that it does not know to be harmless. So no gang
depends on them. Each returns None if it is refused, which means unknown.

On Spark Connect there is no JVM: only :func:`add_profile` and :func:`connection` are called there. The
relay's requests are in :mod:`~hydrogen_magic.driver.placements.spark.relay`; their refusal is an error with
its reason.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MOST_TASKS = 10_000
"""Of one stage; the UI's default is 20."""
_NEVER_MS = 1 << 50
"""A time in the far future, in milliseconds since 1970."""


def _or_none(call: Callable[P, T]) -> Callable[P, T | None]:
    """Let a call return None if Spark refuses it."""

    @functools.wraps(call)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return call(*args, **kwargs)
        except Exception:  # Py4J's, Java's and Python's have no common base
            return None

    return guarded


def _context(session: Any) -> Any:
    """Return the SparkContext of the JVM, a Py4J object. Classic sessions only."""
    return session.spark.sparkContext._jsc.sc()


# ── the session ──────────────────────────────────────────────────────────────────────────────────


def is_stopped(spark: Any) -> bool:
    """Return whether a classic session was stopped; False if that is unknown: its jobs will tell."""
    return getattr(spark.sparkContext, "_jsc", spark) is None


def is_ending(session: Any) -> bool:
    """Return whether the SparkContext of a classic session has stopped, by itself or by its driver."""
    try:
        return bool(_context(session).isStopped())
    except Exception:  # unknown: the error of the job itself says it
        return False


@_or_none
def connection(session: Any) -> dict[str, object] | None:
    """Return what another process needs to use the same session of Spark Connect, as JSON.

    Returns None if code of the notebook is part of the connection.
    """
    from pyspark.sql.connect.client import DefaultChannelBuilder

    client = session.spark.client
    builder = client._builder
    if type(builder) is not DefaultChannelBuilder or builder._interceptors:
        return None
    params = {**builder._params, "session_id": session.spark.session_id, "user_id": client._user_id}
    return {
        "endpoint": builder.endpoint,
        "params": {name: value for name, value in params.items() if value is not None},
        "options": dict(builder._channel_options),
    }


@_or_none
def worker_environment(session: Any) -> dict[str, str]:
    """Return the variables of the Python workers of functions that are created next."""
    return dict(session.spark.sparkContext.environment)


@_or_none
def local_properties(session: Any) -> dict[str, str]:
    """Return the properties of this thread's jobs."""
    found = _context(session).getLocalProperties()
    return {str(name): str(value) for name, value in found.items()} if len(found) else {}


@_or_none
def hide_progress_bar(session: Any) -> None:
    """Hide Spark's progress bar on the console until a job has ended well: a gang has its own view.

    In a notebook Spark shows it by default (``spark.ui.showConsoleProgress``): the JVM writes
    ``[Stage 3:>  (0 + 2) / 2]`` to the kernel's own stderr for as long as a stage runs. It does not within
    half a second of a job's end (``ConsoleProgressBar.refresh``), so the last job's end is set to a time in
    the future. Spark corrects it at the end of the next job.
    """
    bar = _context(session).progressBar()  # a Scala Option
    if bar.isDefined():
        last_finish = bar.get().getClass().getDeclaredField("lastFinishTime")
        last_finish.setAccessible(True)
        last_finish.set(bar.get(), _NEVER_MS)


# ── executors and slots ──────────────────────────────────────────────────────────────────────────


@_or_none
def executors(session: Any) -> str:
    """Return the JSON of the REST interface: one call for any number of executors."""
    return _as_json(session, _context(session).statusStore().executorList(False))


@_or_none
def most_tasks_at_once(session: Any, profile: Any) -> int:
    """Return the number that Spark compares with the number of tasks of a barrier stage."""
    context = _context(session)
    manager = context.resourceProfileManager()
    java = manager.defaultResourceProfile() if profile is None else profile._java_resource_profile
    return int(context.maxNumConcurrentTasks(java))


@_or_none
def running_tasks(session: Any) -> dict[str, int]:
    """Return how many tasks of all jobs hold slots, by executor."""
    counts = _context(session).taskScheduler().runningTasksByExecutors().iterator()
    found: dict[str, int] = {}
    while counts.hasNext():
        entry = counts.next()
        found[str(entry._1())] = int(entry._2())
    return found


@_or_none
def running_tasks_of(session: Any, tag: str) -> int:
    """Return how many tasks of the jobs under a tag hold slots.

    By Spark's scheduler: its status tracker lags behind until the next event.
    """
    sets = _task_sets(_context(session).taskScheduler().rootPool())
    return sum(int(each.runningTasks()) for each in sets if tag in _tags_of(each))


@_or_none
def other_jobs(session: Any, *tags: str) -> dict[str, int]:
    """Return how many tasks hold slots, by the name of their job, without the jobs under these tags."""
    context = _context(session)
    store, found = context.statusStore(), Counter[str]()
    for each in _task_sets(context.taskScheduler().rootPool()):
        running = int(each.runningTasks())
        if running and not set(tags) & set(_tags_of(each)):
            found[_job_name(store.job(each.taskSet().priority()))] += running
    return found


@_or_none
def tasks_of(session: Any, tag: str) -> str:
    """Return the JSON of the REST interface for the tasks of the jobs under a tag."""
    context = _context(session)
    (stage,) = _stages(context.statusTracker(), tag)
    return _as_json(session, context.statusStore().taskList(stage, 0, MOST_TASKS))


def _stages(tracker: Any, tag: str) -> set[int]:
    """Return the numbers of the stages of the jobs under a tag."""
    jobs = (tracker.getJobInfo(number) for number in tracker.getJobIdsForTag(tag))
    return {stage for job in jobs if job.isDefined() for stage in job.get().stageIds()}


def _as_json(session: Any, rows: Any) -> str:
    """Return what the REST interface answers for ``rows``, by its own writer."""
    api = session.spark.sparkContext._jvm.org.apache.spark.status.api.v1
    return str(api.JacksonMessageWriter().mapper().writeValueAsString(rows))


def _job_name(job: Any) -> str:
    """Return the description of a job, or else where it was called. ``job``: a ``JobData``."""
    described = job.description()
    return f"job {job.jobId()} ({described.get() if described.isDefined() else job.name()})"


def _task_sets(pool: Any) -> Iterator[Any]:
    """Yield the ``TaskSetManager`` objects of a scheduler's pool, and of the pools in it."""
    for each in pool.schedulableQueue().toArray():
        if each.schedulableQueue() is None:
            yield each
        else:
            yield from _task_sets(each)


def _tags_of(task_set: Any) -> list[str]:
    tags = task_set.taskSet().properties().getProperty("spark.job.tags")
    return tags.split(",") if tags else []


@_or_none
def stages_of(session: Any, tag: str) -> dict[int, tuple[int, int]]:
    """Return the number of completed and of all tasks of each stage that has begun, by its number."""
    tracker = _context(session).statusTracker()
    found = {}
    for stage in _stages(tracker, tag):
        info = tracker.getStageInfo(stage)
        if info.isDefined() and info.get().submissionTime() > 0:
            found[stage] = info.get().numCompletedTasks(), info.get().numTasks()
    return found


@_or_none
def rows_written(session: Any, tag: str) -> int:
    """Return how many rows the jobs under a tag have written to files, as their tasks have reported."""
    context = _context(session)
    tracker, store = context.statusTracker(), context.statusStore()
    infos = {stage: tracker.getStageInfo(stage) for stage in _stages(tracker, tag)}
    begun = (stage for stage, info in infos.items() if info.isDefined())
    return sum(int(store.lastStageAttempt(stage).outputRecords()) for stage in begun)


@_or_none
def rows_at(session: Any, hosts: Sequence[str]) -> Any:
    """Return a DataFrame with one partition for each of ``hosts``, its preferred location.

    Only the JVM's ``SparkContext.makeRDD`` takes locations; the rows are of no use.
    """
    from pyspark.sql import DataFrame

    context = session.spark.sparkContext
    jvm = context._jvm
    sql, as_seq = jvm.org.apache.spark.sql, jvm.PythonUtils.toSeq
    row = sql.RowFactory.create(context._gateway.new_array(jvm.java.lang.Object, 1))
    located = as_seq([jvm.scala.Tuple2(row, as_seq([host])) for host in hosts])
    rows = _context(session).makeRDD(located, jvm.scala.reflect.ClassTag.apply(row.getClass()))
    schema = sql.types.StructType.fromDDL("n int")
    return DataFrame(session.spark._jsparkSession.createDataFrame(rows, schema), session.spark)


# ── resource profiles ────────────────────────────────────────────────────────────────────────────


def add_profile(session: Any, requests: dict[str, Any]) -> Any:
    """Return a TaskResourceProfile that Spark has accepted. Raises Spark's error."""
    return (_made_by_server if session.is_connect else _made_here)(session, requests)


def _made_here(session: Any, requests: dict[str, Any]) -> Any:
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    jvm = session.spark.sparkContext._jvm
    profile = ResourceProfileBuilder().require(TaskResourceRequests(jvm, requests)).build
    manager = _context(session).resourceProfileManager()
    manager.addResourceProfile(profile._java_resource_profile)
    return profile


def _made_by_server(session: Any, requests: dict[str, Any]) -> Any:
    """Make the server create one now: pyspark does so on use, in its thread's active session."""
    from pyspark.sql.connect.resource.profile import ResourceProfile

    active = type(session.spark)._active_session  # a threading.local
    before = getattr(active, "session", None)
    active.session = session.spark
    try:
        return ResourceProfile({}, requests)
    finally:
        active.session = before
