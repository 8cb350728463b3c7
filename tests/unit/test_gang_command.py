"""The gang that a word after ``%gang`` means."""

from __future__ import annotations

import os
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import hydrogen_magic as hm
from hydrogen_magic.core import events as ev
from hydrogen_magic.core import run_log
from hydrogen_magic.driver import attending, kernel_end, known_gangs
from hydrogen_magic.driver.owner.recorded_gang import RecordedGang
from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.notebook import gang_command
from hydrogen_magic.notebook.arguments.gang import GangCommand, parse_gang
from hydrogen_magic.notebook.arguments.parsing import ArgumentsError
from hydrogen_magic.views.comparison import Comparison
from hydrogen_magic.views.text_table import gang_lines
from tests.records import DEAD, ENDED, launched, write

pytestmark = pytest.mark.usefixtures("no_gangs")

KNOWN = {"a1b2": "wide", "a9ff": "1", "b303": "1", "1c00": "a", "c0de": "c0"}
"""Names of runs by their ids, newest last."""


def complete(name: str | None, **options: Any) -> str:
    return gang_command._complete(name, KNOWN, "", **options)


@pytest.mark.parametrize(
    ("name", "gang"),
    [
        (None, "c0de"),
        ("a1b2", "a1b2"),
        ("wide", "a1b2"),
        ("1", "b303"),
        ("a", "1c00"),
        ("a9", "a9ff"),
        ("c0", "c0de"),
    ],
)
def test_an_id_then_a_name_then_the_beginning_of_an_id(name: str | None, gang: str) -> None:
    assert complete(name) == gang


def test_only_the_gang_that_is_meant_is_stopped() -> None:
    found = [complete(name, to_stop=True) for name in ("wide", "c0", "a9")]
    assert found == ["a1b2", "c0de", "a9ff"]
    for name, meant in (("1", "b303, and the beginning of 1c00"), ("a", "1c00.* a1b2, a9ff")):
        with pytest.raises(ArgumentsError, match=f"'{name}' is the name of gang {meant}"):
            complete(name, to_stop=True)


def test_an_unknown_or_ambiguous_beginning_is_refused() -> None:
    with pytest.raises(ArgumentsError, match=r"no gang has the ID or name 'x': a1b2 \(wide\), "):
        complete("x")
    for name in ("wid", "wdie"):
        with pytest.raises(ArgumentsError, match=f"'{name}'; did you mean 'wide'\\?$"):
            complete(name)
    with pytest.raises(ArgumentsError, match="several gangs begin with '': "):
        complete("")


def test_a_gang_that_cannot_be_reached_is_told_from_an_unknown_one() -> None:
    write("47ed", replace(launched("47ed"), name="ck"), ENDED)
    write("58fe", replace(launched("58fe", owner="another host 1 1"), name="away"))
    for outliving in ((), ("6a6a",)):
        for gang in outliving:
            write(gang, replace(launched(gang), outlives=True), ENDED)
        with pytest.raises(ArgumentsError, match=r"gang 47ed \(ck\) has ended, .*%gang show 47ed"):
            gang_command.reachable("ck")
        with pytest.raises(ArgumentsError, match=r"gang 58fe .* belongs to another kernel"):
            gang_command.reachable("58")
        with pytest.raises(ArgumentsError, match=r"no gang .*reached from here"):
            gang_command.reachable("unknown")


def test_of_one_name_the_newest_run_is_found_whichever_kernel_ran_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = SimpleNamespace(wall_time=2.0, name="wide", outlives=False)
    mine: Any = SimpleNamespace(id="mine", snapshot=lambda: state)
    monkeypatch.setattr(known_gangs, "gangs", lambda: {"mine": mine})
    for gang, wall_time in (("older", 1.0), ("newer", 3.0)):
        outliving = replace(launched(gang, wall_time=wall_time), name="wide", outlives=True)
        write(gang, outliving, ENDED)
    assert gang_command._find("wide").id == "newer"
    assert gang_command._find(None) is mine
    assert gang_command.reachable(None) is mine
    monkeypatch.setattr(gang_command, "attach", lambda gang, wants: f"attached to {gang}")
    assert gang_command.reachable("wide") == "attached to newer"


