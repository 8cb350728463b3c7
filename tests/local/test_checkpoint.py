"""``hm.checkpoint``: what is there is whole, whatever became of those who saved."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

import hydrogen_magic as hm
from hydrogen_magic.core import run_log
from hydrogen_magic.errors import ResultError
from hydrogen_magic.node.worker.checkpoints import checkpoint, sharded_checkpoint
from tests import checkpoints, plain_checkpoints
from tests.gangs import ended, notices_of

pytestmark = pytest.mark.usefixtures("warm_agents")


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ── whole or not at all ──────────────────────────────────────────────────────────────────────────


def test_the_last_one_is_there_and_no_other(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "on use"
    assert hm.checkpoint.load(folder) is None
    for step in range(3):
        hm.checkpoint.save({"step": step}, folder)
    assert hm.checkpoint.load(folder) == {"step": 2}
    assert files(folder) == ["checkpoint"]


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_killed_while_it_saves(moment: str, tmp_path: Path) -> None:
    """A process that dies in the middle leaves the one before, and the next save removes its rest."""
    hm.checkpoint.save("before", tmp_path)
    pid = os.fork()
    if pid == 0:
        _die_at(moment)
        hm.checkpoint.save(_Dying() if moment == "write" else "after", tmp_path)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert len(files(tmp_path)) == 2, "what it had begun"
    assert hm.checkpoint.load(tmp_path) == "before"
    hm.checkpoint.save("later", tmp_path)
    assert hm.checkpoint.load(tmp_path) == "later"
    assert files(tmp_path) == ["checkpoint"]


class _Dying:
    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def _die_at(moment: str) -> None:
    if moment != "write":
        setattr(os, moment, lambda *args: os.kill(os.getpid(), signal.SIGKILL))


def _save_for_ever(folder: Path, said: int) -> None:
    sys.modules.pop("torch", None)
    for step in itertools.count():
        hm.checkpoint.save({"step": step, "data": bytes([step % 256]) * 3_000_000}, folder)
        os.write(said, f"{step}\n".encode())


def test_a_checkpoint_is_not_ahead_of_the_metrics() -> None:
    """The next attempt does not log the steps again that it skips: neither after rank 0 was killed, which
    saves, nor after another one.
    """
    gang = ended(hm.launch(checkpoints.die_after_save, np=2, gpu=False, retries=2))
    gang.raise_for_state()
    assert gang.snapshot().attempt == 2
    metrics = gang.metrics
    assert metrics.step[metrics["rank"] == 0].to_list() == [0, 1, 2, 3, 4, 5]
    assert metrics.step[metrics["rank"] == 1].to_list()[-3:] == [3, 4, 5]


def test_the_last_one_stays_where_the_result_cannot_be_sent() -> None:
    """Else it is deleted with the end of its gang, which succeeds."""
    gang = ended(hm.launch(plain_checkpoints.save_and_return_a_generator, np=2, gpu=False))
    assert gang.state == "SUCCEEDED"
    with pytest.raises(ResultError):
        _ = gang.result
    folder = gang.folder / run_log.CHECKPOINTS
    assert f"hydrogen_magic.checkpoint.load({str(folder)!r})" in notices_of(gang)
    assert hm.checkpoint.load(folder) == "all that is left"
    gang = ended(hm.launch(plain_checkpoints.count, 1, np=2, gpu=False))
    assert {path.name for path in gang.folder.iterdir()} > {"results-0", "results-1"}
    assert not (gang.folder / run_log.CHECKPOINTS).exists()
    assert hm.load_results(gang.id) == {"_": [None]}, "if the kernel had ended"
    assert gang.result == [None]
    assert {path.name for path in gang.folder.iterdir()} == {"events.jsonl"}


def test_killed_at_any_moment(tmp_path: Path) -> None:
    for kills in range(8):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _save_for_ever(tmp_path, writer)
            finally:
                os._exit(1)
        os.close(writer)
        with os.fdopen(reader) as lines:
            for _ in range(3 + kills):
                said = int(lines.readline())
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        state = hm.checkpoint.load(tmp_path)
        assert state["step"] >= said - 1
        assert state["data"] == bytes([state["step"] % 256]) * 3_000_000


@pytest.mark.parametrize("with_torch", [False, True])
def test_a_full_disk_leaves_the_one_before(with_torch: bool, tmp_path: Path) -> None:
    """The system's limit for files cuts a write off as a full disk does."""
    if with_torch:
        import torch

        big: Any = torch.ones(100_000)
    else:
        big = bytes(400_000)
    hm.checkpoint.save("before", tmp_path)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        if not with_torch:
            sys.modules.pop("torch", None)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            hm.checkpoint.save({"big": big}, tmp_path)
        except OSError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        error = pipe.read()
    os.waitpid(pid, 0)
    assert "File too large" in error and "the previous checkpoint is intact" in error
    assert hm.checkpoint.load(tmp_path) == "before"
    assert files(tmp_path) == ["checkpoint"]


