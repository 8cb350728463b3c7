"""Progress of a run on Spark: takes the reports of Python workers, returns the events of a gang.

Uses no socket, session or clock. The gang has a rank for each task that Spark runs at a time; a Python
worker becomes a rank with its first task. Spark may attempt a partition several times, also at the same
time: only the rows of the attempt that is furthest count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.node.prediction.row_labels import failures_text

_ROWS_BAR = -1
"""Number of the progress bar of a rank's rows."""
_EARLIER_RUN = -1
"""The stage of partitions that an earlier run has finished."""
_MAX_ERRORS = 256
"""Failed attempts to remember; after the job has failed, others end with KeyboardInterrupt."""
_SILENT_S = 5.0
"""A worker without a report for so long has ended, or holds the GIL."""
_SILENT_REPORTS = 3
"""The same in intervals between reports."""


@dataclass
class _Worker:
    rank: int
    rows: dict[int, int] = field(default_factory=dict)
    """Rows by attempt."""
    reported_s: float = 0.0
    task: msg.TaskProgress | None = None
    """The current task."""


class SparkProgress:
    """Times are those of the gang. ``interval_s``: time between two reports of a worker.

    ``from_cache``: the run goes on from Spark's cache. Its tasks report to the earlier run, if at all, so
    rows that were not reported here may be that run's, and do not count for the speed.
    """

    def __init__(self, n_ranks: int, interval_s: float = 0.0, *, from_cache: bool = False) -> None:
        self._from_cache = from_cache
        self._silent_s = max(_SILENT_S, _SILENT_REPORTS * interval_s)
        self._errors: deque[tuple[int, str]] = deque(maxlen=_MAX_ERRORS)
        """Rank and error of failed attempts."""
        self._n_ranks = n_ranks
        self._workers: dict[str, _Worker] = {}
        self._partitions: dict[int, msg.TaskProgress] = {}
        """The attempt that is furthest, by partition."""
        self._stage: int | None = None
        """The stage that predicts, None before its first task has reported."""
        self._stages: Mapping[int, tuple[int, int]] = {}
        self._tasks: tuple[int, int] | None = None
        self._began_s: float | None = None
        """Time of the first report about rows."""
        self._polled_s = 0.0
        """Time of Spark's first answer."""
        self._new_events: list[ev.Event] = []
        """Events about workers since the last call of :meth:`events`."""
        self._emitted: dict[object, ev.Event] = {}
        """The last event about each thing, without its time."""

    def resume(self, n_rows: Mapping[int, int]) -> None:
        """Take the partitions, with their rows, that an earlier run has finished: no task reports them."""
        for partition, rows in n_rows.items():
            done = msg.TaskProgress(_EARLIER_RUN, partition, -1, False, "done", rows)
            self._partitions[partition] = done

    # ── reports ──

    def update(self, status: msg.TaskStatus, now_s: float) -> None:
        """Take the report of a worker."""
        worker = self._workers.get(status.worker)
        if worker is None:
            if not status.tasks:
                return
            worker = self._workers[status.worker] = _Worker(self._free_rank(now_s))
            self._new_events.append(
                ev.RankStarted(now_s, worker.rank, status.pid, status.host, status.device)
            )
            self._emitted.pop(("phase", worker.rank), None)
        worker.task, worker.reported_s = None, now_s
        for task in status.tasks:
            self._update_task(worker, task, now_s)
        if status.stacks:
            self._new_events.append(ev.RankStacks(now_s, worker.rank, status.stacks))

    def _update_task(self, worker: _Worker, task: msg.TaskProgress, now_s: float) -> None:
        worker.task = None if task.phase in ("done", "failed", "left") else task
        if task.phase == "failed":
            self._errors.append((worker.rank, task.error))
        if task.is_trial:
            return
        if (
            self._stage is None
        ):  # Spark has ended the process of the trial, perhaps before its report
            for other in self._workers.values():
                other.task = other.task if other is worker else None
            self._tasks = self._stages.get(task.stage)  # until now those of all stages
        self._stage = task.stage
        self._began_s = now_s if self._began_s is None else self._began_s
        worker.rows[task.attempt] = task.rows
        known = self._partitions.get(task.partition)
        if known is None or _reached(task) >= _reached(known):
            self._partitions[task.partition] = task

    def _free_rank(self, now_s: float) -> int:
        """Return a rank that no worker has had, else one without a task, else any."""
        workers = self._workers.values()
        used = {worker.rank for worker in workers}
        busy = {worker.rank for worker in workers if self._is_busy(worker, now_s)}
        ranks = sorted(set(range(self._n_ranks)) - busy, key=lambda rank: (rank in used, rank))
        return ranks[0] if ranks else len(workers) % self._n_ranks

    def count_tasks(self, stages: Mapping[int, tuple[int, int]], now_s: float) -> None:
        """Take the number of finished tasks and of all tasks, by stage."""
        if self._tasks is None:
            self._polled_s = now_s
        self._stages = stages
        if self._stage is not None:
            self._tasks = stages.get(self._stage, self._tasks)
        elif stages:
            done, total = zip(*stages.values(), strict=True)
            self._tasks = sum(done), sum(total)

    # ── state ──

    @property
    def rows(self) -> int:
        return sum(task.rows for task in self._partitions.values())

    @property
    def workers(self) -> set[str]:
        return set(self._workers)

    def culprit(self, error: str) -> tuple[int, str] | None:
        """Return rank and message of the attempt that ``error`` comes from, if known."""
        found = (each for each in reversed(self._errors) if each[1] and error.startswith(each[1]))
        return next(found, None)

    def end_tasks(self) -> None:
        """Count no task as running."""
        for worker in self._workers.values():
            worker.task = None

    def lose(self, stage: int, partition: int) -> int | None:
        """Count no attempt at a partition as running, whose processes have died, and no earlier stage.

        Returns the rank of the last attempt that has reported, None if none has.
        """
        rank = None
        for worker in self._workers.values():
            task = worker.task
            if task is None or (task.stage == stage and task.partition != partition):
                continue
            worker.task = None
            rank = worker.rank if task.stage == stage else rank
        return rank

    def n_busy(self, now_s: float) -> int:
        """Return how many workers have a task."""
        return sum(self._is_busy(worker, now_s) for worker in self._workers.values())

    def _is_busy(self, worker: _Worker, now_s: float) -> bool:
        return worker.task is not None and now_s - worker.reported_s < self._silent_s

    def _n_resumed(self) -> int:
        earlier = (task for task in self._partitions.values() if task.stage == _EARLIER_RUN)
        return sum(task.rows for task in earlier)

    def _n_failed(self) -> int:
        return sum(task.failed for task in self._partitions.values())

    def _task_counts(self) -> tuple[int, int] | tuple[None, None]:
        """Return how many tasks are done, and of how many; Spark Connect also counts failed attempts."""
        if self._tasks is None:
            return None, None
        done, total = self._tasks
        n_open = sum(task.phase != "done" for task in self._partitions.values())
        return min(done, total - n_open), total

    def _expected(self) -> int | None:
        """Return the estimated number of rows, from the partitions that are done."""
        done = [task.rows for task in self._partitions.values() if task.phase == "done"]
        n_done, total = self._task_counts()
        if not done or n_done is None or total is None:
            return None
        # Tasks without rows do not report.
        return max(self.rows, sum(done) * total // max(len(done), n_done))

    # ── events ──

    def events(self, now_s: float) -> list[ev.Event]:
        """Return what has changed since the last call."""
        new, self._new_events = self._new_events, []
        current = [*self._rank_events(now_s), ("rows", self._rows_event(now_s))]
        for about, event in current:
            timeless = replace(event, at_s=0.0)
            if self._emitted.get(about) != timeless:
                self._emitted[about] = timeless
                new.append(event)
        return new

    def end(self, now_s: float, n_rows: int) -> list[ev.Event]:
        """Return the last events; ``n_rows`` is Spark's own count."""
        events = self.events(now_s)
        resumed = n_rows - self.rows if self._from_cache else min(n_rows, self._n_resumed())
        counts = n_rows, n_rows, 0, self._n_failed()
        events.append(ev.RowsDone(now_s, self._start_s(), *counts, resumed=max(0, resumed)))
        if self._n_failed():
            reasons = [
                text for _, task in sorted(self._partitions.items()) for text in task.failures
            ]
            text = failures_text(self._n_failed(), reasons)
            events.append(ev.Notice(now_s, "warning", text))
        return events

    def _start_s(self) -> float:
        return self._polled_s if self._began_s is None else self._began_s

    def _rank_events(self, now_s: float) -> Iterator[tuple[object, ev.Event]]:
        for rank in range(self._n_ranks):
            workers = [worker for worker in self._workers.values() if worker.rank == rank]
            tasks = [w.task for w in workers if w.task is not None and self._is_busy(w, now_s)]
            if workers:
                phase = tasks[-1].phase if tasks else "waiting"
                yield ("phase", rank), ev.RankPhase(now_s, rank, phase)
            rows = sum(sum(worker.rows.values()) for worker in workers)
            if rows:
                yield ("bar", rank), ev.Progress(now_s, rank, _ROWS_BAR, "", rows, None, "rows")

    def _rows_event(self, now_s: float) -> ev.Event:
        done, total = self._task_counts()
        return ev.RowsDone(
            now_s,
            self._start_s(),
            self.rows,
            self._expected(),
            self.n_busy(now_s),
            self._n_failed(),
            is_estimate=True,
            tasks_done=done,
            tasks=total,
            resumed=self._n_resumed(),
        )


def _reached(task: msg.TaskProgress) -> tuple[bool, int]:
    return task.phase == "done", task.rows
