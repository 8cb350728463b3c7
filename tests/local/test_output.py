"""Ranks that write a lot, or nonsense, or to a full disk; and what they leave in shared memory."""

from __future__ import annotations

import functools
import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hydrogen_magic as hm
from hydrogen_magic.core import events as ev
from hydrogen_magic.core import processes
from hydrogen_magic.core.masking import Mask
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.state.output_lines import OutputLines
from hydrogen_magic.errors import RankFailedError
from hydrogen_magic.node.agent import rank_output
from hydrogen_magic.node.agent.output_limits import LivePart, LiveText, RankLog, TokenBucket
from tests import leaks, output_ranks
from tests.gangs import PATIENCE_S, agent_pids, ended, said, until

pytestmark = pytest.mark.usefixtures("warm_agents")


def outputs(gang: Gang) -> list[ev.Output]:
    return [event for event in gang.events() if isinstance(event, ev.Output)]


# ── any bytes ────────────────────────────────────────────────────────────────────────────────────

ODD = st.sampled_from(
    [
        b"\r",
        b"\n",
        b"\0",
        b"\a",
        b"\xff",
        "é".encode(),
        "🙂".encode(),
        "שלום".encode(),
        b"\x1b[31m",
        b"\x1b[2J",
        b"\x1b]8;;http://x\x07",
        b"\xe2\x82",
        "\u202e".encode(),
        b"x" * 9000,
    ]
)
CHUNKS = st.lists(st.one_of(ODD, st.binary(max_size=40)), max_size=40)


def endless() -> TokenBucket:
    return TokenBucket(lambda: 0.0, burst=1e9)


def text_of(part: LivePart | None) -> str:
    return "" if part is None else part.text


@given(CHUNKS)
def test_text_is_that_of_all_bytes_wherever_they_are_cut(chunks: list[bytes]) -> None:
    live, allowance, text = LiveText(), endless(), ""
    for chunk in chunks:
        live.feed(chunk)
        text += text_of(live.take(allowance))
    text += text_of(live.rest())
    assert text == b"".join(chunks).decode("utf-8", "replace")


LONG = st.sampled_from([b"x" * 70_000, "é".encode() * 20_000, b"a line\n" * 3000])


@given(
    st.lists(st.one_of(LONG, st.text(max_size=3000).map(str.encode)), max_size=30),
    st.integers(0, 2000),
)
def test_what_is_left_out_is_counted_and_cuts_no_character(chunks: list[bytes], per_s: int) -> None:
    now = 0.0
    live, allowance = LiveText(), TokenBucket(lambda: now, per_s, burst=500)
    parts: list[LivePart | None] = []
    for chunk in chunks:
        now += 0.05
        live.feed(chunk)
        parts.append(live.take(allowance))
    assert sum(len(text_of(part).encode()) for part in parts) <= 500 + now * per_s
    taken = [part for part in (*parts, live.rest()) if part is not None]
    whole = b"".join(chunks)
    assert sum(len(text.encode()) + skipped for text, skipped, _ in taken) == len(whole)
    assert sum(text.count("\n") + lines for text, _, lines in taken) == whole.count(b"\n")
    assert whole.endswith(taken[-1].text.encode() if taken else b"")


def test_a_stream_that_never_pauses_leaves_the_others_their_part() -> None:
    now = 0.0
    limit = TokenBucket(lambda: now)
    outputs: list[Any] = [
        SimpleNamespace(streams={"stdout": rank_output._Stream(0, Mask([]))}, emit_taken=None)
        for _ in range(3)
    ]
    shown: list[int] = []

    def emit(rank: int, stream: Any) -> None:
        shown.extend([rank] if stream.part else [])

    for rank, output in enumerate(outputs):
        output.emit_taken = functools.partial(emit, rank, output.streams["stdout"])
    for step in range(200):
        now += 0.05
        outputs[0].streams["stdout"].live.feed(b"x" * 30_000)
        outputs[1].streams["stdout"].live.feed(b"y" * 30_000)
        outputs[2].streams["stdout"].live.feed(b"a warning\n" if step % 20 == 0 else b"")
        rank_output.emit_new(outputs, limit)
    assert shown.count(2) == 10 and min(shown.count(0), shown.count(1)) > 50


def test_a_gap_ends_where_a_line_begins() -> None:
    live = LiveText()
    live.feed(b"".join(b"line %06d\n" % n for n in range(10_000)))
    part = live.take(endless())
    assert part is not None
    text, skipped, lines = part
    assert text.startswith("line ") and text.endswith("line 009999\n")
    assert len(text) + skipped == 120_000 and text.count("\n") + lines == 10_000


