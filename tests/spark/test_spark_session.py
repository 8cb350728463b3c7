"""The Spark session with what a gang needs of it: tasks, cancelling, and why a job ended."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hydrogen_magic.driver.placements.spark import spark_session as sessions
from hydrogen_magic.driver.placements.spark.job_errors import SparkJobError
from hydrogen_magic.driver.placements.spark.spark_session import Session
from hydrogen_magic.errors import PlacementError
from tests import shells, spark_classes, spark_rig
from tests.gangs import PATIENCE_S

pytestmark = [
    pytest.mark.spark,
    pytest.mark.usefixtures("warm_agents"),
    pytest.mark.timeout(300),
]

SLOTS = 4
"""Of both sessions."""


@pytest.fixture(
    params=[
        pytest.param("classic", marks=pytest.mark.xdist_group("spark")),
        pytest.param("connect", marks=pytest.mark.xdist_group("connect")),
    ]
)
def session(request: pytest.FixtureRequest) -> Session:
    return sessions._session(request.getfixturevalue(request.param))


def report_partition() -> Callable[[Any], Any]:
    """Return a task that yields its number; made here, so that it travels by value."""

    def task(batches: Any) -> Iterator[Any]:
        import pyarrow
        from pyspark import BarrierTaskContext

        for _ in batches:
            pass
        context = BarrierTaskContext.get()
        assert context is not None
        yield pyarrow.RecordBatch.from_pydict({"o": [str(context.partitionId()).encode()]})

    return task


def sleep() -> Callable[[Any], Any]:
    def task(batches: Any) -> Iterator[Any]:
        import time

        time.sleep(60)
        yield from batches

    return task


def fail() -> Callable[[Any], Any]:
    def task(batches: Any) -> Iterator[Any]:
        raise ValueError("no such column")
        yield from batches

    return task


class InThread(threading.Thread):
    """Something that blocks, on a daemon thread of its own, as gangs run it."""

    def __init__(self, blocks: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._blocks = blocks
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._blocks()
        except SparkJobError as error:
            self.result = error

    def ended(self, within_s: float = PATIENCE_S) -> Any:
        self.join(within_s)
        assert not self.is_alive()
        return self.result


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────


def test_tasks_return_their_bytes_on_any_thread(session: Session) -> None:
    running = InThread(
        lambda: session.run_tasks(report_partition(), 2, None, "who", "hydrogen_magic gang 1")
    )
    assert sorted(running.ended()) == [b"0", b"1"]


def test_a_threads_own_tags_and_description_stay(session: Session) -> None:
    spark = session.spark
    marks = spark if session.is_connect else spark.sparkContext
    add = marks.addTag if session.is_connect else marks.addJobTag
    tags = marks.getTags if session.is_connect else marks.getJobTags
    remove = marks.removeTag if session.is_connect else marks.removeJobTag
    add("mine")
    if not session.is_connect:
        marks.setJobDescription("my job")
    session.run_tasks(report_partition(), 1, None, "theirs", "hydrogen_magic gang 2")
    assert set(tags()) == {"mine"}
    remove("mine")
    if not session.is_connect:
        assert marks.getLocalProperty("spark.job.description") == "my job"
        marks.setJobDescription(None)


def test_jobs_belong_to_the_thread_of_their_cell(session: Session) -> None:
    """They run in threads of ours, and Spark knows jobs by the local properties or tags of a thread."""
    spark = session.spark
    try:
        if session.is_connect:
            spark.addTag("mine")
        else:
            spark.sparkContext.setJobGroup("mine", "my jobs")
        found = session.of_this_thread()
    finally:
        if session.is_connect:
            spark.removeTag("mine")
        else:
            for name in ("spark.jobGroup.id", "spark.job.description"):
                spark.sparkContext.setLocalProperty(name, None)
    running = InThread(lambda: found.run_tasks(sleep(), 1, None, "of a group"))
    cancel = spark.interruptTag if session.is_connect else spark.sparkContext.cancelJobGroup
    deadline = time.monotonic() + PATIENCE_S
    while running.is_alive() and time.monotonic() < deadline:  # it may not have begun
        cancel("mine")
        time.sleep(0.1)
    assert running.ended(0).kind == "cancelled"


def test_cancelled_from_another_thread_just_started_and_long_running(session: Session) -> None:
    for is_under_way in (False, True):
        running = InThread(lambda: session.run_tasks(sleep(), 2, None, "long"))
        spark_rig.until(lambda: bool(sessions._running), PATIENCE_S)
        if is_under_way:
            spark_rig.until(lambda: bool(_jobs(session)), PATIENCE_S)
        session.cancel("long")
        assert running.ended().kind == "cancelled"
    session.cancel("long")  # it has ended: nothing happens


def test_a_cancel_that_fails_is_repeated(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, interrupt = [], Session._interrupt

    def fail_first(session: Session, tag: str) -> None:
        calls.append(tag)
        if len(calls) == 1:
            raise OSError("no connection")
        interrupt(session, tag)

    monkeypatch.setattr(Session, "_interrupt", fail_first)
    running = InThread(lambda: session.run_tasks(sleep(), 1, None, "long"))
    spark_rig.until(lambda: bool(sessions._running), PATIENCE_S)
    session.cancel("long")
    assert running.ended().kind == "cancelled"


def _jobs(session: Session) -> Any:
    """Return the running jobs of a classic session; of Connect, anything: the client knows none."""
    if session.is_connect:
        return [True]
    return session.spark.sparkContext.statusTracker().getActiveJobsIds()


def test_a_cancel_leaves_other_jobs_alone(session: Session) -> None:
    first = InThread(lambda: session.run_tasks(sleep(), 1, None, "first"))
    second = InThread(lambda: session.run_tasks(sleep(), 1, None, "second"))
    spark_rig.until(lambda: len(sessions._running) == 2, PATIENCE_S)
    session.cancel("first")
    assert first.ended().kind == "cancelled"
    assert second.is_alive()
    session.cancel("second")
    assert second.ended().kind == "cancelled"


def test_why_a_stage_failed(session: Session) -> None:
    with pytest.raises(SparkJobError, match="a task failed: ValueError: no such column") as failed:
        session.run_tasks(fail(), 1, None, "failing")
    assert failed.value.kind == "other" and "Traceback" in failed.value.details
    with pytest.raises(SparkJobError, match="more task slots") as refused:
        session.run_tasks(report_partition(), SLOTS + 1, None, "too many")
    assert refused.value.kind == "slots"


def test_a_closed_connect_session_is_reported(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql.connect.session import SparkSession

    where = sessions._session(connect).where
    spark = SparkSession.builder.remote(where).create()
    other = sessions._session(spark)
    running = InThread(lambda: other.run_tasks(sleep(), 1, None, "closed"))
    spark_rig.until(lambda: bool(sessions._running), PATIENCE_S)
    spark.stop()
    assert running.ended().kind == "stopped"
    with pytest.raises(SparkJobError, match="create a new session"):
        other.run_tasks(report_partition(), 1, None, "late")
    other.cancel("late")
    monkeypatch.setattr(sys.modules["__main__"], "spark", spark, raising=False)
    monkeypatch.setattr(sessions, "_active", lambda: None)
    with pytest.raises(PlacementError, match=r"`spark` was stopped.*SparkSession\.builder"):
        sessions.find()


def test_a_connect_session_that_the_server_has_closed_is_reported(connect: Any) -> None:
    """As it does with an idle one: the client does not know."""
    from pyspark.sql.connect.session import SparkSession

    spark = SparkSession.builder.remote(sessions._session(connect).where).create()
    try:
        frame = spark.range(3)
        spark.client.release_session()
        assert not spark.is_stopped
        with shells.loaded_shell() as shell:
            shell.push({"df": frame, "spark": spark})
            for magic, line in (
                ("distributed", "--np 1 --on spark"), ("infer", "df"), ("infer", "df --out lazy")
            ):  # fmt: skip
                with pytest.raises(PlacementError, match=r"session was stopped.*: create a new"):
                    shell.run_cell_magic(magic, line, "predict = len")
    finally:
        spark.stop()


def test_addresses_begin_with_the_one_that_executors_use(session: Session) -> None:
    """With Connect, that is the one of the route to the server, here on loopback."""
    assert session.addresses()[0] == spark_rig.HOST


# ── the console, and a context that is stopped ───────────────────────────────────────────────────


@pytest.mark.exhaustive
def test_no_bar_on_the_console_while_a_gang_runs(tmp_path: Path) -> None:
    """In a process of its own, since the JVM writes the bar, and the session is stopped."""
    out = subprocess.run(
        [sys.executable, "-c", _ON_A_CONSOLE], capture_output=True, text=True, timeout=240,
        env=_environment(tmp_path),
    )  # fmt: skip
    answer = json.loads(out.stdout.splitlines()[-1])
    assert answer == {"kind": "stopped", "values": 1}, out.stderr
    drawn = Counter(re.findall(r"\[Stage (\d+):", out.stderr))
    assert drawn["1"], "the user's own job"
    assert not drawn["0"], "the gang"


def _environment(folder: Path) -> dict[str, str]:
    """Return a person's, but for a JVM and Python workers that begin with what other tests have loaded."""
    spark_rig.add_daemon(folder)
    return {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": spark_rig.HOST,
        "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
        "PYSPARK_SUBMIT_ARGS": f"--conf spark.python.daemon.module={spark_rig.DAEMON} pyspark-shell",
        "JAVA_TOOL_OPTIONS": spark_classes.JVM_OPTIONS,
    }


