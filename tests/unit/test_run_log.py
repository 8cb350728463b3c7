"""Records on disk, and what is made of recorded events: the metrics' table, the timeline."""

from __future__ import annotations

import gc
import gzip
import json
import math
import os
import resource
import shutil
import stat
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import run_log
from hydrogen_magic.driver import history, launcher, tracking
from hydrogen_magic.driver.chrome_trace import write_chrome_trace
from hydrogen_magic.driver.gang_run import GangRun
from hydrogen_magic.driver.metrics import frame
from hydrogen_magic.driver.owner import process
from hydrogen_magic.driver.state import stored_results
from hydrogen_magic.driver.state.gang_state import replay
from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.notebook import gang_command
from hydrogen_magic.notebook.arguments.gang import GangCommand
from hydrogen_magic.views.text_table import gang_lines
from tests import seconds
from tests.records import DEAD, ENDED, METRICS, disk_full_at, launched, write

# ── the record ───────────────────────────────────────────────────────────────────────────────────


def test_what_was_appended_is_read_at_once_and_is_the_owners_alone(hydrogen_home: Path) -> None:
    made = run_log.Record.create("g1", pytest.fail)
    events = [launched("g1"), METRICS, ENDED]
    for event in events:
        made.append(event)
    assert run_log.read("g1") == events  # before close: as a killed kernel leaves it
    made.close()
    made.append(ENDED)
    assert run_log.read("g1") == events
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((hydrogen_home / "runs").stat().st_mode) == 0o700
    assert stat.S_IMODE((made.path / "events.jsonl").stat().st_mode) == 0o600


def test_a_torn_last_line_is_left_out_and_damage_is_told() -> None:
    file = write("g1", launched("g1"), METRICS) / "events.jsonl"
    with file.open("ab") as torn:
        torn.write(b'["GangEnded",{"at_s":1')
    assert run_log.read("g1") == [launched("g1"), METRICS]
    found = run_log.summary("g1")
    assert found is not None and (found.last, found.ended) == (METRICS, None)
    file.write_bytes(b"garbage\n" + file.read_bytes())
    with pytest.raises(HydrogenError, match="run 'g1' is damaged"):
        run_log.read("g1")
    assert (run_log.recent(), run_log.recent_ids()) == ([], ["g1"])


def test_a_record_is_read_on_from_where_it_was_complete() -> None:
    path = write("g1", launched("g1"), METRICS)
    file = path / "events.jsonl"
    last = b'["GangEnded",{"at_s":1.5,"state":"SUCCEEDED","reason":""}]\n'
    with file.open("ab") as growing:
        growing.write(last[:20])
    *_, (event, end) = run_log.read_on("g1", 0)
    assert event == METRICS
    with file.open("ab") as growing:
        growing.write(last[20:] + b"garbage\n")
    rest = run_log.read_on("g1", end)
    event, end = next(rest)
    assert (event, end) == (ev.GangEnded(1.5, "SUCCEEDED", ""), file.stat().st_size - 8)
    with pytest.raises(HydrogenError, match="run 'g1' is damaged"):
        next(rest)


def test_the_last_line_is_found_however_long() -> None:
    stacks = ev.RankStacks(1.0, 0, "x" * 300_000)
    write("g1", launched("g1"), METRICS, stacks)
    found = run_log.summary("g1")
    assert found is not None and found.last == stacks


