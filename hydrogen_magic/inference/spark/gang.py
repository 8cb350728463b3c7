"""The eager way of ``%%infer`` over a Spark DataFrame, without ``--out``: a gang that runs a ``SparkRun``.

It has a record, a view and a stop, as any gang.

controller ── SparkRun, in a thread ──► Spark ──► Python workers, each shown as a rank
  ▲                                                    │
  └──── SparkProgress ◄── hub ◄══ encrypted channel ═══╡ TaskStatus, a few times a second
                           └───── stop, stacks ───────►┘
"""

from __future__ import annotations

import asyncio
import math
import pickle
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hydrogen_magic.capture import Captured
from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.job import JobSpec, Plan
from hydrogen_magic.core.network import PortRange
from hydrogen_magic.core.units import counted
from hydrogen_magic.driver import launcher
from hydrogen_magic.driver.placements import AgentGroup, Attempt, EventSink, Placement
from hydrogen_magic.driver.placements.local_agents import hub
from hydrogen_magic.driver.placements.remote.rank_assignment import unassigned
from hydrogen_magic.driver.placements.spark.capacity_check import ClusterCapacity, slots_now
from hydrogen_magic.driver.placements.spark.hosts import endpoints
from hydrogen_magic.driver.placements.spark.job_errors import SparkJobError, lost_task
from hydrogen_magic.driver.placements.spark.session_settings import SessionSettings
from hydrogen_magic.errors import InferError, PlacementError
from hydrogen_magic.inference.run import InferenceRun
from hydrogen_magic.inference.spark import cached_runs
from hydrogen_magic.inference.spark.cached_runs import CachedRun
from hydrogen_magic.inference.spark.kept_partitions import KeptPartitions
from hydrogen_magic.inference.spark.prepared import PreparedRun, prepare
from hydrogen_magic.inference.spark.progress import SparkProgress
from hydrogen_magic.inference.spark.run import SparkRun
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.node.prediction.row_labels import widened_text
from hydrogen_magic.node.spark.inference_task import CHANGED
from hydrogen_magic.serialization.payload import Payload
from hydrogen_magic.serialization.result_stream import CELL_VALUE, NONE
from hydrogen_magic.transport.daemon_thread import in_daemon_thread

_REPORT_S = 0.2
"""Interval of progress events; views are not drawn more often."""
_MAX_REPORTS_PER_S = 200
"""Reports of all workers together: with more workers, each reports less often."""
_POLL_S = 0.5
"""How often Spark is asked for its tasks."""
_LAST_REPORT_S = 0.3
"""How long the last reports of workers may take after Spark has finished."""
_CANCEL_S = 0.1
"""Head start of Spark's own cancellation: a task that ends before it is cancelled is started again."""
_END_S = 1.5
"""How long workers may take to end their tasks."""
_DEFAULT_RANKS = 2
"""If the number of tasks at a time is not known."""
_without_shared_disk: set[str] = set()
"""Spark applications whose executors do not see this kernel's records."""


def infer_on_spark(
    frame: Any,
    captured: Captured,
    spec: JobSpec,
    options: InferOptions,
    *,
    title: str,
    resume: bool = False,
) -> InferenceRun:
    """Start to run the cell, and its ``predict`` over ``frame``, on Spark. Returns at once.

    The result is a DataFrame that Spark caches. ``resume``: continue a run that was not finished. Raises
    what :func:`~hydrogen_magic.inference.spark.prepared.prepare` raises, and InferError if something
    changed since the run to resume; nothing was started then.
    """
    prepared = prepare(frame, captured, spec, options)
    prints = cached_runs.fingerprint(frame, captured, spec, options)
    kept, begun = _kept(prints, prepared.session.application, resume=resume)
    if begun is None:
        cached_runs.forget(prints)
    place = _TaskPlacement(prepared, prints, kept, begun)
    # No rank is late, since a task may come to it much later. Spark has the cell already.
    spec = replace(spec, placement="spark", np=place.n_ranks, start_timeout_s=math.inf)
    captured = replace(captured, payload=Payload(pickle.dumps(None)))
    gang = launcher.launch_captured(captured, spec, title=title, place=place)
    return InferenceRun(gang, lambda: place.agent_group.value, place.agent_group.finished)


