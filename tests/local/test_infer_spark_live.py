"""The live view of ``%%infer`` on Spark: the progress of tasks, and the reporter of workers."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.messages import FailureReceived, TaskProgress, TaskStatus, decode
from hydrogen_magic.driver.state.formatting import progress_text
from hydrogen_magic.driver.state.gang_state import GangState, fold
from hydrogen_magic.inference.spark.progress import SparkProgress
from hydrogen_magic.node.worker.inference import task_reporter
from hydrogen_magic.node.worker.inference.task_reporter import TaskReporter
from hydrogen_magic.node.worker.inference.task_status import TaskCounter
from hydrogen_magic.transport.channel import Hub
from hydrogen_magic.views.text_table import gang_lines
from hydrogen_magic.views.widget import rank_rows as widget_rows
from tests.gangs import wait_until

STAGE = 7


def task(
    partition: int, attempt: int, rows: int = 0, phase: str = "running", **more: Any
) -> TaskProgress:
    return TaskProgress(STAGE, partition, attempt, more.pop("is_trial", False), phase, rows, **more)


def heard(
    progress: SparkProgress, now_s: float, worker: str, *tasks: TaskProgress
) -> list[ev.Event]:
    progress.update(TaskStatus(worker, "host", 100 + int(worker), "cpu", tasks), now_s)
    return progress.events(now_s)


def rows_of(events: list[ev.Event]) -> ev.RowsDone:
    return next(event for event in reversed(events) if isinstance(event, ev.RowsDone))


def shown(np: int, events: list[ev.Event]) -> GangState:
    """Return the state of a gang that got these events."""
    state = GangState()
    begin = ev.GangLaunched(0.0, "3f2a", "%%infer df", np, "spark", "torch", 0.0, "", {})
    for event in (begin, ev.AttemptStarted(0.0, 0), *events):
        state = fold(state, event)
    return state


# ── the book ─────────────────────────────────────────────────────────────────────────────────────


def test_attempts_at_one_partition_count_once() -> None:
    progress = SparkProgress(2)
    heard(progress, 1.0, "0", task(0, 10, 500))
    heard(progress, 1.2, "0", task(0, 10, 900, "failed", error="no good"))
    assert progress.culprit("no good: and where") == (0, "no good")
    assert progress.culprit("something else") is None
    told = heard(progress, 1.4, "1", task(0, 11, 300))
    assert progress.rows == 900, "it never goes back"
    told = heard(progress, 1.6, "1", task(0, 11, 1000, "done"))
    assert (progress.rows, rows_of(told).done) == (1000, 1000)
    heard(progress, 1.8, "0", task(0, 12, 1000, "running"))  # Spark was impatient with the other
    heard(progress, 1.9, "0", task(0, 12, 1000, "done"))
    assert progress.rows == 1000


def test_the_last_attempt_of_a_lost_partition_is_its_rank() -> None:
    """No attempt at it runs any more, and no task of an earlier stage."""
    progress = SparkProgress(4)
    heard(progress, 1.0, "0", task(2, 2))
    heard(progress, 1.0, "1", task(3, 3))
    heard(progress, 1.2, "2", task(2, 4))
    heard(progress, 1.2, "3", TaskProgress(STAGE - 1, 0, 1, True))
    assert progress.lose(STAGE, 5) is None
    assert progress.lose(STAGE, 2) == 2 and progress.n_busy(1.2) == 1
    progress.end_tasks()
    assert progress.n_busy(1.2) == 0


def test_rows_of_the_first_batch_are_not_counted() -> None:
    progress = SparkProgress(2)
    trial = heard(progress, 1.0, "0", task(0, 1, is_trial=True, phase="loading"))
    assert [type(event) for event in trial] == [ev.RankStarted, ev.RankPhase, ev.RowsDone]
    assert rows_of(trial).done == 0
    told = heard(progress, 5.0, "1", task(0, 2, 100))
    assert (rows_of(told).began_s, rows_of(told).in_flight) == (5.0, 1)


def test_partitions_that_are_done_foretell_the_rest() -> None:
    progress = SparkProgress(2)
    progress.count_tasks({STAGE: (0, 4), 99: (1, 1)}, 0.5)
    assert rows_of(heard(progress, 1.0, "0", task(0, 1, 100))).total is None
    progress.count_tasks({STAGE: (1, 4), 99: (1, 1)}, 2.0)
    told = heard(progress, 3.0, "0", task(0, 1, 1000, "done"), task(1, 2, 200))
    assert rows_of(told) == ev.RowsDone(
        3.0, 1.0, 1200, 4000, 1, 0, is_estimate=True, tasks_done=1, tasks=4
    )
    assert progress_text(rows_of(told)) == (
        "1,200 of about 4,000 rows · 600 rows/s · 4.7 s left · 1 of 4 tasks · 1 chunk in flight"
    )
    end = rows_of(progress.end(9.0, 4100))
    assert progress_text(end, is_over=True) == "4,100 of 4,100 rows · 512 rows/s"


def test_rows_of_an_earlier_run_are_no_speed() -> None:
    of_files = SparkProgress(2)
    of_files.resume({0: 3000, 1: 1000})
    of_files.count_tasks({STAGE: (2, 4)}, 0.5)
    heard(of_files, 1.0, "0", task(2, 1))
    told = rows_of(heard(of_files, 3.0, "0", task(2, 1, 200)))
    assert (told.done, told.resumed) == (4200, 4000)
    assert "100 rows/s" in progress_text(told)
    # Partition 1 was predicted again after all.
    heard(of_files, 5.0, "0", task(1, 2, 1000, "done"), task(2, 1, 200, "done"))
    of_cache = SparkProgress(2, from_cache=True)
    heard(of_cache, 1.0, "0", task(2, 1))
    heard(of_cache, 5.0, "0", task(2, 1, 1200, "done"))
    for end in (of_files.end(7.0, 4200), of_cache.end(7.0, 4200)):
        assert progress_text(rows_of(end), is_over=True) == "4,200 of 4,200 rows · 200 rows/s"


def test_failed_attempts_are_no_tasks_that_are_done() -> None:
    """Spark Connect counts them, too."""
    progress = SparkProgress(4)
    for partition in (0, 1, 3):
        heard(progress, 1.0, str(partition), task(partition, partition, 250, "done"))
    heard(progress, 1.0, "2", task(2, 2, phase="failed", error="no good"))
    progress.count_tasks({STAGE: (5, 4)}, 1.2)
    told = progress.events(1.2)
    assert (rows_of(told).tasks_done, rows_of(told).tasks, rows_of(told).total) == (3, 4, 1000)
    told = heard(progress, 1.4, "4", task(2, 4, 250, "done"))
    assert rows_of(told).tasks_done == 4


def test_partitions_without_rows_foretell_none_and_other_stages_nothing() -> None:
    progress = SparkProgress(2)
    progress.count_tasks({99: (40, 40)}, 0.5)
    assert rows_of(heard(progress, 1.0, "0", task(0, 1, 1000, "done"))).total is None
    progress.count_tasks(
        {STAGE: (150, 200), 99: (40, 40)}, 2.0
    )  # 149 had no row, and no worker to say so
    assert rows_of(progress.events(2.1)).total == 1333


def test_nothing_is_told_twice() -> None:
    progress = SparkProgress(2)
    assert heard(progress, 1.0, "0", task(0, 1, 100))
    assert heard(progress, 1.2, "0", task(0, 1, 100)) == []


def test_a_worker_is_a_rank_and_one_that_is_gone_leaves_its_place() -> None:
    progress = SparkProgress(2)
    events = heard(progress, 1.0, "0", task(0, 1, 100)) + heard(progress, 1.0, "1", task(1, 2, 100))
    events += heard(progress, 4.0, "1", task(1, 2, 300))
    events += heard(
        progress, 8.0, "1", task(1, 2, 500)
    )  # and nothing of the first for seven seconds
    assert progress.n_busy(8.0) == 1
    events += heard(progress, 8.2, "2", task(0, 3, 50))
    state = shown(2, events)
    assert [(rank.pid, rank.phase, rank.bar and rank.bar.n) for rank in state.ranks] == [
        (102, "running", 150), (101, "running", 500),
    ]  # fmt: skip
    assert state.rows is not None and state.rows.done == 600


def test_where_no_worker_says_anything_spark_does() -> None:
    progress = SparkProgress(4)
    progress.count_tasks({3: (1, 2), 4: (0, 6)}, 1.0)
    progress.count_tasks({3: (2, 2), 4: (0, 6)}, 5.0)
    rows = shown(4, progress.events(5.0)).rows
    assert rows is not None
    assert progress_text(rows) == "12 s left · 2 of 8 tasks"


def test_failed_rows_are_told_with_their_partition() -> None:
    progress = SparkProgress(2)
    lines = [f"partition 1: row {n}: no" for n in range(5)]
    there = TaskCounter(task(1, 1))
    there.count(1000, 5, lines)
    heard(
        progress,
        1.0,
        "0",
        there.progress,
        task(0, 2, 10, failed=2, failures=("partition 0: rows 3 to 4: no",)),
    )
    notice = next(event for event in progress.end(2.0, 2000) if isinstance(event, ev.Notice))
    assert notice.text == (
        "7 rows got no prediction: partition 0: rows 3 to 4: no; partition 1: row 0: no;"
        " partition 1: row 1: no; and more"
    )


def test_the_view_shows_rows_and_ranks() -> None:
    progress = SparkProgress(2)
    progress.count_tasks({STAGE: (1, 4)}, 1.0)
    events = heard(progress, 1.0, "0", task(0, 1, 1000, "done"), task(1, 2, phase="loading"))
    events += heard(progress, 3.0, "0", task(1, 2, 1000))
    lines = gang_lines(shown(2, events), 3.0, 100)
    assert "2,000 of about 4,000 rows" in lines[1]
    assert lines[2].split()[:5] == ["rank", "0", "cpu", "running", "2000"]
    assert lines[3].split() == ["rank", "1", "waiting"]
    of_widget = widget_rows.gang_row(shown(2, events), 3.0)["rows"]
    assert of_widget["share"] == 0.5 and "2,000 of about 4,000 rows" in of_widget["text"]


# ── the workers' reporter ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.close()


def on_loop(hub: Hub, function: Callable[[], Any]) -> Any:
    """Return what ``function`` returns on the hub's loop."""
    import asyncio

    async def call() -> Any:
        return function()

    return asyncio.run_coroutine_threadsafe(call(), hub.loop).result(10)