@given(CHUNKS)
def test_lines_that_are_shown_hold_no_control_characters(chunks: list[bytes]) -> None:
    live, lines = LiveText(), OutputLines()
    shown = []
    for chunk in chunks:
        live.feed(chunk)
        if (part := live.take(endless())) is not None:
            shown += lines.feed([ev.Output(0.0, 0, "stdout", *part)])
    shown += lines.flush()
    printed = "".join(line.text for line in shown)
    for control in "\r\n\0\a\x1b[2J", "\x1b]", "\u202e":
        assert control not in printed


def test_a_log_begins_with_the_first_output_and_is_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    log = RankLog(str(path))
    assert not path.exists()
    log.write(b"x")
    log.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_output_belongs_to_the_rank_and_the_stream_that_wrote_it() -> None:
    gang = ended(hm.launch(output_ranks.writes_on_both, np=2))
    assert {(event.rank, event.stream, event.text) for event in outputs(gang)} == {
        (0, "stdout", "rank 0 on 1"),
        (0, "stderr", "rank 0 on 2"),
        (1, "stdout", "rank 1 on 1"),
        (1, "stderr", "rank 1 on 2"),
    }


def test_a_crash_loses_no_byte() -> None:
    gang = hm.launch(output_ranks.everything_then_crash, np=1)
    with pytest.raises(RankFailedError, match="SIGSEGV"):
        _ = gang.result
    log = (gang.folder / "rank-0.log").read_bytes()
    for part in bytes(range(256)), b"by C, 7\n", "é🙂\rשלום".encode():
        assert part in log
    by_stream = {event.stream: "" for event in outputs(gang)}
    for event in outputs(gang):
        by_stream[event.stream] += event.text
    assert by_stream["stderr"] == "é🙂\rשלום"
    assert by_stream["stdout"].startswith(bytes(range(256)).decode("utf-8", "replace"))


# ── much of it ───────────────────────────────────────────────────────────────────────────────────


def test_a_flood_of_output() -> None:
    """As one line, and as many."""
    n_bytes = 128 << 20
    hm.launch(output_ranks.flood, 0, b"", np=1).wait()
    for end in (b"x", b"\n"):
        ours = next(processes.processes([os.getpid()])).rss_bytes
        gang = hm.launch(output_ranks.flood, n_bytes, end, np=1)
        most: dict[int, int] = {}
        while not gang.wait(0.05):
            for process in processes.processes([os.getpid(), *agent_pids()]):
                most[process.pid] = max(most.get(process.pid, 0), process.rss_bytes)
        assert gang.state == "SUCCEEDED"
        assert most.pop(os.getpid()) - ours < 50 << 20
        assert max(most.values()) < 100 << 20
        log = gang.folder / "rank-0.log"
        assert log.stat().st_size == n_bytes
        log.unlink()  # pytest would keep it
        live = sum(len(event.text) for event in outputs(gang))
        assert live < 200_000 * (gang.snapshot().now_s + 2)
        assert live + sum(event.skipped_bytes for event in outputs(gang)) == n_bytes


def test_a_hundred_thousand_points_a_second() -> None:
    n_points, per_s = 50_000, 50_000.0
    gang = ended(hm.launch(output_ranks.log_points, n_points, per_s, np=2))
    gang.raise_for_state()
    batches = [event for event in gang.events() if isinstance(event, ev.Metrics)]
    for rank in gang.ranks:
        mine = [batch for batch in batches if batch.rank == rank.rank]
        arrived = sum(len(batch.steps) for batch in mine)
        assert arrived + sum(batch.skipped for batch in mine) == n_points == rank.n_points
    table = gang.metrics
    assert len(table) == sum(len(batch.steps) for batch in batches)
    assert (table["loss"] == table["step"]).all()
    assert table.groupby("rank")["step"].max().tolist() == [n_points - 1] * 2


# ── in namespaces of their own: a full disk, and a /dev/shm that no other process uses ───────────