def _kept(
    prints: Mapping[str, str], application: str, *, resume: bool
) -> tuple[KeptPartitions | None, CachedRun | None]:
    """Return the files of finished partitions, or the run to resume from Spark's cache.

    Executors that share the disk also leave a run in the cache if they could not write to the disk.
    """
    shares_disk = application not in _without_shared_disk
    begun = None
    if resume:
        begun = cached_runs.find(prints, application, refuses_changes=not shares_disk)
    if begun is not None or not shares_disk:
        return None, begun
    of_files = {name: text for name, text in prints.items() if name != cached_runs.PLAN}
    return KeptPartitions(of_files, resume=resume), None


class _TaskPlacement(Placement):
    """See :class:`hydrogen_magic.driver.placements.Placement`."""

    def __init__(
        self,
        prepared: PreparedRun,
        prints: Mapping[str, str],
        kept: KeptPartitions | None,
        begun: CachedRun | None,
    ) -> None:
        self.n_ranks = _n_slots(prepared)
        self.agent_group = TaskAgentGroup(prepared, self.n_ranks, prints, kept, begun)
        self._prepared = prepared

    def plan(self, spec: JobSpec) -> Plan:
        share = self._prepared.share
        gpu = "assigned by Spark" if share.for_ranks else None
        return unassigned(spec, self._prepared.session.where, gpu, share.notes)

    def open(self, spec: JobSpec) -> AgentGroup:
        return self.agent_group


def _n_slots(prepared: PreparedRun) -> int:
    """Return how many tasks Spark can run at a time, if known; executors may still be added."""
    session = prepared.session
    slots = slots_now(session, _capacity(prepared))
    if not slots:
        settings = SessionSettings.read(session)
        slots = (settings.most_cores or 0) // settings.task_cpus
    return slots or _DEFAULT_RANKS


def _capacity(prepared: PreparedRun) -> ClusterCapacity:
    return ClusterCapacity(None, prepared.share.for_ranks, prepared.share.profile)


