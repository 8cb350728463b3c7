"""How far a run on Spark is: the book of what its Python workers say, and the events that follow.

Knows no socket, session or clock. A gang of such a run has a rank for each task that can run at once, and
a Python worker is a rank from its first task on. Spark may attempt a partition several times, one after
the other or two at once: its rows are counted once, by the attempt that is furthest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.messages import TaskProgress, TaskStatus

__all__ = ["SparkProgress"]

_BAR = -1
"""Number of the bar that counts a rank's rows."""
_MOST_TOLD = 3
"""Failed places that are told one by one."""
_MOST_SAID = 256
"""Failed attempts that are remembered; those whose job has failed end with KeyboardInterrupts."""
_GONE_S = 5.0
"""A worker that says nothing for so long has ended without a word, or holds the GIL."""
_GONE_TURNS = 3
"""Or nothing so many times that it was its turn to."""
_UNTOLD_S = 3.0
"""After so long without a word of any worker it is shown what Spark says of its tasks."""


@dataclass
class _WorkerStatus:
    rank: int
    rows: dict[int, int] = field(default_factory=dict)
    """Of each attempt."""
    heard_s: float = 0.0
    task: TaskProgress | None = None
    """What it is at."""


class SparkProgress:
    """Times are the gang's. ``every_s``: how often each worker says something."""

    def __init__(self, n_ranks: int, every_s: float = 0.0) -> None:
        self._gone_s = max(_GONE_S, _GONE_TURNS * every_s)
        self._said: deque[tuple[int, str]] = deque(maxlen=_MOST_SAID)
        """Ranks of the attempts that failed, and why."""
        self._n_ranks = n_ranks
        self._workers: dict[str, _WorkerStatus] = {}
        self._partitions: dict[int, TaskProgress] = {}
        """The attempt that is furthest."""
        self._stage: int | None = None
        """The stage that predicts, None before one of its tasks has come."""
        self._stages: Mapping[int, tuple[int, int]] = {}
        self._tasks: tuple[int, int] | None = None
        self._began_s: float | None = None
        """When the first rows were heard of."""
        self._seen_s = 0.0
        """When Spark's tasks were."""
        self._fresh: list[ev.Event] = []
        """Of workers that have come since :meth:`events`."""
        self._shown: dict[object, object] = {}
        """What the last events said of each thing."""

    # ── what is said ──

    def hear(self, news: TaskStatus, now_s: float) -> None:
        """Take what a worker says."""
        worker = self._workers.get(news.worker)
        if worker is None:
            if not news.tasks:
                return
            worker = self._workers[news.worker] = _WorkerStatus(self._free_rank(now_s))
            self._fresh.append(ev.RankStarted(now_s, worker.rank, news.pid, news.host, news.device))
            self._shown.pop(("phase", worker.rank), None)
        worker.task, worker.heard_s = None, now_s
        for task in news.tasks:
            self._take(worker, task, now_s)
        if news.stacks:
            self._fresh.append(ev.RankStacks(now_s, worker.rank, news.stacks))

    def _take(self, worker: _WorkerStatus, task: TaskProgress, now_s: float) -> None:
        is_over = task.phase in ("done", "failed", "left")
        worker.task = None if is_over else task
        if task.phase == "failed":
            self._said.append((worker.rank, task.said))
        if task.is_trial:
            return
        if self._stage is None:  # Spark ends the trial's process, which may not be able to say so
            for each in self._workers.values():
                each.task = each.task if each is worker else None
            self._tasks = self._stages.get(task.stage)  # of all of them until now
        self._stage = task.stage
        self._began_s = now_s if self._began_s is None else self._began_s
        worker.rows[task.attempt] = task.rows
        known = self._partitions.get(task.partition)
        if known is None or _reach(task) >= _reach(known):
            self._partitions[task.partition] = task

    def _free_rank(self, now_s: float) -> int:
        """Return a rank that no worker has had; else that of one without a task, or any."""
        workers = self._workers.values()
        had = {worker.rank for worker in workers}
        busy = {worker.rank for worker in workers if self._is_busy(worker, now_s)}
        free = [rank for rank in range(self._n_ranks) if rank not in busy]
        fresh = [rank for rank in free if rank not in had]
        return next(iter(fresh or free), len(workers) % self._n_ranks)

    def count(self, stages: Mapping[int, tuple[int, int]], now_s: float) -> None:
        """Take how many tasks of each stage are done, and how many there are, as Spark has it."""
        if self._tasks is None:
            self._seen_s = now_s
        self._stages = stages
        if self._stage is not None:
            self._tasks = stages.get(self._stage, self._tasks)
        elif stages:
            done, total = zip(*stages.values(), strict=True)
            self._tasks = sum(done), sum(total)

    # ── what is known ──

    @property
    def rows(self) -> int:
        return sum(task.rows for task in self._partitions.values())

    def culprit(self, error: str) -> tuple[int, str] | None:
        """Return the rank of the attempt that ``error`` is of, and what it said; None: not known."""
        of_it = (each for each in reversed(self._said) if each[1] and error.startswith(each[1]))
        return next(of_it, None)

    @property
    def workers(self) -> set[str]:
        return set(self._workers)

    def busy(self, now_s: float) -> int:
        """Return how many workers are at a task."""
        return sum(self._is_busy(worker, now_s) for worker in self._workers.values())

    def _is_busy(self, worker: _WorkerStatus, now_s: float) -> bool:
        return worker.task is not None and now_s - worker.heard_s < self._gone_s

    def _failed(self) -> int:
        return sum(task.failed for task in self._partitions.values())

    def _failures_text(self) -> str:
        """Return what a person is told of rows without predictions, empty where all have one."""
        n_rows = self._failed()
        if not n_rows:
            return ""
        told = [text for _, task in sorted(self._partitions.items()) for text in task.failures]
        rows = "1 row" if n_rows == 1 else f"{n_rows} rows"
        more = ["and more"] if len(told) > _MOST_TOLD else []
        return f"{rows} got no prediction: {'; '.join([*told[:_MOST_TOLD], *more])}"

    def _expected(self) -> int | None:
        """Return how many rows there will be, if all partitions are as those that are done."""
        done = [task.rows for task in self._partitions.values() if task.phase == "done"]
        if not done or self._tasks is None:
            return None
        n_done = max(len(done), self._tasks[0])  # of partitions without rows only Spark tells
        return max(self.rows, sum(done) * self._tasks[1] // n_done)

    # ── what is shown ──

    def events(self, now_s: float) -> list[ev.Event]:
        """Return what differs from what the last call returned."""
        fresh, self._fresh = self._fresh, []
        return [*fresh, *self._changed(self._ranks(now_s)), *self._changed(self._run(now_s))]

    def end(self, now_s: float, n_rows: int) -> list[ev.Event]:
        """Return the events of the end: Spark has counted ``n_rows``."""
        began_s = self._seen_s if self._began_s is None else self._began_s
        text = self._failures_text()
        return [
            *self.events(now_s),
            ev.RowsDone(now_s, began_s, n_rows, n_rows, 0, self._failed()),
            *([ev.Notice(now_s, "warning", text)] if text else []),
        ]

    def _changed(self, told: Iterator[tuple[object, ev.Event]]) -> Iterator[ev.Event]:
        for about, event in told:
            timeless = replace(event, at_s=0.0)
            if self._shown.get(about) != timeless:
                self._shown[about] = timeless
                yield event

    def _ranks(self, now_s: float) -> Iterator[tuple[object, ev.Event]]:
        if not self._workers:
            yield from self._untold(now_s)
        for rank in range(self._n_ranks):
            mine = [worker for worker in self._workers.values() if worker.rank == rank]
            tasks = [w.task for w in mine if w.task is not None and self._is_busy(w, now_s)]
            if mine or (("phase", rank) in self._shown and self._workers):
                phase = tasks[-1].phase if tasks else "waiting"
                yield ("phase", rank), ev.RankPhase(now_s, rank, phase)
            rows = sum(sum(worker.rows.values()) for worker in mine)
            if rows:
                yield ("bar", rank), ev.Progress(now_s, rank, _BAR, "", rows, None, "rows")

    def _untold(self, now_s: float) -> Iterator[tuple[object, ev.Event]]:
        """Yield that ranks run, where no worker can say so."""
        if self._tasks is None or now_s - self._seen_s < _UNTOLD_S:
            return
        done, total = self._tasks
        for rank in range(min(self._n_ranks, total - done)):
            detail = f"{done} of all {total} tasks done"
            yield ("phase", rank), ev.RankPhase(now_s, rank, "running", detail)

    def _run(self, now_s: float) -> Iterator[tuple[object, ev.Event]]:
        began_s = self._seen_s if self._began_s is None else self._began_s
        done, total = self._tasks or (None, None)
        told = ev.RowsDone(
            now_s, began_s, self.rows, self._expected(), self.busy(now_s), self._failed(),
            is_estimate=True, tasks_done=done, tasks=total,
        )  # fmt: skip
        yield "rows", told


def _reach(task: TaskProgress) -> tuple[bool, int]:
    return task.phase == "done", task.rows
