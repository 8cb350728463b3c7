"""A run of ``%%infer`` that ends early, and the next one that continues it.

The kernel dies, or a rank; ``predict`` raises; the user stops the run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hydrogen_magic import capture
from hydrogen_magic.core import dropped_objects, run_log
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.errors import GangStoppedError, HydrogenError, InferError, RankFailedError
from hydrogen_magic.inference import dispatcher, kept_parts
from hydrogen_magic.inference.chunk_queue import Chunk, ChunkQueue
from hydrogen_magic.inference.dispatcher import Dispatcher
from hydrogen_magic.inference.fingerprints import matching
from hydrogen_magic.inference.gang import infer
from hydrogen_magic.inference.kept_parts import KeptParts
from hydrogen_magic.inference.rank_channel import RankChannel
from hydrogen_magic.inference.run import InferenceRun
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.node.prediction.shared_buffers import MAX_IN_FLIGHT
from tests import infer_ranks, leaks
from tests.gangs import notices_of, wait_until

pytestmark = pytest.mark.usefixtures("warm_agents")

N_ROWS, BATCH, NP = 12_000, 50, 2
N_BATCHES = N_ROWS // BATCH
SLOW_S = 0.01
PATIENCE_S = 60.0
WAITING = kept_parts._MAX_WAITING


def table() -> pa.Table:
    return pa.table({"x": range(N_ROWS), "s": [f"s{x}" for x in range(N_ROWS)]})


def parquet(folder: Path) -> str:
    path = folder / "rows.parquet"
    if not path.exists():
        pq.write_table(table(), path, row_group_size=700)
    return str(path)


FRAMES: dict[str, Callable[[Path], Any]] = {
    "pandas": lambda folder: table().to_pandas(),
    "polars": lambda folder: pl.from_arrow(table()),
    "arrow": lambda folder: table(),
    "parquet": parquet,
}


def begun(kind: str, folder: Path, *, resume: bool, seconds: float = SLOW_S) -> InferenceRun:
    captured = capture.capture_call(infer_ranks.logged, (str(folder / "log"), seconds), {})
    frame = FRAMES[kind](folder)
    options = InferOptions(batch_size=BATCH)
    return infer(frame, captured, JobSpec(np=NP), options, title="test", resume=resume)


KERNEL = """
import sys
from pathlib import Path
from tests.local.test_infer_resume import begun, trace
trace(Path(sys.argv[2]) / "trace")
begun(sys.argv[1], Path(sys.argv[2]), resume=sys.argv[3] == "True").gang.wait()
"""


def trace(
    path: Path,
    put_together: Callable[[], Any] = lambda: time.sleep(PATIENCE_S),
    replace: Callable[[Any, str, Any], None] = setattr,
) -> None:
    """Log which chunks this process hands out, which are answered, and which of these are on disk.

    ``put_together`` is called before the result of a run is.
    """

    def note(what: str, chunk: Any = None, row: int = 0) -> None:
        with path.open("a") as file:
            file.write(f"{what} {row} {0 if chunk is None else chunk.num_rows}\n")

    send, keep, write, finish = (
        RankChannel.send_chunk, Dispatcher._keep, KeptParts._write, ChunkQueue.finish,
    )  # fmt: skip

    def sending(channel: RankChannel, chunk: Chunk, **options: Any) -> None:
        note("sent", chunk.table, chunk.first_row)
        send(channel, chunk, **options)

    def keeping(feed: Dispatcher, chunk: Chunk, *answer: Any) -> None:
        note("answered", chunk.table, chunk.first_row)
        keep(feed, chunk, *answer)

    def writing(kept: KeptParts, row: int, rows: Any, *answer: Any) -> None:
        write(kept, row, rows, *answer)
        note("written", rows, row)

    def finishing(queue: ChunkQueue) -> Any:
        note(PUT_TOGETHER)
        put_together()
        return finish(queue)

    replace(RankChannel, "send_chunk", sending)
    replace(Dispatcher, "_keep", keeping)
    replace(KeptParts, "_write", writing)
    replace(ChunkQueue, "finish", finishing)
    replace(kept_parts, "_MAX_WAITING", 0)  # a slow disk is tested elsewhere


PUT_TOGETHER = "put together"
KERNEL_MARK = "HYDROGEN_MAGIC_TEST_KERNEL"
"""Environment variable of a kernel and its ranks."""


class Interrupted:
    """One run after another over the same frame, each of which is ended in the middle."""

    def __init__(
        self, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, seconds: float = SLOW_S
    ) -> None:
        self.kind, self.folder, self._seconds = kind, folder, seconds
        self.log, self._trace = folder / "log", folder / "trace"
        self.log.touch()
        self._trace.touch()
        self.n_runs = 0
        self.lost: set[int] = set()
        """First row of every batch that the last run has predicted, and not kept."""
        self._may_finish = threading.Event()
        trace(self._trace, lambda: self._may_finish.wait(PATIENCE_S), monkeypatch.setattr)

    @property
    def rows(self) -> list[int]:
        """First row of every batch that was predicted."""
        return [int(line) for line in self.log.read_text().split()]

    def until(self, n_more: int, is_over: Callable[[], bool]) -> bool:
        """Wait for so many more batches; return False if the run has ended before."""
        n_done = len(self.rows)
        n_batches, moved_s = n_done + n_more, time.monotonic()
        n_ended = self._trace.read_text().count(PUT_TOGETHER)
        while (
            n_done < n_batches
            and not is_over()
            and self._trace.read_text().count(PUT_TOGETHER) == n_ended
        ):
            if (n_now := len(self.rows)) > n_done:
                n_done, moved_s = n_now, time.monotonic()
            assert time.monotonic() - moved_s < 2 * PATIENCE_S, "a new kernel imports torch first"
            time.sleep(0.005)
        return not is_over()

    def interrupt(self, how: str, n_more: int) -> Any:
        """Begin or continue a run, and end it after so many batches; return its result, if any.

        It ends before its result is put together, whatever ``n_more`` is.
        """
        kept, before = kept_rows(), len(self.rows)
        resume, self.n_runs = self.n_runs > 0, self.n_runs + 1
        self._trace.write_text("")
        self._may_finish.clear()
        value = getattr(self, f"_{how}")(n_more, resume)
        fresh = self.rows[before:]
        assert len(fresh) == len(set(fresh)) and not kept & set(fresh), "each batch once"
        if value is None:
            self.lost = set(fresh) - kept_rows()
            self._check_lost(was_killed=how == "kernel")
        return value

    def _check_lost(self, *, was_killed: bool) -> None:
        """Only batches that ranks had are lost, and answers that waited for the disk of a killed kernel."""
        chunks: dict[str, dict[int, int]] = {"sent": {}, "answered": {}, "written": {}}
        for line in self._trace.read_text().splitlines():
            what, row, n_rows = line.rsplit(" ", 2)
            chunks.setdefault(what, {})[int(row)] = int(n_rows)
        sent, answered, written = (chunks[name] for name in ("sent", "answered", "written"))
        assert len(sent.keys() - answered) <= NP * MAX_IN_FLIGHT
        waited = answered.keys() - written
        assert len(waited) <= (WAITING if was_killed else 0)
        assert batches(written) <= kept_rows()
        in_flight = {row: sent[row] for row in sent.keys() - answered | waited}
        assert self.lost <= batches(in_flight)

    def _kernel(self, n_more: int, resume: bool) -> None:
        command = [sys.executable, "-c", KERNEL, self.kind, str(self.folder), str(resume)]
        mark = str(time.monotonic_ns())
        with subprocess.Popen(command, env={**os.environ, KERNEL_MARK: mark}) as kernel:
            assert self.until(n_more, lambda: kernel.poll() is not None)
            kernel.kill()
        assert kernel.returncode == -signal.SIGKILL
        wait_until(lambda: not leaks.marked(KERNEL_MARK, mark))  # its ranks may have predicted more

    def _rank(self, n_more: int, resume: bool) -> Any:
        run = begun(self.kind, self.folder, resume=resume)
        if self.until(n_more, lambda: run.gang.wait(0)):
            rank = n_more % NP
            wait_until(lambda: run.gang.ranks[rank].pid)
            os.kill(run.gang.ranks[rank].pid, signal.SIGKILL)
        self._may_finish.set()
        run.gang.wait(PATIENCE_S)
        try:
            return run.result
        except RankFailedError:
            return None

    def _raise(self, n_more: int, resume: bool) -> None:
        """Let ``predict`` find a folder where its log was; the set-up does not read it."""
        run = begun(self.kind, self.folder, resume=resume)
        kept, link = self.log.with_name("kept"), self.log.with_name("link")
        assert self.until(n_more, lambda: run.gang.wait(0))
        os.link(self.log, kept)
        link.symlink_to(self.folder)
        link.replace(self.log)
        self._may_finish.set()
        run.gang.wait(PATIENCE_S)
        kept.replace(self.log)
        with pytest.raises(RankFailedError, match="IsADirectoryError"):
            _ = run.result

    def _stop(self, n_more: int, resume: bool) -> Any:
        run = begun(self.kind, self.folder, resume=resume, seconds=self._seconds)
        self.until(n_more, lambda: run.gang.wait(0))
        run.gang.stop()
        self._may_finish.set()
        run.gang.wait(PATIENCE_S)
        if run.gang.state != "STOPPED":
            return run.result
        with suppress(GangStoppedError):  # before a chunk was finished
            check_part(run)
        return None

    def _nothing(self, n_more: int, resume: bool) -> Any:
        self._may_finish.set()
        run = begun(self.kind, self.folder, resume=resume)
        run.gang.wait(PATIENCE_S)
        return run.result


def kept_rows() -> set[int]:
    """Return the first row of every batch whose prediction is kept."""
    journals = run_log.runs_dir().glob("*/kept/journal")
    lines = [line for path in journals for line in path.read_text().split("\n")[1:-1]]
    entries = [json.loads(line) for line in lines if not line.startswith('{"files"')]
    return batches({each["row"]: each["n_rows"] for each in entries})


def batches(chunks: Mapping[int, int]) -> set[int]:
    """Return the first row of every batch of chunks; these are first rows with numbers of rows."""
    return {row + n for row, n_rows in chunks.items() for n in range(0, n_rows, BATCH)}


def check_part(run: InferenceRun) -> None:
    """A run that was stopped has its finished rows, and says which are missing."""
    part = as_pandas(run.result)
    assert 0 < len(part) < N_ROWS and (part["y"] == part["x"] * 2).all()
    (text,) = [each.text for each in run.gang.snapshot().notices if "missing: row" in each.text]
    assert f"stopped: {len(part):,} of 12,000 rows finished" in text and "--resume" in text


def as_pandas(frame: Any) -> pd.DataFrame:
    if isinstance(frame, str):
        return pd.read_parquet(frame)
    return frame if isinstance(frame, pd.DataFrame) else frame.to_pandas()


def check_whole(frame: Any, runs: Interrupted) -> None:
    expected = (
        table()
        .to_pandas()
        .assign(y=lambda df: df["x"] * 2, t=lambda df: "row " + df["x"].astype(str))
    )
    pd.testing.assert_frame_equal(as_pandas(frame), expected, check_dtype=False)
    check_rows(runs)


def check_rows(runs: Interrupted) -> None:
    """Every batch was predicted, and nothing is left of the ended runs."""
    assert set(runs.rows) == set(range(0, N_ROWS, BATCH))
    assert not kept_rows() and not list(runs.folder.glob(".*"))


def test_what_is_finished_is_predicted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the kernel ends, or a rank, or ``predict`` raises, or the user has stopped the run."""
    runs = Interrupted("parquet", tmp_path, monkeypatch)
    for how in ("kernel", "rank", "raise", "stop"):
        before = kept_rows()
        assert runs.interrupt(how, 40) is None
        assert kept_rows() > before
    assert list(tmp_path.glob(".rows-inferred.parquet-*.kept")), "beside the result"
    with pytest.raises(InferError, match="the call changed since"):
        begun("parquet", tmp_path, resume=True, seconds=0.5)
    result = runs.interrupt("nothing", 0)
    assert result == str(tmp_path / "rows-inferred.parquet")
    check_whole(result, runs)


