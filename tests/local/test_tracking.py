"""``--track``: a tracker of a plug-in gets what the kernel knows; MLflow and W&B themselves, if installed."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

import hydrogen_magic as hm
from hydrogen_magic.driver import tracking
from hydrogen_magic.driver.trackers import MetricPoint, RunInfo, Tracker
from hydrogen_magic.driver.trackers.mlflow import MlflowTracker
from hydrogen_magic.driver.trackers.wandb import WandbTracker
from hydrogen_magic.errors import PlacementError, RankFailedError, SweepError
from hydrogen_magic.testing.entry_points import declare
from tests import plain_ranks
from tests.documented import covers_in_both_places
from tests.gangs import PATIENCE_S, alive, ended, notices_of, until, wait_until_gone
from tests.outliving import owner_of

pytestmark = pytest.mark.usefixtures("warm_agents")

TRACKER = """
import os
import threading
import time
from hydrogen_magic.plugins import TrackedRun, Tracker

CALLS = []
ANSWERS = threading.Event()  # without it, the tracker hangs
ANSWERS.set()
FAILS_IN = set()

def called(*call):
    ANSWERS.wait()
    CALLS.append(call)
    if "CALLS_FILE" in os.environ:
        with open(os.environ["CALLS_FILE"], "a") as file:
            print(*call[:1], *call[2:], file=file)
    if call[0] in FAILS_IN:
        raise ConnectionError(f"no server for {call[0]} with correct-horse\\nmore")

class Run(TrackedRun):
    where = "http://tracker/1"

    def __init__(self, gang):
        self.gang = gang

    def log(self, points):
        called("log", self.gang, points)

    def add_file(self, path):
        called("file", self.gang, path.name, path.read_text())

    def end(self, state):
        time.sleep(float(os.environ.get("END_S", 0.1)))  # what does not wait for it comes first
        called("end", self.gang, state)

class Mine(Tracker):
    def start(self, info):
        called("start", info.gang, info)
        return Run(info.gang)

    def open_group(self, name):
        called("open", name)
        return "key of " + name

    def close_group(self, group, state):
        called("close", group, state)

class Missing(Tracker):
    def fault(self):
        return "comet is not installed: pip install comet"

    def start(self, info):
        raise AssertionError
"""


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory, warm_agents: None) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("tracker")
    (folder / "my_tracker.py").write_text(TRACKER)
    points = {"mine": "my_tracker:Mine", "missing": "my_tracker:Missing"}
    declare(folder, "hydrogen_magic.trackers", points)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("my_tracker")


@pytest.fixture
def calls(tracker: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    monkeypatch.setattr(tracking, "_INTERVAL_S", 0.05)
    tracker.CALLS.clear()
    tracker.FAILS_IN.clear()
    found: list[tuple[Any, ...]] = tracker.CALLS
    return found


def run(shell: InteractiveShell, cell: str) -> Any:
    done = shell.run_cell(cell, store_history=True)
    done.raise_error()
    return done.result


LOGS = textwrap.dedent(
    """
    import hydrogen_magic as hm
    for step in range(3):
        hm.log(step, loss=lr * step + hm.rank())
    print("trained", api_token)
    """
)


def test_a_tracker_gets_parameters_points_files_and_the_end(
    notebook_shell: InteractiveShell, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "correct-horse")
    notebook_shell.run_cell("import numpy\nlr, api_token = numpy.float64(0.5), 'correct-horse'")
    run(notebook_shell, f"%%distributed --np 2 --track mine --name wide\n'correct-horse'{LOGS}")
    (_, gang, info), *others = calls
    assert (info.name, info.params, info.group) == ("wide", {"lr": 0.5}, "")
    assert type(info.params["lr"]) is float
    assert info.about["line"].startswith("%%distributed --np 2") and info.about["np"] == "2"
    points = [point for kind, _, *rest in others if kind == "log" for point in rest[0]]
    by_name = {
        name: [(p.step, p.values[name]) for p in points if name in p.values]
        for name in ("loss", "rank1/loss")
    }
    assert by_name == {
        "loss": [(0, 0.0), (1, 0.5), (2, 1.0)],
        "rank1/loss": [(0, 1.0), (1, 1.5), (2, 2.0)],
    }
    assert all(0 < point.unix_s - hm.gangs()[gang].snapshot().wall_time < 100 for point in points)
    files = {call[2]: call[3] for call in calls if call[0] == "file"}
    assert "hm.log(step" in files["cell.py"] and "trained ***" in files["rank-0.log"]
    assert "correct-horse" not in str(calls)
    assert calls[-1] == ("end", gang, "SUCCEEDED")
    assert "tracked by mine: http://tracker/1" in notices_of(hm.gangs()[gang])


def test_a_tracker_that_hangs_holds_nothing_up(
    calls: list[Any],
    tracker: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither the gang nor the cell, after a moment; it gets the rest once it answers."""
    monkeypatch.setattr(tracking, "_FINISH_S", 0.1)
    tracker.ANSWERS.clear()
    try:
        gang = ended(hm.launch(int, np=1, track="mine", run_name="slow"))
        tracking.finish([gang])
        assert f"the tracker has not taken all of gang {gang.id}" in capsys.readouterr().err
        assert calls == []
    finally:
        tracker.ANSWERS.set()
    assert gang.wait_for_tracker(PATIENCE_S)
    assert f"gang {gang.id}: tracked by mine: http" in capsys.readouterr().out
    assert calls[0][2].name == "slow" and calls[-1] == ("end", gang.id, "SUCCEEDED")


