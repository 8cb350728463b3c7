"""A provider of hosts beside Spark: what the machinery of remote placements promises to any of them."""

from __future__ import annotations

import asyncio
import errno
import gc
import hashlib
import json
import os
import re
import select
import shutil
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from IPython.core.interactiveshell import InteractiveShell

import hydrogen_magic as hm
from hydrogen_magic.core import events as ev
from hydrogen_magic.core import processes
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.core.messages import (
    AgentReport,
    CleanedUp,
    ClosureServed,
    FilePart,
)
from hydrogen_magic.core.network import PortRange, host_and_port
from hydrogen_magic.driver import session as sessions
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.placements import Attempt, Job, agent_client, local_agents
from hydrogen_magic.driver.placements.local_agents import hub
from hydrogen_magic.driver.placements.remote import (
    HostTasks,
    agents,
    attempt,
    unassigned,
)
from hydrogen_magic.driver.placements.remote.agents import (
    RemoteAgent,
    RemoteAgentPool,
    agent_pool,
)
from hydrogen_magic.driver.placements.remote.provider import HostsRevokedError
from hydrogen_magic.driver.rendezvous.torch import TorchRendezvous
from hydrogen_magic.errors import HydrogenError, InferError, PlacementError, RankFailedError
from hydrogen_magic.inference.run import InferenceRun
from hydrogen_magic.node.agent import host_task
from hydrogen_magic.serialization.payload import Payload
from hydrogen_magic.testing.contract import GangContract
from hydrogen_magic.testing.entry_points import declare
from hydrogen_magic.transport import file_transfer
from hydrogen_magic.transport.file_transfer import MAX_WINDOW_BYTES, PART_BYTES, Outgoing, Part
from hydrogen_magic.transport.forwarded_channel import ForwardedChannel
from tests import (
    closure_bytes,
    directory_hosts,
    plain_checkpoints,
    plain_ranks,
    ranks,
    shards,
    spark_ranks,
)
from tests.contracts import (
    DOES_NOT_JOIN,
    FINISHES_EARLY,
    LIBRARY,
    PLANS,
    SILENT_END,
    STANDS_STILL,
    mainly,
    without,
)
from tests.directory_hosts import DirectoryHosts
from tests.gangs import (
    PATIENCE_S,
    agents_that_hang,
    alive,
    ended,
    failure_of,
    family_of,
    free_ports,
    hosts_on_other_disks,
    notices_of,
    said,
    until,
    wait_until,
    wait_until_gone,
)

pytestmark = pytest.mark.usefixtures("directories")
launch = partial(hm.launch, on="directories")


@pytest.fixture(scope="module")
def directories(
    tmp_path_factory: pytest.TempPathFactory, warm_agents: None
) -> Iterator[list[Path]]:
    folder = tmp_path_factory.mktemp("remote")
    entry_point = "tests.directory_hosts:DirectoryPlacement"
    declare(folder, "hydrogen_magic.placements", {"directories": entry_point})
    for name in ("one", "other", "third", "third-but-one"):
        (folder / "hosts" / name).mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch, agents_that_hang():
        patch.syspath_prepend(folder)
        patch.setenv(directory_hosts.ROOT, str(folder / "hosts"))
        yield directory_hosts.hosts()


@pytest.fixture
def sent_bytes() -> Iterator[list[int]]:
    """Bytes of each part of a closure that leaves the kernel."""
    with closure_bytes.counted() as sent:
        yield sent


# TestSparkTorch has the rest for agents on hosts; here two more would import torch.
@without(SILENT_END, STANDS_STILL, DOES_NOT_JOIN, FINISHES_EARLY)
@mainly(*PLANS)
class TestDirectories(GangContract):
    placement = "directories"
    library = LIBRARY
    sees_processes = True


def test_every_host_has_an_agent_and_is_sent_the_package(
    directories: list[Path], sent_bytes: list[int]
) -> None:
    found = ended(launch(plain_ranks.host_and_package, np=2)).results
    parts = {size: sent_bytes.count(size) for size in sent_bytes}
    assert parts and all(n % 2 == 0 for n in parts.values()), "a small closure goes to each host"
    assert [number for number, _ in found] == ["0", "1"]
    for (_, package), host in zip(found, directories[:2], strict=True):
        assert Path(package).is_relative_to(host)


def test_displays_and_input_of_ranks_on_other_hosts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt: prompt.upper())
    assert hm.run(plain_ranks.display_and_ask, np=2, on="directories", quiet=True) == "[0] NAME? "
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[0]")]
    assert printed == ["[0] above", "[0] displayed", "[0] below"]


SLOW = "import time\ndef predict(batch):\n    time.sleep(0.05)\n    return {'y': batch['x']}"


@pytest.fixture
def infer(notebook_shell: InteractiveShell) -> Callable[..., Any]:
    """Runs ``%%infer`` over a hundred rows, or others."""
    notebook_shell.push({"rows": pa.table({"x": range(100)})})

    def run(body: str, options: str, **names: Any) -> Any:
        notebook_shell.push(names)
        line = f"rows --on directories --quiet {options}"
        result = notebook_shell.run_cell_magic("infer", line, body)
        return result if "--detach" in options else notebook_shell.user_ns["scored"]

    return run