class Outliving:
    """A gang that this kernel knows."""

    first_rank = 0
    received = SimpleNamespace(nbytes=0)

    def __init__(self, gang_id: str, wall_time: float) -> None:
        self.id = gang_id
        self.state = SimpleNamespace(
            wall_time=wall_time, name=gang_id, outlives=True, is_terminal=False
        )
        self.is_stopped = False

    def snapshot(self) -> Any:
        return self.state

    def stop(self, kill: bool) -> None:
        self.is_stopped = True


def test_a_gang_that_was_attached_to_again_is_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """For `stop`, and for the results that `attach --out` takes."""
    for at_s, name in enumerate(("long", "short")):
        outliving = replace(launched(name, wall_time=float(at_s)), outlives=True)
        write(name, outliving, *([ENDED] if name == "short" else []))
    gangs: list[Any] = [Outliving(name, at_s) for at_s, name in enumerate(("long", "short"))]
    for gang in gangs:
        known_gangs.register(gang)
    monkeypatch.setattr(gang_command, "pick_view", lambda *_, **__: None)
    monkeypatch.setattr(attending, "follow", lambda gang, view: None)
    gang_command.manage(GangCommand("attach", gang="long"))
    assert gang_command._find(None) is gangs[0]
    said: list[str] = []
    gang_command.manage(GangCommand("stop"), said.append)
    assert said == ["stopping gang long\n"] and gangs[0].is_stopped
    assert gang_command.manage(GangCommand("attach", out=("model",))) is gangs[0]
    for gang in gangs:
        known_gangs.forget(gang)