class TaskAgentGroup(AgentGroup):
    """The Python workers of one run."""

    def __init__(
        self,
        prepared: PreparedRun,
        n_ranks: int,
        prints: Mapping[str, str],
        kept: KeptPartitions | None = None,
        begun: CachedRun | None = None,
    ) -> None:
        self._prints, self._kept = prints, kept
        self.value: Any = None
        """The result, once it has succeeded."""
        self._n_ranks = n_ranks
        self._session = prepared.session
        self._capacity = _capacity(prepared)
        self._waits_for = ""
        self._run = SparkRun(prepared, kept, begun.frame if begun is not None else None)
        self._interval_s = max(_REPORT_S, n_ranks / _MAX_REPORTS_PER_S)
        self._progress = SparkProgress(n_ranks, self._interval_s, from_cache=begun is not None)
        self._now_s: Callable[[], float] = time.monotonic
        self._key = self._gang = ""
        self._ends_tasks = False
        """Whether every worker that reports is asked to end its task."""
        self._is_stopped = False
        self._lost_rank: int | None = None
        """Whose process has died, for which the run has failed."""
        self._asked_stacks: set[str] = set()
        """Workers that have still to send their stacks."""

    # ── the attempt ──

    async def launch(self, attempt: Attempt, sink: EventSink) -> None:
        self._now_s = attempt.job.now_s
        self._gang = attempt.gang
        keys = hub().admit(self._receive)
        self._key = keys.key
        try:
            await self._attempt(self._report_to(keys, attempt.job.spec.ports), attempt, sink)
        finally:
            hub().revoke_key(keys.key)

    async def _attempt(
        self, report_to: dict[str, Any] | None, attempt: Attempt, sink: EventSink
    ) -> None:
        self._open_files(sink)
        name = f"hydrogen_magic run {attempt.gang}"
        job = in_daemon_thread(lambda: self._run.result(report_to), name)
        try:
            await self._watch(job, sink)
            self._take_error(job.exception())
            await self._last_reports(job)
            self._end(job, sink)
        finally:
            if not job.done():  # the kernel ends
                self._run.stop()

    def _open_files(self, sink: EventSink) -> None:
        """Let finished partitions go to the record of the run, if it has one."""
        kept = self._run.kept
        if kept is None:
            return
        try:
            kept.open(self._gang)
        except OSError as error:
            self._run.kept = self._kept = None
            text = f"finished partitions are not kept on disk: {error}"
            sink.emit(ev.Notice(self._now_s(), "warning", text))
            return
        self._progress.resume({part.number: part.n_rows for part in kept.earlier()})
        if text := kept.start_text():
            sink.emit(ev.Notice(self._now_s(), "info", text))

    def _report_to(self, keys: Any, ports: PortRange | None) -> dict[str, Any] | None:
        """Return where and how tasks report their progress, None if they cannot."""
        try:
            reachable = endpoints(self._session, ports)
        except PlacementError:
            return None
        return {
            "endpoints": reachable,
            "server_key": keys.server_key,
            "key": keys.key,
            "secret": keys.secret,
            "interval_s": self._interval_s,
        }

    async def _watch(self, job: asyncio.Future[Any], sink: EventSink) -> None:
        """Emit the progress until Spark's job has ended."""
        poll_at = time.monotonic()
        while not job.done():
            await asyncio.wait([job], timeout=_REPORT_S)
            if time.monotonic() >= poll_at and not job.done():
                poll_at = time.monotonic() + _POLL_S
                await self._poll()
                await self._report_wait(sink)
            self._emit(sink, self._progress.events(self._now_s()))

    async def _poll(self) -> None:
        """Ask Spark how many tasks are done; if the session is ending, it does not answer."""
        with suppress(Exception):  # errors of Java, gRPC and pyspark have no common base
            stages = await asyncio.to_thread(self._run.stages)
            self._progress.count_tasks(stages, self._now_s())
        if self._is_stopped:  # perhaps before there was a job to cancel
            self._run.stop()

    async def _report_wait(self, sink: EventSink) -> None:
        """Say what holds all slots, while no task has one."""
        waits_for = ""
        if not (self._is_stopped or self._progress.n_busy(self._now_s())):
            with suppress(Exception):  # as above
                waits_for = await asyncio.to_thread(self._run.lack_of_slots, self._capacity)
        if waits_for != self._waits_for:
            self._waits_for = waits_for
            sink.emit(ev.Queued(self._now_s(), 0 if waits_for else 1, 1, waits_for))

    def _emit(self, sink: EventSink, events: list[ev.Event]) -> None:
        for event in events:
            sink.emit(event)

    def _take_error(self, error: BaseException | None) -> None:
        """Count the tasks no more that Spark runs no more."""
        if error is None:
            return
        if not isinstance(error.__cause__, SparkJobError):  # raised between two jobs
            self._progress.end_tasks()
        elif lost := lost_task(error.__cause__):
            self._lost_rank = self._progress.lose(*lost)

    async def _last_reports(self, job: asyncio.Future[Any]) -> None:
        """Wait for the last reports; after a failure, until workers have left their tasks."""
        limit_s = max(_LAST_REPORT_S, 1.5 * self._interval_s)
        if job.exception() is not None:
            self._ends_tasks, limit_s = True, _END_S
        deadline = time.monotonic() + limit_s
        while self._awaits_reports() and time.monotonic() < deadline:
            await asyncio.sleep(_REPORT_S / 10)

    def _awaits_reports(self) -> bool:
        if self._run.n_rows is None:
            return self._progress.n_busy(self._now_s()) > 0
        return bool(self._progress.workers) and self._progress.rows < self._run.n_rows

    def _end(self, job: asyncio.Future[Any], sink: EventSink) -> None:
        """Emit how it ended. Raises the error that ended it."""
        now_s, error = self._now_s(), job.exception()
        self._report_disk(now_s, sink)
        if error is not None:
            self._keep(error, now_s, sink)
            self._emit_failure(error, now_s, sink)
            raise error
        self.value = job.result()
        cached_runs.forget(self._prints, result=self.value)
        if self._kept is not None:  # also those of an earlier run, after `give_up`
            self._kept.delete()
        for name, first, final in self._run.widened:
            sink.emit(ev.Notice(now_s, "warning", widened_text(name, first, final)))
        if self._is_stopped:  # after the last row: the result will not be used
            self.value.unpersist()
        self._emit(sink, self._progress.end(now_s, self._run.n_rows or 0))
        for rank in range(self._n_ranks):
            value = NONE  # the value of the cell is not used
            sink.deliver(rank, msg.ResultPart(CELL_VALUE), value)
            sink.emit(ev.RankResult(now_s, rank, value.nbytes))
            sink.emit(ev.RankExited(now_s, rank, 0, asked=True))

    def _report_disk(self, now_s: float, sink: EventSink) -> None:
        """Say that finished partitions are not on disk, once for an application that shares none."""
        if self._kept is None or self._run.kept is not None:
            return
        self._kept.give_up()
        if self._run.not_kept:
            text = f"{self._run.not_kept}: they are only in Spark's cache, and Stop returns no rows"
            sink.emit(ev.Notice(now_s, "warning", text))
            return
        application = self._session.application
        if application not in _without_shared_disk:
            _without_shared_disk.add(application)
            text = (
                f"executors cannot write to {self._kept.folder.parent.parent}, so finished partitions are"
                " only in Spark's cache: Stop returns no rows, and --resume works until the Spark"
                " application ends. Set HYDROGEN_MAGIC_HOME to a folder that they share"
            )
            sink.emit(ev.Notice(now_s, "info", text))

    def _keep(self, error: BaseException, now_s: float, sink: EventSink) -> None:
        """Leave the finished partitions to a run with ``--resume``."""
        if self._run.kept is not None:
            if CHANGED in str(error):
                self._run.kept.undo()
            if text := self._run.kept.end_text():
                sink.emit(ev.Notice(now_s, "warning", text))
            return
        if self._run.unfinished is None:
            return
        application = self._session.application
        run = CachedRun(self._gang, self._prints, self._run.unfinished, application)
        cached_runs.keep(run)
        text = "Spark keeps the finished partitions in its cache: run the cell with --resume to continue"
        sink.emit(ev.Notice(now_s, "warning", text))

    def _emit_failure(self, error: BaseException, now_s: float, sink: EventSink) -> None:
        self._emit(sink, self._progress.events(now_s))
        n_busy = self._progress.n_busy(now_s)
        if n_busy:
            text = f"{counted(n_busy, 'task')} may still run; Spark ends {'it' if n_busy == 1 else 'them'}"
            sink.emit(ev.Notice(now_s, "warning", text))
        culprit = self._progress.culprit(str(error)) if isinstance(error, InferError) else None
        if culprit is not None:
            rank, text = culprit
            sink.emit(ev.RankFailed(now_s, rank, ev.ErrorReport("InferError", text), "running"))
        elif self._lost_rank is not None:
            report = ev.ErrorReport("WorkerLost", str(error))
            sink.emit(ev.RankFailed(now_s, self._lost_rank, report, "running"))
        for rank in range(self._n_ranks):
            sink.emit(ev.RankExited(now_s, rank, None, asked=True))

    def finished(self) -> Any:
        """Return the finished partitions of a run that was stopped, None if there are none."""
        if self.value is None:
            self.value = self._run.finished()
        return self.value

    def _receive(self, message: object, data: memoryview | None) -> None:
        """Take the report of a worker; the answer goes to that worker."""
        status = msg.decode(message, msg.TaskStatus)
        self._progress.update(status, self._now_s())
        if any(task.phase == "failed" for task in status.tasks):
            hub().send(self._key, msg.FailureReceived())
        if self._ends_tasks:
            hub().send(self._key, msg.EndTask())
        elif status.worker in self._asked_stacks:
            self._asked_stacks.discard(status.worker)
            hub().send(self._key, msg.ReportStacks())

    # ── commands ──

    def stop(self) -> None:
        self._is_stopped = True
        self._run.stop()
        hub().loop.call_later(_CANCEL_S, self._end_tasks)

    def _end_tasks(self) -> None:
        self._ends_tasks = True

    def kill(self) -> None:
        self.stop()

    def send(self, command: msg.AgentCommand) -> None:
        """Ask for stacks. Tasks have no spans, steps or input, and Spark assigns partitions to them."""
        if isinstance(command, msg.ReportStacks):
            self._asked_stacks = self._progress.workers

    async def release(self) -> None:
        """Do nothing: Spark keeps its Python workers."""