def test_a_full_disk_is_told_with_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:  # file systems on networks say so as late as here
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    hm.checkpoint.save("before", tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        OSError, match=r"does not fit into .* are free; the previous checkpoint is intact"
    ) as e:
        hm.checkpoint.save("after", tmp_path)
    assert e.value.errno == errno.ENOSPC
    assert hm.checkpoint.load(tmp_path) == "before"
    assert files(tmp_path) == ["checkpoint"]


def test_one_that_was_given_up_does_not_overwrite_its_successor(tmp_path: Path) -> None:
    """As a rank does that was cut off while it saved, and comes back when another goes on."""

    class Slow:
        def __reduce__(self) -> Any:
            hm.checkpoint.save("successor's", tmp_path)
            return str, ("of the one that was given up",)

    with pytest.raises(FileNotFoundError, match="another process saves checkpoints"):
        hm.checkpoint.save(Slow(), tmp_path)
    assert hm.checkpoint.load(tmp_path) == "successor's"


# ── states ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": [1, threading.Lock()]}, "`state['a'][1]` (_thread.lock) cannot be saved"),
        ({"f": lambda: 1}, "`state['f']` (function) cannot be saved"),
        ((x for x in "ab"), "`state` (generator) cannot be saved"),
        (
            functools.reduce(lambda nested, _: [nested], range(200), threading.Lock()),
            "a _thread.lock in the state cannot be saved",
        ),
    ],
    ids=["lock", "lambda", "generator", "deep"],
)
def test_what_cannot_be_saved_is_named(state: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError) as caught:
        hm.checkpoint.save(state, tmp_path)
    assert said in str(caught.value) and "leave it out" in str(caught.value)
    assert files(tmp_path) == []


def test_tensors_come_back_where_they_are_wanted(tmp_path: Path) -> None:
    import torch

    model = torch.nn.Linear(3, 2)
    tied = torch.ones(3)
    hm.checkpoint.save({"model": model.state_dict(), "a": tied, "b": tied}, tmp_path)
    state = hm.checkpoint.load(tmp_path)
    assert torch.equal(state["model"]["weight"], model.weight)
    assert state["a"].data_ptr() == state["b"].data_ptr()
    on_meta = hm.checkpoint.load(tmp_path, map_location="meta")
    assert on_meta["a"].device.type == "meta"
    assert torch.load(tmp_path / "checkpoint", weights_only=False)["a"].tolist() == [1, 1, 1]


