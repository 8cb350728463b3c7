"""The gang that a word after ``%gang`` means."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hydrogen_magic.driver import launcher
from hydrogen_magic.notebook import gang_command
from hydrogen_magic.notebook.arguments import ArgumentsError
from tests.records import ENDED, launched, write

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
    assert [complete(name, to_stop=True) for name in ("wide", "c0", "a9")] == [
        "a1b2",
        "c0de",
        "a9ff",
    ]
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


def test_a_gang_that_cannot_be_reached_is_told_from_an_unknown_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher, "gangs", dict)
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
    monkeypatch.setattr(launcher, "gangs", lambda: {"mine": mine})
    for gang, wall_time in (("older", 1.0), ("newer", 3.0)):
        outliving = replace(launched(gang, wall_time=wall_time), name="wide", outlives=True)
        write(gang, outliving, ENDED)
    assert gang_command._find("wide").id == "newer"
    assert gang_command._find(None) is mine
    assert gang_command.reachable(None) is mine
    monkeypatch.setattr(gang_command, "attach", lambda gang, take: f"attached to {gang}")
    assert gang_command.reachable("wide") == "attached to newer"