def test_an_end_costs_a_rank_about_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a chunk could have 40 batches, which take two seconds."""
    runs = Interrupted("pandas", tmp_path, monkeypatch, seconds=0.05)
    assert runs.interrupt("stop", 60) is None
    assert len(runs.rows) - len(runs.lost) == len(kept_rows()) > 0
    # Up to 38 if no answer is on its way when the run is stopped.
    assert len(runs.lost) <= NP * 1.2 / 0.05


def test_rows_of_a_detached_run_are_kept_until_the_result_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel may end before, after days."""
    captured = capture.capture_call(infer_ranks.logged, (str(tmp_path / "log"), 0.001), {})
    spec, options = JobSpec(np=NP, detach=True), InferOptions(batch_size=BATCH)
    frame = table()
    run = infer(frame, captured, spec, options, title="test")
    assert run.gang.wait(PATIENCE_S) and run.gang.state == "SUCCEEDED" and kept_rows()
    assert run_log.is_unseen(run.gang.id), "the next kernel reports it"
    n_before = len((tmp_path / "log").read_text().splitlines())
    again = infer(frame, captured, spec, options, title="test", resume=True)
    predicted = again.result
    assert not run_log.is_unseen(run.gang.id), "this run has its rows"
    assert predicted == run.result and not kept_rows()
    n_again = len((tmp_path / "log").read_text().splitlines()) - n_before
    assert n_again < n_before / 2, "a fast prediction may not be kept"
    assert not run_log.is_unseen(again.gang.id)
    unused = infer(frame, captured, spec, options, title="test")
    assert unused.gang.wait(PATIENCE_S) and kept_rows()
    monkeypatch.setattr(dropped_objects, "process_ends", threading.Event())
    del unused
    assert not kept_rows(), "nothing can use its result"