def test_a_user_without_a_home_has_no_records(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("HYDROGEN_MAGIC_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    problems: list[str] = []
    run_log.Record.create("g1", problems.append)
    assert "home directory" in problems[0] and "HYDROGEN_MAGIC_HOME" in problems[0]
    assert run_log.recent_ids() == []
    with pytest.raises(HydrogenError, match="there is no record of a run 'g1'"):
        run_log.read("g1")


def test_a_home_that_is_a_file_costs_the_record_and_nothing_else(hydrogen_home: Path) -> None:
    hydrogen_home.touch()
    gc.freeze()  # the collection below looks at what is made here
    problems: list[str] = []
    made = run_log.Record.create("g1", problems.append)
    made.append(ENDED)
    assert f"{hydrogen_home} is not a directory" in problems[0] and len(problems) == 1
    logs = made.path
    assert logs.is_dir()
    del made
    gc.collect()
    assert not logs.exists(), "nothing else deletes them"


def test_without_any_place_for_logs_no_gang_is_launched(
    hydrogen_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hydrogen_home.touch()
    monkeypatch.setattr("tempfile.tempdir", str(hydrogen_home))
    with pytest.raises(HydrogenError, match="free some space, or set HYDROGEN_MAGIC_HOME"):
        run_log.Record.create("g1", lambda problem: None)


def test_two_kernels_may_draw_the_same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    write("g1", launched("g1"))
    drawn = iter(["g1", "g2"])
    monkeypatch.setattr(launcher, "_new_id", lambda: next(drawn))
    gang, made = launcher._new_record(pytest.fail)
    made.close()
    assert (gang, made.path) == ("g2", run_log.run_dir("g2"))


def test_a_full_disk_ends_the_record_and_nothing_else() -> None:
    said: list[str] = []
    made = run_log.Record.create("g1", said.append)
    made.append(launched("g1"))
    with disk_full_at((made.path / "events.jsonl").stat().st_size + 10):
        made.append(METRICS)
    made.append(ENDED)
    made.close()
    assert len(said) == 1
    assert run_log.read("g1") == [launched("g1")]


def test_a_home_that_somebody_planted_is_not_used(tmp_path: Path, hydrogen_home: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    hydrogen_home.mkdir()
    (hydrogen_home / "runs").symlink_to(elsewhere)
    said: list[str] = []
    made = run_log.Record.create("g1", said.append)
    made.append(ENDED)
    assert len(said) == 1
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700  # the logs' place, for this run alone
    assert list(elsewhere.iterdir()) == []


def test_writing_an_end_never_raises() -> None:
    damaged = write("damaged", launched("damaged"), METRICS)
    (damaged / "events.jsonl").write_bytes(b"no JSON\n")
    run_log.write_end(damaged, "the kernel ended")
    cut = write("cut", launched("cut"), METRICS)
    with (cut / "events.jsonl").open("ab") as file:
        file.write(b'["Metr')
    with disk_full_at((cut / "events.jsonl").stat().st_size):
        run_log.write_end(cut, "the kernel ended")
    assert run_log.read("cut") == [launched("cut"), METRICS]


def test_a_record_that_a_full_disk_cut_off_is_completed_at_the_end() -> None:
    file = write("g1", launched("g1"), METRICS) / "events.jsonl"
    with file.open("ab") as torn:
        torn.write(b'["Metr')
    events = [launched("g1"), METRICS, METRICS, ENDED]
    shown = ev.Display(0.5, 0, 0, "show")  # not recorded
    run_log.complete("g1", [shown, *events[:3], shown, ENDED])
    run_log.complete("g1", [shown, *events[:3], shown, ENDED])
    assert run_log.read("g1") == events


def test_a_gang_records_at_its_end_what_a_full_disk_refused() -> None:
    said: list[str] = []
    run = GangRun("g1", run_log.Record.create("g1", said.append))
    run.emit(launched("g1"))
    events = run.rank_logs.folder / "events.jsonl"
    with disk_full_at(events.stat().st_size + 10):
        run.emit(METRICS)
    run.emit(ENDED)
    run.finish()
    assert run_log.read("g1")[:2] == [launched("g1"), METRICS] and len(said) == 1
    found = run_log.summary("g1")
    assert found is not None and found.ended is not None


@pytest.mark.parametrize("n_free", [0, 10, 10_000])
def test_the_end_of_a_gang_needs_no_space_on_its_disk(n_free: int) -> None:
    """Without an end, later kernels take a gang that succeeded for one that was stopped."""
    run = GangRun("g1", run_log.Record.create("g1"))
    run.emit(launched("g1"))
    for _ in range(5):
        run.emit(METRICS)
    before = run_log.read("g1")
    with disk_full_at((run.rank_logs.folder / "events.jsonl").stat().st_size + n_free):
        run.emit(ev.Output(2.0, 0, "stdout", "x" * 20_000))
        run.emit(ENDED)
        run.finish()
    *kept, end = run_log.read("g1")
    assert kept == before[: len(kept)] and len(kept) > 1
    assert end == run.events[-1] and isinstance(end, ev.GangEnded)
    assert [rank.phase for rank in replay([*kept, end]).ranks] == ["done", "done"]


def test_an_end_that_is_longer_than_the_record_is_shortened() -> None:
    recorded = [launched("g1"), *[METRICS] * 5]
    file = write("g1", *recorded) / "events.jsonl"
    end = replace(ENDED, reason="x" * 500, metrics={f"loss_{n}": 0.5 for n in range(100)})
    with disk_full_at(file.stat().st_size), pytest.raises(OSError, match="File too large"):
        run_log.complete("g1", [*recorded, end], only_now=True)
    assert run_log.read("g1")[-1:] == [replace(ENDED, reason="x" * 199 + "…")]


def test_the_end_of_a_gang_is_its_last_event(capsys: pytest.CaptureFixture[str]) -> None:
    """Without an end there, the next kernel reports a gang that was lost."""
    record = run_log.Record.create("g1")
    run = GangRun("g1", record)
    record.on_problem = lambda text: run.emit(ev.Notice(9.0, "warning", text))
    run.emit(launched("g1"))
    with disk_full_at((record.path / "events.jsonl").stat().st_size + 10):
        run.emit(ENDED)
    forwarder = tracking._Forwarder(run, "mine", MagicMock(), "", None)
    forwarder._notice("warning", "the last points are missing")
    assert capsys.readouterr().err == "warning: gang g1: the last points are missing\n"
    run.finish()
    assert [*run.events] == run_log.read("g1") == [launched("g1"), ENDED]


def test_the_end_of_an_outliving_gang_is_recorded_once_the_disk_has_space(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write("g1", launched("g1"))
    file = folder / "events.jsonl"
    events = [launched("g1"), METRICS, ENDED]
    gang: Any = SimpleNamespace(id="g1", folder=folder, events=lambda: events)
    (folder / run_log.UNSEEN).touch()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limits = [file.stat().st_size + 10, soft]

    def wait(seconds: float = 5.0) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.pop(0), hard))

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=wait)
    monkeypatch.setattr(stored_results, "time", clock)
    try:
        wait()
        process._complete_record(gang, is_seen=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run_log.read("g1") == events and run_log.is_unseen("g1") and not limits
    process._complete_record(gang, is_seen=True)
    assert not run_log.is_unseen("g1")
    shutil.rmtree(folder)
    process._complete_record(gang, is_seen=False)  # nor does it wait for a deleted folder


def test_a_record_says_why_the_gang_is_over() -> None:
    here = replace(launched("g1", owner=DEAD), host=os.uname().nodename)
    assert run_log.why_over(here) == "its kernel ended"
    outliving = replace(here, outlives=True)
    assert run_log.why_over(outliving) == "its owner process ended unexpectedly"
    before = replace(outliving, owner=f"earlier-boot/{DEAD.partition('/')[2]}")
    assert run_log.why_over(before) == "its machine was restarted"
    assert "owner process" in run_log.why_over(replace(before, host="another"))
    other = ev.Metrics(0.6, 1, (1,), (0.6,), {"val_loss": (0.5,), "loss": (2.0,)})
    path = write("g2", replace(outliving, gang="g2"), METRICS, other)
    (path / run_log.OWNER_SOCKET).touch()
    (path / run_log.CHECKPOINTS).mkdir()
    (path / run_log.CHECKPOINTS / ".checkpoint.arriving").touch()
    run_log.write_end(path, ev.KERNEL_ENDED)  # as an agent does it
    (ended,) = run_log.read("g2")[3:]
    assert isinstance(ended, ev.GangEnded)
    assert (ended.reason, ended.metrics) == (ev.OWNER_ENDED, {"loss": math.inf, "val_loss": 0.5})
    assert not (path / run_log.OWNER_SOCKET).exists() and not (path / run_log.CHECKPOINTS).exists()
    assert run_log.unfinished() == ["g2"], "the user has not been informed"
    (path / run_log.UNSEEN).touch()
    run_log.end_abandoned("g2")
    assert run_log.unfinished() == [] and not run_log.is_unseen("g2")
    found = run_log.summary("g2")
    assert found is not None and found.ended is not None
    assert found.ended.metrics == ended.metrics


@pytest.mark.usefixtures("no_gangs")
def test_a_record_that_cannot_be_read_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for gang, wall_time in (("newer", 1.0), ("deleted", 2.0), ("whole", 3.0)):
        write(gang, launched(gang, wall_time), ev.AttemptStarted(0.5, 0), METRICS)
    file = run_log.run_dir("newer") / "events.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0], b'["EventOfANewerVersion",{"at_s":0.5}]\n', *lines[1:]]))
    known = run_log.recent()
    shutil.rmtree(run_log.run_dir("deleted"))
    monkeypatch.setattr(run_log, "recent", lambda: known)
    states = history.states()
    assert [state.gang for state in states] == ["newer", "deleted", "whole"]
    assert states[0].last_metrics == states[2].last_metrics
    with pytest.raises(HydrogenError, match=r"damaged, or of a newer version: .*EventOfANewer"):
        gang_command.manage(GangCommand("show", gang="newer"))


@pytest.mark.usefixtures("no_gangs")
def test_a_run_on_another_machine_may_be_silent() -> None:
    other = replace(launched("away", owner="another machine:1:1"), host="login2")
    file = write("away", other, ev.AttemptStarted(0.5, 0)) / "events.jsonl"
    (state,) = history.states()
    assert (state.is_terminal, state.reason) == (False, "runs on login2")
    assert gang_lines(state, state.now_s, 100)[0].endswith(" · runs on login2")
    os.utime(file, (0, 0))
    (state,) = history.states()
    assert not state.is_terminal and state.reason.startswith("runs on login2, not heard of since ")


def test_runs_that_ended_last_are_kept_and_unseen_ones() -> None:
    write("long", launched("long", wall_time=1.0), replace(ENDED, at_s=1000.0))
    unseen = write("unseen", launched("unseen", wall_time=2.0), ENDED) / run_log.UNSEEN
    unseen.touch()
    for number in range(3):
        write(f"short{number}", launched(f"short{number}", wall_time=100.0 + number), ENDED)
    run_log.prune(keep=2)
    assert sorted(run_log.recent_ids()) == ["long", "short2", "unseen"]
    unseen.unlink()
    run_log.prune(keep=2)
    assert sorted(run_log.recent_ids()) == ["long", "short2"]


def test_a_silent_run_of_another_machine_is_not_deleted() -> None:
    """It may wait for slots of a cluster, and goes on."""
    other = replace(launched("away", wall_time=1.0, owner="another machine:1:1"), host="login2")
    file = write("away", other, ev.AttemptStarted(0.5, 0)) / "events.jsonl"
    file.with_name(run_log.UNSEEN).touch()  # as of every gang that outlives its kernel
    write("here", launched("here", wall_time=100.0), ENDED)
    hours_ago_s = time.time() - 20 * 3600
    os.utime(file, (hours_ago_s, hours_ago_s))
    run_log.prune(keep=0)
    assert run_log.recent_ids() == ["away"]
    os.utime(file, (0, 0))
    run_log.prune(keep=0)
    assert run_log.recent_ids() == []


def test_records_that_cannot_be_read_are_deleted_at_last() -> None:
    """Their launch was written on a full disk, or by another version."""
    folder = run_log.run_dir("torn")
    folder.mkdir(parents=True)
    (folder / "events.jsonl").touch()
    (folder / "rank-0.log").write_bytes(bytes(1000))
    run_log.prune(keep=0)
    assert run_log.recent_ids() == ["torn"]
    for path in (folder / "events.jsonl", folder / "rank-0.log", folder):
        os.utime(path, (0, 0))
    run_log.prune()
    assert run_log.recent_ids() == []


def test_records_of_runs_that_logged_for_days_do_not_fill_the_disk() -> None:
    for number in range(5):
        folder = write(f"g{number}", launched(f"g{number}", wall_time=100.0 + number), ENDED)
        (folder / "rank-0.log").write_bytes(bytes(1000))
    (run_log.run_dir("g0") / "results-0").touch()
    run_log.kept_dir("g1").mkdir()
    run_log.prune(keep_bytes=2999)
    assert sorted(run_log.recent_ids()) == ["g0", "g1", "g3", "g4"]
    run_log.prune(keep_bytes=1)
    assert sorted(run_log.recent_ids()) == ["g0", "g1", "g4"]


def test_cells_of_a_session_leave_gangs_and_their_data_alone() -> None:
    now_s = time.time()
    for age_s, state in ((1.0, "SUCCEEDED"), (9.0, "FAILED"), (8 * 86400.0, "FAILED")):
        name = f"g{age_s:.0f}"
        begun = launched(name, wall_time=now_s - age_s)
        folder = write(name, begun, ev.GangEnded(0.0, state, ""))
        if state == "FAILED":
            (folder / "checkpoints").mkdir()
    for number in range(4):
        cell = replace(launched(f"c{number}", wall_time=now_s + number), session="s")
        write(f"c{number}", cell, ENDED)
    run_log.prune(keep=2)
    assert sorted(run_log.recent_ids()) == ["c2", "c3", "g1", "g9"]
    run_log.prune(keep=0)
    assert run_log.recent_ids() == ["g9"]
    run_log.prune(keep=0, keep_bytes=0)
    assert run_log.recent_ids() == []


def test_ids_cannot_lead_out_of_the_directory() -> None:
    for name in ("../g1", "", ".", "a/b", "g1\n"):
        with pytest.raises(HydrogenError, match="id of a run"):
            run_log.read(name)
    with pytest.raises(HydrogenError, match="no record of a run"):
        run_log.read("unknown")


def test_an_owner_is_one_process_and_no_other() -> None:
    mine = run_log.owner_of_this_process()
    assert run_log.is_alive(mine)
    machine, pid, started = mine.rsplit(":", 2)
    assert not run_log.is_alive(f"{machine}:{pid}:{int(started) + 1}")  # the pid was used again
    assert not run_log.is_alive(f"another boot:{pid}:{started}")
    for nonsense in ("", ":", "a:b:c"):
        assert not run_log.is_alive(nonsense)


# ── metrics ──────────────────────────────────────────────────────────────────────────────────────


def test_calls_of_one_step_are_one_row_and_later_values_win() -> None:
    events: list[ev.Event] = [
        ev.Metrics(1.0, 1, (0, 1), (0.1, 0.2), {"loss": (3.0, 2.0)}),
        ev.Metrics(1.0, 0, (1, 1), (0.3, 0.4), {"loss": (5.0, 4.0), "rank": (7.0, None)}),
        ev.Metrics(1.0, 1, (1,), (0.5,), {"accuracy": (0.9,)}),
        ev.AttemptStarted(2.0, 1),
        ev.Metrics(3.0, 0, (1,), (2.5,), {"loss": (1.0,)}),
    ]
    table = frame(events)
    assert list(table.columns) == ["attempt", "rank", "step", "time_s", "loss", "rank_", "accuracy"]
    rows = [tuple(None if math.isnan(v) else v for v in row) for row in table.to_numpy()]
    assert rows == [
        (0, 0, 1, 0.4, 4.0, 7.0, None),
        (0, 1, 0, 0.1, 3.0, None, None),
        (0, 1, 1, 0.5, 2.0, None, 0.9),
        (1, 0, 1, 2.5, 1.0, None, None),
    ]
    assert [str(kind) for kind in table.dtypes] == ["int64"] * 3 + ["float64"] * 4


def test_a_later_value_may_be_nan_and_a_metric_may_have_the_name_of_a_column() -> None:
    events = [
        ev.Metrics(1.0, 0, (0, 0), (0.1, 0.2), {"loss": (3.0, math.nan), "rank": (1.0, None)}),
        ev.Metrics(1.0, 0, (0,), (0.3,), {"rank_": (2.0,)}),
    ]
    [row] = frame(events).to_dict("records")
    assert math.isnan(row.pop("loss"))
    assert row == {"attempt": 0, "rank": 0, "step": 0, "time_s": 0.3, "rank__": 1.0, "rank_": 2.0}


def test_no_points_make_an_empty_table_with_its_columns() -> None:
    table = frame([launched("g1"), ENDED])
    assert table.empty
    kinds = dict.fromkeys(("attempt", "rank", "step"), "int64") | {"time_s": "float64"}
    assert dict(table.dtypes.astype(str)) == kinds


# ── timeline ─────────────────────────────────────────────────────────────────────────────────────


def test_the_trace_has_slices_that_nest_or_lie_apart(tmp_path: Path) -> None:
    # Two threads of rank 1: "load" overlaps "step" by half, which one track must not.
    names, starts, ends = (
        ["forward", "step", "load", "step"],
        (1.0, 1.0, 1.5, 2.0),
        (1.2, 2.0, 2.5, 3.0),
    )
    spans = seconds.spans(5.0, 1, names, starts, ends, (1, 0, 0, 0))
    events = [
        ev.RankPhase(0.5, 1, "running"),
        spans,
        ev.CollectiveWait(2.0, 1, "all_reduce", 3, 0.75),
        ev.CollectiveWait(2.25, 1, "", 3, 0.75),
        ev.Metrics(3.0, 1, (0, 1), (1.0, 2.0), {"loss": (0.5, math.nan)}),
        ev.RankExited(4.0, 1, 0),
    ]
    path = write_chrome_trace(events, tmp_path / "trace.json")
    entries = json.loads(path.read_text())["traceEvents"]
    packed = write_chrome_trace(events, tmp_path / "trace.json.gz")
    assert json.loads(gzip.decompress(packed.read_bytes()))["traceEvents"] == entries
    slices = [e for e in entries if e["ph"] == "X"]
    assert {(e["name"], e["ts"], e["dur"]) for e in slices} == {
        ("forward", 1e6, 0.2e6),
        ("step", 1e6, 1e6),
        ("load", 1.5e6, 1e6),
        ("step", 2e6, 1e6),
        ("running", 0.5e6, 3.5e6),
        ("all_reduce", 0.75e6, 1.5e6),
    }
    tracks = {e["name"]: e["tid"] for e in slices}
    assert tracks["forward"] == tracks["step"] != tracks["load"]
    assert [e["args"] for e in entries if e["ph"] == "C"] == [{"value": 0.5}]
    name = {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "rank 1"}}
    assert name in entries


def test_a_timeline_has_what_was_not_over_at_the_end_of_the_run(tmp_path: Path) -> None:
    """The wait in which a rank hung until it was killed, and what a rank does that still runs."""
    events = [
        launched("g1"),
        *(ev.RankPhase(1.0, rank, "running") for rank in (0, 1)),
        *(ev.CollectiveWait(6.0, rank, "barrier", 3, 5.0) for rank in (0, 1)),
        ev.RankExited(300.0, 0, None, "SIGKILL", True),
        ev.RankHealth(301.0, 1, 10, 99.0, "R"),
    ]
    path = write_chrome_trace(events, tmp_path / "trace.json")
    entries = json.loads(path.read_text())["traceEvents"]
    assert {(e["pid"], e["name"], e["ts"], e["dur"]) for e in entries if e["ph"] == "X"} == {
        (0, "running", 1e6, 299e6),
        (0, "barrier", 5e6, 295e6),
        (1, "running", 1e6, 300e6),
        (1, "barrier", 5e6, 296e6),
    }
