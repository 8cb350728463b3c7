"""Errors of Spark jobs, as one plain sentence and a kind for programs.

The texts are those of Spark 4, identical on a classic session and through Spark Connect, where only the
names of the exceptions differ; so the text is analysed, not the exception's class.
"""

from __future__ import annotations

import re

from hydrogen_magic.core.units import clipped

STOPPED = "the Spark session was stopped, or its driver has exited: create a new session"


class SparkJobError(Exception):
    """A barrier stage failed or was cancelled."""

    def __init__(self, kind: str, message: str, details: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        """``cancelled``, ``executor_lost``, ``worker_lost`` (a Python worker ended), ``slots``, ``python``
        (executors run one that cannot serve), ``forbidden`` (a call, by Py4J's security), ``stopped`` (the
        session or its SparkContext) or ``other``."""
        self.details = details
        """Spark's complete error: Java and Python stacks, many lines."""


_CHOOSE_PYTHON = "create a new session with PYSPARK_PYTHON set to"
_SENTENCES: tuple[tuple[str, str, str], ...] = (
    (
        "forbidden",
        r"Py4JSecurityException: (?:Method|Constructor) [^(]*?([\w$]+\.[\w$]+)\("
        r".*?is not (?:white|allow)listed",
        "this cluster forbids {} (Py4J security)",
    ),
    (
        "python",
        r"PYTHON_VERSION_MISMATCH.*?Python in worker.*?(\d+\.\d+)"
        r".*?than that in driver:? \(?(\d+\.\d+)",
        "executors run Python {}, this notebook runs Python {}: "
        f"{_CHOOSE_PYTHON} an interpreter of the same minor version",
    ),
    (
        "python",
        "PYTHON_VERSION_MISMATCH",
        "executors run another minor version of Python than this notebook: "
        f"{_CHOOSE_PYTHON} an interpreter of the same one",
    ),
    (
        "slots",
        "SPARK-24819|BarrierJobSlotsNumberCheckFailed",
        "Spark refused the gang: it needs more task slots than the cluster has now; `--wait 10m` waits "
        "for executors that are missing",
    ),
    (
        "stopped",
        "SparkContext was shut ?down|stopped SparkContext|SparkContext has been shutdown|"
        "SESSION_CLOSED|SESSION_NOT_FOUND|SESSION_CHANGED|NO_ACTIVE_SESSION|"
        r"Answer from Java side is empty|Error while sending or receiving|\AConnectionRefusedError|"
        r"error while trying to connect to the Java server|StatusCode\.UNAVAILABLE|"
        "failed to connect to all addresses|'NoneType' object has no attribute '_?(?:jsc|sc|jvm)|"
        "Cannot invoke RPC on closed channel",
        STOPPED,
    ),
    (
        "executor_lost",
        # On Kubernetes the reason begins on the next line.
        r"ExecutorLostFailure \(executor (\S+) (?:exited|lost|[^\n]*?)\) Reason:\s*(?!Driver st)(\S[^\n]*)",
        "executor {} was lost: {}",
    ),
    (
        "executor_lost",
        r"ExecutorLostFailure \(executor (\S+) (?:exited|lost|[^\n]*?)\)",
        "executor {} was lost",
    ),
    (
        "executor_lost",
        r"ExecutorLost|(?:Executor|Slave|Worker|Host) ?(?:\S*) (?:is )?(?:lost|decommissioned)",
        "an executor was lost",
    ),
    (
        "cancelled",
        r"(?:Job \d+|Stage \d+(?: was)?) cancelled (?:because )?(\S[^\n]*?)(?: SQLSTATE[^\n]*)?(?:\n|\Z)",
        "the Spark job was cancelled ({})",
    ),
    (
        "cancelled",
        r"SPARK_JOB_CANCELLED|OPERATION_CANCELED|Job \d+ cancelled|Stage \d+ (?:was )?cancelled|"
        "killed via the Web UI|cancelled (?:because|as part of)",
        "the Spark job was cancelled",
    ),
    (
        "python",
        r"\A(?=.*(?:Python worker|PythonException))"
        ".*?ModuleNotFoundError: No module named '([^']+)'",
        "executors' Python has no module {}: install it there, or "
        f"{_CHOOSE_PYTHON} an interpreter that has it",
    ),
    (
        "python",
        # Since Java 21: Exec failed, error: 2 (No such file or directory)
        r"""Cannot run program "([^"]+)"[^\n]*?(?:: error=\d+, |, error: \d+ \()([^\n()]+)""",
        f"executors cannot run {{}} ({{}}): {_CHOOSE_PYTHON} a Python that exists there",
    ),
    (
        "python",
        r"Error from python worker:\n.*?([^\n]*\S)\s*\nPYTHONPATH was:",
        f"Python does not start on executors ({{}}): {_CHOOSE_PYTHON} a Python that Spark supports",
    ),
    (
        "worker_lost",
        r"Lost task (\d+)\.\d+ in stage \S+ \(TID \d+\) \((\S+) executor ([^\s)]+)\)"
        "[^\n]*Python worker exited unexpectedly",
        "the Python worker of task {} on host {} (executor {}) exited unexpectedly (killed, or out of "
        "memory)",
    ),
    (
        "worker_lost",
        "Python worker exited unexpectedly",
        "a Python worker on an executor exited unexpectedly (killed, or out of memory)",
    ),
)
"""Kind, pattern and message, into which the pattern's groups are inserted. The first match wins: a stopped
context also cancels jobs, a lost executor also fails a stage."""
_OF_TASK = re.compile("PythonException|PYTHON_EXCEPTION|thrown from the Python worker")
"""Before the exception of a task, in the words of the user's code: only ``python`` is looked for there."""
_PYTHON = re.compile(r"^(?!org\.|java)(\w[\w.]*(?:Error|Exception|Exit|Interrupt)\b.*)$", re.M)
_LOST_TASK = re.compile(r"Lost task (\d+)\.\d+ in stage (\d+)\.")
_FRAME = re.compile(r"^\s+at [\w.$]+|^JVM stacktrace|^\s*\(|^Traceback")
_LONGEST = 300
"""Characters of a sentence; the rest is in the details."""


def explained(error: BaseException) -> SparkJobError:
    """Return the error for ``error``, raised by ``collect()``; never raises."""
    text = _text(error)
    of_spark = _OF_TASK.split(text, maxsplit=1)[0]
    for kind, pattern, message in _SENTENCES:
        found = re.search(pattern, text if kind == "python" else of_spark, re.DOTALL)
        if found is not None:
            parts = (clipped(part.strip().rstrip("."), _LONGEST) for part in found.groups())
            return SparkJobError(kind, message.format(*parts), text)
    return SparkJobError("other", _first_line(text), text)


def lost_task(error: SparkJobError) -> tuple[int, int] | None:
    """Return stage and number of the task whose Python worker has ended; None if they are not known."""
    found = _LOST_TASK.search(error.details) if error.kind == "worker_lost" else None
    return None if found is None else (int(found[2]), int(found[1]))


def _text(error: BaseException) -> str:
    try:
        # Py4J asks the JVM for the stack, but the JVM may have exited.
        return f"{type(error).__name__}: {error}"
    except Exception as second:
        return f"{type(error).__name__}: Answer from Java side is empty ({second!r})"


def _first_line(text: str) -> str:
    """Return the Python exception of a task if there is one, otherwise the first line outside of a
    stack.
    """
    of_task = _OF_TASK.search(text)
    raised = _PYTHON.findall(text, of_task.end()) if of_task else []
    if raised:
        return clipped(f"a task failed: {raised[-1]}", _LONGEST)
    lines = (line.strip(" :") for line in text.splitlines() if not _FRAME.search(line))
    said = [line for line in lines if line and not line.startswith("Py4JJavaError")]
    return clipped(said[0] if said else text, _LONGEST)