def test_a_changed_file_is_refused_by_its_name(tmp_path: Path) -> None:
    """A file that the cell reads and ``predict`` writes may change."""
    weights, log = tmp_path / "weights", tmp_path / "log"
    weights.write_text("1")
    log.touch()

    def begin(*, resume: bool) -> InferenceRun:
        call = (str(log), SLOW_S, str(weights))
        captured = capture.capture_call(infer_ranks.logged, call, {})
        options = InferOptions(batch_size=BATCH)
        return infer(table(), captured, JobSpec(np=NP), options, title="", resume=resume)

    run = begin(resume=False)
    wait_until(lambda: len(kept_rows()) > 10)
    run.gang.stop()
    run.gang.wait(PATIENCE_S)
    before = weights.stat()
    weights.write_text("2")
    with pytest.raises(InferError, match=f"but file {weights} changed since"):
        begin(resume=True)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    run = begin(resume=True)
    assert run.gang.wait(PATIENCE_S) and run.result["y"].to_pylist() == [*range(0, 2 * N_ROWS, 2)]
    assert run.gang.snapshot().rows.resumed


@pytest.mark.parametrize(
    ("begun", "options", "kind"),
    [
        ("fail", {"schema": "y decimal(20,0)"}, Decimal),
        ("null", {"on_error": "collect"}, str),
    ],
    ids=["schema", "text in a file"],
)
def test_a_run_that_a_type_has_ended_goes_on_with_an_option_for_it(
    begun: str, options: dict[str, Any], kind: type, tmp_path: Path
) -> None:
    """With ``null`` rows that are already in a file do not fit."""
    log = tmp_path / "log"
    frame = table() if begun == "fail" else parquet(tmp_path)

    def begin(*, resume: bool, **options: Any) -> InferenceRun:
        captured = capture.capture_call(infer_ranks.drifts, (str(log),), {})
        given = InferOptions(batch_size=BATCH, **options)
        return infer(frame, captured, JobSpec(np=NP), given, title="", resume=resume)

    run = begin(resume=False, on_error=begun)
    # The kernel refuses the type, or a rank whose rows have both.
    said = r"column 'y' as u?int64, but as u?int64 .*--resume and --on-error collect.*--schema"
    with pytest.raises(HydrogenError, match=said):
        _ = run.result
    kept, before = kept_rows(), len(log.read_text().split())
    assert kept
    run = begin(resume=True, **options)
    expected = [2**63 + x if x < 10_000 else -x for x in range(N_ROWS)]
    result = run.result if begun == "fail" else pq.read_table(run.result)
    assert result["y"].to_pylist() == [kind(value) for value in expected]
    assert run.gang.snapshot().rows.resumed == BATCH * len(kept)
    assert not kept & {int(row) for row in log.read_text().split()[before:]}
    if "on_error" in options:
        assert result["error"].null_count == N_ROWS


