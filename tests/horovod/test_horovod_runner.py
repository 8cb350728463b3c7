"""``HorovodRunner`` as the notebooks use it that were written for Databricks'."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import hydrogen_magic as hm
from hydrogen_magic.compat import HorovodRunner, LogCallback
from hydrogen_magic.core import events as ev
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver import launcher
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.placements.spark import spark_session as sessions
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.node.worker.observe import keras
from hydrogen_magic.node.worker.reporting import reporter
from hydrogen_magic.views.tables import plan_table
from hydrogen_magic.views.widget.live_lines import LiveLines
from tests import runner_ranks
from tests.documented import covers

pytestmark = [pytest.mark.horovod, pytest.mark.usefixtures("warm_agents")]


# ── here ─────────────────────────────────────────────────────────────────────────────────────────


def newest_gang() -> Gang:
    return list(hm.gangs().values())[-1]


def lines_of(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what was shown of ranks' output since the last call, sorted."""
    shown = capsys.readouterr().out.splitlines()
    return sorted(line for line in shown if " by " in line)


def test_signatures_are_the_originals() -> None:
    """As of sparkdl 2.2's own test of them; ``np`` may be given by place, and options follow."""
    init = inspect.getfullargspec(HorovodRunner.__init__)
    assert init.args == ["self", "np"]
    assert init.kwonlyargs[0] == "driver_log_verbosity" and init.kwonlydefaults
    assert init.kwonlydefaults.pop("driver_log_verbosity") == "log_callback_only"
    options = ("env", "retries", "timeout", "start_timeout", "pack")
    assert init.kwonlydefaults == dict.fromkeys(options)
    run = inspect.getfullargspec(HorovodRunner.run)
    assert (run.args, run.varkw, run.kwonlyargs) == (["self", "main"], "kwargs", [])


def test_negative_np_is_that_many_processes_here(capsys: pytest.CaptureFixture[str]) -> None:
    """Keywords are the function's own, and output is shown whatever the verbosity."""
    everyone, pid, options = HorovodRunner(np=-2).run(
        runner_ranks.talk, np=4, timeout="mine", on=None
    )
    assert everyone == [0, 1] and pid != os.getpid()
    assert options == {"np": 4, "timeout": "mine", "on": None}
    assert lines_of(capsys) == [
        f"[{n}] {verb} by {n}" for n in (0, 1) for verb in runner_ranks.VERBS
    ]


@covers("""`HorovodRunner(np=-1)`""")
def test_minus_one_is_one_process() -> None:
    everyone, pid, _ = HorovodRunner(np=-1).run(runner_ranks.talk)
    assert everyone == [0] and pid != os.getpid()


