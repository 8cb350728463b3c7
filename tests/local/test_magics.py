"""The magics in a shell of this process, with a stand-in for what launches; then in real front ends."""

from __future__ import annotations

import asyncio
import fcntl
import importlib.metadata
import itertools
import linecache
import os
import random
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pexpect
import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient
from pexpect import fdpexpect

from hydrogen_magic import capture
from hydrogen_magic.capture.lines import cell_labels
from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages, run_log
from hydrogen_magic.core.job import JobSpec, Plan, Slot
from hydrogen_magic.core.network import PortRange
from hydrogen_magic.driver import attending, known_gangs, launcher
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.gang_run import GangRun
from hydrogen_magic.driver.history import history
from hydrogen_magic.driver.placements.spark import spark_session as sessions
from hydrogen_magic.driver.state.gang_results import GangResults
from hydrogen_magic.driver.state.gang_state import replay
from hydrogen_magic.errors import HydrogenError, PlacementError, RankFailedError
from hydrogen_magic.notebook import doctor, extension, gang_command, ipython_cells, magics
from hydrogen_magic.serialization import identity, result_stream
from hydrogen_magic.serialization.identity import Originals
from hydrogen_magic.serialization.pickler import Pickler
from hydrogen_magic.views import static_picture
from tests.gangs import ended
from tests.kernels import LOAD

GONE = "no-such-boot:1:1"


@pytest.fixture
def shell(notebook_shell: InteractiveShell) -> InteractiveShell:
    return notebook_shell


class Launched:
    """Takes the place of everything from the capture to the end of a gang."""

    def __init__(self) -> None:
        self.cells: list[capture.CellText] = []
        self.options: list[dict[str, Any]] = []
        self.histories: list[list[str]] = []
        self.specs: list[JobSpec] = []
        self.titles: list[str] = []
        self.result: Any = 42
        self.out: dict[str, Any] = {}

    def capture_cell(
        self, cell: capture.CellText, namespace: Any, history: Sequence[str] = (), **options: Any
    ) -> Any:
        self.cells.append(cell)
        self.histories.append(list(history))
        self.options.append(options)
        item = SimpleNamespace(name="model", kind="value", nbytes=12_300_000, why="line 3")
        payload = SimpleNamespace(nbytes=12_300_500)
        return SimpleNamespace(
            inventory=(item,),
            payload=payload,
            warnings=("big",),
            hints=("seeded",),
            originals=Originals(),
        )

    def launch_captured(self, captured: Any, spec: JobSpec, *, title: str, planned: Any) -> Any:
        self.specs.append(spec)
        self.titles.append(title)
        return finished(self.result, self.out)


def finished(value: Any, out: dict[str, Any]) -> Gang:
    """Return a gang that has succeeded with these results."""
    run = GangRun("3f2a", run_log.Record(Path(), None, lambda text: None))
    packer = result_stream.Packer(Pickler)
    for name, obj in {**out, result_stream.CELL_VALUE: value}.items():
        run.deliver(0, messages.ResultPart(name), packer.pack(name, obj))
    run.finish()
    return Gang(run)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    fake = Launched()
    plan = Plan((Slot(0, 0, 0, 2, 2, 1, "here", "0"), Slot(1, 1, 0, 2, 2, 1, "here")), ("a note",))
    monkeypatch.setattr(capture, "capture_cell", fake.capture_cell)
    monkeypatch.setattr(launcher, "launch_captured", fake.launch_captured)
    monkeypatch.setattr(launcher, "plan", lambda spec: plan)
    monkeypatch.setattr(attending, "attend", lambda gang, quiet: None)
    return fake


def run(shell: InteractiveShell, cell: str) -> Any:
    done = shell.run_cell(cell, store_history=True)
    done.raise_error()
    return done.result


# ── the magic's line and cell ────────────────────────────────────────────────────────────────────


def test_a_cell_returns_rank_0s_value_and_keeps_braces_of_its_body(
    shell: InteractiveShell, launched: Launched
) -> None:
    shell.user_ns["n"] = 3
    assert run(shell, "%%distributed --np {n}\nprint(f'{n} $n')\n1") == 42
    assert launched.specs[0].np == 3
    assert launched.cells[0].body == "print(f'{n} $n')\n1\n"
    assert launched.titles == ["%%distributed --np 3"]