def test_a_module_that_only_one_kernel_has_loaded_is_no_change() -> None:
    known = {"the cell": "1", "module plots": "2", "module net": "3"}
    runs = [("aaaa", "the run", known)]
    assert matching({"the cell": "1", "module net": "3", "module tables": "4"}, runs) == "the run"
    with pytest.raises(InferError, match="but module net changed since"):
        matching({"the cell": "1", "module net": "5"}, runs)


def test_a_full_disk_ends_no_run(tmp_path: Path, monkeypatch: Any) -> None:
    """Neither where nothing can be written, nor after some answers; the user is told once."""
    append = kept_parts._append
    (tmp_path / "log").touch()
    for n_free in (0, 3):
        written: list[Any] = []

        def full(file: Any, data: Any, n_free: int = n_free, written: list[Any] = written) -> None:
            if len(written) == n_free:
                raise OSError(28, "No space left on device")
            written.append(data)
            append(file, data)

        monkeypatch.setattr(kept_parts, "_append", full)
        run = begun("arrow", tmp_path, resume=False)
        assert run.gang.wait(PATIENCE_S)
        assert run.result["y"].to_pylist() == list(range(0, 2 * N_ROWS, 2))
        (text,) = [each.text for each in run.gang.snapshot().notices if "not kept" in each.text]
        assert len(written) == n_free and "No space left" in text and not kept_rows()