def test_a_step_of_horovods_optimizer_is_one_step() -> None:
    HorovodRunner(np=-2).run(runner_ranks.take_three_steps)
    assert [rank.steps for rank in newest_gang().ranks] == [3, 3]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"np": 0}, ValueError, "Give the number of ranks"),
        ({"np": "2"}, TypeError, "np should be an int"),
        ({"np": 2.0}, TypeError, "np should be an int"),
        ({"np": 2, "driver_log_verbosity": "some"}, ValueError, "'all' or 'log_callback_only'"),
    ],
)
def test_wrong_options_are_refused_at_once(
    options: Mapping[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        HorovodRunner(**options)


# ── on executors ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.spark
def test_without_a_session_there_are_no_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_session_classes", lambda: ())
    with pytest.raises(
        RuntimeError, match=r"SparkSession[^\n]*\nhere `--on spark` is a positive `np`"
    ):
        HorovodRunner(np=2).run(runner_ranks.talk)


@covers("""`np` above the number of task slots""")
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_more_ranks_than_slots_are_refused_with_the_numbers() -> None:
    with pytest.raises(PlacementError, match=r"np 8\b.*\b4 slots.*use `--np 4`"):
        HorovodRunner(np=8).run(runner_ranks.talk)


# ── the notebook's environment ───────────────────────────────────────────────────────────────────


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mapping[str, str]:
    """What the notebook has set in its environment."""
    found = {
        "HOROVOD_TIMELINE": str(tmp_path / "timeline.json"),
        "NCCL_DEBUG": "WARN",
        "TZ": "Asia/Tokyo",  # OMP_NUM_THREADS, say, would have agents import torch again
        "HM_TEST_TOKEN": "s3cr3t-of-the-notebook",
    }
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    return found


def reach_the_ranks(settings: Mapping[str, str], np: int) -> None:
    seen = HorovodRunner(np=np).run(runner_ranks.settings, secret=settings["HM_TEST_TOKEN"])
    assert seen == {name: settings[name] for name in runner_ranks.VARIABLES}
    events = json.loads(Path(settings["HOROVOD_TIMELINE"]).read_bytes())
    assert any(event.get("args", {}).get("name") == "allreduce.seen" for event in events)
    assert "secret is ***" in newest_gang().logs[0]


def test_the_timeline_is_where_the_variable_says(settings: Mapping[str, str]) -> None:
    reach_the_ranks(settings, -2)


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
@covers("""`driver_log_verbosity="log_callback_only"`""")
def test_settings_of_the_notebook_reach_executors_whose_output_is_in_the_logs(
    settings: Mapping[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As Databricks documents it of the timeline; a secret that travels with the call is masked.

    What ranks print there is in the logs only, beside what they tell.
    """
    planned = launcher.plan(JobSpec(np=2, placement="spark", rendezvous="horovod"))
    table = "\n".join(plan_table(planned))
    assert f"HOROVOD_TIMELINE    {settings['HOROVOD_TIMELINE']}" in table
    assert "HM_TEST_TOKEN" not in table
    capsys.readouterr()
    reach_the_ranks(settings, 2)
    assert lines_of(capsys) == [f"[{n}] told by {n}" for n in (0, 1)]
    for rank, log in newest_gang().logs.items():
        verbs = [line for line in log.splitlines() if " by " in line]
        assert sorted(verbs) == [f"{verb} by {rank}" for verb in runner_ranks.VERBS]


# ── log_to_driver and LogCallback ────────────────────────────────────────────────────────────────


@pytest.mark.exhaustive
def test_a_message_is_cut_at_4000_characters(capsys: pytest.CaptureFixture[str]) -> None:
    HorovodRunner(np=-1).run(runner_ranks.tell_much)
    shown = capsys.readouterr().out.splitlines()
    assert "x" * 4000 in shown and shown[-3:-1] == ["two", "lines by me"]
    runner_ranks.tell_much()  # in a plain process it is printed
    assert capsys.readouterr().out.splitlines() == ["x" * 4000, "two", "lines by me"]


def test_a_page_has_a_message_among_the_output() -> None:
    lines = LiveLines()
    lines.feed([ev.Output(0.5, 1, ev.DRIVER, "told\n")], "cafe")
    stdout = 0
    assert lines.take(1.0) == ([[1, stdout, "told", 0.5]], 0)


class AsKeras:
    """Calls callbacks as ``model.fit`` does: two epochs of two batches, with the model it trains."""

    def __init__(self, *callbacks: LogCallback) -> None:
        self._callbacks = callbacks

    def fit(self, model: object) -> None:
        self._call("set_params", {"epochs": 2, "steps": 2})
        self._call("set_model", model)
        self._call("on_train_begin", None)
        for epoch in range(2):
            self._call("on_epoch_begin", epoch, None)
            for batch in range(2):
                self._call("on_train_batch_begin", batch, None)
                self._call("on_train_batch_end", batch, {"loss": 1.0 - batch})
            self._call("on_epoch_end", epoch, {"loss": 0.5})
        self._call("on_train_end", None)

    def _call(self, hook: str, *arguments: object) -> None:
        for callback in self._callbacks:
            getattr(callback, hook)(*arguments)


@contextmanager
def being_rank(number: int) -> Iterator[tuple[reporter.Reporter, list[ev.Event]]]:
    """Make this process a rank; give its reporter, and the list of what that sends."""
    sent: list[ev.Event] = []
    rank = reporter.Reporter(number, 0.0, sent.extend)
    reporter.install(rank)
    yield rank, sent
    rank.close()


@pytest.mark.parametrize("number", [0, 1])
def test_a_callback_tells_of_epochs_and_batches_on_rank_0(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two callbacks one tells of batches too; none records what an observer of the model does."""
    monkeypatch.setattr(keras, "is_seen", lambda model: model == "the model")
    monkeypatch.setenv("RANK", str(number))
    with being_rank(number) as (rank, sent):
        AsKeras(LogCallback(), LogCallback(per_batch_log=True)).fit("the model")
        rank.close()
    told = [event.text for event in sent if isinstance(event, ev.Output)]
    batches = ["batch 1: loss 1", "batch 2: loss 0"]
    epoch = [*["begins"] * 2, *batches, *["ends: loss 0.5"] * 2]
    expected = [f"epoch {n}/2 {what}\n" for n in (1, 2) for what in epoch]
    assert told == (expected if number == 0 else [])
    assert not [event for event in sent if isinstance(event, ev.Metrics)]


@pytest.fixture
def rank_0() -> Iterator[tuple[reporter.Reporter, list[ev.Event]]]:
    with being_rank(0) as found:
        yield found


def test_a_callback_called_by_hand_makes_curves(
    rank_0: tuple[reporter.Reporter, list[ev.Event]],
) -> None:
    """Keras is not asked for anything, and nobody else sees these metrics."""
    callback = LogCallback()
    assert callback._implements_train_batch_hooks(), "Keras 2 asks"
    for epoch in range(2):
        callback.on_epoch_begin(epoch)
        for batch in range(2):
            callback.on_train_batch_begin(batch)
            callback.on_train_batch_end(batch, {"loss": 1.0 - batch})
        callback.on_epoch_end(epoch, {"loss": 0.5, "val_loss": 0.25})
    rank, sent = rank_0
    rank.close()
    points = rows([event for event in sent if isinstance(event, ev.Metrics)])
    epochs = (
        [(0, 1, None), (1, 0, None), (1, None, 0.25)],
        [(2, 1, None), (3, 0, None), (3, None, 0.25)],
    )
    assert points == [*epochs[0], *epochs[1]]
    said = [event.text for event in sent if isinstance(event, ev.Output)]
    assert said[:2] == ["epoch 1 begins\n", "epoch 1 ends: loss 0.5, val_loss 0.25\n"]


def rows(metrics: list[ev.Metrics]) -> list[tuple[int, float | None, float | None]]:
    """Return step, loss and val_loss of every point."""
    found = []
    for event in metrics:
        columns = zip(event.steps, event.values["loss"], event.values["val_loss"], strict=True)
        found += list(columns)
    return found
