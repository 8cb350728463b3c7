"""What a gang on Spark reports while it waits: for executors, for slots of other jobs, for Python workers.

Its own tasks hold slots too, and are never counted as those of others.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver.placements.remote.host_tasks import HostTasks
from hydrogen_magic.driver.placements.spark import (
    application_status,
    capacity_check,
    hosts,
    private_calls,
)
from hydrogen_magic.driver.placements.spark.application_status import Executor, ExecutorList
from hydrogen_magic.driver.placements.spark.capacity_check import (
    ONE_TASK,
    ClusterCapacity,
    lack_of_slots,
    waits_for,
)
from hydrogen_magic.driver.placements.spark.spark_session import Session

EARLIER, OWN = "hydrogen_magic-cafe-0", "hydrogen_magic-cafe-1"


@dataclass(frozen=True)
class Job:
    """A job of a Spark application."""

    tags: str
    n_running: int
    description: str = ""
    """Empty: the job has none, and is named by where it was called."""

    def task_set(self, number: int) -> Any:
        """Return it as Spark's scheduler has it."""
        tags = SimpleNamespace(getProperty=lambda name: self.tags or None)
        return SimpleNamespace(
            schedulableQueue=lambda: None,
            runningTasks=lambda: self.n_running,
            taskSet=lambda: SimpleNamespace(priority=lambda: number, properties=lambda: tags),
        )

    def of_store(self, number: int) -> Any:
        """Return it as Spark's status store has it."""
        described = SimpleNamespace(
            isDefined=lambda: bool(self.description), get=lambda: self.description
        )
        return SimpleNamespace(
            jobId=lambda: number, description=lambda: described, name=lambda: "collect at 1"
        )

    def of_ui(self, number: int) -> dict[str, Any]:
        """Return it as the UI answers; Connect puts user and session before a tag."""
        described = {"description": self.description} if self.description else {}
        tags = [f"SparkConnect_OperationTag_User_me_Session_1_Tag_{self.tags}"] if self.tags else []
        active = {"numActiveTasks": self.n_running, "jobTags": tags}
        return {"jobId": number, "name": "collect at 1", **described, **active}


def pool(*members: Any) -> Any:
    queue = SimpleNamespace(toArray=lambda: members)
    return SimpleNamespace(schedulableQueue=lambda: queue)


_applications = itertools.count()


def session_of(
    monkeypatch: pytest.MonkeyPatch,
    n_executors: int | None,
    jobs: Sequence[Job] | None,
    settings: Mapping[str, str] = {},
    *,
    is_connect: bool = False,
) -> Session:
    """Return a session of an application with these executors and jobs; None: unknown."""
    found = tuple(Executor(str(n), "a", 2, 0, ()) for n in range(n_executors or 0))
    known = None if n_executors is None else ExecutorList(found, 0.0, 60.0)
    monkeypatch.setattr(capacity_check, "roster", lambda session, within_s: known)
    listed = list(enumerate(jobs or ()))
    sets = [job.task_set(n) for n, job in listed]
    root = pool(*sets[:1], pool(*sets[1:]))  # as with spark.scheduler.mode=FAIR
    store = SimpleNamespace(job=lambda number: listed[number][1].of_store(number))
    context = SimpleNamespace(
        taskScheduler=lambda: SimpleNamespace(rootPool=lambda: root), statusStore=lambda: store
    )
    of_ui = [job.of_ui(n) for n, job in listed]
    monkeypatch.setattr(
        private_calls, "_context", lambda session: None if jobs is None else context
    )
    monkeypatch.setattr(
        application_status, "_from_ui", lambda *asked: None if jobs is None else (of_ui, 60.0)
    )
    spark: Any = SimpleNamespace(conf=SimpleNamespace(getAll={"spark.master": "there", **settings}))
    return Session(spark, is_connect, f"waiting-{next(_applications)}", "there")


THREE = {"spark.executor.instances": "3"}
ETL = Job("", 3, "etl")
MANY = [Job("", n, f"etl {n}") for n in range(1, 6)]