def has_begun(run: InferenceRun) -> Callable[[], bool]:
    assert run.gang is not None
    rows = run.gang.snapshot
    return lambda: (found := rows().rows) is not None and found.done > 2


def test_rows_are_sent_to_ranks_on_other_hosts(
    infer: Callable[..., Any], directories: list[Path], tmp_path: Path
) -> None:
    """Also rows, and predictions, that are larger than a part of a file. Each rank waits for the other."""
    rows = pa.table({"x": [bytes([n]) * (PART_BYTES // 2) for n in range(8)]})
    body = (
        "import os, pathlib, time, pyarrow as pa\n"
        "def predict(batch: pa.Table):\n"
        "    pathlib.Path(met, os.environ['RANK']).touch()\n"
        "    until_s = time.monotonic() + patience_s\n"
        "    while len(os.listdir(met)) < 2 and time.monotonic() < until_s: time.sleep(0.01)\n"
        "    return {'y': batch['x'], 'folder': [os.environ['TMPDIR']] * len(batch)}"
    )
    (met := tmp_path / "met").mkdir()
    options = "--np 2 --batch-size 3 --out scored"
    scored = infer(body, options, rows=rows, met=str(met), patience_s=PATIENCE_S)
    assert scored["y"].equals(rows["x"]) and scored["x"].equals(rows["x"])
    assert set(scored["folder"].to_pylist()) == set(map(str, directories[:2]))


def test_rows_of_a_rank_that_is_lost_are_predicted_by_the_next_attempt(
    infer: Callable[..., Any], tmp_path: Path
) -> None:
    body = (
        "import os, pathlib\n"
        "def predict(batch):\n"
        "    if 50 in list(batch['x']) and not pathlib.Path(once).exists():\n"
        "        pathlib.Path(once).touch()\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return {'y': 2 * batch['x']}"
    )
    options = "--np 2 --batch-size 4 --retries 1 --detach"
    run = infer(body, options, once=str(tmp_path / "once"))
    assert run.result["y"].to_pylist() == [2 * n for n in range(100)]
    assert run.gang.snapshot().attempt == 1


def test_a_stop_returns_the_rows_that_other_hosts_have_predicted(infer: Callable[..., Any]) -> None:
    run = infer(SLOW, "--np 2 --batch-size 1 --detach")
    until(run.gang, has_begun(run))
    run.gang.stop()
    assert ended(run.gang).state == "STOPPED" and 2 < len(run.result) < 100


def test_rows_are_predicted_on_a_host_whose_last_gang_runs_on_elsewhere(
    infer: Callable[..., Any], notebook_shell: InteractiveShell, tmp_path: Path
) -> None:
    """Its agent serves the next gang before the other host ends; that end concerns no other gang."""
    notebook_shell.push({"end": str(tmp_path / "end")})
    body = (
        "import pathlib, time\n"
        "while hm.rank() == 1 and not pathlib.Path(end).exists(): time.sleep(0.01)"
    )
    notebook_shell.push({"hm": hm})
    gang = notebook_shell.run_cell_magic(
        "distributed", "--np 2 --on directories --quiet --detach", body
    )

    def freed() -> list[RemoteAgent]:
        mine = [each for each in list(agent_pool()._agents) if each.gang == gang.id]
        return [each for each in mine if each._clean and each._clean.done()]

    until(gang, freed)
    (agent,) = freed()
    run = infer(SLOW, "--np 1 --batch-size 1 --detach")
    until(run.gang, has_begun(run))
    assert agent.gang == run.gang.id, "the same one"
    (tmp_path / "end").touch()
    assert ended(gang).state == "SUCCEEDED"
    assert ended(run.gang).state == "SUCCEEDED" and len(run.result) == 100


def test_rows_are_not_sent_on_when_the_hosts_are_taken_away(
    infer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def revoked(hosts: DirectoryHosts) -> None:
        raise HostsRevokedError("the directories were taken away")

    run = infer(SLOW, "--np 2 --batch-size 1 --detach")
    until(run.gang, has_begun(run))
    monkeypatch.setattr(DirectoryHosts, "_check", revoked)
    with pytest.raises(HostsRevokedError, match="taken away"):
        ended(run.gang).raise_for_state()
    assert "hydrogen_magic dispatcher" not in [thread.name for thread in threading.enumerate()]


def test_a_channel_that_is_closed_is_no_success(
    infer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no more files can be opened: the rank sees the end of its rows."""

    def content(channel: ForwardedChannel, frame: Any, fds: list[int]) -> tuple[int, int]:
        if frame.get("row", 0) > 10:
            raise OSError(errno.EMFILE, "too many open files")
        return get_content(channel, frame, fds)

    get_content = ForwardedChannel._content
    monkeypatch.setattr(ForwardedChannel, "_content", content)
    run = infer(SLOW, "--np 1 --batch-size 1 --detach")
    with pytest.raises(InferError, match="ended before all rows were predicted"):
        _ = run.result
    assert run.gang.state == "FAILED"
    assert "the channel of a rank was closed: OSError: " in notices_of(run.gang)


def test_infer_runs_on_the_ranks_of_a_session_elsewhere(
    infer: Callable[..., Any], notebook_shell: InteractiveShell
) -> None:
    first = "import os\nscale, kept = 3, os.getpid()\nos.getpid()"
    where = "--session lab --on directories --quiet"
    try:
        notebook_shell.run_cell_magic("distributed", f"--np 2 {where}", first)
        body = (
            "def predict(batch): return {'y': scale * batch['x'], 'pid': os.getpid(), 'kept': kept}"
        )
        with pytest.raises(RankFailedError, match="ZeroDivisionError"):
            infer(f"{body}\n1 / 0", "--session lab")
        for cell in (body, "scale = 4"):
            scored = infer(cell, "--session lab --batch-size 1 --out scored")
            assert scored["pid"].equals(scored["kept"])
        assert scored["y"].to_pylist() == [4 * n for n in range(100)]
        found = notebook_shell.run_cell_magic("distributed", where, "scale, kept == os.getpid()")
        assert found == (4, True)
    finally:
        for lab in sessions.sessions():
            lab.end()


def test_a_task_that_is_killed_between_cells_ends_its_session(
    directories: list[Path], notebook_shell: InteractiveShell
) -> None:
    where = "--np 2 --session lab --on directories --quiet"
    notebook_shell.run_cell_magic("distributed", where, "kept = 1")
    (lab,) = sessions.sessions()
    os.kill(task_in(directories[1]), signal.SIGKILL)
    wait_until(lambda: lab.why_ended)
    of_agent = r"the Python process of its task ended \(on host \S+\)"
    of_placement = r"the task in \S+ ended with -9"  # which may notice it first
    assert re.fullmatch(f"{of_agent}|{of_placement}", lab.why_ended)
    assert lab.loss == "; lost with its ranks: kept"


@pytest.mark.parametrize(
    "call",
    [
        pytest.param([ranks.hang, "collective"], marks=pytest.mark.exhaustive),  # imports torch
        [plain_ranks.hang],
    ],
)
def test_a_task_that_is_killed_ends_its_rank(directories: list[Path], call: list[Any]) -> None:
    gang = launch(*call, np=2)
    until(gang, said(gang, "about to hang"))
    family = family_of(gang)
    os.kill(task_in(directories[1]), signal.SIGKILL)
    error = failure_of(gang)
    assert error.rank == 1
    assert "the Python process of its task ended" in str(error)
    wait_until_gone(family)


def test_the_end_of_an_agent_is_not_that_of_another_host_of_its_name(
    directories: list[Path],
) -> None:
    gang = launch(plain_ranks.hang, np=2)
    until(gang, said(gang, "about to hang"))
    (rank,) = processes.processes([gang.ranks[1].pid or 0])
    os.kill(rank.ppid, signal.SIGKILL)
    failure_of(gang)
    exits = (event for event in gang.events() if isinstance(event, ev.RankExited))
    assert [exit_.rank for exit_ in exits if exit_.hint == "its host was lost"] == [1]


@pytest.mark.parametrize(
    "how",
    [signal.SIGUSR1, pytest.param(signal.SIGSTOP, marks=pytest.mark.exhaustive)],
)
def test_an_agent_that_does_not_respond_ends_with_its_task(
    directories: list[Path], how: signal.Signals
) -> None:
    """The provider kills the tasks of a gang that is killed; the other agent responds, and stays."""
    gang = launch(plain_ranks.family, np=2)
    until(gang, said(gang, "batch"))
    family, agents = family_of(gang), agents_of(gang)
    os.kill(agents[1], how)
    if how == signal.SIGUSR1:  # a task ends a stopped agent itself
        # On a busy machine, the task may start its guard later than the provider kills it.
        assert host_task._SUSPECT_S < agent_client._KILL_RESPONSE_S
        task = task_in(directories[1])
        until(gang, lambda: processes.descendants(task))
    gang.stop(kill=True)
    pressed_s = time.monotonic()
    wait_until_gone([*family, agents[1]])
    assert time.monotonic() - pressed_s < 10, "five seconds on a machine that is not busy"
    assert ended(gang).state == "STOPPED"
    assert alive(agents) == agents[:1]
    again = ended(launch(plain_ranks.parent, np=2)).results
    assert again[0] == agents[0] != again[1] != agents[1]


_PATIENT = {
    "_UNWANTED_S = 4.0": f"_UNWANTED_S = {PATIENCE_S}",
    "ready.poll(_PING_S * 1000)": f"ready.poll({1000 * PATIENCE_S})",
}
"""Changes of a task and its guard, for agents that answer late because the machine is busy."""


def test_an_agent_that_answers_late_is_not_ended(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is silent, its task has a process that would end it."""

    def patient(tasks: HostTasks, *arguments: Any) -> str:
        source = program(tasks, *arguments)
        for limit, longer in _PATIENT.items():
            assert limit in source
            source = source.replace(limit, longer)
        return source

    program = HostTasks.program
    monkeypatch.setattr(HostTasks, "program", patient)
    gang = launch(plain_ranks.hang, np=1)
    until(gang, said(gang, "about to hang"))
    (agent,), task = agents_of(gang), task_in(directories[0])

    def guards() -> list[int]:
        return [child.pid for child in processes.descendants(task)]

    os.kill(agent, signal.SIGSTOP)
    until(gang, guards)
    (guard,) = guards()
    os.kill(agent, signal.SIGCONT)
    wait_until_gone([guard])
    assert alive([agent, task]) == [agent, task]
    os.kill(agent, signal.SIGSTOP)
    until(gang, guards)
    (guard,) = guards()
    os.kill(task, signal.SIGKILL)
    os.kill(agent, signal.SIGCONT)
    wait_until_gone([guard])
    assert "the Python process of its task ended" in str(failure_of(gang))
    assert alive([agent]) == [agent]


def task_in(directory: Path) -> int:
    """Return the pid of the task that works there, when those of earlier gangs have exited."""

    def found() -> list[int]:
        every = processes.processes()
        mine = [one.pid for one in every if one.ppid == os.getpid() and not one.has_exited]
        return [pid for pid in mine if works_in(pid, directory)]

    wait_until(lambda: len(found()) == 1)
    return found()[0]


def works_in(pid: int, directory: Path) -> bool:
    try:
        return os.path.samefile(f"/proc/{pid}/cwd", directory)
    except OSError:  # it has exited
        return False


def agents_of(gang: Gang) -> list[int]:
    """Return the pids of the agents of a gang's ranks."""
    pids = [rank.pid or 0 for rank in gang.ranks]
    return [next(processes.processes([pid])).ppid for pid in pids]


def test_a_host_that_is_silent_for_too_long_is_given_up() -> None:
    """As one that is cut off: its agent and its task continue."""
    gang = launch(plain_ranks.hang, np=1)
    until(gang, said(gang, "about to hang"))
    family = family_of(gang)
    (agent,) = (each for each in list(agent_pool()._agents) if each.gang == gang.id)

    def is_over() -> bool:
        agent.last_message_s = time.monotonic() - 2 * attempt._LOST_S
        return gang.wait(0.05)

    try:
        wait_until(is_over)
    finally:
        gang.stop(kill=True)
    assert re.match(
        r"rank 0 failed: HostLost: .* has not responded for \d+ s", str(failure_of(gang))
    )
    wait_until_gone(family)


def test_a_host_whose_ranks_have_ended_may_leave(tmp_path: Path) -> None:
    """Its agent exits after a minute without a gang, while ranks of other hosts go on."""
    gang = launch(plain_ranks.wait_unless_first, str(tmp_path / "over"), np=2)
    until(gang, lambda: gang.ranks[0].is_over and "waiting" in gang.logs[1])
    running: Any = agent_pool().waiters[gang.id, 0]
    until(gang, running._done_agents)
    (agent,) = running._done_agents()
    agent.hub.loop.call_soon_threadsafe(agent.kill)
    for _ in range(3):  # looks of the kernel
        agent.last_message_s = time.monotonic() - 2 * attempt._LOST_S
        assert not gang.wait(attempt._WATCH_S)
    (tmp_path / "over").touch()
    assert ended(gang).results == ["over"] * 2 and "no connection" not in notices_of(gang)


def test_hosts_that_were_taken_away_are_named_though_agents_report_lost_tasks_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start_agents = DirectoryHosts.start_agents

    async def start_and_revoke(hosts: DirectoryHosts, *arguments: Any) -> None:
        await start_agents(hosts, *arguments)
        while "TaskLost" not in str(gang.events()):
            await asyncio.sleep(0.05)
        raise HostsRevokedError("the directories were taken away")

    def kill(hosts: DirectoryHosts) -> None:
        for process in hosts._running:
            process.kill()

    monkeypatch.setattr(attempt, "_LATE_REPORTS_S", 60.0)
    monkeypatch.setattr(DirectoryHosts, "start_agents", start_and_revoke)
    gang = launch(plain_ranks.hang, np=2)
    until(gang, said(gang, "about to hang"))
    family = family_of(gang)
    monkeypatch.setattr(DirectoryHosts, "_check", kill)
    with pytest.raises(HostsRevokedError, match="taken away"):
        ended(gang).raise_for_state()
    wait_until_gone(family)


def test_tasks_of_a_gang_that_has_succeeded_are_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy host they return late; the provider would count them as failed."""
    seen: list[str] = []
    mine: list[DirectoryHosts] = []
    start_agents, release = DirectoryHosts.start_agents, DirectoryHosts.release

    async def return_late(hosts: DirectoryHosts, *arguments: Any) -> None:
        mine.append(hosts)
        await start_agents(hosts, *arguments)
        await asyncio.sleep(3.0)
        seen.append("returned")

    async def note_release(hosts: DirectoryHosts) -> None:
        if hosts in mine:  # not those of the gang before
            seen.append("released")
        await release(hosts)

    monkeypatch.setattr(DirectoryHosts, "start_agents", return_late)
    monkeypatch.setattr(DirectoryHosts, "release", note_release)
    assert ended(launch(plain_ranks.rank, np=2)).results == [0, 1]
    wait_until(lambda: "released" in seen)
    assert seen == ["returned", "released"]


def test_agents_may_report_the_end_later_than_the_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy host: their tasks are over, but their last messages are on the way."""
    start_agents, take = DirectoryHosts.start_agents, RemoteAgent.take
    tasks_ended = threading.Event()

    async def note_end(hosts: DirectoryHosts, *arguments: Any) -> None:
        await start_agents(hosts, *arguments)
        tasks_ended.set()

    def take_late(agent: RemoteAgent, report: AgentReport, data: Any) -> None:
        if isinstance(report, CleanedUp) and not tasks_ended.is_set():
            hub().loop.call_later(2 * attempt._LATE_REPORTS_S, take_late, agent, report, data)
        else:
            take(agent, report, data)

    monkeypatch.setattr(DirectoryHosts, "start_agents", note_end)
    monkeypatch.setattr(RemoteAgent, "take", take_late)
    assert ended(launch(plain_ranks.rank, np=2)).results == [0, 1]


_STARTS_SLOWLY = """
real_start = _start
def _start(*arguments):
    found = real_start(*arguments)
    open({folder!r} + "/started", "w").close()
    while not os.path.exists({folder!r} + "/answered"):
        time.sleep(0.01)
    return found
"""
_COMES_FIRST = """
real_say = _say
def _say(*arguments):
    answer = real_say(*arguments)
    open({folder!r} + "/answered", "w").close()
    return answer
"""


def test_a_new_agent_serves_the_gang_that_has_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a task of another gang comes first; both agents would have the keys of one task otherwise."""
    program, changes = HostTasks.program, [_STARTS_SLOWLY, _COMES_FIRST]

    def changed(tasks: HostTasks, *arguments: Any) -> str:
        source, main, call = program(tasks, *arguments).rpartition("\nmain(json.loads(")
        return f"{source}{changes.pop(0).format(folder=str(tmp_path))}{main}{call}"

    monkeypatch.setattr(HostTasks, "program", changed)
    options: dict[str, Any] = {"np": 1, "ports": str(in_row(6))}  # for which no warm agent listens
    first = launch(plain_ranks.meet, str(tmp_path), "first", "second", **options)
    wait_until((tmp_path / "started").exists)
    second = launch(plain_ranks.meet, str(tmp_path), "second", "first", **options)
    assert ended(first).result != ended(second).result


def test_what_a_host_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    instructions = HostTasks.instructions

    def more_needed(tasks: HostTasks, *arguments: Any) -> dict[str, Any]:
        return {**instructions(tasks, *arguments), "needs": ["no_such_module"]}

    monkeypatch.setattr(HostTasks, "instructions", more_needed)
    with pytest.raises(PlacementError, match="directories have no module no_such_module"):
        ended(launch(plain_ranks.host_and_package, np=1)).raise_for_state()


def test_an_agent_that_exits_while_it_starts_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = str(in_row(4))  # for which no warm agent listens
    monkeypatch.setenv("PYTHONUTF8", "9")  # the tasks ignore it
    with pytest.raises(
        HydrogenError, match=r"(?s)exited while it started; its last output:.*PYTHONUTF8"
    ):
        ended(launch(os.getpid, np=2, ports=ports)).raise_for_state()


def test_an_agent_keeps_the_last_closure_alone_of_gangs_that_ended() -> None:
    """Closures and results come and go as memory files; a closure is kept for another attempt."""
    for _ in range(2):
        pids = ended(launch(plain_ranks.parent, np=2)).results

    def held(pid: int) -> Iterator[str]:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                name = str(fd.readlink()).partition(" ")[0]
                if name.startswith("/memfd:hydrogen_magic:") and name != stacks:
                    yield name

    stacks = "/memfd:hydrogen_magic:stacks"  # of workers that wait for the next gang
    kept = ["/memfd:hydrogen_magic:arriving"]
    # Agents that are idle for a minute end.
    wait_until(lambda: all([*held(pid)] == kept for pid in pids), PATIENCE_S / 2)


def test_the_next_gang_of_a_host_goes_on_when_the_one_before_is_stopped(tmp_path: Path) -> None:
    """The agent of a host serves it as soon as its own ranks of the first gang have ended."""
    first = launch(plain_ranks.wait_unless_first, str(tmp_path / "first"), np=2)
    until(first, lambda: first.ranks and first.ranks[0].phase == "done")
    second = launch(plain_ranks.wait_unless_first, str(tmp_path / "second"), np=1)
    until(second, said(second, "waiting"))
    first.stop()
    assert ended(first).state == "STOPPED"
    (tmp_path / "second").touch()
    assert ended(second).result == "over"


# ── the closure ──────────────────────────────────────────────────────────────────────────────────

_N_BYTES = 40_000_000


def digests(gang: hm.Gang) -> set[str]:
    return set(ended(gang).results)


def launch_with_data(n_bytes: int, np: int) -> tuple[hm.Gang, str]:
    data = os.urandom(n_bytes)
    gang = launch(plain_ranks.digest, data, np=np)
    return gang, hashlib.sha256(data).hexdigest()


def test_a_large_closure_leaves_the_kernel_once(sent_bytes: list[int]) -> None:
    n_bytes = 16 * PART_BYTES
    gang, digest = launch_with_data(n_bytes, np=4)
    assert digests(gang) == {digest}
    assert n_bytes <= sum(sent_bytes) < 2 * n_bytes


@pytest.mark.parametrize(
    "after_bytes", [pytest.param(0, marks=pytest.mark.exhaustive), _N_BYTES // 2]
)
def test_a_host_whose_source_is_lost_gets_the_rest_from_the_kernel(
    sent_bytes: list[int], monkeypatch: pytest.MonkeyPatch, after_bytes: int
) -> None:
    """The first host serves two others through a connection that breaks, at once or halfway."""
    take = RemoteAgent.take

    def through_proxy(agent: RemoteAgent, report: AgentReport, data: memoryview | None) -> None:
        transfer: Any = getattr(agent.on_closure_report, "__self__", None)
        if isinstance(report, ClosureServed) and agent is transfer._agents[0]:
            report = replace(report, endpoint=breaking_proxy(report.endpoint, after_bytes))
        take(agent, report, data)

    monkeypatch.setattr(RemoteAgent, "take", through_proxy)
    gang, digest = launch_with_data(_N_BYTES, np=3)
    assert digests(gang) == {digest}
    from_kernel = 3 * _N_BYTES - 2 * after_bytes
    assert from_kernel <= sum(sent_bytes) + 2 * PART_BYTES
    assert sum(sent_bytes) < 1.1 * from_kernel + 2 * MAX_WINDOW_BYTES


def breaking_proxy(endpoint: str, after_bytes: int) -> str:
    """Return an endpoint in front of ``endpoint``: each connection breaks after so many bytes towards us."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    listening = socket.create_server(("127.0.0.1", 0))
    if after_bytes == 0:
        with listening:  # nothing listens there any more
            return f"tcp://127.0.0.1:{listening.getsockname()[1]}"

    def serve() -> None:
        with listening:
            pairs = []
            for _ in range(2):
                ours = listening.accept()[0]
                pairs.append((ours, socket.create_connection((host, int(port)))))
        left = {theirs: after_bytes for _, theirs in pairs}
        other = {one: two for pair in pairs for one, two in (pair, pair[::-1])}
        while other:
            for sock in select.select(list(other), [], [])[0]:
                if sock not in other:
                    continue
                data = sock.recv(1 << 16)
                left[sock] = left.get(sock, 1 << 62) - len(data)
                if data and left[sock] > 0:
                    other[sock].sendall(data)
                    continue
                for each in (sock, other[sock]):
                    other.pop(each)
                    each.close()

    threading.Thread(target=serve, daemon=True).start()
    return f"tcp://127.0.0.1:{listening.getsockname()[1]}"


def test_instructions_of_a_task_do_not_grow_with_the_gang() -> None:
    """All tasks get the same ones: together, they must not grow with the square of the ranks."""
    small, large = (instructions_of(np) for np in (8, 800))
    assert len(large) < len(small) + 100


def instructions_of(np: int) -> str:
    async def made() -> str:
        spec = JobSpec(np=np)
        job = Job(
            spec, unassigned(spec, "x"), Payload(b""), (), (), TorchRendezvous(), Path("/x"), 0.0
        )
        pool = agent_pool()
        invited = pool.invite(np)
        tasks = HostTasks(Attempt("cafe", 0, job), "hosts", pool, invited, lambda: False)
        try:
            return json.dumps(tasks.instructions(["tcp://127.0.0.1:1"]))
        finally:
            pool.uninvite(invited)

    loop = local_agents.hub().loop
    return asyncio.run_coroutine_threadsafe(made(), loop).result(PATIENCE_S)


# ── ports and addresses ──────────────────────────────────────────────────────────────────────────


def in_row(count: int) -> PortRange:
    ports = free_ports(count)
    return PortRange(ports[0], ports[-1])


def rendezvous_port(**options: Any) -> int:
    """Return the port at which the ranks of a gang meet."""
    return int(launch(plain_ranks.environment, **options).result["MASTER_PORT"])


def test_listeners_for_other_machines_have_ports_of_the_range(directories: list[Path]) -> None:
    ports = in_row(4)
    assert ports.first < rendezvous_port(np=1, ports=str(ports)) <= ports.last
    listening = [endpoint for (_, found), endpoint in hub()._endpoints.items() if found == ports]
    assert [host_and_port(endpoint)[1] for endpoint in listening] == [ports.first]
    warm = rendezvous_port(np=1)
    assert not ports.first <= warm <= ports.last, "agents with ports of a range are for that range"


def test_a_range_without_a_free_port_is_named(directories: list[Path]) -> None:
    ports = in_row(1)
    expected = f"cannot listen on 127.0.0.1: all ports of {ports} are in use; set a larger range"
    with pytest.raises(PlacementError, match=expected):
        rendezvous_port(np=1, ports=str(ports))  # the kernel itself has the only one
    taken = in_row(1)
    with socket.create_server(("127.0.0.1", taken.first)):
        expected = f"cannot listen on 127.0.0.1 .*: all ports of {taken} are in use"
        with pytest.raises(PlacementError, match=expected):
            rendezvous_port(np=1, ports=str(taken))


def test_an_address_where_something_else_answers_is_passed_over(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a proxy that accepts all connections, and closes those that lead nowhere."""
    listen = RemoteAgentPool.listen
    with socket.create_server(("127.0.0.1", 0)) as other:
        answering = threading.Thread(target=lambda: other.accept()[0].close(), daemon=True)
        answering.start()

        def listen_elsewhere(*arguments: Any) -> list[str]:
            return [f"tcp://127.0.0.1:{other.getsockname()[1]}", *listen(*arguments)]

        monkeypatch.setattr(RemoteAgentPool, "listen", listen_elsewhere)
        gang = launch(plain_ranks.rank, np=1, ports=str(in_row(8)))  # which takes a new agent
        assert ended(gang).result == 0
        answering.join(PATIENCE_S)
        assert not answering.is_alive()


@pytest.mark.exhaustive  # hosts in namespaces
def test_addresses_of_ipv6(directories: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_hosts, "ADDRESSES", ["::1"])
    local_agents.close()  # warm agents have addresses of IPv4
    assert launch(spark_ranks.meeting_place).result == ("::1", [0, 1])
    local_agents.close()


# ── data of hm.dataset ───────────────────────────────────────────────────────────────────────────


@pytest.fixture
def no_shared_disk() -> Iterator[None]:
    with hosts_on_other_disks():
        yield


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of datasets that were sent to a host."""
    names: list[str] = []
    send = RemoteAgent.send_dataset

    async def count(agent: RemoteAgent, name: str, *rest: Any) -> str:
        names.append(name)
        return await send(agent, name, *rest)

    monkeypatch.setattr(RemoteAgent, "send_dataset", count)
    return names


def numbers(n_rows: int = 1000) -> Any:
    return hm.dataset(pa.table({"x": range(n_rows)}))


@pytest.mark.usefixtures("no_shared_disk")
def test_each_host_receives_a_dataset_once(directories: list[Path], sent: list[str]) -> None:
    """Also one of several parts; its files go with the notebook's."""
    n_rows = PART_BYTES // 2
    with numbers(n_rows) as rows:
        assert rows.n_bytes > PART_BYTES
        assert ended(launch(shards.n_files_here, rows, np=2)).results == [1, 1]
        found = ended(launch(shards.read_here, rows, np=2)).results
        assert shards.are_all_numbers(found, n_rows)
        assert sent == [rows.name] * 2
        copies = [Path(folder) for _, _, folder in found]
        for copy, host in zip(copies, directories, strict=False):
            assert copy.is_relative_to(host)
            assert copy.name == rows.name and len(list(copy.iterdir())) == 1
    ended(launch(plain_ranks.environment, np=2)).raise_for_state()
    assert not any(copy.exists() for copy in copies)


def test_hosts_that_see_the_notebooks_disk_receive_no_data(sent: list[str]) -> None:
    with numbers() as rows:
        found = ended(launch(shards.read_here, rows, np=1)).results
        assert [folder for _, _, folder in found] == [rows.path]
    assert shards.are_all_numbers(found, 1000)
    assert sent == []


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_shared_disk")
def test_a_host_that_cannot_store_a_dataset_is_named() -> None:
    (_, _, first), _ = ended(launch(shards.read_here, numbers(), np=2)).results
    folder = Path(first).parent
    shutil.rmtree(folder)
    folder.touch()
    with numbers() as rows:
        with pytest.raises(HydrogenError) as failed:
            ended(launch(shards.read_here, rows, np=2)).raise_for_state()
        problem = rf"cannot store the data of hm.dataset\(\), .*B: Not a directory \({folder}\)"
        assert re.search(problem, str(failed.value))
        folder.unlink()
        ended(launch(shards.read_here, rows, np=2)).raise_for_state()


@pytest.mark.usefixtures("no_shared_disk")
def test_a_stop_while_a_dataset_travels_keeps_the_session(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has arrived is deleted; the next cell may be in hours."""

    async def send(outgoing: Outgoing, part: Part, data: memoryview) -> None:
        if isinstance(part, FilePart) and part.offset:
            travels.set()
            await asyncio.Future()
        await original(outgoing, part, data)

    def arriving() -> list[Path]:
        return [path for host in directories for path in host.glob("hydrogen-*/datasets/.*")]

    travels, original = threading.Event(), Outgoing.send
    pids = ended(launch(os.getpid, session="kept", np=2)).results
    with numbers(PART_BYTES // 4) as rows, monkeypatch.context() as patch:
        patch.setattr(Outgoing, "send", send)
        gang = launch(shards.read_here, rows, session="kept")
        assert travels.wait(PATIENCE_S)
        wait_until(arriving)
        gang.stop()
        assert ended(gang).state == "STOPPED"
        wait_until(lambda: not arriving())
    assert ended(launch(os.getpid, session="kept")).results == pids
    sessions.sessions()[0].end()


@pytest.mark.parametrize("on", ["local", "directories"])
def test_the_next_cell_of_a_session_does_not_record_by_itself(on: str, tmp_path: Path) -> None:
    over = tmp_path / "over"
    cell = partial(hm.launch, plain_ranks.is_recording, str(over), on=on, session="own")
    gang = cell(np=1)
    gang.record(True)
    until(gang, lambda: gang.snapshot().is_recording)
    over.touch()
    ended(gang).raise_for_state()
    assert ended(cell()).results == [False]
    sessions.sessions()[0].end()


@pytest.mark.usefixtures("no_shared_disk")
def test_a_host_that_is_lost_while_it_receives_data_is_named(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def travel(*args: Any) -> str:
        travels.set()
        return await asyncio.Future()

    travels = threading.Event()
    monkeypatch.setattr(attempt, "_LOST_S", 5.0)
    monkeypatch.setattr(RemoteAgent, "send_dataset", travel)
    pids = ended(launch(plain_ranks.parent, np=2)).results
    with numbers() as rows:
        gang = launch(shards.read_here, rows, np=2)
        assert travels.wait(PATIENCE_S)
        # The whole host stands still: its task, if it went on, would end a stopped agent first.
        for pid in (task_in(directories[1]), pids[1]):
            os.kill(pid, signal.SIGSTOP)
        assert ended(gang).state == "FAILED"
    found = "has not responded for 5 s, while the data of hm.dataset() was sent to it"
    assert found in gang.snapshot().reason
    os.kill(pids[1], signal.SIGKILL)
    wait_until_gone(pids[1:])


@pytest.mark.exhaustive
def test_only_hosts_that_lack_the_data_receive_it(sent: list[str]) -> None:
    with hosts_on_other_disks(slice(1, 2)), numbers() as rows:
        found = ended(launch(shards.read_here, rows, np=2)).results
        assert shards.are_all_numbers(found, 1000)
        assert [folder == rows.path for _, _, folder in found] == [True, False]
        assert sent == [rows.name]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_shared_disk")
def test_a_dataset_that_was_deleted_is_reported_by_the_ranks(sent: list[str]) -> None:
    rows = numbers()
    rows.delete()
    failure = str(failure_of(launch(shards.read_here, rows, np=2)))
    assert "FileNotFoundError: the data of hm.dataset() is in" in failure and sent == []
    with numbers() as others:
        found = ended(launch(shards.read_here, others, rows, np=2)).results
    assert shards.are_all_numbers(found, 1000) and sent == [others.name] * 2


@pytest.mark.usefixtures("no_shared_disk")
def test_a_dataset_that_is_deleted_on_its_way_is_reported_by_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def delete(agent: RemoteAgent, *args: Any) -> str:
        rows.delete()
        return await send(agent, *args)

    rows, send = numbers(), RemoteAgent.send_dataset
    monkeypatch.setattr(RemoteAgent, "send_dataset", delete)
    failure = str(failure_of(launch(shards.read_here, rows, np=1)))
    assert "FileNotFoundError: the data of hm.dataset() is in" in failure


def write_and_tell(
    told: Path, problem: OSError | None, part: FilePart, data: memoryview, path: Path
) -> bool:
    """Write a part of a checkpoint; make the file ``told`` at its end. Later ones have ``problem``."""
    if problem is not None and told.exists():
        raise problem
    is_complete = file_transfer.write_part(part, data, path)
    if is_complete:
        told.touch()
    return is_complete


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_shared_disk")
def test_a_checkpoint_that_does_not_fit_here_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the notebook's machine: the ranks go on, and the next attempt continues from what is there."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(agents, "write_part", partial(write_and_tell, tmp_path / "kept", full))
    gang = ended(launch(plain_checkpoints.save_two, str(tmp_path / "kept"), np=2, retries=1))
    assert gang.results == [1, 1]
    assert notices_of(gang).count("(No space left on device: ") == 1


@pytest.mark.usefixtures("no_shared_disk")
@pytest.mark.parametrize(
    ("function", "args", "problem"),
    [
        (
            plain_checkpoints.save_two,
            [True],
            r"host .* cannot store the checkpoint, .*B: Not a directory \(.*\); free space there",
        ),
        (plain_checkpoints.spoil, [], r"the folder .* on host .* cannot be made: File exists"),
    ],
)
def test_a_host_that_cannot_store_a_checkpoint_is_named(
    function: Any, args: list[Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    monkeypatch.setattr(agents, "write_part", partial(write_and_tell, kept, None))
    gang = launch(function, str(kept), *args, np=2, retries=1)
    with pytest.raises(HydrogenError, match=problem):
        ended(gang).raise_for_state()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_shared_disk")
def test_an_attempt_has_the_data_that_was_deleted_meanwhile(tmp_path: Path) -> None:
    """As of a gang that has outlived the notebook, which deletes it at its end."""
    rows = numbers()
    gang = launch(shards.read_again, rows, str(tmp_path), np=1, retries=1)
    until(gang, (tmp_path / "read").exists)
    rows.delete()
    (tmp_path / "deleted").touch()
    assert shards.are_all_numbers(ended(gang).results, 1000)


@pytest.mark.usefixtures("no_shared_disk")
def test_one_host_that_cannot_store_a_dataset_ends_the_others_transfer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[str] = []

    async def travel(agent: RemoteAgent, *rest: Any) -> str:
        if not ends:
            ends.append("refused")
            return "its disk is full"
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    monkeypatch.setattr(RemoteAgent, "send_dataset", travel)
    with numbers() as rows, pytest.raises(HydrogenError, match="its disk is full; free"):
        ended(launch(shards.read_here, rows, np=2)).raise_for_state()
    wait_until(lambda: ends == ["refused", "cancelled"])


# ── all agents are closed: last, since each that starts again takes a second of a processor ───────


def test_errors_after_the_end_of_an_attempt_are_not_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Agents that had not ended their ranks when the hosts were taken away, as one that is stopped."""

    def revoked(hosts: DirectoryHosts) -> None:
        raise HostsRevokedError("the directories were taken away")

    monkeypatch.setattr(attempt, "_END_S", 0.0)
    gang = launch(plain_ranks.hang, np=2)
    until(gang, said(gang, "about to hang"))
    family = family_of(gang)
    monkeypatch.setattr(DirectoryHosts, "_check", revoked)
    with pytest.raises(HostsRevokedError) as caught:
        ended(gang).raise_for_state()
    local_agents.close()
    wait_until_gone(family)
    traceback.clear_frames(caught.tb)  # they hold what asyncio reports when it is freed
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
