"""Gangs that outlive their kernel (``--outlive``)."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

import hydrogen_magic as hm
from hydrogen_magic.core import events as ev
from hydrogen_magic.core import processes, run_log
from hydrogen_magic.driver import kernel_end
from hydrogen_magic.driver.datasets import folders
from hydrogen_magic.driver.owner import connection, local_socket
from hydrogen_magic.driver.owner.connection import AttachedGang, attach
from hydrogen_magic.errors import GangStoppedError, HydrogenError, PlacementError
from hydrogen_magic.notebook import extension
from hydrogen_magic.transport import framing
from tests import made_up_gpus, plain_ranks
from tests.gangs import PATIENCE_S, ended, notices_of, until, wait_until, wait_until_gone
from tests.jupyter import Kernel
from tests.outliving import TRAINING, losses, owner_of, spans

RESUMING = """
import os, signal
import hydrogen_magic as hm
began = hm.checkpoint.load() or 0
for step in range(began, 6):
    hm.checkpoint.save(step + 1)
    if step == 3 and began == 0 and hm.rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
began
"""


@pytest.fixture
def training(tmp_path: Path) -> str:
    return TRAINING.format(go=str(tmp_path / "go"))


@pytest.fixture
def kernel(tmp_path: Path, hydrogen_home: Path) -> Iterator[Kernel]:
    kernel = Kernel(hydrogen_home, tmp_path)
    kernel.load()
    yield kernel
    kernel.shut_down()


Launch = Callable[..., AttachedGang]


@pytest.fixture
def launched(notebook_shell: InteractiveShell, training: str) -> Iterator[Launch]:
    """Launches the training from this process."""
    gangs = []

    def launch(line: str = "--np 2", cell: str = training) -> AttachedGang:
        gang = notebook_shell.run_cell_magic("distributed", f"--outlive {line}", cell)
        assert isinstance(gang, AttachedGang)
        gangs.append(gang)
        return gang

    yield launch
    for gang in gangs:
        if not gang.wait(0):
            attach(gang.id, "take").stop(kill=True)
            gang.wait(60)


IN_A_TERMINAL = """
import contextlib, io, json, sys
from hydrogen_magic.__main__ import main
for line in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = main(["gang", *line.split()])
    print(json.dumps([line, status, out.getvalue(), err.getvalue()]))
"""


def terminal(*lines: str) -> list[subprocess.CompletedProcess[str]]:
    """Run commands for gangs in one process beside the kernel's; return what each of them prints."""
    command = [sys.executable, "-c", IN_A_TERMINAL, *lines]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    return [subprocess.CompletedProcess(*json.loads(line)) for line in printed.splitlines()]


def test_it_goes_on_over_a_restart_and_the_death_of_its_kernel(
    kernel: Kernel, training: str, tmp_path: Path
) -> None:
    launched = kernel.run(f"%%distributed --np 2 --outlive --out model\n{training}")
    assert not launched.error and "will be stopped after 24 hours" in launched.stream()
    gang_id = kernel.value("_.id").strip("'")
    (owner,) = processes.processes([owner_of(gang_id)])
    # Other programs end the children of a kernel, or its session, when they end the kernel.
    assert owner.ppid != kernel.pid and os.getsid(owner.pid) != os.getsid(kernel.pid)
    wait_until(lambda: len(losses(gang_id)) > 5)
    kernel.restart(now=False)
    assert f"gang {gang_id} is still running (cell 2, since " in (said := kernel.load())
    assert f" %): %gang attach {gang_id}" in said
    assert f"gang {gang_id} is still running" in kernel.run("%gang").stream()
    attached = kernel.run(f"%gang attach {gang_id}")
    assert "begins" in attached.stream()  # printed before there was this kernel
    os.kill(kernel.pid, signal.SIGKILL)
    kernel.revive()
    at, at_s = len(losses(gang_id)), spans(gang_id)[-1]
    wait_until(lambda: len(losses(gang_id)) > at and spans(gang_id)[-1] > at_s)
    kernel.load()
    kernel.run(f"gang = get_ipython().run_line_magic('gang', 'attach {gang_id}')")
    refused = kernel.run(f"%gang attach {gang_id} --out model")
    assert "is still running" in refused.stream("stderr")
    (tmp_path / "go").touch()
    assert kernel.value("gang.wait(60), gang.result, gang.results") == "(True, 41, [41, 42])"
    kernel.run("steps = [s for s, r in zip(gang.metrics['step'], gang.metrics['rank']) if r == 0]")
    assert kernel.value("sorted(steps) == list(range(max(steps) + 1))") == "True"
    kernel.run("model = 'mine'")
    assert kernel.value("gang.out") == "<variables of rank 0: model>"
    assert kernel.value("gang.out['model'].weights[0] > 5, model") == "(True, 'mine')"
    taken = kernel.run(f"%gang attach {gang_id} --out model")
    assert f"assigned model of gang {gang_id} (replaced: model)" in taken.stream()
    assert kernel.value("model.weights[0] > 5") == "True"
    assert sorted(os.listdir(run_log.run_dir(gang_id))) == [
        "events.jsonl",
        "rank-0.log",
        "rank-1.log",
        "results-0",
        "results-1",
    ]