_ON_A_CONSOLE = """
import json, threading, time
from pyspark.sql import SparkSession
from hydrogen_magic.driver.placements.spark import spark_session as sessions

def slow(batches):
    import pyarrow, time
    for _ in batches: pass
    time.sleep(1.5)
    yield pyarrow.RecordBatch.from_pydict({"o": [b"x"]})

def stuck(batches):
    import time
    time.sleep(60)
    yield from batches

spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
assert spark.conf.get("spark.ui.showConsoleProgress") == "true"
found = sessions.find()
values = found.run_tasks(slow, 1, None, "gang")
spark.range(0, 1, 1, 1).mapInArrow(slow, "o binary").collect()
kinds = []
def run():
    try:
        found.run_tasks(stuck, 1, None, "stopped")
    except sessions.SparkJobError as error:
        kinds.append(error.kind)
thread = threading.Thread(target=run, daemon=True)
thread.start()
tracker = spark.sparkContext.statusTracker()
while not tracker.getActiveJobsIds(): time.sleep(0.02)
spark.stop()
thread.join(120)
print(json.dumps({"kind": kinds[0], "values": len(values)}))
"""


@pytest.mark.exhaustive
def test_after_a_restart_of_spark(tmp_path: Path) -> None:
    """In a process of its own, with ``local[2]``: agents are children of its JVM, which stays."""
    out = subprocess.run(
        [sys.executable, "-c", _RESTARTED], capture_output=True, text=True, timeout=240,
        env=_environment(tmp_path),
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    gangs, frames, function, column, values = json.loads(out.stdout.splitlines()[-1])
    assert gangs == [[0, 1], [0, 1]]
    stopped = "PlacementError: the Spark session of this DataFrame was stopped: create one first, "
    assert [text.startswith(stopped) for text in frames] == [True, True], frames
    assert "PlacementError: the Spark session of this function was stopped" in function
    assert "belongs to another Spark session: call hm.udf again" in column
    assert values == [0.0, 100.0]


_RESTARTED = """
import json, os
from pyspark.sql import SparkSession
import hydrogen_magic as hm
from hydrogen_magic.inference.spark.prepared import prepare

def session():
    made = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    return made, made.range(2).selectExpr("cast(id as double) x")

def rank():
    import os
    return int(os.environ["RANK"])

def said_of(column):
    try:
        return str(frame.select(column()).collect())
    except Exception as error:
        return f"{type(error).__name__}: {error}"

gangs = []
spark, frame = session()
same = hm.udf(lambda batch: batch.x, "y double")
column = same("x")
frame.select(column).collect()
gangs.append(hm.launch(rank, np=2, on="spark").results)
spark.stop()
ended = [said_of(lambda: use(frame)) for use in (hm.dataset, lambda frame: prepare(frame, *3 * [None]))]
spark, frame = session()
hundredfold = hm.udf(lambda batch: 100 * batch.x, "y double")  # with the same numbers of broadcasts
said = said_of(lambda: same("x")), said_of(lambda: column)
values = [row[0] for row in frame.select(hundredfold("x")).collect()]
gangs.append(hm.launch(rank, np=2, on="spark").results)
print(json.dumps([gangs, ended, *said, values]))
spark.stop()
"""


# ── finding the session ──────────────────────────────────────────────────────────────────────────


def test_the_notebooks_own_session_comes_first(
    connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql.connect.session import SparkSession

    active = sessions.find()
    own = SparkSession.builder.remote(sessions._session(connect).where).create()
    try:
        main = sys.modules["__main__"]
        monkeypatch.setattr(main, "spark", own, raising=False)
        assert sessions.find() == sessions._session(own) != active
        monkeypatch.setattr(main, "spark", "not a session")
        assert InThread(sessions.find).ended() != sessions._session(own)
    finally:
        own.stop()


def test_a_version_that_is_too_old_is_refused(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sessions._versions[session.application] == session.spark.version
    monkeypatch.setitem(sessions._versions, session.application, "3.5.1")
    with pytest.raises(PlacementError, match=r"has Spark 3\.5\.1; Spark 4\.0 or newer"):
        sessions._session(session.spark)