@pytest.mark.parametrize("is_connect", [False, True], ids=["classic", "connect"])
@pytest.mark.parametrize(
    ("n_executors", "settings", "jobs", "text"),
    [
        (2, {}, [], "2 executors"),
        (1, {}, [], "1 executor"),
        (2, {}, [Job(OWN, 2)], "2 executors"),
        (2, {}, [Job(OWN, 2), ETL], "2 executors; job 1 (etl) holds 3 slots"),
        (2, {}, [ETL, Job(f"mine,{OWN}", 1)], "2 executors; job 0 (etl) holds 3 slots"),
        (2, {}, [Job("", 1)], "2 executors; job 0 (collect at 1) holds 1 slot"),
        (2, {}, [Job("", 0, "ends"), ETL], "2 executors; job 1 (etl) holds 3 slots"),
        (
            2,
            {},
            [Job(EARLIER, 2, "hydrogen_magic gang cafe, 2 ranks"), Job(OWN, 0)],
            "2 executors; job 0 (hydrogen_magic gang cafe, 2 ranks) holds 2 slots",
        ),
        (
            2,
            {},
            [*MANY, Job(OWN, 9)],
            "2 executors; job 4 (etl 5) holds 5 slots; job 3 (etl 4) holds 4 slots; "
            "job 2 (etl 3) holds 3 slots; 2 more jobs hold slots",
        ),
        (
            2,
            {},
            MANY[1:],
            "2 executors; job 3 (etl 5) holds 5 slots; job 2 (etl 4) holds 4 slots; "
            "job 1 (etl 3) holds 3 slots; 1 more job holds slots",
        ),
        (1, THREE, [Job(OWN, 1)], "1 of 3 executors so far"),
        (1, THREE, [ETL], "1 of 3 executors so far; job 0 (etl) holds 3 slots"),
        (0, THREE, [], "0 of 3 executors so far"),
        (3, THREE, [], "3 executors"),
        (1, {"spark.cores.max": "8", "spark.executor.cores": "2"}, [], "1 of 4 executors so far"),
        (1, {"spark.cores.max": "2", "spark.executor.cores": "2"}, [], "1 executor"),
        (1, {**THREE, "spark.master": "local[2]"}, [ETL], "1 executor; job 0 (etl) holds 3 slots"),
        (None, THREE, [ETL, Job(OWN, 1)], "job 0 (etl) holds 3 slots"),
        (1, {}, None, "1 executor"),
        (None, {}, None, ""),
    ],
)
def test_what_a_gang_waits_for(
    n_executors: int | None,
    settings: Mapping[str, str],
    jobs: Sequence[Job] | None,
    text: str,
    is_connect: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = session_of(monkeypatch, n_executors, jobs, settings, is_connect=is_connect)
    assert waits_for(session, OWN) == text


def test_before_it_has_a_job_all_jobs_are_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_connect in (False, True):
        session = session_of(monkeypatch, 2, [ETL, Job("mine", 1)], is_connect=is_connect)
        assert waits_for(session, "").count("holds") == 2


@pytest.mark.parametrize("is_connect", [False, True], ids=["classic", "connect"])
@pytest.mark.parametrize(
    ("jobs", "text"),
    [
        ([ETL, Job(OWN, 1)], ""),
        ([ETL, Job(EARLIER, 1)], ""),
        ([ETL], ""),
        ([ETL, Job("", 1, "b")], "2 executors; job 0 (etl) holds 3 slots; job 1 (b) holds 1 slot"),
        ([Job("", 5, "etl")], "2 executors; job 0 (etl) holds 5 slots"),
        (None, ""),
    ],
)
def test_what_jobs_without_a_slot_wait_for(
    jobs: Sequence[Job] | None, text: str, is_connect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(monkeypatch, 2, jobs, is_connect=is_connect)
    monkeypatch.setattr(private_calls, "most_tasks_at_once", lambda session, profile: 4)
    assert lack_of_slots(session, ONE_TASK, EARLIER, OWN) == text


# ── counting slots ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", call)
    for pause in ("_QUEUED_S", "_WORKERS_S"):
        monkeypatch.setattr(hosts, pause, 0.0)


class Scheduler:
    """A cluster of four slots: another job holds two of them, and one that ends a third.

    The gang's two tasks start before the look of this number.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, start: float, n_shown: int = 2) -> None:
        self._looks, self._start, self._n_shown = itertools.count(), start, n_shown
        monkeypatch.setattr(hosts, "free_slots", lambda session, capacity: 4 - self._held())
        monkeypatch.setattr(hosts, "running_tasks", lambda session, tag: self._own())
        monkeypatch.setattr(hosts, "waits_for", lambda session, tag: "")

    def _held(self) -> int:
        return 2 + (2 if next(self._looks) >= self._start else 1)

    def _own(self) -> int:
        return self._n_shown if next(self._looks) >= self._start else 0


def watched(
    attached: Sequence[set[int]] = (),
    *,
    free: int = 1,
    late_s: float = 1e9,
    is_connect: bool = False,
) -> tuple[list[ev.Event], list[str]]:
    """Let a gang of two watch its tasks, those of ``attached`` at each look and then all.

    ``free``: slots that were free before. Return what it reports, and which jobs it cancels.
    """
    reported: list[ev.Event] = []
    cancelled: list[str] = []
    session: Any = SimpleNamespace(
        cancel=cancelled.append, is_connect=is_connect, python="/a/python"
    )
    looks = iter(attached)
    job = SimpleNamespace(spec=JobSpec(np=2), now_s=lambda: 1.0)
    attempt = SimpleNamespace(job=job)
    known: Any = None  # only the attempt and its attached tasks are needed
    tasks = HostTasks(attempt, "", known, known, lambda: next(looks, {0, 1}))  # type: ignore[arg-type]
    watching = hosts.SparkHosts(session, ClusterCapacity(None, False, None))
    watching._late_s = late_s
    sink: Any = SimpleNamespace(emit=reported.append)
    asyncio.run(asyncio.wait_for(watching._watch(free, tasks, sink), 5.0))
    return reported, cancelled


NONE_YET: list[set[int]] = [set()] * 12


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("start", range(7))
def test_its_own_tasks_are_not_those_of_others(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever they start: between two looks, too."""
    Scheduler(monkeypatch, start)
    reported, _ = watched(NONE_YET)
    queued = [(event.have, event.wanted) for event in reported if isinstance(event, ev.Queued)]
    assert queued[-1] == (2, 2) and set(queued[:-1]) <= {(1, 2), (2, 2)}
    assert len(queued) <= start // 2 + 1


@pytest.mark.usefixtures("no_threads")
def test_its_own_tasks_count_that_spark_shows_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The UI, by which Connect is asked, may show one of two tasks for ten seconds."""
    Scheduler(monkeypatch, 0, n_shown=1)
    reported, _ = watched(NONE_YET, is_connect=True)
    assert {event.have for event in reported if isinstance(event, ev.Queued)} == {1}


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize("is_connect", [False, True])
def test_slots_that_are_lost_after_the_job_was_submitted_are_missed(
    is_connect: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not through Connect: the UI may not know yet that the gang's own tasks hold them."""
    Scheduler(monkeypatch, 9)
    reported, _ = watched([set()] * 6, free=2, is_connect=is_connect)
    queued = [event for event in reported if isinstance(event, ev.Queued)]
    assert [(event.have, event.wanted) for event in queued] == ([] if is_connect else [(1, 2)] * 3)


@pytest.mark.usefixtures("no_threads")
@pytest.mark.parametrize(("n_running", "is_ended"), [(0, True), (1, True), (2, False)])
def test_a_late_gang_is_ended_unless_its_tasks_have_their_slots(
    n_running: int, is_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their Python workers may take longer to start than the gang may wait."""
    monkeypatch.setattr(hosts, "free_slots", lambda session, capacity: 0)
    monkeypatch.setattr(hosts, "running_tasks", lambda session, tag: n_running)
    monkeypatch.setattr(hosts, "waits_for", lambda session, tag: "")
    _, cancelled = watched(NONE_YET, late_s=0.0)
    assert bool(cancelled) is is_ended


# ── Python workers that do not start ─────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("no_threads")
def test_tasks_without_python_are_reported_with_their_executors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Scheduler(monkeypatch, 0)
    where = {0: ("a", "3"), 1: ("b", "4")}
    monkeypatch.setattr(hosts, "executors_of_tasks", lambda session, tag: where)
    reported, _ = watched([*NONE_YET, {1}, {1}, {1}, {1}])
    told = [event for event in reported if isinstance(event, ev.RankPhase)]
    started, end = "/a/python has not started", "see the stderr of executor 3 on a"
    both = f"{started} in 2 of 2 Spark tasks; {end}, executor 4 on b"
    one = f"{started} in 1 of 2 Spark tasks; {end}"
    assert [(event.rank, event.phase, event.detail) for event in told] == [
        (rank, "starting", text) for text in (both, one) for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("places", "named"),
    [
        ({}, "the executors"),
        ({0: ("a", "0"), 9: ("b", "9")}, "executor 0 on a"),
        (dict.fromkeys(range(4), ("a", "0")) | {4: ("a", "1")}, "executors 0, 1 on a"),
        (
            {0: ("a", "0"), 1: ("b", "1"), 2: ("a", "0"), 3: ("c", "3"), 4: ("d", "4")},
            "executor 0 on a, executor 1 on b, 2 more hosts",
        ),
        (
            {0: ("a", "0"), 1: ("b", "1"), 2: ("c", "2")},
            "executor 0 on a, executor 1 on b, 1 more host",
        ),
    ],
)
def test_a_few_executors_are_named(places: Mapping[int, tuple[str, str]], named: str) -> None:
    text = hosts.late_workers(range(6), 800, places, "")
    assert text == f"Python has not started in 6 of 800 Spark tasks; see the stderr of {named}"
