"""What is recorded while ranks run: spans without the user's help, and the torch profiler's traces."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hydrogen_magic as hm
from hydrogen_magic.capture import capture_call
from hydrogen_magic.core import events as ev
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.core.masking import Mask
from hydrogen_magic.core.messages import AgentCommand, RecordSpans
from hydrogen_magic.driver import launcher, profile_merge, profiling
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.state.collective_waits import late_in_all
from hydrogen_magic.driver.state.gang_state import GangState, RankState
from hydrogen_magic.driver.state.span_tracks import SpanTracks
from hydrogen_magic.node.worker import commands
from hydrogen_magic.node.worker.interactive import user_input
from hydrogen_magic.node.worker.reporting import profiler, reporter
from hydrogen_magic.transport import framing
from tests import ranks, recorded_ranks, training
from tests.gangs import PATIENCE_S, ended, notices_of, spans_of, until, until_reported_again

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("warm_agents")

BY_ITSELF = {"data wait", "forward", "loss", "backward", "optimizer step", "save checkpoint"}
COLLECTIVES = {"all_reduce", "all_reduce (async)", "wait"}


@pytest.fixture
def over(tmp_path: Path) -> Path:
    """A file that ranks wait for."""
    return tmp_path / "over"


@pytest.fixture
def gang(over: Path) -> Iterator[Gang]:
    """Two ranks that train until ``over`` is there."""
    launched = hm.launch(training.train, str(over), np=2)
    until(launched, lambda: launched.ranks and all(rank.steps > 2 for rank in launched.ranks))
    yield launched
    launched.stop()
    ended(launched)


def until_profiled(gang: Gang) -> Path:
    until(gang, lambda: gang.snapshot().profile_path and not gang.snapshot().profiling)
    return Path(gang.snapshot().profile_path)


def phases_of(gang: Gang) -> list[str]:
    return [event.phase for event in gang.events() if isinstance(event, ev.Profiling)]


def assert_nested(spans: list[tuple[str, float, float, int]]) -> None:
    """Of one depth none overlaps another, and each lies inside one of the depth above.

    Depths of several threads are stacked, so what begins a stack lies in nothing.
    """
    by_depth: dict[int, list[tuple[float, float]]] = {}
    for _, start, end, depth in spans:
        assert end >= start >= 0
        by_depth.setdefault(depth, []).append((start, end))
    for of_depth in by_depth.values():
        of_depth.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(of_depth))


def inside(spans: list[tuple[str, float, float, int]], outer: list[tuple[Any, ...]]) -> bool:
    return all(any(o[1] <= s[1] and s[2] <= o[2] for o in outer) for s in spans)


# ── spans by themselves ──────────────────────────────────────────────────────────────────────────


def test_recording_is_turned_on_and_off_while_ranks_run(gang: Gang) -> None:
    assert spans_of(gang, "spans") == {}
    gang.record(True)

    def seen(rank: int, track: str) -> set[str]:
        return {name for name, *_ in spans_of(gang, track).get(rank, ())}

    def has_all(rank: int) -> bool:
        return seen(rank, "spans") >= BY_ITSELF and seen(rank, "collectives") >= COLLECTIVES

    until(gang, lambda: has_all(0) and has_all(1))
    gang.record(True)  # a second time without effect
    gang.record(False)
    until_reported_again(gang, 10)  # what was on its way has arrived
    recorded = spans_of(gang, "spans")
    until_reported_again(gang, 10)
    assert spans_of(gang, "spans") == recorded
    assert [e.on for e in gang.events() if isinstance(e, ev.Recording)] == [True, False]
    collectives = spans_of(gang, "collectives")
    for rank in (0, 1):
        assert seen(rank, "spans") - {ev.GRADIENTS} == BY_ITSELF
        assert_nested(recorded[rank])
        assert_nested(collectives[rank])


def test_timeline_records_from_the_start(over: Path, tmp_path: Path) -> None:
    over.touch()
    spec = JobSpec(np=2, timeline="")
    captured = capture_call(
        training.train, (str(over),), {}, max_closure_bytes=1 << 24, ranks_have_gpu=False
    )
    gang = launcher.launch_captured(captured, spec, title="train")
    ended(gang).raise_for_state()
    steps = gang.ranks[0].steps
    assert gang.snapshot().is_recording
    for rank in (0, 1):
        names = [name for name, *_ in spans_of(gang, "spans")[rank]]
        assert names.count("optimizer step") == names.count("backward") == steps
    entries = json.loads(gang.timeline(tmp_path / "trace.json").read_text())["traceEvents"]
    threads = {e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert {"phases", "spans", "collectives"} <= threads


def test_waiting_for_gradients_is_not_the_ranks_own_work() -> None:
    """It is told from the backward pass, except where a user's own hook does the communication."""
    n_steps = 60
    captured = capture_call(
        training.train_unevenly,
        (n_steps,),
        {},
        max_closure_bytes=1 << 24,
        ranks_have_gpu=False,
    )
    gang = launcher.launch_captured(captured, JobSpec(np=2, timeline=""), title="train")
    ended(gang).raise_for_state()
    found = spans_of(gang, "spans")
    for rank in (0, 1):
        assert_nested(found[rank])
        own = {name: [s for s in found[rank] if s[0] == name] for name, *_ in found[rank]}
        assert inside(own[ev.GRADIENTS], own["plain"])
        assert len(own["backward"]) == 2 * n_steps
    tracks = SpanTracks()
    tracks.feed(gang.events())
    waited_s = []
    for rank in (0, 1):
        spans = tracks.spans(rank, ev.SPANS)
        is_wait = [tracks.names[name] == f"waiting for rank {1 - rank}" for name in spans.names]
        waited_s.append(float(spans.durations_s[is_wait].sum()))
    assert waited_s[0] > 0.5 * n_steps * 0.02 and waited_s[0] > waited_s[1]
    late = late_in_all({rank.rank: rank.waits for rank in gang.snapshot().ranks})
    assert late is not None and late.ranks == (1,)


