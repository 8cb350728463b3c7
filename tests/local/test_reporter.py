"""What a rank reports: exact counts, in order, and never at the cost of the user's code."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.processes import COOKIE
from hydrogen_magic.node.worker import api
from hydrogen_magic.node.worker.main_thread import Watch, report_exception
from hydrogen_magic.node.worker.reporting import event_sender, metric_points, point_queue
from hydrogen_magic.node.worker.reporting import reporter as reporters
from hydrogen_magic.node.worker.reporting.send_interval import SendInterval
from hydrogen_magic.node.worker.reporting.training_progress import Collective

TIMEOUT_S = 60.0


class Sent:
    """Takes what a reporter sends, encoded as JSON as it crosses the socket."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []
        self._came = threading.Condition()

    def __call__(self, batch: Sequence[ev.Event]) -> None:
        decoded = [ev.decode(_via_json(event)) for event in batch]
        with self._came:
            self.events += decoded
            self._came.notify_all()

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def wait_for(self, condition: Callable[[], object]) -> None:
        with self._came:
            assert self._came.wait_for(condition, TIMEOUT_S), self.events


def _via_json(event: ev.Event) -> object:
    return json.loads(json.dumps(ev.encode(event)))


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def reporter(sent: Sent) -> Iterator[reporters.Reporter]:
    made = reporters.Reporter(3, time.monotonic(), sent)
    reporters.install(made)
    yield made
    made.close()
    reporters.install(None)


# ── hm.log ───────────────────────────────────────────────────────────────────────────────────────


def test_points_arrive_as_columns(reporter: reporters.Reporter, sent: Sent) -> None:
    api.log(loss=1.5)
    api.log(loss=1, accuracy=np.float32(0.5))
    api.log(step=7, accuracy=True)
    api.log(loss=np.int64(2))
    reporter.close()
    (metrics,) = sent.of(ev.Metrics)
    assert (metrics.rank, metrics.steps) == (3, (0, 1, 7, 2))
    assert metrics.values == {"loss": (1.5, 1, None, 2), "accuracy": (None, 0.5, 1, None)}
    assert list(metrics.times_s) == sorted(metrics.times_s)
    assert metrics.skipped == 0


def test_nan_and_infinity_are_values(reporter: reporters.Reporter, sent: Sent) -> None:
    api.log(loss=math.nan, bound=-math.inf)
    reporter.close()
    assert str(sent.of(ev.Metrics)[0].values) == "{'loss': (nan,), 'bound': (-inf,)}"


