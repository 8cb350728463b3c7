"""Traces of ranks become one: clocks, threads, arrows, nesting, and what is no trace at all."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import masking
from hydrogen_magic.driver import profile_merge

CPU, GPU = 4321, 0


def slice_(name: str, ts: float, dur: float, cat: str = "cpu_op", **where: Any) -> dict[str, Any]:
    place = {"pid": CPU, "tid": 1, **where}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, **place}


def trace(*events: dict[str, Any], marks: tuple[tuple[float, float], ...] = ((2.0, 7e9),)) -> bytes:
    """Return a rank's trace; ``marks``: the gang's time (s) and the trace's (µs)."""
    set_ = [slice_(f"hydrogen_magic.clock {at:.9f}", ts, 1.0) for at, ts in marks]
    content = {"schemaVersion": 1, "traceEvents": [*set_, *events], "traceName": "x"}
    return json.dumps(content, indent=2).encode()


def merged(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return found


def test_clocks_are_brought_together(tmp_path: Path) -> None:
    """The first mark was late by 500 µs, the second by none: the second tells the clock."""
    late = trace(slice_("a", 7e9 + 3000, 10), marks=((2.0, 7e9 + 500), (2.001, 7e9 + 1000)))
    traces = {1: late, 0: trace(slice_("a", 7e9 + 3000, 10))}
    done = profile_merge.merge(traces, tmp_path / "p.json.gz")
    assert (done.ranks, done.errors) == ((0, 1), {})
    at = {e["pid"]: e["ts"] for e in merged(tmp_path / "p.json.gz") if e["ph"] == "X"}
    assert at == {0: 2.003e6, 1: 2.003e6}
    assert [spans.starts_ns for spans in done.spans] == [(2_003_000_000,)] * 2


def test_secrets_in_names_are_masked(tmp_path: Path) -> None:
    secret = 'open "sesame" please'
    answer = trace(slice_(f"fetch {secret}", 7e9, 10))
    fd = os.memfd_create("trace")
    os.write(fd, answer)
    mask = masking.Mask([secret])
    with os.fdopen(masking.masked_file(fd, mask), "rb") as file:
        file.seek(0)
        assert file.read() == mask.data(answer) != answer
    done = profile_merge.merge({0: answer}, tmp_path / "p.json.gz", mask=mask.text)
    names = [e["name"] for e in merged(tmp_path / "p.json.gz") if e["ph"] == "X"]
    assert names == ["fetch ***"] and done.spans[0].names == ("fetch ***",)


def test_threads_and_streams_lie_below_each_other(tmp_path: Path) -> None:
    events = [
        {"ph": "M", "name": "thread_name", "pid": GPU, "tid": 7, "args": {"name": "stream 7 "}},
        slice_("step", 7e9, 100),
        slice_("mm", 7e9 + 10, 50),
        slice_("empty", 7e9 + 20, 5),
        slice_("launch", 7e9 + 30, 5, cat="cuda_runtime"),
        slice_("backward", 7e9 + 20, 100, tid=2),
        slice_("grad", 7e9 + 30, 10, tid=2),
        slice_("kernel", 7e9 + 40, 200, cat="kernel", pid=GPU, tid=7),
        {"ph": "s", "id": 3, "pid": CPU, "tid": 1, "ts": 7e9 + 30, "cat": "ac2g", "name": "ac2g"},
        {"ph": "f", "id": 3, "pid": GPU, "tid": 7, "ts": 7e9 + 40, "cat": "ac2g", "name": "ac2g"},
        slice_("PyTorch Profiler (0)", 7e9, 500, cat="Trace", pid="Spans", tid="x"),
    ]
    done = profile_merge.merge({5: trace(*events)}, tmp_path / "p.json.gz")
    (spans,) = done.spans
    assert spans.names == ("step", "mm", "empty", "backward", "grad", "kernel")
    assert spans.depths == (0, 1, 2, 3, 4, 5)
    assert (spans.rank, spans.track, spans.skipped) == (5, "profiler", 0)
    entries = merged(tmp_path / "p.json.gz")
    names = {e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    assert names == {0: "main thread", 1: "thread 2", 2: "GPU 0 stream 7"}
    assert {e["id"] for e in entries if e["ph"] in "sf"} == {"5.3"}
    assert {e["name"] for e in entries if e["ph"] == "X"} >= {"launch", "kernel"}
    assert "PyTorch Profiler (0)" not in {e["name"] for e in entries}


def test_the_outermost_are_kept_and_stay_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_merge, "MAX_SPANS", 5)
    inner = [slice_(f"inner{n}", 7e9 + n * 100 + 90, 10.5 + n) for n in range(4)]
    outer = [slice_(f"outer{n}", 7e9 + n * 100, 100) for n in range(4)]
    (spans,) = profile_merge.merge({0: trace(*outer, *inner)}, tmp_path / "p").spans
    assert (len(spans.names), spans.skipped) == (5, 3)
    rows = list(zip(spans.names, spans.depths, spans.starts_ns, spans.ends_ns, strict=True))
    top = {name: (start, end) for name, depth, start, end in rows if depth == 0}
    assert list(top) == [f"outer{n}" for n in range(4)]
    for _, _, start, end in rows:
        assert any(first <= start and end <= last for first, last in top.values())


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b'{"error": "RuntimeError: busy"}', "RuntimeError: busy"),
        (b"", "lacks the marks"),
        (b"\xff\x00 not a trace", "lacks the marks"),
        (b'{"traceEvents": []}', "lacks the marks"),
        (trace()[:-40], "damaged"),
        (b'{"traceEvents": [{"ph": "X", "name": "cut', "damaged"),
        (b'{"traceEvents": [1, null, "a", {}]}', "damaged"),
        (b'{"traceEvents": [' + b"[" * 100_000, "damaged"),
        (trace(slice_("a", float("nan"), 1)), "damaged"),
        (trace({"ph": "X", "pid": 1, "tid": []}), "damaged"),
        (trace({"ph": "M", "name": "thread_name", "pid": {}, "tid": []}), "damaged"),
        (trace({"ph": "X", "pid": 1, "tid": 1, "ts": 1.0, "name": "a"}), "damaged"),
        (trace(slice_("a", 10**400, 1)), "damaged"),
    ],
)
def test_what_is_no_trace_is_said_and_the_others_go_on(
    answer: bytes, said: str, tmp_path: Path
) -> None:
    done = profile_merge.merge({0: answer, 1: trace(slice_("a", 7e9, 1))}, tmp_path / "p.json.gz")
    assert (done.ranks, list(done.errors)) == ((1,), [0])
    assert said in done.errors[0]
    assert {e["pid"] for e in merged(tmp_path / "p.json.gz") if e["ph"] == "X"} == {1}
    alone = profile_merge.merge({1: b"{}"}, tmp_path / "none.json.gz")
    assert (alone.ranks, list(tmp_path.glob("none*"))) == ((), [])


def test_a_slice_without_a_name_is_one_all_the_same(tmp_path: Path) -> None:
    nameless = {key: value for key, value in slice_("", 7e9, 1).items() if key != "name"}
    (spans,) = profile_merge.merge({0: trace(nameless)}, tmp_path / "p").spans
    assert spans.names == ("",)


def test_nothing_is_left_when_nobody_wants_it(tmp_path: Path) -> None:
    with pytest.raises(profile_merge.UnwantedError):
        profile_merge.merge({0: trace(slice_("a", 7e9, 1))}, tmp_path / "p", lambda: False)
    assert list(tmp_path.iterdir()) == []


def test_what_a_trace_puts_into_the_far_future_can_be_recorded(tmp_path: Path) -> None:
    answer = trace(slice_("a", 7e9, 1), slice_("late", 1e300, 1e300))
    (spans,) = profile_merge.merge({0: answer}, tmp_path / "p").spans
    assert max(spans.ends_ns) < 10**18
    assert ev.decode(json.loads(json.dumps(ev.encode(spans)))) == spans