@pytest.fixture(scope="module")
def recorded(warm_agents: None, homes: Iterator[Path]) -> list[list[ev.Event]]:
    """The events of each part of ``recorded_ranks.record``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYDROGEN_MAGIC_HOME", str(next(homes)))
        gang = ended(hm.launch(recorded_ranks.record, np=1))
    gang.raise_for_state()
    parts = list[list[ev.Event]]([[]])
    for event in gang.events():
        parts[-1].append(event)
        if isinstance(event, ev.Notice):
            parts.append([])
    return parts


def test_spans_nest_also_when_a_step_raises(recorded: list[list[ev.Event]]) -> None:
    rows = [
        (name, depth)
        for spans in recorded[0]
        if isinstance(spans, ev.Spans)
        for name, depth in zip(spans.names, spans.depths, strict=True)
    ]
    assert rows == [
        ("forward", 2),
        ("loss", 2),
        ("mine", 1),
        ("backward", 1),
        ("optimizer step", 0),
        ("forward", 1),  # the one that raises, while the step that raised counts as open
    ]


def test_observed_code_compiles_whole_and_once(recorded: list[list[ev.Event]]) -> None:
    """What the rank asserts, and the spans that its compiled modules record."""
    names = [name for spans in recorded[2] if isinstance(spans, ev.Spans) for name in spans.names]
    assert (names.count("forward"), names.count("backward")) == (12, 6)


@pytest.mark.exhaustive
def test_compiled_code_sends_and_receives(cold: None) -> None:
    """``isend`` and ``irecv`` are wrapped, and the compiler cannot trace what they call. A new agent has not
    imported torch yet: its ranks wrap them before other modules of torch import them.
    """
    assert ended(hm.launch(ranks.swap_compiled, np=2)).results == [2.0, 4.0]


# ── orders ───────────────────────────────────────────────────────────────────────────────────────


def test_malformed_orders_are_reported_and_ignored() -> None:
    ours, theirs = socket.socketpair()
    sent: list[ev.Event] = []
    rank = reporter.Reporter(0, time.monotonic(), sent.extend)
    taken = commands.AgentCommands(
        framing.FrameReader(theirs),
        rank,
        profiler.Profiler(rank, lambda number, fd: None),
        lambda is_recording: None,
        user_input.UserInput(rank),
        lambda is_forced: None,
    )
    with ours, theirs:
        taken.poll()  # nothing there: no wait
        odd: list[Any] = [
            7,
            [],
            {},
            ["Eval", {}],
            ["StartProfile", {}],
            ["RecordSpans", {"gang": "cafe", "on": "yes"}],
            ["Quit", {}],
            ["StartProfile", {"number": "x", "steps": {}, "path": 1}],
            None,
        ]
        for order in odd:
            framing.send(ours, order, [0])
        ours.sendall(b"\x00\x00\x00\x02\x00{]")
        framing.send(ours, RecordSpans("cafe", True))
        before = len(os.listdir("/proc/self/fd"))
        taken.poll()
        # What other tests have left may be closed meanwhile.
        assert rank.is_recording and len(os.listdir("/proc/self/fd")) <= before
        ours.close()
        taken.poll()
        taken.poll()
    rank.close()
    assert [e.level for e in sent if isinstance(e, ev.Notice)] == ["warning"] * (len(odd) + 1)


def test_a_rank_in_a_blocked_collective_does_not_delay_orders(over: Path) -> None:
    gang = hm.launch(training.block, str(over), np=2)
    until(gang, lambda: gang.ranks[1].waiting_in)
    gang.record(True)
    gang.profile(2)
    gang.ask_stacks()
    until(gang, lambda: gang.ranks and all("File" in rank.stacks for rank in gang.ranks))
    until(gang, lambda: gang.snapshot().profiling == "waiting")
    gang.stop()
    ended(gang)
    assert (gang.state, phases_of(gang)) == ("STOPPED", ["waiting", ""])
    for ask in (gang.record, gang.profile, gang.ask_stacks):
        ask()  # after the end nothing happens
    assert isinstance(gang.events()[-1], ev.GangEnded)
    with pytest.raises(ValueError, match="1 to 1000"):
        gang.profile(0)


# ── profiles ─────────────────────────────────────────────────────────────────────────────────────


def test_three_steps_of_two_ranks_are_one_trace(gang: Gang, over: Path) -> None:
    gang.profile(3)
    gang.profile(3)  # while the first is being made
    path = until_profiled(gang)
    # Three steps may be over before it is reported that they began.
    assert [p for p in phases_of(gang) if p != "recording"] == ["waiting", "reading", ""]
    assert "is already in progress" in notices_of(gang)
    requested_s, reported_s = (
        next(e.at_s for e in gang.events() if isinstance(e, ev.Profiling) and e.phase == phase)
        for phase in ("waiting", "reading")
    )
    entries = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in entries if e["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1"}
    slices = [e for e in entries if e["ph"] == "X"]
    assert {(e["pid"], e["tid"]) for e in slices} >= {(0, 0), (1, 0)}
    assert all(requested_s <= e["ts"] / 1e6 <= reported_s for e in slices)
    for rank in (0, 1):
        own = [e["name"] for e in slices if e["pid"] == rank]
        assert sum("Optimizer.step#SGD.step" in name for name in own) == 3
    shown = spans_of(gang, "profiler")
    for rank in (0, 1):
        assert_nested(shown[rank])
        # One clock: ranks of a DDP step cannot be a step apart.
        steps = [s for s in shown[rank] if "Optimizer.step" in s[0]]
        assert len(steps) == 3
        assert inside([s for s in shown[rank] if s[3] == 1], [s for s in shown[rank] if s[3] == 0])
    gang.profile(1)
    until(gang, lambda: gang.snapshot().profile_path.endswith("profile-2.json.gz"))
    over.touch()
    assert gang.result > 3
    assert gang.logs == {0: "", 1: ""}  # the profiler prints nothing of its own
    kept = {file.name for file in path.parent.iterdir()}
    assert kept == {"events.jsonl", "profile-1.json.gz", "profile-2.json.gz"}


def test_a_cell_that_ends_first_is_profiled_as_far_as_it_went(gang: Gang, over: Path) -> None:
    gang.profile(1000)
    until(gang, lambda: gang.snapshot().profiling == "recording")
    over.touch()
    ended(gang).raise_for_state()
    assert phases_of(gang) == ["waiting", "recording", "reading", ""]
    assert Path(gang.snapshot().profile_path).exists()
    assert isinstance(gang.events()[-1], ev.GangEnded)


class ProfiledGang:
    """A gang of one rank that is asked for profiles, and its agent group."""

    id = "cafe"

    def __init__(self, folder: Path) -> None:
        self.emitted: list[ev.Event] = []
        self.state = GangState(ranks=(RankState(0, phase="running"),))
        self.mask = Mask()
        self.profiling = profiling.GangProfiler(self, self, folder, lambda: 1.0)  # type: ignore[arg-type]

    def emit(self, event: ev.Event) -> None:
        self.emitted.append(event)

    def send(self, command: AgentCommand) -> None:
        """Take the order that a rank would."""

    async def made(self, number: int, answer: bytes) -> None:
        """Ask for a profile, have it answered, and wait until it is over."""
        with mmap.mmap(-1, len(answer)) as trace:
            trace.write(answer)
            self.profiling.start(1)
            self.profiling.on_trace(0, number, trace)
            await self.profiling.close(is_wanted=True)


def test_a_fault_of_the_merge_is_reported_and_ends_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("something")

    monkeypatch.setattr(profile_merge, "merge", broken)
    gang = ProfiledGang(tmp_path)
    asyncio.run(gang.made(1, b"{}"))
    phases = [event.phase for event in gang.emitted if isinstance(event, ev.Profiling)]
    assert phases == ["waiting", "reading", ""]
    (notice,) = (event for event in gang.emitted if isinstance(event, ev.Notice))
    assert notice.text == "the ranks' traces could not be merged (ZeroDivisionError: something)"


def test_repeated_requests_for_a_profile_get_one_notice(tmp_path: Path) -> None:
    async def ask() -> ProfiledGang:
        gang = ProfiledGang(tmp_path)
        for _ in range(50):
            gang.profiling.start(1)
        await gang.profiling.close(is_wanted=False)
        return gang

    emitted = asyncio.run(ask()).emitted
    assert [type(event) for event in emitted] == [ev.Profiling, ev.Notice, ev.Profiling]


@pytest.mark.parametrize("phase", ["recording", "reading"])
def test_stop_does_not_wait_for_a_profile(
    gang: Gang, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for its steps nor for the merge, which lasts here as long as the profile is wanted."""

    def held(
        traces: Any, path: Path, is_wanted: Callable[[], bool], mask: Callable[[str], str]
    ) -> profile_merge.Profile:
        while is_wanted():
            time.sleep(0.01)
        return merge(traces, path, is_wanted, mask)

    merge = profile_merge.merge
    monkeypatch.setattr(profile_merge, "merge", held)
    monkeypatch.setattr(profiling, "_READ_S", 2 * PATIENCE_S)
    gang.profile(1000 if phase == "recording" else 5)
    until(gang, lambda: gang.snapshot().profiling == phase)
    gang.stop()
    ended(gang)
    assert (gang.state, phases_of(gang)[-1]) == ("STOPPED", "")
    assert gang.snapshot().profile_path == ""