def reporter_to(hub: Hub, take: Callable[[object], None]) -> TaskReporter:
    keys = on_loop(hub, lambda: hub.admit(lambda message, data: take(message)))
    return TaskReporter(
        {
            "endpoints": [on_loop(hub, lambda: hub.listen("127.0.0.1"))], "interval_s": 0.05,
            "server_key": keys.server_key, "key": keys.key, "secret": keys.secret,
        }
    )  # fmt: skip


def test_the_kernel_hears_of_a_task_until_it_wants_no_more(hub: Hub) -> None:
    said: list[TaskStatus] = []
    reporter = reporter_to(hub, lambda message: said.append(decode(message, TaskStatus)))
    there = TaskCounter(task(3, 1))
    with reporter.reporting(there):
        there.count(700, 0, [])
        wait_until(lambda: any(t.rows == 700 for news in said for t in news.tasks))
    wait_until(lambda: any(t.phase == "done" for news in said for t in news.tasks))
    on_loop(hub, lambda: hub.revoke_key(reporter.key))
    wait_until(lambda: reporter.is_closed)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that ends waits for long until its last report is sent."""
    monkeypatch.setattr(task_reporter, "_LAST_REPORT_S", 60.0)


@pytest.mark.usefixtures("patient")
def test_the_process_of_a_failed_task_does_not_end_before_the_kernel_knows(hub: Hub) -> None:
    said: list[TaskProgress] = []

    def take(message: object) -> None:
        said.extend(decode(message, TaskStatus).tasks)
        if any(each.phase == "failed" for each in said):
            hub.send(reporter.key, FailureReceived())

    reporter = reporter_to(hub, take)
    with pytest.raises(ValueError, match="no good"), reporter.reporting(TaskCounter(task(3, 1))):
        raise ValueError("no good")
    assert said[-1].error == "no good"
    on_loop(hub, lambda: hub.revoke_key(reporter.key))
    wait_until(lambda: reporter.is_closed)


@pytest.mark.usefixtures("patient")
def test_a_task_does_not_wait_for_a_kernel_that_cannot_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    nowhere = {"endpoints": [f"tcp://127.0.0.1:{port}"], "interval_s": 0.05}
    reporter = TaskReporter({**nowhere, "server_key": "", "key": "", "secret": ""})
    with reporter.reporting(TaskCounter(task(0, 1))):
        wait_until(lambda: reporter.is_closed)
    began = time.monotonic()
    with pytest.raises(ValueError, match="no good"), reporter.reporting(TaskCounter(task(0, 1))):
        raise ValueError("no good")
    assert time.monotonic() - began < 30
