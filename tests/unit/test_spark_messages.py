"""What a user reads of Spark's errors, and without a Spark session."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hydrogen_magic.driver.datasets.spark import dataset
from hydrogen_magic.driver.placements.spark import spark_session as sessions
from hydrogen_magic.driver.placements.spark.barrier_job import as_error
from hydrogen_magic.driver.placements.spark.job_errors import explained, lost_task
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.inference.spark.prepared import prepare
from hydrogen_magic.node.agent import host_task


def test_without_a_session_the_message_shows_how_to_make_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "_session_classes", lambda: ())
    with pytest.raises(PlacementError, match=r"a Spark session.*master\('spark://.*'sc://HOST'"):
        sessions.find()


@pytest.mark.parametrize("use", [lambda frame: dataset(frame, None, reuse=True),
                                 lambda frame: prepare(frame, *[None] * 3)])  # fmt: skip
def test_a_frame_of_a_stopped_session_is_refused(
    use: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = SimpleNamespace(sparkContext=SimpleNamespace(_jsc=None))
    session = sessions.Session(stopped, False, "app", "spark://host:7077")
    monkeypatch.setattr(sessions, "of", lambda frame: session)
    frame = SimpleNamespace(isStreaming=False, columns=[], schema=SimpleNamespace(fields=[]))
    frame.alias = lambda name: SimpleNamespace(semanticHash=lambda: 0)
    with pytest.raises(PlacementError, match=r"DataFrame was stopped: create one.*'sc://HOST'"):
        use(frame)


LOST = (
    "Job aborted due to stage failure: Task 2 in stage 3.0 failed 2 times, most recent failure: Lost task "
    "2.1 in stage 3.0 (TID 10) (10.0.0.7 executor 1): org.apache.spark.SparkException: Python worker exited "
    "unexpectedly (crashed). Consider setting"
)
SAID = [
    ("[SPARK_JOB_CANCELLED] Job 7 cancelled killed via the Web UI SQLSTATE: XXKDA",
     "cancelled", "the Spark job was cancelled (killed via the Web UI)"),
    ("[SPARK_JOB_CANCELLED] Job 9 cancelled as part of cancellation of all jobs SQLSTATE: XXKDA",
     "cancelled", "the Spark job was cancelled (as part of cancellation of all jobs)"),
    ("[OPERATION_CANCELED] Operation has been canceled. SQLSTATE: HY008",
     "cancelled", "the Spark job was cancelled"),
    ("Job aborted due to stage failure: Could not recover from a failed barrier ResultStage. Most "
     "recent failure reason: Stage failed because barrier task ResultTask(10, 1) finished "
     "unsuccessfully.\nExecutorLostFailure (executor 0 exited caused by one of the running tasks) "
     "Reason: Command exited with code 137\nDriver stacktrace:",
     "executor_lost", "executor 0 was lost: Command exited with code 137"),
    (LOST, "worker_lost", (
        "the Python worker of task 2 on host 10.0.0.7 (executor 1) exited unexpectedly (killed, or out of "
        "memory)"
    )),
    ("org.apache.spark.SparkException: Job 12 cancelled because SparkContext was shut down",
     "stopped", "the Spark session was stopped, or its driver has exited: create a new session"),
    ("[PYTHON_EXCEPTION] An exception was thrown from the Python worker: pyspark.errors.exceptions"
     ".base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different version: "
     "3.12 than that in driver: 3.11, PySpark cannot run with different minor versions.",
     "python", (
         "executors run Python 3.12, this notebook runs Python 3.11: create a new session with "
         "PYSPARK_PYTHON set to an interpreter of the same minor version"
     )),
    ("[PYTHON_EXCEPTION] An exception was thrown from the Python worker: Traceback (most recent call"
     " last):\n  File \"worker.py\", line 1920, in read_udfs\n    import pyarrow as pa\n"
     "ModuleNotFoundError: No module named 'pyarrow'\n\tat org.apache.spark.api.python.X(Y.scala:1)",
     "python", (
         "executors' Python has no module pyarrow: install it there, or create a new session "
         "with PYSPARK_PYTHON set to an interpreter that has it"
     )),
    ("An error occurred while calling o412.sc. Trace:\npy4j.security.Py4JSecurityException: Method public "
     "org.apache.spark.SparkContext org.apache.spark.api.java.JavaSparkContext.sc() is not whitelisted on "
     "class class org.apache.spark.api.java.JavaSparkContext\n\tat py4j.security.WhitelistingPy4J",
     "forbidden", "this cluster forbids JavaSparkContext.sc (Py4J security)"),
    ("An error occurred while calling o61.collectToPython.\n: org.apache.spark.SparkException: Job "
     "aborted due to stage failure: Could not recover from a failed barrier ResultStage.\n"
     'java.io.IOException: Cannot run program "/opt/py/python": error=2, No such file or directory'
     "\n\tat java.base/java.lang.ProcessBuilder.start(ProcessBuilder.java:1143)",
     "python", (
         "executors cannot run /opt/py/python (No such file or directory): create a new session "
         "with PYSPARK_PYTHON set to a Python that exists there"
     )),
    ("Job aborted due to stage failure: Could not recover from a failed barrier ResultStage. Most recent "
     "failure reason: Stage failed because barrier task ResultTask(0, 1) finished unsuccessfully.\n"
     'java.io.IOException: Cannot run program "/opt/py/python": Exec failed, error: 2 (No such file or '
     'directory) \n\tat java.base/java.lang.ProcessBuilder.start(ProcessBuilder.java:1170)',
     "python", (
         "executors cannot run /opt/py/python (No such file or directory): create a new session "
         "with PYSPARK_PYTHON set to a Python that exists there"
     )),
    ("Stage failed because barrier task ResultTask(3, 0) finished unsuccessfully.\n"
     "ExecutorLostFailure (executor 13 exited caused by one of the running tasks) Reason: \n"
     "The executor with id 13 exited with exit code 137(SIGKILL, possible container OOM).\n",
     "executor_lost", (
         "executor 13 was lost: The executor with id 13 exited with exit code 137(SIGKILL, possible "
         "container OOM)"
     )),
    ("Stage failed because barrier task ResultTask(3, 0) finished unsuccessfully.\n"
     "ExecutorLostFailure (executor 13 exited caused by one of the running tasks) Reason: \n"
     "Driver stacktrace:",
     "executor_lost", "executor 13 was lost"),
    ("An error occurred while calling o48.collectToPython.\n: org.apache.spark.SparkException: Job "
     "aborted due to stage failure: Task 0 in stage 0.0 failed 1 times, most recent failure: Lost task 0.0 "
     "in stage 0.0 (TID 0) (10.0.0.7 executor 0): org.apache.spark.SparkException: \n"
     "Error from python worker:\n  Traceback (most recent call last):\n    File \"daemon.py\", line 42\n"
     "  SyntaxError: invalid syntax\n  \nPYTHONPATH was:\n  /opt/spark/pyspark.zip\n"
     "org.apache.spark.SparkException: EOFException occurred while reading the port number from "
     "pyspark.daemon's stdout.\n\tat org.apache.spark.api.python.PythonWorkerFactory.create(X.scala:1)",
     "python", (
         "Python does not start on executors (SyntaxError: invalid syntax): create a new session "
         "with PYSPARK_PYTHON set to a Python that Spark supports"
     )),
    *(
        (f"An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
         f'  File "<ipython-input-1>", line 4, in lookup\n{said}',
         "other", f"a task failed: {said}")
        for said in (
            "ConnectionRefusedError: [Errno 111] Connection refused",
            "AttributeError: 'NoneType' object has no attribute 'score'",
            "ValueError: Worker 3 is lost",
            "RuntimeError: Job 7 cancelled",
        )
    ),
    ("java.net.ConnectException: Call From a/10.0.0.1 to b:9000 failed: Connection refused",
     "other", (
         "RuntimeError: java.net.ConnectException: Call From a/10.0.0.1 to b:9000 failed: Connection refused"
     )),
]  # fmt: skip
"""Texts of Spark 4.3, classic and Connect, as they came."""


def test_the_task_of_a_lost_worker() -> None:
    assert lost_task(explained(ValueError(LOST))) == (3, 2)
    assert (
        lost_task(explained(ValueError(LOST.replace("Python worker exited", "It ended")))) is None
    )


@pytest.mark.parametrize(("text", "kind", "sentence"), SAID)
def test_sparks_messages_in_one_sentence(text: str, kind: str, sentence: str) -> None:
    error = explained(RuntimeError(text))
    assert (error.kind, str(error)) == (kind, sentence)
    assert text in error.details


def test_what_a_task_misses_is_reported_whole_where_its_python_has_a_long_path() -> None:
    """The sentence about the job is cut off in the middle of it."""
    missing = f"executors have no module x (Python 3.11.7, /{'environment/' * 20}bin/python)"
    problem = host_task._ProblemError("missing", missing)
    raised = f"Traceback (most recent call last):\n{type(problem).__qualname__}: {problem}"
    error = explained(RuntimeError(f"thrown from the Python worker: {raised}\n\tat org.apache.X"))
    assert str(error).endswith("…")
    session = sessions.Session(SimpleNamespace(), False, "app", "spark://there:7077")
    assert missing in str(as_error(error, session))
