"""Reports of a task of an ``%%infer`` on Spark, to a kernel that waits for the run.

The task only counts; a thread beside it reports to the kernel a few times a second. The thread never
delays the task or makes it fail: when the kernel cannot be reached, has ended or no longer waits, the
thread ends and the task continues without reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hydrogen_magic.core.messages import TaskProgress
from hydrogen_magic.node.worker.task_status import TaskCounter

if TYPE_CHECKING:
    from hydrogen_magic.node.worker.task_reporter import TaskReporter

__all__ = ["task_of"]


@contextmanager
def task_of(boot: Mapping[str, Any]) -> Iterator[TaskCounter]:
    """Give the status that a task of ``boot`` updates; it is reported if the kernel asks for that."""
    task = _task(boot)
    teller = _teller_for(boot.get("tell"))
    if teller is None:
        yield task
        return
    with teller.telling(task):
        yield task


def _task(boot: Mapping[str, Any]) -> TaskCounter:
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    ids = context.stageId(), context.partitionId(), context.taskAttemptId()
    return TaskCounter(TaskProgress(*ids, is_trial=boot["columns"] is None))


_teller: TaskReporter | None = None
"""Reporter of the last run; those of earlier runs end by themselves."""


def _teller_for(tell: Mapping[str, Any] | None) -> TaskReporter | None:
    global _teller
    if tell is None:
        return None
    if _teller is None or _teller.key != tell["key"]:
        try:
            from hydrogen_magic.node.worker.task_reporter import TaskReporter

            _teller = TaskReporter(tell)
        except (ImportError, RuntimeError):  # no pyzmq here, or no resources for another thread
            return None
    return None if _teller.is_over else _teller