def test_the_owner_of_a_gang_waits_for_its_tracker(
    notebook_shell: InteractiveShell,
    calls: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CALLS_FILE", str(tmp_path / "calls"))
    monkeypatch.setenv("END_S", "2.5")
    notebook_shell.run_cell("lr, api_token = 0.5, 'x'")
    gang = run(notebook_shell, f"%%distributed --outlive --np 1 --track mine{LOGS}")
    assert alive([owner_of(gang.id)]), "the notebook's cell does not wait for it"
    wait_until_gone([owner_of(gang.id)])
    told = (tmp_path / "calls").read_text()
    assert told.startswith("start ") and told.endswith("\nend SUCCEEDED\n")
    assert "file cell.py" in told and "hm.log(step, loss" in told and "file rank-0.log" in told
    assert calls == [], "the kernel sends nothing"


def test_a_tracker_learns_that_its_gang_ends_with_the_kernel(tracker: Any, tmp_path: Path) -> None:
    code = """
        import time
        import hydrogen_magic as hm
        from tests import plain_ranks
        gang = hm.launch(plain_ranks.hang, np=1, track="mine")
        while "about to hang" not in gang.logs[0]:
            time.sleep(0.05)
    """
    told = tmp_path / "calls"
    folders = [str(Path(tracker.__file__).parent), os.getcwd()]
    environment = {"CALLS_FILE": str(told), "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-c", textwrap.dedent(code)]
    subprocess.run(command, env={**os.environ, **environment}, check=True, timeout=PATIENCE_S)
    assert told.read_text().endswith("\nend STOPPED\n")


@pytest.mark.parametrize("fails_in", ["start", "log", "end"])
def test_a_tracker_that_fails_costs_a_notice(
    calls: list[Any],
    tracker: Any,
    fails_in: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", "correct-horse")
    tracker.FAILS_IN.add(fails_in)
    gang = hm.launch(plain_ranks.log_and_wait, str(tmp_path / "go"), np=1, track="mine")
    if fails_in != "end":  # the notice comes while the gang runs
        until(gang, lambda: "no server" in notices_of(gang))
    (tmp_path / "go").touch()
    assert ended(gang).state == "SUCCEEDED"
    assert gang.wait_for_tracker(PATIENCE_S)
    said = notices_of(gang) + capsys.readouterr().err
    what = "anything" if fails_in == "start" else "the rest"
    assert (
        f"mine does not get {what} of this gang: ConnectionError: no server for {fails_in}" in said
    )
    assert "correct-horse" not in said
    if fails_in != "start":
        assert calls[-1] == ("end", gang.id, "SUCCEEDED"), "it does not seem to run for ever"


def test_failed_gangs_are_tracked_as_such(calls: list[Any]) -> None:
    with pytest.raises(RankFailedError):
        hm.run(int, "no number", np=1, quiet=True, track="mine")
    assert calls[-1][2] == "FAILED"


def test_the_runs_of_a_sweep_are_a_group(
    notebook_shell: InteractiveShell,
    calls: list[Any],
    tracker: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What the tracker could not take is reported once for all runs."""
    tracker.FAILS_IN.add("file")
    notebook_shell.run_cell("lr = 1")
    with pytest.raises(SweepError):
        run(
            notebook_shell,
            "%%distributed --np 1 --track mine --name all --sweep lr=0,1\n1 / lr",
        )
    started = {call[2].name: call[2] for call in calls if call[0] == "start"}
    assert sorted(started) == ["all lr=0", "all lr=1"]
    assert {info.group for info in started.values()} == {"key of all"}
    assert started["all lr=1"].params == {"lr": 1}
    assert [call for call in calls if call[0] in ("open", "close")] == [
        ("open", "all"),
        ("close", "key of all", "FAILED"),
    ]
    assert calls[-1][0] == "close", "after the ends of its runs"
    said = capsys.readouterr()
    text = "ConnectionError: no server for file"
    assert text in said.out + said.err and said.out.count(text) <= 1


def test_what_cannot_track_is_refused_before_anything_starts(
    notebook_shell: InteractiveShell, calls: list[Any]
) -> None:
    with pytest.raises(UsageError, match="--track missing: comet is not installed: pip install"):
        run(notebook_shell, "%%distributed --track missing\n1")
    with pytest.raises(UsageError, match=r"'wadnb' is not supported; did you mean wandb\?"):
        run(notebook_shell, "%%distributed --track wadnb\n1")
    with pytest.raises(PlacementError, match=r"`--track comet`: no tracker of this name .* mlflow"):
        hm.launch(int, track="comet")
    for name, pip in (("mlflow", "mlflow-skinny"), ("wandb", "wandb")):
        if importlib.util.find_spec(name) is None:
            with pytest.raises(ValueError, match=f"{name} is not installed: pip install {pip}"):
                hm.launch(int, track=name)


@pytest.mark.parametrize(("name", "kind"), [("mlflow", MlflowTracker), ("wandb", WandbTracker)])
def test_a_folder_named_like_a_library_is_no_library(
    name: str, kind: type[Tracker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert f"{name} is not installed" in str(kind().fault())


# ── the trackers themselves ──────────────────────────────────────────────────────────────────────


@covers_in_both_places("""`mlflow.start_run()`, `mlflow.log_param(…)`""")
@pytest.mark.exhaustive  # as all that need a tracker's library; those above have the rest
def test_mlflow_has_the_runs_of_a_sweep(
    on_executors: bool,
    notebook_shell: InteractiveShell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE")
    said = "cannot be opened: MlflowException: .*maintenance mode"
    with pytest.raises(ValueError, match=said):
        hm.launch(int, track="mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_experiment("mine")
    notebook_shell.run_cell("lr, api_token = 1.0, 'x'")
    cell = LOGS.replace("loss=", "**{'val@loss': float('nan')}, loss=")
    where = "--on spark --cpu" if on_executors else ""
    run(
        notebook_shell,
        f"%%distributed --np 1 --quiet --track mlflow --name all --sweep lr=0.5,2.0 {where}\n{cell}",
    )
    assert mlflow.active_run() is None
    client = mlflow.MlflowClient()
    found = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    by_name = {each.info.run_name: each for each in found}
    assert sorted(by_name) == ["all", "all lr=0.5", "all lr=2.0"]
    assert {each.info.status for each in found} == {"FINISHED"}
    one = by_name["all lr=2.0"]
    assert one.data.params == {"lr": "2.0"}
    assert one.data.tags["mlflow.parentRunId"] == by_name["all"].info.run_id
    history = client.get_metric_history(one.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(0, 0.0), (1, 2.0), (2, 4.0)]
    assert "val_loss" in one.data.metrics
    files = {each.path for each in client.list_artifacts(one.info.run_id)}
    assert files == {"cell.py", "rank-0.log"}


@pytest.mark.exhaustive
def test_mlflow_takes_every_name_of_a_metric_and_a_user_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr("getpass.getuser", Mock(side_effect=KeyError("uid not found: 54321")))
    mlflow.set_tracking_uri(tmp_path.as_uri())
    experiment = mlflow.set_experiment("names")
    names = [
        "loss",
        "loss/val",
        "loss_val_",
        "acc/val/top",
        "acc",
        "acc/val",
        "val/loss",
        "/a",
        "b/",
        "../c",
        "d//e",
        ".",
        "..f",
        "",
        "g@1",
        "long" * 100,
    ]
    tracked = MlflowTracker().start(RunInfo("ab12", "names", {"model": "a", "model/lr": 1}, {}))
    mlflow.set_tracking_uri((tmp_path / "of another cell").as_uri())
    for step in range(2):
        tracked.log([MetricPoint(step, 1.0, {name: 1.0}) for name in names])
    tracked.end("SUCCEEDED")
    mlflow.set_tracking_uri(tmp_path.as_uri())
    [found] = mlflow.MlflowClient().search_runs([experiment.experiment_id])
    assert len(found.data.metrics) == len(names)
    assert {"loss", "loss_val_", "acc/val/top", "acc_", "acc_val_"} <= set(found.data.metrics)
    assert found.data.params == {"model": "a", "model_lr_": "1"}
    assert {"val/loss", "_a", "b_", "___c", "d__e", "_", "__", "__f", "g_1"} <= set(
        found.data.metrics
    )


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """W&B without a server: runs are written to ``tmp_path``."""
    library = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # set by the library; back after the test
    yield library
    library.teardown()


@pytest.mark.exhaustive
def test_wandb_has_a_run_beside_the_notebooks_own(wandb: Any, tmp_path: Path) -> None:
    own = wandb.init(name="of the notebook", settings=wandb.Settings(console="off"))
    with pytest.raises(RankFailedError):
        hm.run(fail_at, 0.25, np=2, quiet=True, track="wandb", run_name="broken")
    assert wandb.run is own
    own.finish()
    wandb.teardown()
    [folder] = [each for each in _offline_runs(tmp_path) if own.id not in each.name]
    assert (folder / "files" / "rank-0.log").read_text() == "first step\n"
    assert [(step, loss) for _, step, loss in _losses(folder)] == [(0, 0.25)]
    records = list(_records(next(folder.glob("*.wandb"))))
    [run_record] = [each.run for each in records if each.HasField("run")][-1:]
    assert run_record.display_name == "broken"
    config = {item.key: json.loads(item.value_json) for item in run_record.config.update}
    assert config["lr"] == 0.25
    assert [each.exit.exit_code for each in records if each.HasField("exit")] == [1]


@pytest.mark.exhaustive
def test_a_run_of_a_rank_is_tracked_beside_it(
    wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its values are observed, so the tracker's run has them too: each run has each value once."""
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    hm.run(log_to_own_run, np=1, quiet=True, track="wandb", run_name="tracked")
    wandb.teardown()
    values = [(0, 0.0), (1, 0.5), (2, 1.0)]
    found = {
        each.name.rpartition("-")[2] == "mine": [(step, loss) for step, _, loss in _losses(each)]
        for each in _offline_runs(tmp_path)
    }
    assert found == {True: values, False: values}


def log_to_own_run() -> None:
    import wandb

    with wandb.init(settings=wandb.Settings(console="off", silent=True)) as run:
        for step in range(3):
            run.log({"loss": step / 2})


def _offline_runs(folder: Path) -> list[Path]:
    return sorted((folder / "wandb").glob("offline-run-*"))


def _losses(folder: Path) -> list[tuple[int, int | None, float]]:
    """Return the values of ``loss``: W&B's step, the value of ``step`` beside it, and it."""
    found = []
    for record in _records(next(folder.glob("*.wandb"))):
        row = {(i.key or i.nested_key[0]): json.loads(i.value_json) for i in record.history.item}
        if "loss" in row:
            found.append((record.history.step.num, row.get("step"), row["loss"]))
    return found


def fail_at(lr: float) -> None:
    print("first step", flush=True)
    hm.log(0, loss=lr)
    raise ValueError("diverged")


def _records(path: Path) -> Iterator[Any]:
    """Yield what W&B wrote: a log as of LevelDB, whose records fit into one block here."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place = path.read_bytes(), 7
    while place < len(data):
        _, size, kind = struct.unpack_from("<IHB", data, place)
        assert kind == 1, "a whole record"
        record = Record()
        record.ParseFromString(data[place + 7 : place + 7 + size])
        yield record
        place += 7 + size