def test_a_profile_of_ranks_without_steps_is_given_up(
    over: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "_STEP_S", 0.3)
    gang = hm.launch(training.wait_for, str(over), np=2)
    until(gang, lambda: gang.ranks and all(rank.phase == "running" for rank in gang.ranks))
    gang.profile()
    until(gang, lambda: phases_of(gang) == ["waiting", ""])
    assert "no optimizer step within 0.3 s on ranks 0 and 1" in notices_of(gang)
    over.touch()
    assert gang.result is None


def test_without_torch_a_profile_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm forkserver may have torch from another cell; a fresh one does not."""
    answers: list[tuple[int, bytes]] = []
    rank = reporter.Reporter(0, time.monotonic(), lambda batch: None)
    made = profiler.Profiler(rank, lambda n, fd: answers.append((n, os.pread(fd, 1 << 10, 0))))
    monkeypatch.delitem(sys.modules, "torch")
    made.start(4, 5, "/nowhere")
    ((number, answer),) = answers
    assert (number, rank.steps.on_step) == (4, None)
    assert "not imported torch" in json.loads(answer)["error"]


class FakeProfile:
    """Stands for torch's while it is on."""

    def __exit__(self, *_: object) -> None: ...

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text("trace")


def test_a_profile_cancelled_while_the_profiler_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting takes seconds the first time; nothing of it may reach the user's optimizer."""
    pytest.importorskip("torch")
    answers: list[tuple[int, str]] = []
    rank = reporter.Reporter(0, time.monotonic(), lambda batch: None)
    made = profiler.Profiler(
        rank, lambda n, fd: answers.append((n, os.pread(fd, 1 << 10, 0).decode()))
    )

    def started(_: reporter.Reporter) -> FakeProfile:
        made.start(1, 0, "")  # as the reporter's thread would, which polls meanwhile
        made.start(2, 3, str(tmp_path / "other"))
        return FakeProfile()

    monkeypatch.setattr(profiler, "_started", started)
    made.start(1, 100, str(tmp_path / "trace"))
    rank.steps.add(1)
    rank.steps.add(1)  # the first one that can end it
    made.finish()
    busy, early = answers
    assert busy[0] == 2 and "already being profiled" in busy[1]
    assert early == (1, "trace")
    assert rank.steps.on_step is None and list(tmp_path.iterdir()) == []


def test_a_profile_cancelled_before_it_starts(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    answers: list[int] = []
    rank = reporter.Reporter(0, time.monotonic(), lambda batch: None)
    made = profiler.Profiler(rank, lambda number, fd: answers.append(number))
    made.start(1, 5, str(tmp_path / "trace"))
    made.start(1, 0, "")
    rank.steps.add(1)
    made.finish()
    assert answers == [] and rank.steps.on_step is None


def test_a_profiler_of_the_users_own_goes_on(over: Path) -> None:
    gang = hm.launch(recorded_ranks.profile_oneself, str(over), np=1)
    until(gang, lambda: gang.ranks and gang.ranks[0].steps)
    gang.profile(2)
    until(gang, lambda: phases_of(gang)[-1:] == [""])
    over.touch()
    assert gang.result is True
    assert gang.snapshot().profile_path == ""
    assert "no profile of rank 0: RuntimeError: the cell's own profiler" in notices_of(gang)
    left = {file.name for file in gang.folder.iterdir()}
    assert left <= {"events.jsonl", "rank-0.log"}, "torch may print something"