def test_a_class_that_the_cell_defines_later_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = types.ModuleType("__main__")
    exec("class Early: pass", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    hm.checkpoint.save(main.Early(), tmp_path)
    assert type(hm.checkpoint.load(tmp_path)) is main.Early
    del main.Early
    with pytest.raises(
        ValueError, match=r"'Early'.*; define it before .*, write its name in the cell that loads"
    ):
        hm.checkpoint.load(tmp_path)


@pytest.mark.parametrize("rest", [b"", b"\x80\x05cut off", b"PK\x03\x04not a zip"], ids=repr)
def test_a_damaged_file_is_named(rest: bytes, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(rest)
    with pytest.raises(ValueError, match=f"{tmp_path}/checkpoint is not a checkpoint of"):
        hm.checkpoint.load(tmp_path)
    call = re.escape(f"hm.checkpoint.load({str(tmp_path)!r})")
    with pytest.raises(ValueError, match=f"{tmp_path}/checkpoint is a file: .* {call}"):
        hm.checkpoint.load(tmp_path / "checkpoint")


# ── folders ──────────────────────────────────────────────────────────────────────────────────────


def test_a_plain_process_has_a_folder_of_its_own() -> None:
    code = (
        "import hydrogen_magic as hm, warnings\n"
        "assert hm.checkpoint.load() is None\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    for step in (1, 2): hm.checkpoint.save(step)\n"
        "assert hm.checkpoint.load() == 2 and len(said) == 1\n"
        "print(str(said[0].message).partition(' saves to ')[2].partition(',')[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "hydrogen_magic-checkpoints-" in done.stdout
    assert not Path(done.stdout.strip()).exists(), "it goes with the process"


def test_ranks_outside_of_a_gang_are_asked_for_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("HYDROGEN_MAGIC_CHECKPOINTS", "")
    for call in (hm.checkpoint.load, lambda: hm.checkpoint.save(1)):
        with pytest.raises(RuntimeError, match="HYDROGEN_MAGIC_CHECKPOINTS"):
            call()
    monkeypatch.setenv("HYDROGEN_MAGIC_CHECKPOINTS", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    hm.checkpoint.save(1)
    assert hm.checkpoint.load() is None, "rank 0 saves"
    monkeypatch.setenv("RANK", "0")
    hm.checkpoint.save(1)
    assert hm.checkpoint.load() == 1


def test_the_folder_of_the_environment_may_be_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HYDROGEN_MAGIC_CHECKPOINTS", "~/runs")
    hm.checkpoint.save(1)
    assert hm.checkpoint.load(tmp_path / "runs") == hm.checkpoint.load() == 1
    named = {"HYDROGEN_MAGIC_CHECKPOINTS": "runs"}  # read by the agent, which is elsewhere
    assert checkpoint.folder_of(named, "/work") == Path("/work/runs")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a rank tells its agent."""
    names: list[str] = []
    monkeypatch.setattr(checkpoint._process, "on_save", None)
    checkpoint.install(names.append)
    return names


def as_rank(
    patch: pytest.MonkeyPatch, folder: Path, *, rank: int, host: int, is_shared: bool
) -> None:
    variables = checkpoint.environment(folder, is_shared=is_shared)
    place = {"RANK": str(rank), "WORLD_SIZE": "4", "GROUP_RANK": str(host)}
    for name, value in {**variables, **place}.items():
        patch.setenv(name, value)


def test_the_agent_hears_of_what_other_hosts_do_not_see(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint._process, "saved_elsewhere", set())
    as_rank(monkeypatch, tmp_path, rank=0, host=0, is_shared=True)
    hm.checkpoint.save("shared")
    hm.checkpoint.save("of the user", tmp_path / "users")
    assert told == []
    as_rank(monkeypatch, tmp_path, rank=0, host=0, is_shared=False)
    hm.checkpoint.save("mine")
    assert told == ["checkpoint"] and (tmp_path / told[0]).is_file()
    assert hm.checkpoint.load() == "mine"
    as_rank(monkeypatch, tmp_path / "host 1", rank=2, host=1, is_shared=False)
    assert hm.checkpoint.load() is None
    hm.checkpoint.save("mine")
    with pytest.raises(
        RuntimeError, match="on rank 0's host; the other hosts receive it for the next"
    ):
        hm.checkpoint.load()
    assert told == ["checkpoint"]


def test_a_sharded_state_is_refused_where_hosts_share_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_checkpoint, "is_sharded", lambda state: True)
    as_rank(monkeypatch, tmp_path, rank=1, host=1, is_shared=False)
    with pytest.raises(RuntimeError, match="set HYDROGEN_MAGIC_CHECKPOINTS_SHARED=1"):
        hm.checkpoint.save({})
    assert files(tmp_path) == []


# ── the next attempt ─────────────────────────────────────────────────────────────────────────────


def test_the_next_attempt_goes_on_from_it() -> None:
    gang = hm.launch(checkpoints.resume, 6, np=2, retries=1)
    assert gang.wait(60)
    expected = {"start": 4, "best": (True, 1.5), "steps": 2}
    assert gang.results == [expected, expected]


def test_a_folder_of_the_users_outlives_the_gang(tmp_path: Path) -> None:
    found = [hm.launch(plain_checkpoints.count, 2, folder=tmp_path, np=1).result for _ in range(2)]
    assert found == [[None, 0], [1, 0]]


@pytest.mark.parametrize("on", ["local", "inline"])
def test_what_a_failed_gang_saved_last_stays_with_its_record(on: str) -> None:
    """Only that: what went well is not wanted any more, and may be gigabytes. Each gang begins anew."""
    for fails in (False, True):
        gang = hm.launch(plain_checkpoints.count, 3, fails, np=1, on=on)
        assert gang.wait(60)
        assert next(iter(gang.metrics["began"])) == -1
        folder = run_log.runs_dir() / gang.id / "checkpoints"
        assert hm.checkpoint.load(folder) == (2 if fails else None)
        assert folder.exists() == fails
    assert checkpoint.FOLDER not in os.environ, "inline, it was the gang's own too"


# ── sharded ──────────────────────────────────────────────────────────────────────────────────────


def test_a_sharded_state_comes_back_on_another_number_of_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    gang = ended(hm.launch(checkpoints.sharded, str(folder), 6, False, np=2))
    pointer, parts = files(folder)
    assert pointer == "checkpoint" and parts.endswith(".shards"), "the one before is gone"
    assert {"__0_0.distcp", "__1_0.distcp"} < set(files(folder / parts))
    gang = hm.launch(checkpoints.sharded, str(folder), 6, True, np=3)
    assert gang.wait(60)
    assert gang.results == [(1, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])] * 3
    with pytest.raises(ValueError, match=r"is sharded: call .*into="):
        hm.checkpoint.load(folder)
    with pytest.raises(TypeError, match=r"into=…\) got a object: pass a dict"):
        hm.checkpoint.load(folder, into=object())  # type: ignore[arg-type]
    hm.checkpoint.save("plain again", folder)
    assert files(folder) == ["checkpoint"]


def test_a_sharded_state_needs_one_folder_for_all(tmp_path: Path) -> None:
    gang = hm.launch(checkpoints.save_in_vain, str(tmp_path), np=2)
    assert gang.wait(60)
    assert ["is not the same folder on all hosts" in said for said in gang.results] == [True, True]
    assert files(tmp_path / "0") == files(tmp_path / "1") == [], "nothing half there"


def test_a_ranks_part_of_an_optimizers_state_is_refused(tmp_path: Path) -> None:
    """All ranks would load that of rank 0; what the error names instead is saved and loaded."""
    gang = ended(hm.launch(checkpoints.parts_of_optimizers, str(tmp_path), np=2, gpu=False))
    gang.raise_for_state()
    of_fsdp, of_zero, of_zero_3 = gang.results[0]
    assert "`state['optimizer']['state'][0]['exp_avg']` (torch.Tensor) cannot be " in of_fsdp
    assert "call `get_state_dict(model, opt)` of torch.distributed.checkpoint.state_dict" in of_fsdp
    assert (
        "`state['optimizer']['weights'][0]` (torch.Tensor) cannot be saved: DeepSpeed's" in of_zero
    )
    assert "engine.save_checkpoint(folder)" in of_zero
    assert (
        "`state['optimizer']['weights'][0]` (torch.Tensor) cannot be saved: it is empty"
        in of_zero_3
    )
    assert gang.results[1] == [], "rank 0 saves"
