"""Runs side by side: what differs, and their curves, from recorded events."""

from __future__ import annotations

import base64
import math
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.state.gang_state import GangState, RankState
from hydrogen_magic.views.comparison import Comparison
from hydrogen_magic.views.sweep import _MOST_WARNINGS, _warnings
from tests.pictures import ended, trained

NOW = 100.0


@dataclass
class Run:
    """The events of a run that is over."""

    recorded: list[ev.Event]

    def events(self, start: int = 0) -> list[ev.Event]:
        return self.recorded[start:]

    def wait(self, timeout_s: float | None = None) -> bool:
        return True


def run(name: str, np: int = 2, **params: bool | int | float | str) -> Run:
    first, *others = trained(np, 20, ("loss", "accuracy"), spans=False)
    assert isinstance(first, ev.GangLaunched)
    return Run(ended([replace(first, name=name, params=params), *others]))


def charts(html: str) -> dict[str, str]:
    """Return the SVG of each chart by its text for readers without pictures."""
    found = re.findall(r'alt="([^"]*)" src="data:image/svg\+xml;base64,([^"]*)"', html)
    return {alt: base64.b64decode(data).decode() for alt, data in found}


def test_only_what_differs_is_listed() -> None:
    same = {"width": 64, "note": "a $x$ note"}
    compared = Comparison([run("wide", lr=0.1, **same), run("deep", np=3, lr=0.01, **same)])
    header, *rows = compared.lines(NOW)
    assert header.split() == ["run", "state", "took", "np", "lr", "loss", "accuracy"]
    assert [re.split(r"\s{2,}", row)[:5:2] for row in rows] == [
        ["wide (3f2a)", rows[0].split()[3] + " s", "0.1"],
        ["deep (3f2a)", rows[1].split()[3] + " s", "0.01"],
    ]


def test_curves_of_all_runs_are_in_the_same_charts() -> None:
    shorter = run("shorter")
    for place, event in enumerate(shorter.recorded):
        if isinstance(event, ev.Metrics):
            shorter.recorded[place] = replace(event, values={"loss": event.values["loss"]})
    html = Comparison([run("wide"), run("deep"), shorter]).html(NOW)
    drawn = charts(html)
    names = [f"Legend: {name} (3f2a)" for name in ("wide", "deep", "shorter")]
    assert list(drawn)[:3] == names
    assert [alt.partition(":")[0] for alt in list(drawn)[3:]] == ["loss", "accuracy"]
    loss, accuracy = list(drawn.values())[3:]

    def n_lines(svg: str) -> int:
        return len(re.findall(r'fill="none" stroke="#', svg))

    assert (n_lines(loss), n_lines(accuracy)) == (3, 2)
    assert loss.count("fill-opacity") == 3, "the values around each mean, which the scale includes"


def test_the_legend_has_the_values_in_which_runs_differ() -> None:
    """Names where two runs have the same values."""
    runs = [run(f"search lr={lr}", lr=lr, width=64) for lr in (0.1, 0.01)]
    for compared, legend in (
        (runs, ["lr=0.1", "lr=0.01"]),
        ([*runs, runs[0]], [f"search lr={lr} (3f2a)" for lr in (0.1, 0.01)]),
        ([runs[0], run("plain", lr=1)], ["lr=0.1, width=64", "lr=1"]),
        ([runs[0], run("plain")], ["search lr=0.1 (3f2a)", "plain (3f2a)"]),
    ):
        drawn = charts(Comparison(compared).html(NOW))
        assert [alt for alt in drawn if alt.startswith("Legend")] == [
            f"Legend: {n}" for n in legend
        ]


def test_runs_that_wait_are_listed_and_more_than_eight_are_told_apart() -> None:
    ranks = (RankState(0), RankState(1))
    like = GangState(placement="local", rendezvous="torch", state="QUEUED", ranks=ranks)
    planned = [replace(like, params={"lr": lr, "w": 8}) for lr in range(30)]
    runs = [run(f"search lr={lr}", lr=lr, w=8) for lr in range(28)]
    waiting = [Run([]), Run([])]
    compared = Comparison([*runs, *waiting], planned)
    waits, as_of = compared.lines(NOW)[-2:]
    assert waits.split() == ["QUEUED", "29"] and as_of.startswith("as of 19")
    html = compared.html(NOW)
    assert [html.count(square) for square in ("&#9632;", "&#9636;", "&#9633;")] == [14, 8, 8]
    drawn = charts(html)
    legend = [alt for alt in drawn if alt.startswith("Legend")]
    assert legend == [f"Legend: lr={lr}, w=8" for lr in range(4, 28)], "the newest 24"
    loss = next(svg for alt, svg in drawn.items() if alt.startswith("loss"))
    lines = re.findall(
        r'stroke="(#\w+)"[^>]*stroke-linejoin="round"( stroke-dasharray="[^"]*")?', loss
    )
    assert len(lines) == len(set(lines)) == 24


def test_runs_that_wait_differ_in_the_values_of_their_sweep_alone() -> None:
    """Nothing else is known of them before they begin."""
    like = GangState(placement="local", rendezvous="torch", state="QUEUED", ranks=(RankState(0),))
    planned = [replace(like, name=f"lr={lr}", params={"lr": lr}) for lr in (0.1, 0.2)]
    compared = Comparison([run("search lr=0.1", lr=0.1, epochs=5), Run([])], planned)
    titles = compared.lines(NOW)[0]
    assert "lr" in titles and "epochs" not in titles


def test_a_value_that_is_not_finite_is_blamed_on_its_run() -> None:
    broken, values = run("broken"), {"loss": (math.nan,), "accuracy": (0.5,)}
    broken.recorded.insert(-1, ev.Metrics(5.0, 0, (20,), (5.0,), values))
    [loss] = [alt for alt in charts(Comparison([run("fine"), broken]).html(NOW)) if "loss" in alt]
    assert "not finite at step 20 (broken (3f2a))" in loss


def test_names_and_values_are_text() -> None:
    hostile = "</td><img src=x onerror=alert(1)>"
    html = Comparison([run(hostile, note=hostile), run("x" * 100, note="<b>")]).html(NOW)
    assert "<img src=x" not in html and "&lt;img" in html and "<b></td>" not in html
    for svg in charts(html).values():
        assert "<img" not in svg


@pytest.mark.parametrize(("n_more", "more"), [(1, "1 more warning"), (2, "2 more warnings")])
def test_a_sweep_shows_its_first_warnings_and_counts_the_others(n_more: int, more: str) -> None:
    notices = [ev.Notice(1.0, "warning", f"text {n}") for n in range(_MOST_WARNINGS + n_more)]
    states: Any = [SimpleNamespace(notices=notices, name=f"lr={lr}") for lr in (1, 2)]
    *shown, last = _warnings(states)
    assert shown == [f"warning: text {n}" for n in range(_MOST_WARNINGS)] and last == more
    states[0].notices = []
    assert _warnings(states)[0] == "lr=2: warning: text 0"
