"""Horovod's timeline of a training that runs: seen, begun and ended, kept; here and on Spark."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import hydrogen_magic as hm
from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.chrome_trace import write_chrome_trace
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.state.stragglers import stragglers
from hydrogen_magic.notebook.arguments.gang import GangCommand
from hydrogen_magic.notebook.gang_command import manage
from hydrogen_magic.views.text_table import warnings
from tests import horovod_training
from tests.gangs import PATIENCE_S, notices_of, spans_of, until, until_reported_again

pytestmark = [
    pytest.mark.horovod,
    pytest.mark.usefixtures("warm_agents"),
    pytest.mark.timeout(300),
]


SPARK = pytest.param(
    "spark", marks=[pytest.mark.spark, pytest.mark.exhaustive, pytest.mark.xdist_group("spark")]
)


@pytest.fixture(params=["local", SPARK])
def launch(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Gang]]:
    """Launches trainings that go on until a file is there, and ends them."""
    if request.param == "spark":
        request.getfixturevalue("spark")
    started: list[Gang] = []

    def launched(env: dict[str, str] | None = None, **options: Any) -> Gang:
        function = partial(horovod_training.train, str(tmp_path / "over"), **options)
        gang = hm.launch(function, np=2, on=request.param, rendezvous="horovod", env=env)
        started.append(gang)
        until(gang, lambda: gang.ranks and all(rank.steps > 2 for rank in gang.ranks))
        return gang

    yield launched
    for gang in started:
        gang.stop(kill=True)
        assert gang.wait(PATIENCE_S)


only_here = pytest.mark.parametrize("launch", ["local"], indirect=True)
"""Where Spark goes by code that other tests of this file run as well."""


def now_s(gang: Gang) -> float:
    return float(gang._control._job.now_s())  # type: ignore[union-attr]


def of_horovod(gang: Gang, start: int = 0) -> list[ev.Spans]:
    events = gang.events(start)
    return [e for e in events if isinstance(e, ev.Spans) and e.track == ev.COORDINATOR and e.names]


def until_shown(gang: Gang) -> None:
    """Wait until a span of now is there."""
    since_s = now_s(gang)
    until(gang, lambda: any(max(e.ends_ns) > since_s * 1e9 for e in of_horovod(gang)))


def kept(gang: Gang) -> list[list[dict[str, Any]]]:
    return [json.loads(path.read_bytes()) for path in gang.kept_timelines]


def test_a_running_training_is_seen_and_its_timeline_kept(
    launch: Callable[..., Gang], tmp_path: Path
) -> None:
    """An empty variable names no timeline of the user's."""
    gang = launch(env={"HOROVOD_TIMELINE": ""})
    assert of_horovod(gang) == []
    gang.record(True)
    for _ in range(3):
        until_shown(gang)  # while it runs, again and again
    (tmp_path / "over").touch()
    assert gang.wait(PATIENCE_S) and gang.state == "SUCCEEDED", gang.snapshot().reason
    spans = spans_of(gang, ev.COORDINATOR)
    assert set(spans) == {0}, "the coordinator's"
    assert {"negotiate allreduce", "allreduce", "gloo allreduce"} <= {name for name, *_ in spans[0]}
    # One clock: what the coordinator did for the last call lies within the call as its rank saw it.
    last = max((span for span in spans[0] if span[0] == "allreduce"), key=lambda span: span[2])
    call = max(spans_of(gang, ev.COLLECTIVES)[0], key=lambda span: span[2])
    assert call[0] == "hvd.allreduce"
    assert call[1] - 0.001 < last[1] <= last[2] < call[2] + 0.001
    (raw,) = kept(gang)
    assert "timeline" not in notices_of(gang)
    names = [e["args"]["name"] for e in raw if "name" in e.get("args", {})]
    assert "allreduce.the last one" in names
    trace = json.loads(write_chrome_trace(gang.events(), tmp_path / "trace.json").read_bytes())
    tracks = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert {"spans", "coordinator", "collectives"} <= tracks


@only_here
def test_it_begins_and_ends_again_and_again(launch: Callable[..., Gang], tmp_path: Path) -> None:
    gang = launch()
    for number in (1, 2, 3, 4):
        file = gang.folder / f"horovod-timeline-{number}.json"
        # A file goes on if the end of a recording comes while it still begins.
        while not file.exists():
            gang.record(False)
            until_reported_again(gang, 2)
            gang.record(True)
            until_shown(gang)
        until(gang, lambda file=file: b'"E"' in file.read_bytes())
    os.kill(gang.ranks[0].pid or 0, signal.SIGKILL)
    assert gang.wait(PATIENCE_S) and gang.state == "FAILED"
    files = kept(gang)
    assert [path.name for path in gang.kept_timelines] == [
        f"horovod-timeline-{n}.json" for n in (1, 2, 3, 4)
    ]
    assert all(any(e["ph"] == "E" for e in raw) for raw in files)
    assert notices_of(gang).count("timeline") == 0
    said: list[str] = []
    manage(GangCommand("timeline", gang=gang.id, file=str(tmp_path / "all.json")), said.append)
    assert all(str(path) in "".join(said) for path in gang.kept_timelines)


@only_here
def test_the_slowest_rank_is_named(launch: Callable[..., Gang], tmp_path: Path) -> None:
    gang = launch(late_s=0.2)
    gang.record(True)
    sentence = "ranks waited for rank 1 in collectives: "

    def said() -> bool:
        return any(w.text.startswith(sentence) for w in warnings(gang.snapshot(), now_s(gang)))

    until(gang, said)
    assert set(stragglers(gang.snapshot(), now_s(gang))) == {1}
    (tmp_path / "over").touch()
    assert gang.wait(PATIENCE_S) and gang.state == "SUCCEEDED"
    assert sentence in notices_of(gang), "it is shown afterwards too"


@only_here
def test_the_users_own_timeline_is_theirs(launch: Callable[..., Gang], tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    gang = launch(own_timeline=str(own))
    gang.record(True)
    until_shown(gang)
    (tmp_path / "over").touch()
    assert gang.wait(PATIENCE_S) and gang.state == "SUCCEEDED"
    assert gang.kept_timelines == []
    assert b"the last one" in own.read_bytes(), "as Horovod has written it"
