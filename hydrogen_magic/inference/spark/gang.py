"""A run over a Spark DataFrame as a gang: its record, its view, its stop; what runs is a Spark job.

loop ── SparkRun, by a thread ──► Spark ──► Python workers, a rank each
  ▲                                              │
  └───── tally ◄──── hub ◄════ wire, encrypted ══╡ rows done, a few times a second
                      └───────── what we want ──►┘ (where they can reach us)
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hydrogen_magic.capture import Captured
from hydrogen_magic.core import events as ev
from hydrogen_magic.core.job import JobSpec, Plan, Slot
from hydrogen_magic.core.messages import EndTask, ReportStacks, TaskStatus, decode
from hydrogen_magic.driver import launcher
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.placements import AgentGroup, Attempt, EventSink, Placement
from hydrogen_magic.driver.placements.local_agents import hub
from hydrogen_magic.driver.placements.spark.application_limits import most_cores
from hydrogen_magic.driver.placements.spark.capacity_check import ClusterCapacity, slots_now
from hydrogen_magic.driver.placements.spark.remote_agents import agent_pool
from hydrogen_magic.driver.placements.spark.session_settings import SessionSettings
from hydrogen_magic.errors import InferError, PlacementError
from hydrogen_magic.inference.spark.prepared import PreparedRun, prepare
from hydrogen_magic.inference.spark.progress import SparkProgress
from hydrogen_magic.inference.spark.run import SparkRun
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.serialization import payload
from hydrogen_magic.serialization.result_stream import CELL_VALUE, NONE, ResultPart

__all__ = ["SparkInferGang", "infer_on_spark"]

_TELL_S = 0.2
"""How often the view is told: it draws no more often."""
_TOLD_PER_S = 200
"""How many workers may say something in a second: with more of them each says it more seldom."""
_LOOK_S = 0.5
"""How often Spark is asked for its tasks."""
_LAST_S = 0.3
"""How long the workers' last word may take once Spark is done; Spark has counted the rows too."""
_CANCEL_S = 0.1
"""How long Spark has the first word when the run is stopped: a task that ends before it is cancelled
would be started again."""
_END_S = 1.5
"""How long workers may take to end what they are at."""
_FEWEST = 2
"""Ranks where nobody can say how many tasks run at once."""


class SparkInferGang:
    """A run of ``%%infer`` over a Spark DataFrame in the user's hands."""

    def __init__(self, gang: Gang, agent_group: TaskAgentGroup) -> None:
        self.gang = gang
        """A rank for each task that Spark can run at once."""
        self._agent_group = agent_group

    @property
    def result(self) -> Any:
        """The DataFrame with its predictions, kept by Spark (``cache``).

        Waits for the end. Raises InferError for what the cell or ``predict`` raise, and what
        :meth:`Gang.raise_for_state` raises.
        """
        self.gang.wait()
        self.gang.raise_for_state()
        return self._agent_group.value

    def __repr__(self) -> str:
        return f"<Inference by {self.gang!r}>"


def infer_on_spark(
    frame: Any, captured: Captured, spec: JobSpec, options: InferOptions, *, title: str
) -> SparkInferGang:
    """Have Spark run what was captured, and its ``predict`` over ``frame``. Returns at once.

    Raises what :func:`~hydrogen_magic.inference.spark.prepared.prepare` raises; nothing was started then.
    """
    place = _TaskPlacement(prepare(frame, captured, spec, options))
    # No rank is late: a partition may come to it in an hour. The cell is with Spark already.
    spec = replace(spec, placement="spark", np=place.n_ranks, start_timeout_s=math.inf)
    captured = replace(captured, parcel=payload.pack(None))
    return SparkInferGang(
        launcher.launch_captured(captured, spec, title=title, place=place), place.agent_group
    )


