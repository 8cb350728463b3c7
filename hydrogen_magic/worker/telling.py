"""What a kernel that waits for a run on Spark hears of its tasks.

A task only counts; a thread beside it tells the kernel a few times a second. Nothing of that holds a
task up or has it fail: where the kernel cannot be reached, has gone, or waits no longer, the thread
ends and tasks go on in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydrogen_magic.worker.teller import Teller

__all__ = ["News", "TaskNews", "task_of"]

_MOST_FAILURES = 3
"""Failed places whose text a task tells; all of them are counted."""


@dataclass
class TaskNews:
    """One attempt at one partition, so far."""

    stage: int
    partition: int
    attempt: int
    """Spark's number of this very attempt, of which there is no second in an application."""
    is_trial: bool
    """It is there to see which columns ``predict`` returns; its rows come once more."""
    phase: str = "loading"
    """``loading`` (the cell runs), ``running``, then ``done``, ``failed`` or ``left`` (nobody wants the
    rest of it)."""
    rows: int = 0
    """Rows done."""
    failed: int = 0
    """Of these, the ones without a prediction."""
    said: str = ""
    """Why it failed."""
    failures: tuple[str, ...] = ()
    """What a person is told of the first rows that got no prediction."""

    def count(self, n_rows: int, failed: int, failures: Sequence[str]) -> None:
        """Count a chunk that is done."""
        self.rows += n_rows
        self.failed += failed
        self.failures = (*self.failures, *failures)[:_MOST_FAILURES]


@dataclass
class News:
    """What a worker says."""

    worker: str
    """Tells it from all others."""
    host: str
    pid: int
    device: str
    tasks: tuple[TaskNews, ...]
    """The one under way, and those that ended since the last time."""
    stacks: str = ""
    """Where its threads are, when that was asked."""


@contextmanager
def task_of(boot: Mapping[str, Any]) -> Iterator[TaskNews]:
    """Give what a task of ``boot`` counts in; told to the kernel where that wants to know."""
    task = _task(boot)
    teller = _teller_for(boot.get("tell"))
    if teller is None:
        yield task
        return
    with teller.telling(task):
        yield task


def _task(boot: Mapping[str, Any]) -> TaskNews:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    ids = context.stageId(), context.partitionId(), context.taskAttemptId()
    return TaskNews(*ids, is_trial=boot["columns"] is None)


_teller: Teller | None = None
"""Of the last run; those of earlier ones end by themselves."""


def _teller_for(tell: Mapping[str, Any] | None) -> Teller | None:
    global _teller
    if tell is None:
        return None
    if _teller is None or _teller.key != tell["key"]:
        try:
            from hydrogen_magic.worker.teller import Teller

            _teller = Teller(tell)
        except (ImportError, RuntimeError):  # no pyzmq here, or no room for one more thread
            return None
    return None if _teller.is_over else _teller