def test_tensors_are_read_at_the_call_and_without_a_warning(
    reporter: reporters.Reporter, sent: Sent
) -> None:
    torch = pytest.importorskip("torch")
    loss = torch.tensor(2.0, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        api.log(a=loss, b=torch.tensor([3], dtype=torch.int32), c=torch.tensor(0.5).bfloat16())
    loss.data.fill_(9.0)  # as an optimizer would, before the thread looks
    reporter.close()
    assert sent.of(ev.Metrics)[0].values == {"a": (2,), "b": (3,), "c": (0.5,)}


def repr_type(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize("on_a_rank", [True, False])
@pytest.mark.parametrize("value", ["3", None, [1.0], 1j, np.zeros(2), np.ndarray], ids=repr_type)
def test_a_value_that_is_not_a_number_is_named_at_the_call(
    value: object, on_a_rank: bool, request: pytest.FixtureRequest
) -> None:
    if on_a_rank:
        request.getfixturevalue("reporter")
    with pytest.raises(TypeError, match=rf"hm\.log\(loss=…\).*{type(value).__name__}"):
        api.log(accuracy=1.0, loss=value)
    with pytest.raises(TypeError, match="step"):
        api.log(step=0.5, loss=1.0)  # type: ignore[arg-type]


def test_an_integer_that_no_float_holds_is_refused() -> None:
    with pytest.raises(TypeError, match=r"hm\.log\(loss=…\) must be at most 1\.8e\+308"):
        api.log(loss=10**400)


def test_children_of_a_rank_warn_once_that_they_report_nothing(
    reporter: reporters.Reporter,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reporters.install(None)  # as a fork does
    monkeypatch.setenv(COOKIE, "a gang")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("multiprocessing.parent_process", object)
    with pytest.warns(UserWarning, match=r"hm\.log\(\) reports nothing here.* by rank 3") as caught:
        [api.log(loss=1.0) for _ in range(3)]
    assert [each.filename for each in caught] == [__file__]
    reporters.install(reporter)
    reporters.install(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        api.log(loss=1.0)
    assert "reports nothing here" in capsys.readouterr().err


def test_no_point_is_lost_or_doubled_between_threads(
    reporter: reporters.Reporter, sent: Sent
) -> None:
    reporter.start()
    threads = [
        threading.Thread(target=lambda: [api.log(v=1.0) for _ in range(5000)]) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reporter.close()
    steps = [step for event in sent.of(ev.Metrics) for step in event.steps]
    assert sorted(steps) == list(range(15000))


def test_wide_points_are_cut_into_events_of_bounded_size(
    reporter: reporters.Reporter, sent: Sent
) -> None:
    for step in range(400):
        reporter.log(step, {f"metric {i}": i for i in range(500)})
    reporter.close()
    events = sent.of(ev.Metrics)
    assert all(len(e.steps) * len(e.values) <= 1 << 16 for e in events)
    assert [step for e in events for step in e.steps] == list(range(400))


def test_a_gpu_that_hangs_keeps_back_its_values_only(
    reporter: reporters.Reporter, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unfinished:
        done = False

        def query(self) -> bool:
            return self.done

    class CudaTensor:
        is_cuda = True

        def numel(self) -> int:
            return 1

    event = Unfinished()
    monkeypatch.setattr(metric_points, "_copy_on_gpu", lambda value: (4.0, event))
    reporter.start()
    api.log(early=1.0)
    api.log(late=CudaTensor())
    reporter.post(ev.RankPhase(0.0, 3, "finishing"))
    assert [e.values for e in sent.of(ev.Metrics)] == [{"early": (1.0,)}]
    assert len(sent.of(ev.RankPhase)) == 1
    event.done = True
    reporter.post(ev.Notice(0.0, "info", "computed"))
    assert sent.of(ev.Metrics)[-1].values == {"late": (4.0,)}
    event.done = False
    monkeypatch.setattr(event_sender, "_LAST_GPU_WAIT_S", TIMEOUT_S)
    api.log(later=CudaTensor())
    threading.Timer(2 * event_sender._GPU_WAIT_S, lambda: setattr(event, "done", True)).start()
    reporter.close(is_patient=True)  # of a cell that has succeeded
    assert sent.of(ev.Metrics)[-1].values == {"later": (4.0,)}


def test_values_that_no_gpu_computes_in_time_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    points = point_queue.PointQueue(0, SendInterval(0, 1))
    points.add(0.0, None, {"v": 1.0})
    monkeypatch.setattr(metric_points, "is_computed", lambda ready: False)
    assert list(points.take(1.0, 0.01)) == []
    (last,) = points.take(2.0, 0.01, is_last=True)
    assert last.skipped == 1 and last.steps == ()


# ── order, ends, forks ───────────────────────────────────────────────────────────────────────────


def test_what_was_recorded_before_a_post_is_sent_before_it(
    reporter: reporters.Reporter, sent: Sent
) -> None:
    reporter.start()
    for number in range(50):
        api.log(v=number)
        reporter.post(ev.Notice(0.0, "info", str(number)))
        assert sent.events[-1] == ev.Notice(0.0, "info", str(number))
        assert sent.of(ev.Metrics)[-1].steps[-1] == number


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_command_that_fails_costs_no_event(reporter: reporters.Reporter, sent: Sent) -> None:
    failures = iter([ZeroDivisionError("of ours"), KeyError("again"), SystemExit()])

    def fail() -> None:
        raise next(failures)

    reporter.on_tick = fail
    reporter.start()
    sent.wait_for(lambda: sent.of(ev.Notice))
    assert "ZeroDivisionError: of ours" in sent.of(ev.Notice)[0].text
    sending = reporter._sender._thread
    assert sending is not None
    sending.thread.join(TIMEOUT_S)  # which nothing but the last failure ends
    api.log(loss=1.0)
    reporter.close()
    assert sent.of(ev.Metrics)[0].values == {"loss": (1.0,)} and len(sent.of(ev.Notice)) == 1


def test_close_is_bounded_while_the_agent_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_sender, "_CLOSE_S", 0.2)
    reads, stuck = threading.Event(), threading.Event()

    def send(batch: Sequence[ev.Event]) -> None:
        stuck.set()
        reads.wait(TIMEOUT_S)

    reporter = reporters.Reporter(0, time.monotonic(), send)
    reporter.start()
    reporter.log(None, {"v": 1.0})
    assert stuck.wait(TIMEOUT_S)
    sending = reporter._sender._thread
    assert sending is not None
    reporter.close()
    assert sending.is_busy, "it is not waited for"
    reads.set()
    sending.wait(TIMEOUT_S)
    sending.end()


def test_the_end_of_the_agent_does_not_disturb_the_rank() -> None:
    def send(batch: Sequence[ev.Event]) -> None:
        raise BrokenPipeError

    reporter = reporters.Reporter(0, time.monotonic(), send)
    reporters.install(reporter)
    reporter.start()
    api.log(v=1.0)
    reporter.post(ev.RankPhase(0.0, 0, "finishing"))
    api.log(v=2.0)
    reporter.post(ev.RankPhase(0.0, 0, "finishing"))
    reporter.close()


def test_a_forked_child_reports_nothing(
    reporter: reporters.Reporter, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    reporter.start()
    with api.span("around the fork"):
        with warnings.catch_warnings():  # Python 3.12 warns of threads, which is the point here
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            api.log(from_child=1.0)
            list(api.track([1, 2]))
            os._exit(0 if reporters.current() is None and api.rank() == 3 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    api.log(from_parent=1.0)
    reporter.close()
    assert [set(e.values) for e in sent.of(ev.Metrics)] == [{"from_parent"}]
    assert not sent.of(ev.Progress)


# ── steps, bars, spans ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("order", "steps"),
    [
        ("aaaa", 4),
        ("abab", 2),  # a GAN
        ("aaabaaab", 6),  # with three steps of one for every step of the other
        ("abcdabcd", 2),  # an optimizer per parameter
        ("aaabbb", 5),  # one after the other: the second one's first step closes no round
    ],
)
def test_optimizers_count_as_rounds(
    order: str, steps: int, reporter: reporters.Reporter, sent: Sent
) -> None:
    for name in order:
        reporter.steps.add(ord(name))
    reporter.close()
    assert [event.count for event in sent.of(ev.Steps)] == [steps]


def test_track_reports_its_end_after_exhaustion_break_and_error(
    reporter: reporters.Reporter, sent: Sent
) -> None:
    def closed_bars() -> list[tuple[float, float | None]]:
        reporter.post(ev.Notice(0.0, "info", "flush"))
        return [(bar.n, bar.total) for bar in sent.of(ev.Progress) if bar.closed]

    assert list(api.track(range(4))) == [0, 1, 2, 3]
    assert closed_bars() == [(4, 4)]
    for item in api.track(iter("abc"), desc="unknown length"):
        if item == "b":
            break
    assert closed_bars()[1:] == [(1, None)]
    _raised(lambda: [1 / 0 for _ in api.track(range(3), total=9)])
    assert closed_bars()[2:] == [(0, 9)]
    assert len(api.track(range(5))) == 5
    with pytest.raises(TypeError, match="total"):
        len(api.track(iter(())))


def test_many_short_bars_do_not_pile_up(reporter: reporters.Reporter, sent: Sent) -> None:
    outer = reporter.bars.new()
    reporter.bars.update(outer, "outer", 0.0, 2.0)
    for _ in range(10_000):
        list(api.track(range(1)))
    reporter.close()
    bars = sent.of(ev.Progress)
    assert len(bars) < 1000
    assert bars[0].bar == outer


def test_a_bar_of_an_earlier_cell_is_none_of_a_later_ones(sent: Sent) -> None:
    """In a session, it may close when its name is assigned again."""
    numbers = [reporters.Reporter(0, time.monotonic(), sent).bars.new() for _ in range(2)]
    assert len({*numbers}) == 2


def test_spans_nest_and_wrap_functions(reporter: reporters.Reporter, sent: Sent) -> None:
    @api.span("sync")
    def twice(n: int) -> int:
        return 1 if n == 0 else 2 * twice(n - 1)

    @api.span("async")
    async def later() -> int:
        await asyncio.sleep(0)
        return 5

    with pytest.raises(KeyError), api.span("failed"):
        raise KeyError
    with api.span("outer"):
        assert twice(1) == 2
    assert asyncio.run(later()) == 5
    reporter.close()
    (spans,) = sent.of(ev.Spans)
    assert spans.names == ("failed", "sync", "sync", "outer", "async")
    assert spans.depths == (0, 2, 1, 0, 0)
    assert all(a <= b for a, b in zip(spans.starts_ns, spans.ends_ns, strict=True))
    assert spans.starts_ns[3] <= spans.starts_ns[2] <= spans.starts_ns[1]


def test_a_span_begins_where_it_was_opened_even_if_the_rank_is_interrupted_at_its_end(
    reporter: reporters.Reporter, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = itertools.chain([1, 1, 50], itertools.repeat(1))
    clock = itertools.accumulate(steps, initial=time.monotonic_ns())
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(clock))
    with api.span("outer"), api.span("inner"):
        pass
    monkeypatch.undo()
    reporter.close()
    (spans,) = sent.of(ev.Spans)
    assert spans.names == ("inner", "outer")
    assert spans.starts_ns[1] < spans.starts_ns[0]


def test_a_plain_process_is_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (api.rank(), api.local_rank(), api.world_size()) == (0, 0, 1)
    api.log(loss=1.0)
    with api.span("not recorded"):
        assert list(api.track("ab")) == ["a", "b"]


# ── watch ────────────────────────────────────────────────────────────────────────────────────────


def test_an_exception_is_known_while_clean_up_still_runs(
    reporter: reporters.Reporter, sent: Sent
) -> None:
    reporter.start()

    def fails() -> None:
        try:
            raise ValueError("first")
        finally:
            sent.wait_for(lambda: sent.of(ev.RankFailed))

    _raised(fails)
    (failed,) = sent.of(ev.RankFailed)
    assert failed.in_flight
    assert (failed.error.type, failed.error.message) == ("ValueError", "first")
    assert failed.error.frames[-1].text == 'raise ValueError("first")'


def _looks(watch: Watch, n: int = 3) -> list[ev.Event]:
    return [event for i in range(n) for event in watch.poll(float(i), "running", None)]


@contextmanager
def _looking(watch: Watch) -> Iterator[list[ev.Event]]:
    """What the watch sees while an exception passes through this ``__exit__``."""
    seen: list[ev.Event] = []
    try:
        yield seen
    finally:
        seen += _looks(watch)


def test_only_what_goes_on_unwinding_is_reported() -> None:
    watch = Watch(0)
    try:
        raise ImportError("optional")
    except ImportError:
        assert _looks(watch) == []  # dealt with here, however long it takes
    try:
        try:
            raise OSError("passed on")
        except OSError:
            (failed,) = _looks(watch)
            assert _looks(watch) == []  # once
            raise
    except OSError:
        assert isinstance(failed, ev.RankFailed)
    assert _looks(watch) == [ev.ExceptionHandled(1.0, 0)]
    assert _looks(watch) == []
    try:
        with _looking(watch) as seen:
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert seen == []


def test_a_finally_inside_a_handler_still_unwinds() -> None:
    def clean_up_in_handler(seen: list[ev.Event]) -> None:
        try:
            raise ValueError
        except ValueError:
            try:
                _ = 1 / 0
            finally:
                seen += _looks(Watch(0))

    seen: list[Any] = []
    _raised(lambda: clean_up_in_handler(seen))
    assert [event.error.type for event in seen] == ["ZeroDivisionError"]


def test_a_collective_that_waits_is_reported_once_and_so_is_its_end() -> None:
    watch, inside = Watch(2), Collective("all_reduce", 7, 10_000_000_000)
    looked = [
        list(watch.poll(at_s, "running", collective))
        for at_s, collective in [(10.5, inside), (11.1, inside), (12.0, inside), (13.0, None)]
    ]
    assert looked == [
        [],
        [ev.CollectiveWait(11.1, 2, "all_reduce", 7, 10.0)],
        [],
        [ev.CollectiveWait(13.0, 2, "", 7, 10.0)],
    ]


# ── exceptions as text ───────────────────────────────────────────────────────────────────────────


def _raised(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_a_report_has_the_chain_and_the_users_frames_only() -> None:
    def fails() -> None:
        try:
            api.log(loss="high")
        except TypeError as error:
            raise RuntimeError("training failed") from error

    report = report_exception(_raised(fails))
    assert (report.type, report.message, report.is_direct_cause) == (
        "RuntimeError",
        "training failed",
        True,
    )
    assert report.cause is not None
    assert report.cause.type == "TypeError"
    assert [frame.text for frame in report.cause.frames] == ['api.log(loss="high")']
    assert not report.cause.is_direct_cause


def test_odd_exceptions_are_reported_too() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise ValueError

    a, b = BrokenError(), KeyError("\ud800")
    a.__cause__, b.__context__ = b, a
    a.__notes__ = ["a note", 3]  # type: ignore[list-item]
    report = report_exception(a)
    assert "BrokenError.__str__ raised ValueError" in report.message
    assert report.notes == ("a note",)
    assert report.cause is not None
    assert report.cause.cause is None
    assert ev.decode(_via_json(ev.RankFailed(0.0, 0, report, "running"))).error == report


def test_attributes_of_an_exception_may_fail() -> None:
    class FailingError(Exception):
        def __getattribute__(self, name: str) -> Any:
            return super().__getattribute__(name) if name == "__class__" else {}[name]

        @property
        def exceptions(self) -> None:
            raise OSError

    def fails() -> None:
        raise FailingError("told") from OSError("the cause")

    report = report_exception(_raised(fails))
    assert report.type.endswith("FailingError") and report.message == "told"
    assert report.frames[-1].text == 'raise FailingError("told") from OSError("the cause")'
    assert report.is_direct_cause and report.cause is not None
    assert report.cause.message == "the cause" and report.notes == ()


def test_long_chains_and_deep_recursion_are_cut() -> None:
    def fall(n: int) -> int:
        return fall(n - 1) + 1 if n else 1 // 0

    frames = report_exception(_raised(lambda: fall(297))).frames
    assert len(frames) == 101 and sum(frame.n_left_out or 1 for frame in frames) == 300
    error = ValueError("0")
    for number in range(1, 100):
        newer = ValueError(str(number))
        newer.__cause__, error = error, newer
    report: ev.ErrorReport | None = report_exception(error)
    depth = 0
    while report is not None:
        report, depth = report.cause, depth + 1
    assert depth == 11


def test_errors_for_lack_of_a_gpu_get_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = AssertionError("Torch not compiled with CUDA enabled")
    assert report_exception(error).notes[0].startswith("torch finds no GPU on this rank: use")
    if not hasattr(torch._C, "_cuda_setDevice"):
        assert report_exception(_raised(lambda: torch.cuda.set_device(0))).notes
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert report_exception(error).notes == ()


def test_the_line_that_does_not_compile_is_a_frame() -> None:
    report = report_exception(_raised(lambda: compile("x = 1\ny = = 2\n", "<cell 7>", "exec")))
    assert report.frames[-1] == ev.Frame("<cell 7>", 2, "<module>", "y = = 2")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups came with Python 3.11")
def test_the_parts_of_a_group_are_notes() -> None:
    group = ExceptionGroup("two", [ValueError("one"), KeyError("two")])  # noqa: F821
    assert report_exception(group).notes == (
        "sub-exception 1: ValueError: one",
        "sub-exception 2: KeyError: 'two'",
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_is_sent_even_when_the_thread_that_sends_has_died(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking = threading.Event()
    reporter = reporters.Reporter(3, time.monotonic(), sent)

    def look(*args: object) -> object:
        looking.set()
        reporter._sender._wake.wait(TIMEOUT_S)  # until something is posted
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Watch, "poll", look)
    reporter.start()
    assert looking.wait(TIMEOUT_S)
    phase = ev.RankPhase(0.0, 3, "finishing")
    reporter.post(phase)
    assert sent.events == [phase]


def test_in_a_large_gang_posts_do_not_wait(sent: Sent) -> None:
    """By a clock that stands still it is never this rank's turn."""
    rank = reporters.Reporter(0, 0.0, sent, interval=SendInterval(63, 100_000, clock=lambda: 0.0))
    reporters.install(rank)
    rank.start()
    api.log(loss=1.0)
    rank.post(ev.Notice(0.0, "info", "now"))
    assert [type(event) for event in sent.events] == [ev.Metrics, ev.Notice]
    rank.close()
    reporters.install(None)


@pytest.mark.parametrize(
    ("n_logged", "first", "n_skipped"), [(50_000, 0, 0), (80_000, 80_000 - 3000, 80_000 - 3000)]
)
def test_a_rank_that_logs_too_much_sends_its_newest_points(
    sent: Sent, n_logged: int, first: int, n_skipped: int
) -> None:
    """A burst is sent part by part; what exceeds the queue leaves the newest part only."""
    rank = reporters.Reporter(0, 0.0, sent, interval=SendInterval(0, 2))
    reporters.install(rank)
    for n in range(n_logged):
        api.log(n, loss=1.0)
    rank._sender._flush()
    metrics = [event for event in sent.events if isinstance(event, ev.Metrics)]
    assert [event.steps[0] for event in metrics] == [first]
    assert [len(event.steps) for event in metrics] == [3000]
    assert sum(event.skipped for event in metrics) == n_skipped
    rank.close()
    steps = [step for event in sent.events if isinstance(event, ev.Metrics) for step in event.steps]
    assert steps == list(range(first, n_logged))
    reporters.install(None)