def test_rows_of_a_fast_predict_are_not_kept(tmp_path: Path, monkeypatch: Any) -> None:
    """Their checksum would take as long."""
    monkeypatch.setattr(dispatcher, "_FAST_BYTES_S", 0.0)
    (tmp_path / "log").touch()
    run = begun("arrow", tmp_path, resume=False)
    wait_until(lambda: run.gang.snapshot().rows is not None and run.gang.snapshot().rows.done)
    run.gang.stop()
    assert run.gang.wait(PATIENCE_S) and len(run.result)
    assert not kept_rows() and "--resume" not in notices_of(run.gang)


def check_same(frame: Any, undisturbed: Any) -> None:
    """The frames are equal, including the types of their columns."""
    if isinstance(frame, str):
        frame, undisturbed = pq.read_table(frame), pq.read_table(undisturbed)
    assert type(frame) is type(undisturbed)
    if isinstance(frame, pd.DataFrame):
        pd.testing.assert_frame_equal(frame, undisturbed)
    else:
        assert frame.schema == undisturbed.schema and frame.equals(undisturbed)


ENDS = [*["kernel", "rank"] * 3, "stop", "raise"]
LATE = ["kernel", "rank"]
"""Of the runs over each kind of frame, in any order: 32 times in all, a process is killed."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", FRAMES)
def test_runs_that_end_at_any_moment(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first 40 % of what is left, then in the rest, then while the result is put together."""
    (tmp_path / "undisturbed").mkdir()
    with monkeypatch.context() as patched:
        undisturbed = Interrupted(kind, tmp_path / "undisturbed", patched).interrupt("nothing", 0)
    chance, runs = random.Random(kind), Interrupted(kind, tmp_path, monkeypatch)
    hows = [*chance.sample(ENDS, len(ENDS)), *chance.sample(LATE, len(LATE))]
    parts = [*(chance.uniform(0, 0.4) for _ in ENDS), chance.uniform(0.4, 1), 2]
    for how, part in zip(hows, parts, strict=True):
        n_left = N_BATCHES - len(kept_rows())
        assert runs.interrupt(how, int(part * n_left)) is None
    assert len(kept_rows()) == N_BATCHES - len(runs.lost)
    n_before = len(runs.rows)
    check_same(runs.interrupt("nothing", 0), undisturbed)
    assert set(runs.rows[n_before:]) == runs.lost
    check_rows(runs)


HASHED = """
from hydrogen_magic import capture
import sys
for letters in ('"a", "b"', '"a", "c"'):
    exec(compile('''
WORDS = {"a", "the", "of"}
class Model:
    names = frozenset(WORDS)
    def score(self, text): return text in {"x", "y", "z"}
def helper(text): return [w for w in text if w in (LETTERS)]
model = Model()
'''.replace("LETTERS", letters), sys.argv[1], "exec"), globals())
    cell = capture.CellText("def predict(b): return helper(WORDS), model", *sys.argv[1:3], 2, str)
    for item in sorted(capture.capture_cell(cell, globals()).digests().items()):
        print(*item)
"""


def test_another_kernel_makes_the_same_fingerprint() -> None:
    """Though hashes, and the numbers of cells, are others."""
    found = [digests(seed, f"<cell {seed}>", f"Cell In[{seed}]") for seed in "12"]
    assert found[0] == found[1]
    n_names, rest = divmod(len(found[0]), 2)
    assert n_names >= 3 and not rest
    pairs = zip(found[0][:n_names], found[0][n_names:], strict=True)
    assert [one.split()[0] for one, other in pairs if one != other] == ["helper"]


def digests(seed: str, *args: str) -> Sequence[str]:
    """Return what each name is recognized by, for one version of ``helper`` after the other."""
    env = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", HASHED, *args],
        check=True, timeout=60, capture_output=True, text=True, env=env,
    )  # fmt: skip
    return done.stdout.splitlines()