def run_apart(setup: str, script: str, tmp_path: Path) -> Any:
    """Run ``script`` in mount and IPC namespaces of its own after ``setup``; return what it prints."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare for a mount namespace")
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    command = f"{setup} && exec {sys.executable} {tmp_path}/script.py"
    done = subprocess.run(
        ["unshare", "--mount", "--ipc", "sh", "-c", command],
        text=True,
        capture_output=True,
        timeout=4 * PATIENCE_S,
        check=False,
        env={**os.environ, "HYDROGEN_MAGIC_HOME": str(tmp_path / "home")},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_full_disk_hides_no_error(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    found = run_apart(
        f"mount -t tmpfs -o size=1m tmpfs {tmp_path}/home",
        """
        import json
        import hydrogen_magic as hm

        def fails():
            for n in range(30_000):
                print("line", n, "x" * 90)
            raise ValueError("bad batch 17")

        gang = hm.launch(fails, np=1)  # of two, one may take all the space
        gang.wait()
        try:
            gang.result
        except hm.errors.RankFailedError as error:
            print(json.dumps({
                "report": error.report, "notices": [n.text for n in gang.snapshot().notices],
                "log": gang.logs[error.rank],
                "last": [e for e in gang.events() if isinstance(e, hm.core.events.Output)][-1].is_logged,
            }))
        """,
        tmp_path,
    )
    assert "ValueError: bad batch 17" in found["report"]
    cut = "... the rest of the output is not kept ..."
    assert cut in found["report"], "what it shows is not the last output"
    notices = " ".join(found["notices"])
    assert "(No space left on device): the rest of its output is not kept" in notices
    assert not found["last"]
    assert found["log"].startswith("line 0 ") and found["log"].endswith(f"\n{cut}\n")


def test_a_log_leaves_space_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notebook has to be saved while a cell prints without end."""
    log, size_bytes = RankLog(str(tmp_path / "rank-0.log")), 8 << 30
    free_bytes = iter([2 << 30, 700 << 20])
    monkeypatch.setattr(
        os,
        "fstatvfs",
        lambda fd: SimpleNamespace(f_frsize=1, f_blocks=size_bytes, f_bavail=next(free_bytes)),
    )
    said = [log.write(b"x" * (1 << 20)) for _ in range(40)]
    (message,) = filter(None, said)
    assert said.index(message) == 31, "looked at every 16 MB"
    assert "(less than 859 MB free on the disk): the rest of its output is not kept" in message
    log.close()


def test_a_log_that_cannot_be_opened_costs_nothing_else(tmp_path: Path) -> None:
    log = RankLog(str(tmp_path / "missing" / "rank-0.log"))
    assert "No such file" in (log.write(b"x") or "")
    assert log.write(b"x") is None
    log.close()


@pytest.mark.parametrize("kill", [False, True])
def test_shared_memory_of_a_stopped_rank_and_its_child_is_removed(kill: bool) -> None:
    gang = hm.launch(output_ranks.share, np=1)
    until(gang, said(gang, "/dev/shm/torch_"))
    paths = gang.logs[0].splitlines()[-1].split()  # after Python's warning of a fork with threads
    assert len(paths) == 2 and all(map(os.path.exists, paths))
    gang.stop(kill)
    ended(gang)
    assert not any(map(os.path.exists, paths))


def test_the_memory_of_a_child_that_ends_with_its_rank_is_removed() -> None:
    path = hm.run(output_ranks.child_that_shares, np=1, quiet=True)
    assert path.startswith("/dev/shm/") and not os.path.exists(path)


def test_the_memory_of_a_child_that_was_just_killed_is_removed() -> None:
    """It is a zombie until its parent has looked at its exit status."""
    code = """
        import asyncio, os, time
        from hydrogen_magic.node.agent.descendants import DescendantCleanup

        path, (receiving, sending) = "/dev/shm/torch_{}_1_1", os.pipe()
        cleanup = DescendantCleanup(set, None)
        child = os.fork()
        if not child:
            os.open(path.format(os.getpid()), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            os.write(sending, b".")
            time.sleep(1000)
        os.read(receiving, 1)
        asyncio.run(cleanup.run())
        print(os.path.exists(path.format(child)), os.waitpid(child, 0)[1])
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.stdout, done.stderr) == ("False 9\n", "")


# ── zombies ──────────────────────────────────────────────────────────────────────────────────────


def zombies() -> Iterator[int]:
    below = {os.getpid(), *(p for p in leaks.tree(os.getpid()) if not leaks.is_lent(p))}
    return (p.pid for p in processes.processes() if p.state == "Z" and p.ppid in below)


def test_no_zombies_while_and_after() -> None:
    gang = hm.launch(output_ranks.orphans, 5, np=2)
    until(gang, said(gang, "had"))
    assert leaks.settle(lambda: [str(pid) for pid in zombies()], PATIENCE_S) == []
    gang.stop()
    ended(gang)
    assert leaks.settle(lambda: [str(pid) for pid in zombies()], PATIENCE_S) == []
