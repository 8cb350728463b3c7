"""What pages order, without a kernel: done once, always answered, and files within bounds."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.owner.recorded_gang import RecordedGang
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.views.widget import downloads
from hydrogen_magic.views.widget.page_commands import CommandHandler
from tests.fake_gang import FakeGang


class Hearing:
    """A desk, and what comes of it."""

    def __init__(self, gang: Any) -> None:
        self.sent: list[dict[str, Any]] = []
        self.asked: list[Mapping[str, Any]] = []
        self.desk = CommandHandler(gang, self._send, self.asked.append)

    def _send(self, content: Mapping[str, Any], buffers: Sequence[bytes] = ()) -> None:
        self.sent.append(dict(content))

    def order(self, order_id: str = "1", **content: Any) -> dict[str, Any]:
        self.desk.take({"id": order_id, "client": "me", **content})
        return self.sent[-1] if self.sent else {}


@pytest.fixture
def gang(tmp_path: Path) -> FakeGang:
    return FakeGang(tmp_path)


@pytest.fixture
def hearing(gang: FakeGang) -> Hearing:
    return Hearing(gang)


ORDERS: dict[str, dict[str, Any]] = {
    "stacks": {}, "record": {"on": True}, "profile": {"steps": 5}, "stop": {}, "kill": {},
}  # fmt: skip


def test_orders_act_at_once(hearing: Hearing, gang: FakeGang) -> None:
    for do, options in ORDERS.items():
        ack = hearing.order(do, do=do, **options)
        assert ack == {"kind": "ack", "to": "me", "id": do, "ok": True}
    assert gang.told == ["stacks", ("record", True), ("profile", 5), "stop", "kill"]


def test_a_repeated_order_is_answered_again_and_done_once(hearing: Hearing, gang: FakeGang) -> None:
    for _ in range(3):
        hearing.order(do="stop")
    assert gang.told == ["stop"]
    assert [ack["ok"] for ack in hearing.sent] == [True] * 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"do": "format disk"},
        {"do": None},
        {},
        {"do": ["stop"]},
        {"do": "record"},
        {"do": "profile"},
    ],
    ids=str,
)
def test_what_is_no_order_is_refused_with_a_reason(
    hearing: Hearing, gang: FakeGang, wrong: dict[str, Any]
) -> None:
    ack = hearing.order(**wrong)
    assert ack["ok"] is False and "reload the page" in ack["text"]
    assert gang.told == [] and hearing.asked == []


@pytest.mark.parametrize(
    "junk",
    [
        None,
        "stop",
        3,
        [],
        {"do": "stop"},
        {"do": "stop", "id": "1"},
        {"do": "stop", "id": "1", "client": "\ud800"},
        {"do": "stop", "id": "\ud800", "client": "1"},
        {"do": "stop", "id": "1" * 1000, "client": "1"},
    ],
)
def test_what_names_nobody_is_left_alone(hearing: Hearing, gang: FakeGang, junk: Any) -> None:
    hearing.desk.take(junk)
    assert gang.told == [] and hearing.sent == []


def test_after_the_end_only_data_are_given(tmp_path: Path) -> None:
    gang = FakeGang(tmp_path, ended=True)
    hearing = Hearing(gang)
    for do in ORDERS:
        ack = hearing.order(do, do=do)
        assert ack["ok"] is False and "has already ended: succeeded" in ack["text"]
    assert hearing.order("hello", do="hello")["ok"] is True
    assert gang.told == [] and [order["do"] for order in hearing.asked] == ["hello"]


def test_a_gang_of_another_kernel_refuses_orders(tmp_path: Path) -> None:
    class Elsewhere(RecordedGang):
        def snapshot(self) -> GangState:
            return FakeGang(tmp_path).snapshot()

    hearing = Hearing(Elsewhere("3f2a"))
    for do, options in ORDERS.items():
        ack = hearing.order(do, do=do, **options)
        assert ack["ok"] is False and "in the notebook that started it" in ack["text"]


def test_that_a_file_is_being_made_is_said_at_once_and_again(hearing: Hearing) -> None:
    being_made = {"kind": "ack", "to": "me", "id": "1", "ok": True, "pending": True}
    assert [hearing.order(do="csv"), hearing.order(do="csv")] == [being_made] * 2
    [order] = hearing.asked
    hearing.desk.answer(order, ok=True)
    made = {"kind": "ack", "to": "me", "id": "1", "ok": True}
    assert [hearing.sent[-1], hearing.order(do="csv")] == [made] * 2


def test_orders_kept_in_mind_are_bounded(hearing: Hearing) -> None:
    for number in range(1000):
        hearing.order(str(number), do="rows", ranks=[0])
    assert len(hearing.desk._answers) <= 256


# ── files ────────────────────────────────────────────────────────────────────────────────────────

ASKED = {"id": "7", "client": "me"}


def test_a_file_travels_in_parts_and_comes_out_whole(
    gang: FakeGang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "_PART_BYTES", 7)
    (tmp_path / "rank-1.log").write_bytes(b"twenty bytes of text")
    file = downloads.make_file(gang, {"do": "log", "rank": 1, **ASKED})
    sent = list(downloads.parts(file, ASKED))
    assert [(part.content["part"], part.content["parts"]) for part in sent] == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]
    assert b"".join(part.buffers[0] for part in sent) == b"twenty bytes of text"
    assert {part.content["name"] for part in sent} == {"gang-3f2a-rank-1.log"}


def test_a_rank_that_wrote_nothing_has_an_empty_file(gang: FakeGang) -> None:
    file = downloads.make_file(gang, {"do": "log", "rank": 0, **ASKED})
    assert [part.buffers for part in downloads.parts(file, ASKED)] == [[b""]]


def test_all_ranks_come_one_after_the_other(gang: FakeGang, tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_bytes(b"no end")
    (tmp_path / "rank-1.log").write_bytes("fünf\n".encode())
    file = downloads.make_file(gang, {"do": "log", "rank": None, **ASKED})
    assert file.data.decode() == "── rank 0 ──\nno end\n── rank 1 ──\nfünf\n"


def test_metrics_and_trace(gang: FakeGang) -> None:
    table = downloads.make_file(gang, {"do": "csv", **ASKED}).data.decode().splitlines()
    assert table == ["attempt,rank,step,time_s,loss", "0,0,1,1.0,0.5", "0,0,2,2.0,"]
    trace = json.loads(gzip.decompress(downloads.make_file(gang, {"do": "trace", **ASKED}).data))
    assert "step" in [entry["name"] for entry in trace["traceEvents"]]


@pytest.mark.parametrize("order", [{"do": "csv"}, {"do": "trace"}, {"do": "log", "rank": 0}])
def test_what_is_too_large_for_a_page_stays_on_disk(
    gang: FakeGang, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: dict[str, Any]
) -> None:
    monkeypatch.setattr(downloads, "_MOST_BYTES", 10)
    (tmp_path / "rank-0.log").write_bytes(b"more than ten bytes")
    with pytest.raises(HydrogenError, match="too large for a page") as refused:
        downloads.make_file(gang, {**order, **ASKED})
    path = Path(str(refused.value).rpartition(" is in ")[2])
    assert path.parent == tmp_path and path.stat().st_size > 10


def test_a_rank_there_is_not_is_refused(gang: FakeGang) -> None:
    with pytest.raises(HydrogenError, match="no rank 9"):
        downloads.make_file(gang, {"do": "log", "rank": 9, **ASKED})


def test_a_table_of_nothing_is_refused_before_it_fills_the_memory(gang: FakeGang) -> None:
    gang._events += [ev.Metrics(1.0, 0, (n,), (1.0,), {f"loss {n}": (1.0,)}) for n in range(9000)]
    with pytest.raises(HydrogenError, match=r"9001 metrics over 9002 steps .* mostly empty"):
        downloads.make_file(gang, {"do": "csv"})  # type: ignore[arg-type]