class _TaskPlacement(Placement):
    """See :class:`hydrogen_magic.driver.placements.Placement`."""

    def __init__(self, prepared: PreparedRun) -> None:
        session, share = prepared.session, prepared.share
        self.n_ranks = _n_slots(prepared)
        self.agent_group = TaskAgentGroup(prepared, self.n_ranks)
        self._where = session.where
        self._gpu = "one assigned by Spark" if share.for_ranks else None
        self._notes = share.notes

    def plan(self, spec: JobSpec) -> Plan:
        np, where, gpu = spec.np, self._where, self._gpu
        slots = (Slot(rank, 0, 0, np, np, 1, where, gpu, address="") for rank in range(np))
        return Plan(tuple(slots), self._notes)

    def open(self, spec: JobSpec) -> AgentGroup:
        return self.agent_group


def _n_slots(prepared: PreparedRun) -> int:
    """Return how many tasks Spark can run at once, as far as that is known: executors may yet come."""
    session, share = prepared.session, prepared.share
    slots = slots_now(session, ClusterCapacity(None, share.for_ranks, share.profile))
    if not slots:
        settings = SessionSettings.read(session)
        slots = (most_cores(session, settings) or 0) // settings.task_cpus
    return slots or _FEWEST


class TaskAgentGroup:
    """Spark's Python workers that run this; see :class:`hydrogen_magic.driver.placements.AgentGroup`."""

    def __init__(self, prepared: PreparedRun, n_ranks: int) -> None:
        self.value: Any = None
        """The result, after a good end."""
        self._n_ranks = n_ranks
        self._session = prepared.session
        self._run = SparkRun(prepared)
        self._work = _inheriting(prepared, self._run.result)
        self._every_s = max(_TELL_S, n_ranks / _TOLD_PER_S)
        self._tally = SparkProgress(n_ranks, self._every_s)
        self._now_s: Callable[[], float] = time.monotonic
        self._key = ""
        self._is_ending = False
        """Each worker that reports is asked to end its task."""
        self._is_unwanted = False
        self._asked: set[str] = set()
        """Workers that shall say where their threads are."""

    # ── the attempt ──

    async def launch(self, attempt: Attempt, sink: EventSink) -> None:
        self._now_s = attempt.job.now_s
        keys = hub().admit(self._hear)
        self._key = keys.key
        try:
            await self._attempt(self._address(keys), attempt, sink)
        finally:
            hub().dismiss(keys.key)

    async def _attempt(
        self, tell: dict[str, Any] | None, attempt: Attempt, sink: EventSink
    ) -> None:
        job = _in_thread(lambda: self._work(tell), f"hydrogen_magic run {attempt.gang}")
        try:
            await self._watch(job, sink)
            await self._last_words(job)
            self._end(job, sink)
        finally:
            if not job.done():  # this kernel ends
                self._run.stop()

    def _address(self, keys: Any) -> dict[str, Any] | None:
        """Return where and how tasks tell how far they are, None where they cannot."""
        try:
            endpoints = agent_pool().endpoints(self._session)
        except PlacementError:
            return None
        return {
            "endpoints": endpoints, "server_key": keys.server_key, "key": keys.key,
            "secret": keys.secret, "every_s": self._every_s,
        }  # fmt: skip

    async def _watch(self, job: asyncio.Future[Any], sink: EventSink) -> None:
        """Tell how far it is until Spark's job has ended."""
        look_at = time.monotonic()
        while not job.done():
            await asyncio.wait([job], timeout=_TELL_S)
            if time.monotonic() >= look_at and not job.done():
                look_at = time.monotonic() + _LOOK_S
                await self._look()
                if self._is_unwanted:  # before there was a job that could be cancelled
                    self._run.stop()
            for event in self._tally.events(self._now_s()):
                sink.emit(event)

    async def _look(self) -> None:
        """Have Spark say how many tasks are done. It may be ending: then it says nothing any more."""
        with suppress(Exception):  # exceptions of Java, gRPC and pyspark have no common base
            stages = await asyncio.to_thread(self._run.stages)
            self._tally.count(stages, self._now_s())

    async def _last_words(self, job: asyncio.Future[Any]) -> None:
        """Wait for what workers have still to say; after a bad end until they have left their tasks."""
        join_timeout_s = max(_LAST_S, 1.5 * self._every_s)
        if job.exception() is not None:
            self._is_ending, join_timeout_s = True, _END_S
        deadline = time.monotonic() + join_timeout_s
        while self._is_awaited() and time.monotonic() < deadline:
            await asyncio.sleep(_TELL_S / 10)

    def _is_awaited(self) -> bool:
        if self._run.n_rows is None:
            return self._tally.busy(self._now_s()) > 0
        return bool(self._tally.workers) and self._tally.rows < self._run.n_rows

    def _end(self, job: asyncio.Future[Any], sink: EventSink) -> None:
        """Say how it ended. Raises what ended it."""
        now_s, error = self._now_s(), job.exception()
        if error is None:
            self.value = job.result()
            if self._is_unwanted:  # stopped when all was done: nobody will ask for it
                self.value.unpersist()
            events = self._tally.end(now_s, self._run.n_rows or 0)
        else:
            events = [*self._tally.events(now_s), *self._left_over(now_s)]
        for event in events:
            sink.emit(event)
        culprit = self._tally.culprit(str(error)) if isinstance(error, InferError) else None
        if culprit is not None:
            rank, said = culprit
            report = ev.ErrorReport("InferError", said)
            sink.emit(ev.RankFailed(now_s, rank, report, "running"))
        for rank in range(self._n_ranks):
            self._end_rank(rank, error is None, now_s, sink)
        if error is not None:
            raise error

    def _end_rank(self, rank: int, is_well: bool, now_s: float, sink: EventSink) -> None:
        """Say of a rank that it is over: its Python worker is Spark's again."""
        if is_well:
            # the value of the cell is not used
            sink.deliver(rank, ResultPart(CELL_VALUE), NONE)
            sink.emit(ev.RankResult(now_s, rank, NONE.nbytes))
        sink.emit(ev.RankExited(now_s, rank, 0 if is_well else None, asked=True))

    def _left_over(self, now_s: float) -> list[ev.Event]:
        """Return what a person is told of tasks that did not end when they were asked to."""
        left = self._tally.busy(now_s)
        tasks = "1 task has" if left == 1 else f"{left} tasks have"
        text = (
            f"{tasks} not ended yet, perhaps as predict holds the GIL: Spark ends them in seconds"
        )
        return [ev.Notice(now_s, "warning", text)] if left else []

    # ── what workers say ──

    def _hear(self, message: object, data: memoryview | None) -> None:
        news = decode(message, TaskStatus)
        self._tally.hear(news, self._now_s())
        if self._is_ending:
            hub().send(self._key, EndTask())  # to the one that we have just heard
        elif news.worker in self._asked:
            self._asked.discard(news.worker)
            hub().send(self._key, ReportStacks())

    # ── orders ──

    def stop(self) -> None:
        self._is_unwanted = True
        self._run.stop()
        hub().loop.call_later(_CANCEL_S, self._have_them_end)

    def _have_them_end(self) -> None:
        self._is_ending = True

    def kill(self) -> None:
        self.stop()

    def dismiss(self, rank: int) -> None:
        """Which task does which rows is Spark's business."""

    def ask_stacks(self) -> None:
        self._asked = self._tally.workers

    def record(self, on: bool) -> None:
        """Tasks have no spans."""

    def profile(self, number: int, steps: int) -> None:
        """Tasks have no optimizer steps."""

    async def release(self) -> None:
        """Python workers are Spark's."""


def _inheriting(prepared: PreparedRun, work: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``work`` as this very thread would do it: a classic session's pool is its thread's."""
    if prepared.session.is_connect:
        return work
    from pyspark import inheritable_thread_target

    inheriting: Callable[..., Any] = inheritable_thread_target(prepared.session.spark)(work)
    return inheriting


def _in_thread(work: Callable[[], Any], name: str) -> asyncio.Future[Any]:
    """Return a future of what ``work`` returns or raises, in a thread that keeps no process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.cancelled():
            return
        done.set_result(value) if error is None else done.set_exception(error)

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as problem:  # whatever it is, the gang must be told
            error = problem
        with suppress(RuntimeError):  # the loop was closed meanwhile, with the kernel
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return done
