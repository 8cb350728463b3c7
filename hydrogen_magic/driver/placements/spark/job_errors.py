"""Errors of Spark jobs, as one plain sentence and a kind for programs.

The texts are those of Spark 4, identical on a classic session and through Spark Connect, where only the
names of the exceptions differ; so the text is analysed, not the exception's class.
"""

from __future__ import annotations

import re

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


_LOST = re.compile(r"ExecutorLostFailure \(executor (\S+) (?:exited|lost|.*?)\)(?: Reason: (.*))?")
_LOST_STAGE = re.compile(r"(?:Executor|Slave|Worker|Host) ?(\S*) (?:is )?(?:lost|decommissioned)")
_VERSIONS = re.compile(r"Python in worker.*?(\d+\.\d+).*?than that in driver:? \(?(\d+\.\d+)", re.S)
_CANCELLED = re.compile(
    r"SPARK_JOB_CANCELLED|OPERATION_CANCELED|Job \d+ cancelled|Stage \d+ (?:was )?cancelled|"
    r"killed via the Web UI|cancelled (?:because|as part of)"
)
_REASON = re.compile(r"(?:Job|Stage) \d+ (?:was )?cancelled ([^\n]*)")
_SHUT_DOWN = re.compile(
    r"SparkContext was shut ?down|stopped SparkContext|SparkContext has been shutdown|"
    r"SESSION_CLOSED|SESSION_NOT_FOUND|SESSION_CHANGED|NO_ACTIVE_SESSION|"
    r"Answer from Java side is empty|Error while sending or receiving|Connection refused|"
    r"error while trying to connect to the Java server|StatusCode\.UNAVAILABLE|"
    r"failed to connect to all addresses|'NoneType' object has no attribute '_?(?:jsc|sc|jvm)|"
    r"Cannot invoke RPC on closed channel"
)
_MISSING = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
_PROGRAM = re.compile(r'Cannot run program "([^"]+)".*?: error=\d+, ([^\n]+)')
_PYTHON = re.compile(r"^(?!org\.|java)(\w[\w.]*(?:Error|Exception|Exit|Interrupt)\b.*)$", re.M)
_FORBIDDEN = re.compile(
    r"Py4JSecurityException: (?:Method|Constructor) [^(]*?([\w$]+\.[\w$]+)\(.*?"
    r"is not (?:white|allow)listed",
    re.S,
)
_FRAME = re.compile(r"^\s+at [\w.$]+|^JVM stacktrace|^\s*\(|^Traceback")
_LONGEST = 300
"""Characters of a sentence; the rest is in the details."""


def explained(error: BaseException) -> SparkJobError:
    """Return the error for ``error``, raised by ``collect()``; never raises."""
    text = _text(error)
    kind, message = next(
        ((kind, said) for kind, read in _READERS if (said := read(text)) is not None),
        ("other", _first_line(text)),
    )
    return SparkJobError(kind, message, text)


def _text(error: BaseException) -> str:
    try:
        # Py4J asks the JVM for the stack, but the JVM may have exited.
        return f"{type(error).__name__}: {error}"
    except Exception as second:
        return f"{type(error).__name__}: Answer from Java side is empty ({second!r})"


def _stopped(text: str) -> str | None:
    if not _SHUT_DOWN.search(text):
        return None
    return STOPPED


def _slots(text: str) -> str | None:
    if "SPARK-24819" in text or "BarrierJobSlotsNumberCheckFailed" in text:
        return "Spark refused the gang: it needs more task slots than the cluster has now"
    return None


def _other_version(text: str) -> str | None:
    if "PYTHON_VERSION_MISMATCH" not in text:
        return None
    versions = _VERSIONS.search(text)
    there, here = versions.groups() if versions else ("another minor version", "this one")
    return (
        f"executors run Python {there}, this notebook runs Python {here}: create a new session "
        "with PYSPARK_PYTHON set to an interpreter of the same minor version"
    )


def _executor_lost(text: str) -> str | None:
    lost = _LOST.search(text)
    if lost is not None:
        reason = (lost[2] or "").strip().rstrip(".")
        return f"executor {lost[1]} was lost" + (f": {_short(reason)}" if reason else "")
    if "ExecutorLost" in text or _LOST_STAGE.search(text):
        return "an executor was lost"
    return None


def _cancelled(text: str) -> str | None:
    if not _CANCELLED.search(text):
        return None
    reason = _REASON.search(text)
    said = reason[1].partition(" SQLSTATE")[0].strip().rstrip(".") if reason else ""
    said = said.removeprefix("because").strip()
    return "the Spark job was cancelled" + (f" ({_short(said)})" if said else "")


def _missing(text: str) -> str | None:
    module = _MISSING.search(text)
    if module is None or ("Python worker" not in text and "PythonException" not in text):
        return None
    return (
        f"executors' Python has no module {module[1]}: install it there, or create a new session "
        "with PYSPARK_PYTHON set to an interpreter that has it"
    )


def _no_python(text: str) -> str | None:
    program = _PROGRAM.search(text)
    if program is None:
        return None
    return (
        f"executors cannot run {program[1]} ({program[2]}): create a new session with "
        "PYSPARK_PYTHON set to a Python that exists there"
    )


def _forbidden(text: str) -> str | None:
    call = _FORBIDDEN.search(text)
    return None if call is None else f"this cluster forbids {call[1]} (Py4J security)"


def _crashed(text: str) -> str | None:
    if "Python worker exited unexpectedly" in text:
        return "a Python worker on an executor exited unexpectedly (killed, or out of memory)"
    return None


_READERS = (
    ("forbidden", _forbidden),
    ("python", _other_version),
    ("slots", _slots),
    ("stopped", _stopped),
    ("executor_lost", _executor_lost),
    ("cancelled", _cancelled),
    ("python", _missing),
    ("python", _no_python),
    ("worker_lost", _crashed),
)
"""The first match wins: a stopped context also cancels jobs, a lost executor also fails a stage."""


def _first_line(text: str) -> str:
    """Return the Python exception of a task if there is one, otherwise the first line outside of a
    stack.
    """
    raised = _PYTHON.findall(text.partition("PYTHON_EXCEPTION")[2])
    if raised:
        return _short(f"a task failed: {raised[-1]}")
    lines = (line.strip(" :") for line in text.splitlines() if not _FRAME.search(line))
    said = [line for line in lines if line and not line.startswith("Py4JJavaError")]
    return _short(said[0] if said else text)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