@pytest.mark.parametrize("magic", ["distributed", "gang"])
@pytest.mark.parametrize(
    ("swept", "found"),
    [
        ("""--sweep "path=*[f'run{i}' for i in range(2)]" --np {n}""", ["'run0'", "'run1'"]),
        ("--np {n} --sweep path={1, 2}, {n}", ["{1, 2}", "{3}"]),
        ("""--sweep 'path="$n","a --np {n}"' --np {n}  # isn't {n}""", ["'$n'", "'a --np {n}'"]),
        ("--sweep=path={n} --np {n}", ["{3}"]),
    ],
)
def test_values_of_a_sweep_are_evaluated_as_written(
    shell: InteractiveShell,
    magic: str,
    swept: str,
    found: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell.user_ns.update(path=0, n=3, i=9)
    prepared: list[Any] = []

    def prepare(captured: Any, spec: JobSpec, *others: Any) -> Any:
        prepared.append((spec.np, [repr(values["path"]) for values, _ in captured]))
        raise HydrogenError("enough")

    monkeypatch.setattr(magics.sweep, "prepare", prepare)
    with pytest.raises(HydrogenError, match="enough"):
        run(shell, f"%%{magic} --cpu {swept}\nprint(path)")
    assert prepared == [(3, found)]


def test_names_of_the_calling_function_are_expanded(
    shell: InteractiveShell, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(gang_command, "manage", lambda command: asked.append(command.gang))
    shell.user_ns["who"] = "me"
    run(
        shell,
        """
def call(n):
    get_ipython().run_cell_magic("distributed", "--np {n} --name $who", "pass")
    %gang stop {n}
call(3)
""",
    )
    assert [(spec.np, spec.name) for spec in launched.specs] == [(3, "me")]
    assert asked == ["3"]


def test_a_trailing_semicolon_silences_the_value(
    shell: InteractiveShell, launched: Launched
) -> None:
    assert run(shell, "%%distributed\n1;") is None
    assert run(shell, "%%distributed\n!echo it's (\n1") == 42


def test_out_names_come_into_the_notebook(shell: InteractiveShell, launched: Launched) -> None:
    launched.out = {"model": "trained"}
    run(shell, "model = 'old'")
    run(shell, "%%distributed --out model\npass")
    assert shell.user_ns["model"] == "trained"


def test_a_failed_gang_leaves_the_notebooks_names_alone_and_raises(
    shell: InteractiveShell, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = finished(None, {"model": "half"})
    failed._run.finish(HydrogenError("rank 1 failed"))
    monkeypatch.setattr(launcher, "launch_captured", lambda *args, **kwargs: failed)
    run(shell, "model = 'old'")
    with pytest.raises(HydrogenError):
        run(shell, "%%distributed --out model\npass")
    assert shell.user_ns["model"] == "old"


def test_a_wrong_line_is_a_usage_error_and_starts_nothing(
    shell: InteractiveShell, launched: Launched
) -> None:
    with pytest.raises(UsageError, match="did you mean --np"):
        run(shell, "%%distributed --npp 4\n1")
    with pytest.raises(UsageError, match="needs a script"):
        run(shell, "%distributed --np 4")
    with pytest.raises(UsageError, match="did you mean stop"):
        run(shell, "%gang stpo")
    assert launched.specs == []


def test_a_syntax_error_is_shown_as_pythons_own(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run_cell("%%distributed\nx = 1\ny = = 2", store_history=True)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert re.search(
        r"^  Cell In\[\d+\], line 3\n    y = = 2\n        \^\nSyntaxError: invalid syntax$",
        shown.strip("\n"),
    ), shown


def test_what_is_not_there_is_refused_before_anything_is_captured(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_session_classes", lambda: ())  # of other tests
    with pytest.raises(PlacementError, match="spark"):
        run(shell, "%%distributed --on spark\nundefined_name")
    with pytest.raises(UsageError, match="mpi"):
        run(shell, "%%distributed --with mpi\nundefined_name")


def test_config_sets_defaults_and_the_line_wins(
    shell: InteractiveShell, launched: Launched
) -> None:
    run(shell, "%config Distributed.np = 4")
    run(shell, "%config Distributed.max_closure = '2GiB'")
    run(shell, "%config Distributed.ports = '40000-40100'")
    run(shell, "%%distributed --retries 1\n1")
    run(shell, "%%gang --np 3\n1")
    ports = PortRange(40000, 40100)
    unnamed = replace(launched.specs[0], name="")
    assert unnamed == JobSpec(np=4, retries=1, ports=ports, max_closure_bytes=2 << 30)
    assert launched.specs[1].np == 3
    run(shell, "%config Distributed.ports = '40000'")
    with pytest.raises(UsageError, match=r"Distributed\.ports should be a range of ports like"):
        run(shell, "%%distributed\n1")


def test_dry_run_shows_the_inventory_and_the_places_and_runs_nothing(
    shell: InteractiveShell, launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(shell, "%%distributed --dry-run\nmodel") is None
    assert capsys.readouterr().out.splitlines() == [
        "name   kind   size     why",
        "model  value  12.3 MB  line 3",
        "1 name, 12.3 MB in all",
        "warning: big",
        "warning: seeded",
        "",
        "rank  host  local_rank  device",
        "0     here  0           GPU 0",
        "1     here  1           CPU",
        "a note",
    ]
    assert launched.specs == []


# ── what the capture learns of the notebook ──────────────────────────────────────────────────────────


def test_the_cell_knows_its_number_its_lines_and_earlier_sources(
    shell: InteractiveShell, launched: Launched
) -> None:
    run(shell, "import math as m")
    run(shell, "def f(): return m.pi")
    run(shell, "\n\n%%distributed --np 2\nf()\n")
    cell = launched.cells[0]
    assert (cell.label, cell.filename, cell.first_line) == ("Cell In[3]", "<Cell In[3]>", 4)
    assert linecache.getline(cell.filename, 4) == "f()\n"  # for functions that come back
    sources = [source.strip() for source in launched.histories[0]]
    assert sources == ["import math as m", "def f(): return m.pi"]
    filename = shell.user_ns["f"].__code__.co_filename
    assert cell_labels(shell.user_ns)[filename] == "Cell In[2]"
    if hasattr(shell.compile, "format_code_name"):  # IPython 8
        assert shell.compile.format_code_name(cell.filename) == ("Cell", "In[3]")


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ("%%distributed\nx = 1\n", 2),
        ("\n\n%%distributed --np 2\nx = 1", 4),
        ("%%time\n%%distributed\nx = 1", 3),
        ("something else", 2),
    ],
)
def test_the_bodys_first_line_is_found_as_the_user_sees_it(raw: str, line: int) -> None:
    assert ipython_cells.first_line_of("x = 1\n", raw) == line


# ── loading ──────────────────────────────────────────────────────────────────────────────────────


def test_loading_names_who_had_the_name_and_unloading_gives_it_back(
    shell: InteractiveShell,
) -> None:
    extension.unload(shell)
    of_ipython = shell.magics_manager.magics["line"]["debug"]

    def distributed(line: str, cell: str | None = None) -> str:
        return "theirs"

    distributed.__module__ = "other_extension.magic"
    shell.register_magic_function(distributed, "line_cell", "distributed")
    with pytest.warns(UserWarning, match=r"registered by other_extension\.magic"):
        extension.load(shell)
    with pytest.raises(UsageError):
        run(shell, "%%distributed --npp\n1")
    extension.unload(shell)
    assert run(shell, "%%distributed\n1") == "theirs"
    assert shell.magics_manager.magics["line"]["debug"] is of_ipython
    assert not any(isinstance(c, magics.Distributed) for c in shell.configurables)


def write_run(
    name: str, owner: str, *more: ev.Event, wall_time: float = 1.0, outlives: bool = False
) -> None:
    kept = run_log.Record.create(name)
    title = "%%distributed"
    launch = ev.GangLaunched(
        0.0, name, title, 2, "local", "torch", wall_time, owner, {}, outlives=outlives
    )
    for event in (launch, ev.AttemptStarted(0.0, 0), *more):
        kept.append(event)
    kept.close()


def test_loading_reports_results_that_an_earlier_kernel_did_not_use_once(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = run_log.owner_of_this_process().rpartition(":")[0].rpartition(":")[0]
    gone, names = f"{machine}:4194303:1", [f"gone{number}" for number in range(5)]
    owners = {**dict.fromkeys(names, gone), "here": run_log.owner_of_this_process()}
    name_of_value, value = result_stream.CELL_VALUE, {"loss": 0.5}
    results: dict[str, GangResults] = {}  # copies of dropped ones are deleted
    for began, (name, owner) in enumerate(owners.items()):
        write_run(name, owner, ev.GangEnded(9.0, "SUCCEEDED", "2 ranks finished"), wall_time=began)
        results[name] = GangResults(name, run_log.run_dir(name))
        section = result_stream.Packer(Pickler).pack(name_of_value, value)
        results[name].add(1, 0, messages.ResultPart(name_of_value), section)
        assert not results[name].keep(run_log.run_dir(name) / run_log.CHECKPOINTS)
    extension.unload(shell)
    extension.load(shell)
    line, *others, rest = capsys.readouterr().out.splitlines()
    assert line.startswith("gang gone4 succeeded (") and len(others) == 2
    call = "hydrogen_magic.load_results('gone4', 1)"
    assert line.endswith(f"and its results have not been used: {call}")
    assert rest == "the same holds for 2 more gangs: gone1, gone0"
    assert known_gangs.load_results("gone4", 1) == {"_": value}
    extension.unload(shell)
    extension.load(shell)
    assert capsys.readouterr().out == "" and known_gangs.load_results("gone0", 1) == {"_": value}
    assert known_gangs.load_results("here", 1) == {"_": value} and not run_log.is_unseen("here")


def test_loading_reports_a_run_whose_kernel_died_once(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = run_log.owner_of_this_process().rpartition(":")[0].rpartition(":")[0]
    write_run("dead", f"{machine}:4194303:1", ev.RankStarted(0.5, 0, 1, "here", "cpu"))
    write_run("mine", run_log.owner_of_this_process())
    with open(run_log.runs_dir() / "dead" / "events.jsonl", "a") as file:
        file.write('["Output", {"at_')  # it was killed while it wrote
    extension.unload(shell)
    extension.load(shell)
    assert "1 earlier run was stopped when the kernel ended: dead" in capsys.readouterr().out
    assert replay(run_log.read("dead")).state == "STOPPED"
    extension.unload(shell)
    extension.load(shell)
    assert capsys.readouterr().out == ""


# ── %gang ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def gang(monkeypatch: pytest.MonkeyPatch) -> Gang:
    """A gang of this kernel that runs, by its events."""
    run = GangRun("3f2a", run_log.Record.create("3f2a"))
    owner = run_log.owner_of_this_process()
    run.emit(ev.GangLaunched(0.0, "3f2a", "--np 2", 2, "local", "torch", 1.0, owner, {}))
    run.emit(ev.AttemptStarted(0.0, 0))
    run.emit(ev.RankPhase(0.2, 0, "running"))
    run.emit(ev.Output(0.3, 1, "stdout", "hello\x1b[2J\n"))
    gang = Gang(run, picture=static_picture)
    monkeypatch.setattr(known_gangs, "gangs", lambda: {"3f2a": gang})
    return gang


def printed_by(shell: InteractiveShell, line: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    run(shell, line)
    return capsys.readouterr().out


def test_gangs_are_listed_in_the_order_of_their_start(
    shell: InteractiveShell, gang: Gang, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that the notebook still refers to may be older than one that is only recorded."""
    write_run("ab12", GONE, wall_time=2.0)
    listed = printed_by(shell, "%gang", capsys).splitlines()
    assert [line.split()[0] for line in listed[1:3]] == [gang.id, "ab12"]


def test_attach_without_an_id_takes_the_newest_run_that_goes_on(
    shell: InteractiveShell, gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a gang of this kernel, nor one that the kernel attached to last."""

    def attach(name: str, take: bool) -> Gang:
        raise HydrogenError(f"attached to {name}")

    monkeypatch.setattr(gang_command, "attach", attach)
    mine = run_log.owner_of_this_process()
    write_run("aa11", mine, wall_time=2.0, outlives=True)
    write_run("bb22", mine, wall_time=3.0, outlives=True)
    write_run("cc33", GONE, ev.GangEnded(9.0, "STOPPED", "?"), wall_time=4.0, outlives=True)
    write_run("dd44", mine, wall_time=5.0)
    for line, name in (("%gang attach", "bb22"), ("%gang attach --out model", "cc33")):
        with pytest.raises(HydrogenError, match=f"attached to {name}"):
            run(shell, line)


def test_gangs_are_listed_shown_and_read(
    shell: InteractiveShell, gang: Gang, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = ev.RankStacks(6.0, 0, "in train")
    write_run("ab12", GONE, taken, ev.GangEnded(7.0, "FAILED", "rank 0 failed: E", None))
    listed = printed_by(shell, "%gang", capsys).splitlines()
    found = [(line.split()[0], "FAILED" in line, "RUNNING" in line) for line in listed[1:]]
    assert found == [("ab12", True, False), ("3f2a", False, True)]
    assert "gang 3f2a · 2 ranks · running" in printed_by(shell, "%gang show", capsys)
    assert "failed after 7.0 s" in printed_by(shell, "%gang show ab", capsys)
    assert printed_by(shell, "%gang logs 3f --rank 1", capsys) == "hello\n"
    assert printed_by(shell, "%gang logs 3f --rank 0", capsys) == "rank 0 wrote nothing\n"
    stacks = "gang ab12 has ended: its last stacks, taken while it ran\n── rank 0 ──\nin train\n"
    assert printed_by(shell, "%gang stacks ab", capsys) == stacks
    assert "gang 3f2a" in printed_by(shell, "%gang show '--np 2'", capsys), "by its name"
    with pytest.raises(UsageError, match=r"no gang has the ID or name 'zz': ab12 \(.*\), 3f2a"):
        run(shell, "%gang logs zz")
    with pytest.raises(UsageError, match="ranks: 0, 1"):
        run(shell, "%gang logs 3f --rank 7")


def test_runs_are_told_apart_by_names_values_and_metrics(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(history()["gang"])  # of other tests in this process
    monkeypatch.setenv("SERVICE_TOKEN", "correct-horse")
    values = "lr, wide, optimizer, note = 0.01, True, 'adam', 'correct-horse battery'"
    run(shell, f"import hydrogen_magic as hm\n{values}\napi_token, rows = 'of the user', [1, 2]")
    used = "hm.log(0, loss=lr * 50)\nwide, optimizer, note, api_token, rows"
    run(shell, f"%%distributed --np 1 --on inline --name 'wide net'\n{used}")
    run(shell, "lr = 0.1")
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/me/lab.ipynb")
    run(shell, f"%%distributed --np 1 --on inline\n{used}")
    number = shell.execution_count - 1

    with pytest.raises(ZeroDivisionError):
        run(shell, "%%distributed --np 1 --on inline\n1 / 0")
    runs = history()
    found = runs[~runs["gang"].isin(before)].set_index("name").dropna(axis=1, how="all")
    assert list(found.index) == [
        "wide net", f"lab.ipynb, cell {number}", f"lab.ipynb, cell {number + 1}"
    ]  # fmt: skip
    assert list(found["state"]) == ["SUCCEEDED", "SUCCEEDED", "FAILED"]
    assert list(found["params.lr"][:2]) == [0.01, 0.1]
    assert list(found["metrics.loss"][:2]) == [0.5, 5.0]
    params = {name for name in found if name.startswith("params.")}
    assert params == {"params.lr", "params.wide", "params.optimizer", "params.note"}
    assert found["params.note"].iloc[0] == "*** battery"
    assert found["started"].is_monotonic_increasing and (found["duration_s"] < 60).all()

    listed = printed_by(shell, "%gang", capsys)
    line = next(line for line in listed.splitlines() if "wide net" in line)
    assert "loss 0.5" in line and "lr=0.01, wide=True, optimizer=adam" in line
    assert "of the user" not in listed and "correct-horse" not in listed
    assert "succeeded" in printed_by(shell, "%gang show 'wide net'", capsys)


def test_a_run_needs_a_name_that_fits_on_a_line(shell: InteractiveShell) -> None:
    for name in ("''", "'  '", "x" * 101):
        with pytest.raises(UsageError, match=r"--name.*should be a name of 1 to 100 characters"):
            run(shell, f"%%distributed --name {name}\n1")


def test_stop_asks_the_gangs_that_run(
    shell: InteractiveShell, gang: Gang, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, bool]] = []
    control = SimpleNamespace(stop=lambda reason, kill=False: asked.append((reason, kill)))
    gang._control = control  # type: ignore[assignment]
    assert printed_by(shell, "%gang stop --all", capsys) == "stopping gang 3f2a\n"
    run(shell, "%gang stop 3f2a --kill")
    assert asked == [("user", False), ("user", True)]
    gang._run.emit(ev.GangEnded(1.0, "STOPPED", "stopped by you"))
    assert printed_by(shell, "%gang stop --all", capsys) == "this kernel runs no gang\n"


def test_stop_of_all_gangs_goes_on_after_one_that_refuses(
    shell: InteractiveShell,
    gang: Gang,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(reason: str, kill: bool = False) -> None:
        raise HydrogenError("gang 1b2c is controlled by another kernel")

    gang._control = SimpleNamespace(stop=lambda reason, kill=False: None)  # type: ignore[assignment]
    theirs = Gang(gang._run, SimpleNamespace(stop=refuse))  # type: ignore[arg-type]
    monkeypatch.setattr(known_gangs, "gangs", lambda: {"1b2c": theirs, "3f2a": gang})
    said = "gang 1b2c is controlled by another kernel\nstopping gang 3f2a\n"
    assert printed_by(shell, "%gang stop --all", capsys) == said


def test_a_wait_that_is_over_leaves_the_gang_alone(shell: InteractiveShell, gang: Gang) -> None:
    with pytest.raises(HydrogenError, match="gang 3f2a is still running"):
        run(shell, "%gang wait 3f2a --timeout 10ms")


def test_the_gang_of_the_doctor_leaves_no_record(shell: InteractiveShell) -> None:
    kept, known = run_log.recent_ids(), known_gangs.gangs()
    assert doctor.two_ranks().is_well
    assert (run_log.recent_ids(), known_gangs.gangs()) == (kept, known)


def test_the_doctor_says_what_to_do(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> float:
        raise HydrogenError("x", report="rank 1 failed: RuntimeError: no route")

    bad = doctor.two_ranks(fails).lines()
    assert bad[0].startswith("BAD  2 ranks all_reduce: rank 1 failed") and "->" in bad[1]
    assert doctor.two_ranks(lambda: 3.0).is_well
    assert doctor.package("no_such_package", "pip install it").lines()[1].endswith("pip install it")
    assert "GB free" in doctor.run_directory(tmp_path).found
    assert "pip" not in doctor.pyarrow().found
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "18.1.0")
    assert doctor.pyarrow().is_well and "hydrogen_magic[infer]" in doctor.pyarrow().found


# ── in real front ends ───────────────────────────────────────────────────────────────────────────

CELLS = (
    LOAD,
    "def step(x):\n    if x == 1:\n        raise ValueError(f'bad batch {x}')\n    return x",
    "%%distributed --np 2 --out y\nimport os\nprint('hi from', os.environ['RANK'])\ny = 7\nstep(3)",
    "y",
    "%%distributed --np 2\nimport os\nprint('last words', os.environ['HM_TEST_TOKEN'])\n"
    "step(int(os.environ['RANK']))",
    "gang = get_ipython().run_cell_magic('distributed', '--detach', 'step(5)')\ngang.result;",
    "%distributed -m this.is.nowhere",
    "%%distributed --np 1 --quiet\nimport os\n"
    "shown = display({'text/html': '<i>a</i>'}, raw=True, display_id='a')\n"
    "display({'image/png': 'iVBORw0=', 'text/plain': 'plot'}, raw=True)\n"
    "shown.update({'text/html': '<b>b</b>' + os.environ['HM_TEST_TOKEN']}, raw=True)",
    "%%distributed --np 1 --quiet --out figure\nfrom matplotlib.figure import Figure\n"
    "figure = Figure()\nfigure.subplots();",
    "figure",
)
TOKEN = "hf_Zq81-live-Qx9"


def executed(cells: Sequence[str], folder: Path) -> Any:
    """Return a notebook of ``cells`` as nbclient runs it, for nbconvert as well, and as it is saved."""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    around = {"metadata": {"path": str(folder)}}
    client = NotebookClient(book, timeout=240, allow_errors=True, resources=around)
    asyncio.run(client.async_execute())
    nbformat.write(book, folder / "out.ipynb")
    return nbformat.read(folder / "out.ipynb", as_version=4)


def test_a_saved_notebook_shows_everything_once_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HM_TEST_TOKEN", TOKEN)
    book = executed(CELLS, tmp_path)
    assert TOKEN not in (tmp_path / "out.ipynb").read_text()
    _, _, trained, brought_back, failed, _, nowhere, displayed, _, figure = (
        cell.outputs for cell in book.cells
    )

    kinds = [kind for kind, _ in itertools.groupby(out.output_type for out in trained)]
    assert kinds == ["display_data", "stream", "execute_result"]
    assert re.fullmatch(
        r"gang \w+ · 2 ranks · succeeded in [\d.]+ s\nrank 0 .*done.*\nrank 1 .*done.*",
        trained[0].data["text/plain"],
    )
    printed = "".join(out.text for out in trained if out.output_type == "stream")
    assert sorted(printed.splitlines()) == ["[0] hi from 0", "[1] hi from 1"]
    assert (trained[-1].data["text/plain"], brought_back[0].data["text/plain"]) == ("3", "7")

    error = next(out for out in failed if out.output_type == "error")
    assert error.ename == "RankFailedError"
    assert error.traceback[:6] == [
        "rank 1 failed: ValueError: bad batch 1        (Cell In[5], line 4)",
        "  Cell In[5], line 4, in <module>",
        "      step(int(os.environ['RANK']))",
        "  Cell In[2], line 3, in step",
        "      raise ValueError(f'bad batch {x}')",
        "ValueError: bad batch 1",
    ]
    assert "  last words ***" in error.traceback[error.traceback.index("last output of rank 1:") :]
    assert [out.ename for out in nowhere] == ["CaptureError"]
    shown = {kind: text for out in displayed for kind, text in out.data.items()}
    assert (shown["text/html"], shown["image/png"]) == ("<b>b</b>***", "iVBORw0=")
    assert figure[0].data["image/png"].startswith("iVBORw0KGgo"), "the kernel has drawn none itself"


STUBBORN = """
import time
while True:
    try:
        print("go " * 2, flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        pass
"""
"""What is typed is echoed, and does not look like this output."""
CONTROL_C = "\x03"


@contextmanager
def ipython_terminal() -> Iterator[pexpect.spawnbase.SpawnBase]:
    """Start IPython in a terminal.

    ``pexpect.spawn`` forks this process, and closes all files in the child: gRPC's threads there, which an
    earlier test may have started, abort it.
    """
    options = "--no-banner --simple-prompt --colors=NoColor --HistoryManager.enabled=False"
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 40, 160, 0, 0))
    process = subprocess.Popen(
        ["setsid", "--ctty", sys.executable, "-m", "IPython", *options.split()],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    try:
        yield fdpexpect.fdspawn(ours, encoding="utf-8", timeout=60)
    finally:
        os.close(ours)
        process.kill()
        process.wait()


def test_control_c_in_a_terminal_stops_the_gang_and_gives_the_prompt_back() -> None:
    with ipython_terminal() as terminal:
        terminal.expect_exact("In [1]: ")
        terminal.sendline("%load_ext hydrogen_magic")
        terminal.expect_exact("In [2]: ")
        body = r"import time\nprint('go ' * 2)\ntime.sleep(600)"
        terminal.sendline(f'get_ipython().run_cell_magic("distributed", "", "{body}")')
        terminal.expect(r"\[\d\] .*go go ")
        terminal.expect("2 ranks · running")
        terminal.send(CONTROL_C)
        terminal.expect("stopped after")
        terminal.expect_exact("In [3]: ")
        assert "GangStoppedError: stopped by you" in terminal.before
        assert "Traceback" not in terminal.before

        terminal.sendline(
            f"get_ipython().run_cell_magic('distributed', '--grace 600', {STUBBORN!r})"
        )
        for _ in range(2):
            terminal.expect_exact("go go ")
        terminal.send(CONTROL_C)
        terminal.expect_exact("go go ")  # a rank that reacts too late is terminated
        terminal.send(CONTROL_C)  # kills
        terminal.expect_exact("In [4]: ")
        assert "GangStoppedError: stopped by you" in terminal.before
        terminal.sendline("exit()")
        terminal.expect(pexpect.EOF)


# ── real ranks ───────────────────────────────────────────────────────────────────────────────────

POOLS = """
import multiprocessing
class Item:
    def __init__(self, value): self.value = value
def work(item): return Item(item.value + 1)
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(work, [Item(1)])[0].value)
"""


def test_a_script_may_start_processes_in_every_way(
    shell: InteractiveShell, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pools.py").write_text(POOLS)
    run(shell, f"%distributed --quiet --timeout 240 --np 1 {tmp_path / 'pools.py'}")
    assert capfd.readouterr().out == "fork 2\nspawn 2\nforkserver 2\n"


def test_a_scripts_last_words_are_said_once(
    shell: InteractiveShell, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit('no data')\n")
    with pytest.raises(RankFailedError, match="exited with status 1"):
        run(shell, f"%distributed --quiet --np 1 {tmp_path / 'leaves.py'}")
    assert capfd.readouterr().err == "no data\n"


def test_ranks_draw_different_numbers(shell: InteractiveShell) -> None:
    """And those of the generators of Python, NumPy and torch with ``--seed N`` on rank r: N + r."""
    run(shell, "import random, numpy as np, torch")
    cell = "%%distributed --quiet --detach\nrandom.random(), np.random.rand(), torch.rand(1).item()"
    drawn = [values for _ in range(2) for values in run(shell, cell).results]
    assert [len(set(values)) for values in zip(*drawn, strict=True)] == [4, 4, 4]
    seeded = run(shell, cell.replace("--quiet", "--quiet --seed 3")).results
    import numpy as np
    import torch

    seeds = [3, 4]
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    of_torch = [torch.rand(1, generator=generator).item() for generator in generators]
    of_numpy = [np.random.RandomState(seed).rand() for seed in seeds]
    of_python = [random.Random(seed).random() for seed in seeds]
    assert seeded == list(zip(of_python, of_numpy, of_torch, strict=True))


def test_a_detached_cell_that_is_run_again_names_its_gang_that_still_runs(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its view is replaced with the output of the cell."""
    line, cell = "%%distributed --np 1 --quiet --detach", "import time\ntime.sleep(600)"
    first = run(shell, f"{line}\n{cell}")
    other = run(shell, f"{line}\n{cell} # another one")
    assert "still runs" not in capsys.readouterr().out
    again = run(shell, f"{line}\n{cell}")
    said = f"gang {first.id}, launched before by the same code, still runs: %gang stop {first.id} stops it"
    assert said in capsys.readouterr().out.splitlines()
    for gang in (first, other, again):
        gang.stop(kill=True)
        ended(gang)


@pytest.mark.parametrize(
    "line", ["%%distributed --detach", "%%distributed --outlive", "%%infer numbers --detach"]
)
def test_an_interrupt_during_the_launch_stops_a_gang_in_the_background(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    def interrupted(launch: Any, *arguments: Any, **options: Any) -> Gang:
        signal.raise_signal(signal.SIGINT)
        gang: Gang = launch(*arguments, **options)
        return gang

    for module, name in ((launcher, "launch_captured"), (magics, "launch_outliving")):
        monkeypatch.setattr(module, name, partial(interrupted, getattr(module, name)))
    run(shell, "import pandas\nnumbers = pandas.DataFrame({'x': range(9)})")
    waits = "import time\ndef predict(batch):\n    time.sleep(600)\ntime.sleep(600)"
    found = run(shell, f"{line} --np 1 --quiet\n{waits}")
    gang = ended(found if isinstance(found, Gang) else found.gang)
    assert (gang.state, gang.snapshot().reason) == ("STOPPED", "stopped by you")


def test_an_interrupt_while_results_are_assigned_waits_for_all_of_them(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(commit: Any, *arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        commit(*arguments)

    commit = partial(interrupted, identity._Updates.commit)
    monkeypatch.setattr(identity._Updates, "commit", lambda updates: commit(updates))
    run(shell, "import torch\ntensor, count = torch.zeros(2), 0\nsame = tensor")
    with pytest.raises(KeyboardInterrupt):
        run(shell, "%%distributed --np 1 --quiet --out tensor,count\ntensor += 1; count += 1")
    assert run(shell, "same is tensor, tensor.tolist(), count") == (True, [1, 1], 1)


def test_a_timeline_that_cannot_be_written_is_a_usage_error(
    shell: InteractiveShell, gang: Gang
) -> None:
    with pytest.raises(UsageError, match="could not be written"):
        run(shell, f"%gang timeline {gang.id} -o /no/such/folder/trace.json")