@pytest.mark.parametrize(("has_ended", "is_drawn"), [(True, True), (False, False)])
def test_a_headless_run_draws_a_gang_that_has_ended(
    has_ended: bool, is_drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("a1b2", launched("a1b2"), *([ENDED] if has_ended else []))
    view = MagicMock()
    monkeypatch.setattr(gang_command, "draws_html", lambda: True)
    monkeypatch.setattr(gang_command, "pick_view", lambda *_, **__: view)
    said: list[str] = []
    gang_command.manage(GangCommand("show", gang="a1b2"), said.append)
    assert view.close.called == is_drawn and bool(said) != is_drawn


def test_a_gang_of_another_kernel_is_followed_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = run_log.Record.create("a1b2")
    record.append(launched("a1b2"))
    record.append(ev.RankStarted(1.0, 0, 100, "here", "cpu"))
    followed: list[RecordedGang] = []
    monkeypatch.setattr(gang_command, "draws_widgets", lambda: True)
    monkeypatch.setattr(gang_command, "pick_view", lambda *_, **__: None)
    monkeypatch.setattr(attending, "follow", lambda gang, view: followed.append(gang))
    gang_command.manage(GangCommand("show", gang="a1b2"))
    (gang,) = followed
    assert len(gang.events()) == 2
    assert gang.snapshot().ranks[0].phase == "starting" and not gang.wait(0)
    record.append(ev.RankPhase(2.0, 0, "running"))
    assert gang.events(2) == [ev.RankPhase(2.0, 0, "running")]
    assert gang.snapshot().ranks[0].phase == "running" and not gang.wait(0.01)
    record.append(ENDED)
    assert gang.wait() and gang.snapshot().state == "SUCCEEDED" and gang.events(3) == [ENDED]


@pytest.mark.parametrize("kernel", [None, "a kernel"])
def test_a_script_reports_the_gangs_that_its_end_stops(
    kernel: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    over = SimpleNamespace(id="g1", wait=lambda _: True, stop_for=lambda *_: None)
    running = SimpleNamespace(id="g2", wait=lambda _: False, stop_for=lambda *_: None)
    monkeypatch.setattr(known_gangs, "running", {"g1": (over, ()), "g2": (running, ())})
    monkeypatch.setattr(kernel_end, "kernel_here", lambda: kernel)
    kernel_end.end_with_kernel()
    told = "hydrogen_magic: this process ends, which stops 1 running gang (g2): "
    assert capsys.readouterr().err.startswith(told) == (kernel is None)


def test_results_are_loaded_by_id_or_name() -> None:
    write("a1b2", replace(launched("a1b2", owner=DEAD), name="wide"), ENDED)
    for name, said in {
        "a1b2": "no results of rank 0 are saved for run 'a1b2'",
        "wide": "no results of rank 0 are saved for run 'a1b2'",
        "a1": "no results of rank 0 are saved for run 'a1b2'",
        "wdie": "no gang has the ID or name 'wdie'; did you mean 'wide'?",
        "zz zz": r"no gang has the ID or name 'zz zz': .*a1b2 \(wide\)",
    }.items():
        with pytest.raises(HydrogenError, match=said):
            known_gangs.load_results(name)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (
            b'["GangLaunched",{"at_s":0.0,"of_a_newer_version":1}]\n',
            "is damaged, or of a newer version",
        ),
        (b'["AttemptStarted",{"at_s":0.5,"attempt":0}]\n', "is damaged: its beginning is missing"),
        (b"", "is empty"),
        (None, "cannot be read: .*directory"),
    ],
)
def test_a_record_that_cannot_be_read_is_not_denied(
    content: bytes | None,
    why: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write("a1b2") / "events.jsonl"
    file.unlink()
    file.mkdir() if content is None else file.write_bytes(content)
    if content == b"":
        assert not run_log.unreadable(), "it may have just begun"
        os.utime(file, (0, 0))
    (file.parent / run_log.UNSEEN).touch()
    told = f"the record of run 'a1b2' {why}"
    for find in (gang_command._find, gang_command.reachable):
        with pytest.raises(ArgumentsError, match=told):
            find("a1b2")
    said: list[str] = []
    gang_command.manage(GangCommand("list"), said.append)
    line = "1 record cannot be read (a1b2): %gang show a1b2 says why\n"
    begin = "gang a1b2, which this kernel has not seen end, cannot be attached to: "
    assert "".join(said).startswith(line + begin) and re.search(told, said[0])
    assert hm.history().empty and capsys.readouterr().err == f"warning: {line}"
    with pytest.raises(ArgumentsError, match="1 record cannot be read"):
        gang_command._find(None)


@pytest.mark.parametrize("folder", [".", "runs"])
def test_records_out_of_reach_are_not_denied(
    folder: str, hydrogen_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a volume that belongs to another user."""
    not_ours = hydrogen_home / folder
    not_ours.parent.mkdir(exist_ok=True)
    not_ours.touch()
    told = f"the records of gangs cannot be read: {not_ours} is not a directory"
    for line in ("list", "show a1b2", "stop a1b2"):
        with pytest.raises(ArgumentsError, match=f"^{told}.*; set HYDROGEN_MAGIC_HOME"):
            gang_command.manage(parse_gang(line))
    assert hm.history().empty and capsys.readouterr().err.startswith(f"warning: {told}")


def test_a_run_is_not_compared_with_itself() -> None:
    write("a1b2", launched("a1b2", owner=DEAD), ENDED)
    with pytest.raises(ArgumentsError, match="a1b2 and a1 are the same run, a1b2"):
        gang_command.manage(GangCommand("compare", compared=("a1b2", "a1")))


def test_a_gang_whose_kernel_died_has_ended_everywhere() -> None:
    """In each view of its record, which has no end."""
    running = [ev.RankStarted(1.0, 0, 100, "here", "cpu"), ev.RankPhase(2.0, 0, "running")]
    steps = [ev.Steps(7.0 + count, 0, count) for count in (1, 2)]
    for name in ("a1b2", "c3d4"):
        write(name, launched(name, owner=DEAD), *running, *steps)
    gangs = [RecordedGang(name) for name in ("a1b2", "c3d4")]
    end = ev.GangEnded(9.0, "STOPPED", "its kernel ended")
    assert gangs[0].wait(0) and gangs[0].events()[-1] == end
    (line, rank, *_) = gang_lines(gangs[0].snapshot(), 9.0, 100)
    assert line.endswith("stopped after 9.0 s: its kernel ended")
    assert "stopped" in rank and "steps/s" not in rank
    for row in Comparison(gangs).lines(time.time())[1:]:
        assert "STOPPED" in row and "9.0 s" in row


def test_the_log_of_one_rank_is_read_alone() -> None:
    """Those of all ranks may not fit into memory."""
    folder = write("g1", launched("g1", owner=DEAD), ENDED)
    (folder / "rank-0.log").mkdir()
    (folder / "rank-1.log").write_text("one\ntwo\n")
    said: list[str] = []
    gang_command._logs(GangCommand("logs", gang="g1", rank=1), said.extend)
    assert said == ["one", "two"]
    assert [*RecordedGang("g1").logs] == [0, 1]
    with pytest.raises(ArgumentsError, match=r"--rank 2: .* known ranks: 0, 1"):
        gang_command.manage(GangCommand("logs", gang="g1", rank=2), said.append)