READING = """
import pathlib, time
import hydrogen_magic as hm
while not pathlib.Path({go!r}).exists():
    time.sleep(0.02)
shares = [hm.shard(rows, batch_size=4).to_numpy() for rows in (here, there)]  # without torch
[sum(len(batch["x"]) for batch in share) for share in shares]
"""


def test_the_data_of_its_notebook_stays_until_its_end(
    notebook_shell: InteractiveShell, launched: Launch, tmp_path: Path, hydrogen_home: Path
) -> None:
    table = pytest.importorskip("pyarrow").table({"x": range(10)})
    here, there = hm.dataset(table), hm.dataset(table, path=tmp_path / "shared")
    notebook_shell.push({"here": here, "there": there})
    gang = launched("--np 2", READING.format(go=str(tmp_path / "go")))
    there.delete()
    folders.delete_all()  # as at the end of the kernel
    kernel_end.clean_up_abandoned()  # as in the next one
    owner = owner_of(gang.id)
    (tmp_path / "go").touch()
    assert ended(gang).results == [[5, 5], [5, 5]]
    wait_until_gone([owner])
    assert not list((hydrogen_home / "datasets").iterdir())
    assert not list((tmp_path / "shared").iterdir())


def test_one_controls_and_others_watch(launched: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hydrogen_magic.driver.gang._STACKS_S", PATIENCE_S)
    gang = launched()
    watching = connection.connect(gang.id, "control").follow()
    assert [event for event in watching.events() if isinstance(event, ev.GangLaunched)]
    with pytest.raises(HydrogenError, match=r"is controlled by .*stop it there, or take control"):
        watching.stop()
    until(gang, lambda: all(rank.phase == "running" for rank in gang.ranks))
    assert "running" not in watching.stacks().get(0, "running"), "whoever watches sees stacks"
    refused, unknown = terminal(f"stop {gang.id}", "stop zz")
    assert (refused.returncode, f"gang stop {gang.id} --take\n" in refused.stderr) == (1, True)
    assert unknown.stderr.startswith(
        f"no gang that can be reached from here has the ID or name 'zz': {gang.id} ("
    )
    watching.connection.take_control()
    with pytest.raises(HydrogenError, match="is controlled by"):
        wait_until(lambda: gang.record(False))
    watching.connection.close()
    wait_until(lambda: gang.connection.control.is_yours)
    gang.stop()
    ended(gang)
    assert (gang.state, gang.snapshot().reason) == ("STOPPED", "stopped by you")
    wait_until(lambda: gang.connection._sock.fileno() < 0)
    gang.stop()  # does nothing, as for any gang that has ended
    with pytest.raises(GangStoppedError):
        gang.raise_for_state()


def test_a_terminal_lists_follows_and_stops_it(launched: Launch, tmp_path: Path) -> None:
    gang = launched("--np 2 --name night")
    assert "night" in terminal("list")[0].stdout
    command = [sys.executable, "-m", "hydrogen_magic", "gang", "attach", "night"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert any("begins" in line for line in following.stdout)
        following.send_signal(signal.SIGINT)
        assert "continues" in following.stdout.read()
    assert following.returncode == 0
    assert not gang.wait(0.2)
    wait_until(lambda: "begins" in gang.logs[1])
    logs, stopped = terminal(f"logs {gang.id} --rank 1", f"stop {gang.id} --take")
    assert "begins" in logs.stdout
    assert stopped.stdout == f"stopping gang {gang.id}\n"
    assert ended(gang).state == "STOPPED"
    again, after = terminal(f"stop {gang.id} --take", f"attach {gang.id}")
    assert again.stdout == f"gang {gang.id} has already ended: STOPPED\n"
    assert (after.returncode, "begins" in after.stdout) == (1, True)


def test_its_ranks_end_with_its_owner(launched: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    gang = launched()
    until(gang, lambda: all(rank.phase == "running" for rank in gang.ranks))
    pids = [rank.pid for rank in gang.ranks if rank.pid is not None]
    os.kill(owner_of(gang.id), signal.SIGKILL)
    wait_until_gone(pids)
    ended(gang)
    assert (gang.state, gang.snapshot().reason) == ("STOPPED", ev.OWNER_ENDED)
    extension._report_stopped_runs()  # as %load_ext does it
    said = capsys.readouterr().out
    assert f"gang {gang.id} has ended: its owner process ended unexpectedly" in said


def test_a_stopped_owner_is_reported(
    launched: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_SILENCE_S", 0.2)
    gang = launched("--np 1")
    owner = owner_of(gang.id)
    os.kill(owner, signal.SIGSTOP)
    try:
        until(
            gang,
            lambda: (
                f"is stopped (SIGSTOP) and reports nothing: kill -CONT {owner}" in notices_of(gang)
            ),
        )
    finally:
        os.kill(owner, signal.SIGCONT)
    until(gang, lambda: "responds again" in notices_of(gang))
    (tmp_path / "go").touch()
    assert ended(gang).result == 41
    assert len(run_log.read(gang.id)) == len(gang.events()) - 2


def test_a_folder_that_is_deleted_ends_its_owner_with_the_gang(
    launched: Launch, tmp_path: Path
) -> None:
    gang = launched("--np 1")
    owner = owner_of(gang.id)
    until(gang, lambda: gang.snapshot().last_metrics)
    shutil.rmtree(gang.folder)
    (tmp_path / "go").touch()
    assert ended(gang).state == "SUCCEEDED" and "they are lost" in notices_of(gang)
    wait_until_gone([owner])


@pytest.mark.exhaustive
def test_a_terminated_owner_stops_its_gang(launched: Launch) -> None:
    gang = launched()
    until(gang, lambda: all(rank.phase == "running" for rank in gang.ranks))
    os.kill(owner_of(gang.id), signal.SIGTERM)
    assert "its owner process was terminated" in ended(gang).snapshot().reason


def test_a_launch_that_fails_is_raised_in_the_kernel(
    launched: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(PlacementError, match="GPU"):
        launched("--np 2 --gpu")


def test_it_is_retried_from_its_checkpoint_while_nobody_is_attached(launched: Launch) -> None:
    gang = launched("--np 2 --retries 1", RESUMING)
    gang.connection.close()
    wait_until_gone([owner_of(gang.id)])
    (listed,) = (found.stdout for found in terminal("list"))
    assert f"gang {gang.id} has ended: 2 ranks finished (" in listed
    assert listed.endswith(f": %gang attach {gang.id}\n")
    again = attach(gang.id)
    assert (again.result, again.snapshot().attempt, again.state) == (4, 1, "SUCCEEDED")
    assert "has ended" not in terminal("list")[0].stdout


VISIBLE = """
import os, pathlib, time
while not pathlib.Path({go!r}).exists():
    time.sleep(0.02)
os.environ["CUDA_VISIBLE_DEVICES"]
"""


def test_it_uses_free_gpus_first_and_leaves_the_others(
    launched: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As do gangs of any kernel: an owner and this process are as far apart as two kernels."""
    made_up_gpus.report(3, tmp_path, monkeypatch)
    go = tmp_path / "go"
    cell = VISIBLE.format(go=str(go))
    first, second = (launched("--np 1 --gpu", cell) for _ in range(2))
    first.connection.close()
    here = hm.launch(plain_ranks.visible_gpus, str(go), np=1, gpu=True)
    go.touch()
    assert [ended(second).result, ended(here).result] == ["1", "2"]
    wait_until_gone([owner_of(first.id)])
    assert attach(first.id).result == "0"
    assert hm.run(plain_ranks.visible_gpus, str(go), np=1, quiet=True) == "0"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_not_served(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with local_socket.listen(tmp_path) as listener, local_socket.connect(tmp_path, 5) as mine:
        assert stat.S_IMODE((tmp_path / run_log.OWNER_SOCKET).stat().st_mode) == 0o600
        own, _ = listener.accept()
        with own:
            assert framing.is_of_this_user(own) and mine.fileno() >= 0
        (tmp_path / run_log.OWNER_SOCKET).chmod(0o666)
        listener.settimeout(PATIENCE_S)
        code = f"import os, socket\nos.chdir({str(tmp_path)!r})\nos.setuid(65534)\n"
        code += "sock = socket.socket(socket.AF_UNIX)\nsock.connect('owner.sock')\nsock.recv(1)"
        with subprocess.Popen([sys.executable, "-c", code]) as other:
            sock, _ = listener.accept()
            with sock:
                assert not framing.is_of_this_user(sock)
        assert other.returncode == 0


@pytest.mark.exhaustive
def test_a_full_disk_is_reported_and_loses_nothing(launched: Launch, tmp_path: Path) -> None:
    gang = launched()
    owner = owner_of(gang.id)
    until(gang, lambda: gang.snapshot().last_metrics)
    soft, hard = resource.prlimit(owner, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    until(gang, lambda: "the rest of this run is not recorded" in notices_of(gang))
    shown = len(gang.events())
    until(gang, lambda: len(gang.events()) > shown + 10)
    (tmp_path / "go").touch()
    wait_until(lambda: "the results cannot be stored in the record of the gang" in notices_of(gang))
    resource.prlimit(owner, resource.RLIMIT_FSIZE, (soft, hard))
    assert ended(gang).results == [41, 42]
    assert run_log.read(gang.id) == gang.events()


@pytest.mark.exhaustive
def test_its_limit_and_its_timeline_need_no_kernel(
    notebook_shell: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wait.py").write_text("import time\nprint('waits', flush=True)\ntime.sleep(600)\n")
    line = "--outlive --np 1 --timeout 15s --timeline trace.json wait.py"
    gang = notebook_shell.run_line_magic("distributed", line)
    assert isinstance(gang, AttachedGang)
    gang.connection.close()
    wait_until_gone([owner_of(gang.id)])
    again = attach(gang.id)
    assert again.snapshot().reason == "stopped: it ran longer than its timeout of 15 s"
    assert "waits" in again.logs[0] and "traceEvents" in Path("trace.json").read_text()
