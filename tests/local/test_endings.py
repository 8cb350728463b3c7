"""Endings of gangs on this machine, beside those that the contract suite has for every placement.

``test_contract`` tests who is named when a rank raises, is killed, stands still or never joins, what Stop
ends, and a retry. Here are the endings that take something special, and what is checked before a start.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

import hydrogen_magic as hm
from hydrogen_magic import capture
from hydrogen_magic.capture import CellText
from hydrogen_magic.core import events as ev
from hydrogen_magic.core import processes
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.core.messages import Ping
from hydrogen_magic.driver import attending, launcher
from hydrogen_magic.driver.interrupts import interrupts_held
from hydrogen_magic.driver.placements import local_agents
from hydrogen_magic.driver.placements.local import LocalAgentGroup
from hydrogen_magic.driver.placements.local_agent import LocalAgent
from hydrogen_magic.errors import (
    GangStoppedError,
    GangTimeoutError,
    HydrogenError,
    PlacementError,
)
from tests import ending_ranks, leaks, made_up_gpus, plain_ranks, ranks
from tests.gangs import (
    PATIENCE_S,
    agent_pids,
    alive,
    ended,
    failure_of,
    family_of,
    noticed_after_s,
    notices_of,
    said,
    until,
    wait_until,
    wait_until_gone,
)

pytestmark = pytest.mark.usefixtures("warm_agents")

LATE_S = 10
"""A start timeout that ranks keep on a machine that is busy with other tests."""


# ── a rank fails ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["SIGSEGV", "SIGABRT", "SIGKILL"])
def test_a_fatal_signal_is_explained(how: str) -> None:
    error = failure_of(hm.launch(ending_ranks.die, how, np=1))
    assert how in str(error)
    if how == "SIGKILL":
        assert re.search(r"used up to [\d.]+ MB of memory", error.report), error.report
    else:
        assert "ending_ranks.py" in error.report, "the Python stack at the crash"


@pytest.mark.parametrize(("hard_s", "how"), [(1, "SIGKILL"), (9, "SIGXCPU")])
def test_a_limit_of_the_cpu_time_is_explained(hard_s: int, how: str) -> None:
    error = failure_of(hm.launch(ending_ranks.reach_cpu_limit, hard_s, np=1))
    assert f"killed by {how} (its CPU time reached its limit: raise RLIMIT_CPU" in str(error)


def test_a_retry_names_the_cause_alone() -> None:
    gang = hm.launch(ranks.return_in_the_second_attempt, np=2, retries=1)
    until(gang, lambda: gang.ranks and gang.ranks[0].waiting_in and gang.ranks[1].pid)
    os.kill(gang.ranks[1].pid or 0, signal.SIGKILL)
    assert ended(gang).results == [0, 1]
    (text,) = notices_of(gang).splitlines()
    cause = "another process killed it, or the system was out of memory"
    assert re.fullmatch(
        rf"rank 1 failed: killed by SIGKILL \({cause}; .*\): restarting all ranks", text
    ), text


def test_killed_while_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kills_on_import.py").write_text(
        "import os\nif os.environ.get('RANK') == '1': os.kill(os.getpid(), 9)\ndef f(): return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import kills_on_import  # type: ignore[import-not-found]

    error = failure_of(hm.launch(kills_on_import.f, np=2))
    assert error.rank == 1
    assert "SIGKILL" in str(error)


def test_results_that_wait_for_the_agent_arrive_after_the_exit(tmp_path: Path) -> None:
    """An agent is busy, or waits for the kernel, while its rank sends the last ones and exits."""
    goes_on = tmp_path / "go"
    names = [f"v{n}" for n in range(50)]
    waits = f"while not Path({str(goes_on)!r}).exists(): time.sleep(0.01)"
    begins = ["import time", "from pathlib import Path", "print('ready', flush=True)", waits]
    text = "\n".join([*begins, *(f"{name} = 1" for name in names)])
    captured = capture.capture_cell(CellText(text, "<cell>", "cell", 2, str), {}, out=names)
    gang = launcher.launch_captured(captured, JobSpec(np=1), title="many results")
    until(gang, said(gang, "ready"))
    pids = agent_pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    goes_on.touch()
    wait_until_gone(family_of(gang))
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    ended(gang).raise_for_state()
    assert gang.received.of(0).everything().keys() >= set(names)


def test_killed_after_its_result_before_its_exit(tmp_path: Path) -> None:
    """Exit handlers may save a checkpoint, so the gang has failed; its results are kept."""
    go = tmp_path / "go"
    gang = hm.launch(ranks.end_after_result, str(go), np=2)
    until(gang, lambda: gang.ranks and all(r.result_bytes is not None for r in gang.ranks))
    go.touch()
    error = failure_of(gang)
    assert error.rank == 1
    assert "killed by SIGKILL after its result had arrived" in str(error)
    how = "the results of ranks 0 and 1 (the value) are saved in the record of the gang; load them with "
    assert f"{how}hydrogen_magic.load_results('{gang.id}')" in error.report
    assert hm.load_results(gang.id) == {"_": 7}


@pytest.mark.parametrize("how", ["raise", "_exit(0)", "SIGKILL"])
def test_a_closure_that_ends_who_loads_it(how: str) -> None:
    error = failure_of(hm.launch(ranks.use, ranks.EndsAtUnpickling(how, os.getpid()), np=2))
    assert error.rank == 1
    assert "loading" in error.report
    if how == "raise":
        assert "this cannot be loaded" in error.report


def test_ranks_that_fail_together_print_nothing_of_ours(tmp_path: Path) -> None:
    """Rank 0 is interrupted while its message is computed; rank 1 has a huge one."""
    gang = hm.launch(ranks.fail_together, str(tmp_path / "begun"), "the end", np=2)
    error = failure_of(gang)
    assert error.rank == 1
    assert "ValueError: bad batch xxx" in error.report and "xxx the end" in error.report
    assert len(error.report) < 20_000
    assert list(gang.logs.values()) == ["", ""]
    late = gang.ranks[0].failure
    assert late is not None and late.error.frames[-1].text == "raise SlowToSayError"
    assert late.error.message == "said at last"


def test_an_interrupted_exit_handler_prints_nothing_of_ours_or_of_a_library() -> None:
    library = "/usr/lib/python3/site-packages/torch/_dynamo/utils.py"
    gang = hm.launch(ending_ranks.leave_slowly, "", library, logging.__file__, np=3)
    until(gang, said(gang, "leaving"))
    gang.stop()
    log = ended(gang).logs[0]
    assert ", in hang" in log and log.rstrip(": \n").endswith("KeyboardInterrupt")
    assert "hydrogen_magic" not in log
    assert [gang.logs[1], gang.logs[2]] == ["leaving\n"] * 2


def test_a_cell_that_exits_names_its_line() -> None:
    """A rank that exits with status 0 has not finished the cell either."""
    gang = hm.launch(sys.exit, "bad config", np=2)
    assert str(failure_of(gang)).endswith("failed: SystemExit: bad config")
    assert not notices_of(gang), "no rank was in a collective"
    error = failure_of(hm.launch(ranks.end_one, 1, "exit(0)", np=2))
    assert "exit code 0 before the end of the cell counts as a failure" in error.report
    assert "sys.exit(int(how[5:-1]))" in error.report


def test_a_cell_that_closes_the_ranks_descriptors_is_explained() -> None:
    error = failure_of(hm.launch(os.closerange, 3, 256, np=1))
    assert "the cell has closed file descriptors that are not its own" in error.report


def test_a_stream_of_the_users_need_not_flush() -> None:
    gang = ended(hm.launch(ending_ranks.tee, np=2))
    assert gang.results == [4, 4]
    assert all(log.startswith("hello\n") for log in gang.logs.values())


def test_a_child_of_the_cell_may_exit_raise_or_return() -> None:
    """It is a copy of the rank, with the rank's connection to its agent. It prints no frames of ours."""
    gang = ended(hm.launch(ending_ranks.fork_three, np=1))
    assert gang.result == (7, 1) and len(gang.metrics) == 1, "it sends nothing of its parent"
    assert gang.logs[0].count("  File ") == 1 and "ValueError: of a child" in gang.logs[0]


def test_memory_error() -> None:
    error = failure_of(hm.launch(ranks.out_of_memory, 200 << 20, np=2))
    assert error.rank == 1
    assert "MemoryError" in str(error) and "RLIMIT_AS" in error.report


def test_a_limit_of_the_address_space_is_raised() -> None:
    code = """
import resource
from hydrogen_magic.core import address_space
name, hard = resource.RLIMIT_AS, resource.getrlimit(resource.RLIMIT_AS)[1]
spark = {"PYSPARK_EXECUTOR_MEMORY_MB": "8192"}
resource.setrlimit(name, (8 << 30, hard))
address_space.raise_limit_of_workers({})
assert resource.getrlimit(name) == (8 << 30, hard), "of the user"
address_space.raise_limit_of_workers(spark)
assert resource.getrlimit(name) == (hard, hard), resource.getrlimit(name)
resource.setrlimit(name, (8 << 30, 8 << 30))
address_space.raise_limit_of_workers(spark)  # only a privileged process may do it: no error elsewhere
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_out_of_memory_by_the_system() -> None:
    group = Path("/sys/fs/cgroup/memory") / f"hydrogen-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs a writable memory cgroup: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(300 << 20))

        error = failure_of(hm.launch(ending_ranks.eat, str(group / "cgroup.procs"), np=2))
        assert error.rank == 1
        assert "SIGKILL" in str(error) and "out of memory" in str(error)
    finally:
        group.rmdir()


def test_the_last_attempt_fails_the_gang() -> None:
    """An attempt that succeeds after one that failed is in the contract suite."""
    gang = hm.launch(sys.exit, 3, np=1, retries=1)
    assert "SystemExit: 3" in str(failure_of(gang))
    assert gang.snapshot().attempt == 1
    assert notices_of(gang).count("restarting all ranks") == 1, "only before another attempt"


def test_stop_ends_attempts_too() -> None:
    gang = hm.launch(sys.exit, 3, np=1, retries=1000)
    until(gang, lambda: gang.snapshot().attempt >= 2)
    gang.stop()
    assert ended(gang).snapshot().attempt < 1000


# ── it hangs ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.exhaustive  # the contract has ranks that do not join
def test_hanging_at_import_ends_by_start_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_module.py").write_text(
        "import os, time\nif os.environ.get('RANK') == '1': time.sleep(1000)\ndef f(): return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import slow_module  # type: ignore[import-not-found]

    error = failure_of(hm.launch(slow_module.f, np=2, start_timeout=LATE_S))
    assert error.rank == 1
    assert f"did not reach the cell within {LATE_S} s" in str(error)


def test_a_stopped_process_is_seen() -> None:
    gang = hm.launch(ranks.end_one, 1, "SIGSTOP", np=2)
    until(gang, lambda: gang.ranks[1].process_state == "T")
    gang.stop()
    with pytest.raises(GangStoppedError):
        ended(gang).raise_for_state()


def test_stacks_are_written_where_the_user_handles_signals(tmp_path: Path) -> None:
    gang = hm.launch(plain_ranks.wait_with_own_handler, str(tmp_path / "over"), np=1)
    until(gang, said(gang, "waiting"))
    until(gang, lambda: "in wait_for" in gang.stacks().get(0, ""))
    (tmp_path / "over").touch()
    assert ended(gang).result == []


def test_children_of_all_threads_are_of_the_family(tmp_path: Path) -> None:
    """A rank is not ended while one of them sends."""
    gang = hm.launch(plain_ranks.start_by_thread, str(tmp_path / "over"), np=1)
    until(gang, said(gang, "started"))
    child = int(gang.logs[0].split()[-1])
    assert child in processes.family(gang.ranks[0].pid or 0)
    (tmp_path / "over").touch()
    assert ended(gang).result == child and not alive([child])


@pytest.mark.parametrize("ways", [["collective"] * 2, ["sleep", "c"]])
def test_stacks_say_where_ranks_hang(ways: list[str]) -> None:
    gang = hm.launch(ranks.hang_each, ways, np=2)
    until(gang, said(gang, "about to hang"))
    until(gang, lambda: sum("in hang" in text for text in gang.stacks().values()) == 2)
    gang.stop()
    ended(gang)


def test_stacks_of_a_rank_that_writes_them_late_are_reported(tmp_path: Path) -> None:
    """As on a busy machine, where a rank gets the processor after those of its peers were reported."""
    over = tmp_path / "over"
    gang = hm.launch(plain_ranks.log_and_wait, str(over), np=2)
    until(gang, said(gang, "begun"))
    late = gang.ranks[1].pid or 0
    os.kill(late, signal.SIGSTOP)
    gang.ask_stacks()
    until(gang, lambda: "in log_and_wait" in gang.ranks[0].stacks)
    os.kill(late, signal.SIGCONT)
    over.touch()
    ended(gang).raise_for_state()
    assert "in log_and_wait" in gang.ranks[1].stacks


def test_ranks_that_disagree_are_told_apart() -> None:
    gang = hm.launch(ranks.one_collective_more, 1000.0, np=2)
    error = failure_of(gang)
    assert str(error) == "rank 1 never entered the all_reduce its peers were waiting in"
    assert error.rank == 1
    assert "in one_collective_more" in error.report, "where it was instead"


# ── it is stopped ────────────────────────────────────────────────────────────────────────────────


def test_stop_ends_ranks_whatever_they_do() -> None:
    gang = hm.launch(ranks.hang_each, ["sleep", "c", "deaf", "stubborn"], np=4)
    until(gang, said(gang, "about to hang"))
    until(gang, lambda: "deaf" in gang.logs[2])
    family = family_of(gang)
    gang.stop()
    ended(gang)
    assert not alive(family), "no rank is given up"
    with pytest.raises(GangStoppedError, match="stopped by you"):
        gang.raise_for_state()


def test_kill_does_not_ask() -> None:
    gang = hm.launch(ranks.hang, "stubborn", np=2, grace=3600)
    until(gang, said(gang, "about to hang"))
    gang.stop()
    gang.stop(kill=True)
    gang.stop(kill=True)
    ended(gang)


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.1])
def test_stop_while_it_starts(delay_s: float) -> None:
    gang = hm.launch(plain_ranks.hang, np=2)
    time.sleep(delay_s)  # any moment of the launch
    gang.stop()
    assert ended(gang).state == "STOPPED"


@pytest.mark.parametrize("is_made", [True, False])
def test_a_view_that_fails_stops_its_gang_and_is_the_reason(
    is_made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing:
        interval_s = 0.1

        def __init__(self, gang: hm.Gang, quiet: bool) -> None:
            if not is_made:
                raise OSError("no terminal")

        def update(self, state: object, fresh: object) -> None:
            raise OSError("no terminal")

        def withdraw_input(self) -> None: ...

        def close(self, state: object) -> None: ...

    monkeypatch.setattr(attending, "pick_view", Failing)
    gang = hm.launch(ranks.hang, "sleep", np=1)
    with pytest.raises(OSError, match="no terminal"):
        attending.attend(gang)
    with pytest.raises(GangStoppedError, match="the cell or script that waited for it failed"):
        gang.raise_for_state()


def test_a_tracker_gets_the_last_points_also_when_the_view_fails_to_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Failing:
        interval_s = 0.1

        def update(self, state: object, fresh: object) -> None: ...

        def withdraw_input(self) -> None: ...

        def close(self, state: object) -> None:
            raise OSError("no terminal")

    waited: list[hm.Gang] = []
    monkeypatch.setattr(attending, "pick_view", lambda gang, quiet: Failing())
    monkeypatch.setattr(attending.tracking, "finish", waited.extend)
    gang = hm.launch(plain_ranks.rank, np=1)
    with pytest.raises(OSError, match="no terminal"):
        attending.attend(gang)
    assert waited == [gang]


def test_an_interrupt_is_for_the_gang_that_the_main_thread_waits_for() -> None:
    class Waited:
        def __init__(self) -> None:
            self.stops: list[bool] = []

        def stop(self, kill: bool = False) -> None:
            self.stops.append(kill)

    def wait_beside() -> None:
        with interrupts_held() as interrupts:
            interrupts.take(beside)

    mine, beside = Waited(), Waited()
    with interrupts_held() as interrupts:
        interrupts.take(mine)
        for _ in range(2):  # the second begins while the first interrupt takes effect
            other = threading.Thread(target=wait_beside)
            other.start()
            other.join()
            signal.raise_signal(signal.SIGINT)
    assert (mine.stops, beside.stops) == ([False, True], [])


def test_an_interrupt_that_the_process_ignores_stops_nothing() -> None:
    """A shell starts jobs in the background so."""

    class Waited:
        def stop(self, kill: bool) -> None:
            raise AssertionError

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_held() as interrupts:
            interrupts.take(Waited())
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("during", ["cleaned_up", "release"])
def test_stop_after_the_last_rank_changes_nothing(
    during: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = LocalAgent if during == "cleaned_up" else LocalAgentGroup
    takes_its_time = getattr(part, during)

    async def and_is_stopped(self: object) -> None:
        await takes_its_time(self)
        list(hm.gangs().values())[-1].stop()
        await asyncio.sleep(0)  # until the controller has it

    monkeypatch.setattr(part, during, and_is_stopped)
    gang = ended(hm.launch(plain_ranks.rank, np=2))
    assert gang.state == "SUCCEEDED" and gang.results == [0, 1]
    assert "all ranks had ended before Stop" in notices_of(gang)


def test_a_rank_may_clean_up_when_stopped(tmp_path: Path) -> None:
    gang = hm.launch(ranks.clean_up_on_stop, str(tmp_path / "saved"), np=2)
    until(gang, said(gang, "ready"))
    gang.stop()
    ended(gang)
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1"]


def test_a_handler_of_the_cells_may_clean_up_when_stopped() -> None:
    gang = hm.launch(ending_ranks.save_at_interrupt, np=1, grace=PATIENCE_S)
    until(gang, said(gang, "ready"))
    gang.stop()
    assert ended(gang).logs[0] == "ready\nsaving\nsaved\n"
    assert gang.snapshot().ranks[0].phase == "stopped"


def test_timeout() -> None:
    begun = time.monotonic()
    gang = hm.launch(ranks.hang, "sleep", np=2, timeout=1.5)
    with pytest.raises(GangTimeoutError, match=r"it ran longer than its timeout of 1\.5 s"):
        ended(gang).raise_for_state()
    assert time.monotonic() - begun >= 1.5


def test_the_error_of_a_stopped_gang_says_where_its_ranks_waited() -> None:
    gang = hm.launch(ranks.hang, "collective", np=2)
    until(gang, lambda: gang.ranks[0].waiting_in.startswith("all_reduce"))
    gang.stop()
    where = "rank 0 waited in all_reduce #2 for .* s; missing: rank 1"  # ranks.meet has the first
    with pytest.raises(GangStoppedError, match=f"stopped by you; when it was stopped, {where}"):
        ended(gang).raise_for_state()


def test_a_jump_of_the_wall_clock_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gang = hm.launch(ranks.hang, "sleep", np=2, timeout=3600, start_timeout=3600)
    until(gang, said(gang, "about to hang"))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 7200)
    assert not gang.wait(1.0), "two hours by the wall clock are no time"
    assert gang.snapshot().now_s < 60
    gang.stop()
    ended(gang)


@pytest.mark.parametrize("count", [20, pytest.param(250, marks=pytest.mark.exhaustive)])
def test_many_children(count: int) -> None:
    gang = hm.launch(ranks.many_children, count, np=2)
    until(gang, said(gang, "forked"))
    family = family_of(gang)
    assert len(family) == 2 * (1 + count)
    gang.stop()
    ended(gang)
    assert not alive(family)


# ── between gangs ────────────────────────────────────────────────────────────────────────────────


def test_an_agent_keeps_no_closure_of_a_gang_that_ended() -> None:
    """Closures come as memory files; whoever forgets to close one keeps its memory."""
    stacks = "/memfd:hydrogen_magic:stacks"  # of workers that wait for the next gang

    def held() -> list[str]:
        links = [link for pid in agent_pids() for link in leaks._links(pid)]
        names = [link.partition(" ")[0] for link in links]
        return [
            name for name in names if name.startswith("/memfd:hydrogen_magic:") and name != stacks
        ]

    for _ in range(2):
        ended(hm.launch(plain_ranks.rank, np=2)).raise_for_state()
    wait_until(lambda: not held())


# ── while it computes ──


def test_ranks_are_batch_work_and_the_notebook_is_not() -> None:
    assert hm.launch(ranks.scheduling, np=2).results == [os.SCHED_BATCH] * 2
    assert [os.sched_getscheduler(pid) for pid in agent_pids()] == [os.SCHED_BATCH]
    policies = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended
            policies.add(os.sched_getscheduler(int(thread)))
    assert os.SCHED_BATCH in policies, "the thread that listens to agents"
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


# ── before it starts ─────────────────────────────────────────────────────────────────────────────


def test_too_few_gpus_are_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up_gpus.report(2, tmp_path, monkeypatch)
    with pytest.raises(PlacementError, match=r"needs 4 GPUs, this machine has 2: use `--np 2`"):
        hm.launch(plain_ranks.environment, np=4, gpu=True)


def test_every_rank_has_a_gpu_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up_gpus.report(4, tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    found = hm.launch(plain_ranks.environment, np=2, gpu=True).results
    assert [(e["LOCAL_RANK"], e["CUDA_VISIBLE_DEVICES"]) for e in found] == [
        ("0", "3,1"),
        ("1", "3,1"),
    ]
    assert hm.launch(plain_ranks.environment, np=1, gpu=False).result["CUDA_VISIBLE_DEVICES"] == ""
    assert hm.launch(plain_ranks.environment, np=2).result["CUDA_VISIBLE_DEVICES"] == "3,1"
    monkeypatch.setenv(
        "CUDA_VISIBLE_DEVICES", "MIG-aa,MIG-bb"
    )  # slices, which the driver's list lacks
    assert hm.launch(plain_ranks.environment, np=1).result["CUDA_VISIBLE_DEVICES"] == "MIG-aa"


def test_the_environment_is_torchruns() -> None:
    found = hm.launch(plain_ranks.environment, np=2, env={"MINE": "1"}).results
    for rank, environment in enumerate(found):
        expected = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_WORLD_SIZE": 2,
            "GROUP_RANK": 0,
            "GROUP_WORLD_SIZE": 1,
            "ROLE_RANK": rank,
            "ROLE_WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": 1,
            "MINE": 1,
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        assert {name: environment.get(name) for name in expected} == {
            name: str(value) for name, value in expected.items()
        }
    assert "RANK" not in os.environ


LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F")
"""As ``/proc/net`` writes 127.0.0.1, and as a JVM of a test's cluster has it."""


def test_nothing_listens_but_on_loopback() -> None:
    gang = hm.launch(ranks.hang, "collective", np=2)
    until(gang, lambda: gang.ranks and gang.ranks[0].waiting_in)
    wildcards = [
        line.split()[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[3] == "0A"
        and not line.split()[1].startswith(LOOPBACK)
        and _inode_is_ours(line.split()[9])
    ]
    gang.stop()
    ended(gang)
    assert wildcards == []


def _inode_is_ours(inode: str) -> bool:
    pids = [process.pid for process in processes.descendants(os.getpid())]
    return any(f"socket:[{inode}]" in leaks._links(pid) for pid in pids)


def test_a_gang_that_ended_left_a_whole_record_and_cannot_be_stopped() -> None:
    from hydrogen_magic.core import run_log

    gang = ended(hm.launch(plain_ranks.rank, np=2))
    gang.stop()
    gang.stop(kill=True)
    assert gang.state == "SUCCEEDED" and gang.results == [0, 1]
    events = run_log.read(gang.id)
    assert events == gang.events()
    assert isinstance(events[-1], ev.GangEnded)


def test_what_ranks_see_is_as_it_was_at_launch() -> None:
    """The notebook goes on while a gang runs: its arrays may change, the ranks' must not."""
    import numpy

    data = numpy.ones(1_000_000)
    gang = hm.launch(numpy.sum, data, np=1)
    data[:] = 0
    assert ended(gang).result == 1_000_000


def test_where_ranks_run_is_as_it_was_at_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the second attempt, which begins when the notebook has gone on."""

    then, later = tmp_path / "then", tmp_path / "later"
    then.mkdir()
    later.mkdir()
    (later / "again").touch()
    monkeypatch.chdir(then)
    monkeypatch.setenv("MODE", "then")
    gang = hm.launch(ending_ranks.look, np=1, retries=1)
    monkeypatch.chdir(later)
    monkeypatch.setenv("MODE", "later")
    monkeypatch.setattr(sys, "path", [*sys.path, "/added/later"])
    until(gang, said(gang, "first"))
    (then / "go").touch()
    assert ended(gang).result == (str(then), "then", False)


def test_a_launch_that_cannot_be_said_leaves_nothing_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(PlacementError, match="working directory"):
        ended(hm.launch(int, "1", np=1)).raise_for_state()
    monkeypatch.chdir(tmp_path)
    assert hm.launch(int, "2", np=1).result == 2


def test_an_environment_that_is_too_large_is_an_error_not_a_hang() -> None:
    with pytest.raises(HydrogenError, match=r"^the ranks could not be started: .* too long"):
        ended(hm.launch(plain_ranks.rank, np=2, env={"TORCH_X": "x" * 200_000})).raise_for_state()


# ── an agent starts anew, or dies ────────────────────────────────────────────────────────────────

# Last, and without torch: each agent that ends would cost another one that imports it.


STARTS_A_THREAD = """
import os, threading
if os.getpid() != {kernel}:
    threading.Thread(target=threading.Event().wait, daemon=True, name="of a library").start()
def f(): return "of a library" in [thread.name for thread in threading.enumerate()]
"""


def test_what_starts_a_thread_when_it_is_imported_is_left_to_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork lacks its parent's threads: from the second gang on, no template imports it."""
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "starts_a_thread.py").write_text(STARTS_A_THREAD.format(kernel=os.getpid()))
    monkeypatch.syspath_prepend(packages)
    import starts_a_thread  # type: ignore[import-not-found]

    ended(hm.launch(starts_a_thread.f, np=2)).raise_for_state()
    assert ended(hm.launch(starts_a_thread.f, np=2)).results == [True, True]


def test_signals_that_the_notebook_blocks_or_ignores_reach_ranks(cold: None) -> None:
    blocked = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        gang = ended(hm.launch(ending_ranks.signals, np=1))
    finally:
        signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert gang.result == (set(), signal.SIG_DFL)


def test_an_agent_that_is_killed_takes_its_ranks_along_and_costs_an_attempt() -> None:
    gang = hm.launch(plain_ranks.family, np=2, retries=1)

    def is_training(attempt: int) -> bool:
        # The logs have the lines of earlier attempts, too.
        return gang.snapshot().attempt == attempt and all(
            rank.pid is not None and gang.logs[rank.rank].count("batch") > attempt
            for rank in gang.ranks
        )

    for attempt, how in enumerate((signal.SIGTERM, signal.SIGKILL)):
        until(gang, partial(is_training, attempt))
        family = family_of(gang)
        for pid in agent_pids():
            os.kill(pid, how)
        wait_until_gone(family)
    ended(gang)
    with pytest.raises(hm.errors.HydrogenError, match=r"^the agent process .* \(SIGKILL\)"):
        gang.raise_for_state()
    assert "exited unexpectedly (SIGTERM); its ranks were killed: restarting" in notices_of(gang)


def test_an_agent_that_is_killed_while_it_starts_costs_an_attempt() -> None:
    local_agents.close()  # no warm one
    gang = hm.launch(ending_ranks.return_later, np=2, retries=1)
    until(gang, agent_pids)
    for pid in agent_pids():
        os.kill(pid, signal.SIGKILL)
    assert ended(gang).results == ["1", "1"]
    assert "exited unexpectedly (SIGKILL); its ranks were killed: restarting" in notices_of(gang)


KILLS_FORKSERVERS = """
import os
from pathlib import Path
importer = os.getpid()
if importer != {kernel} and "RANK" not in os.environ:
    for left in Path({left!r}).iterdir():
        left.unlink()
        os.kill(importer, 9)
def is_its_importer(): return os.getpid() == importer
"""


@pytest.mark.parametrize("n_deaths", [1, 2])
def test_a_template_that_dies_is_replaced_and_no_rank_is_blamed(
    n_deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have killed the first one: the next one imports the module. After two, ranks do."""
    packages, left = tmp_path / "site-packages", tmp_path / "left"
    packages.mkdir()
    left.mkdir()
    for n in range(n_deaths):
        (left / str(n)).touch()
    name = f"kills_{n_deaths}"
    text = KILLS_FORKSERVERS.format(kernel=os.getpid(), left=str(left))
    (packages / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(packages)
    module = importlib.import_module(name)

    gang = ended(hm.launch(module.is_its_importer, np=2))
    assert gang.results == [n_deaths > 1] * 2
    assert "the forkserver exited unexpectedly" in notices_of(gang)


@pytest.mark.parametrize(
    ("stopped", "kill"),
    [
        pytest.param("agent", False, marks=pytest.mark.exhaustive),
        pytest.param("agent", True, marks=pytest.mark.exhaustive),
        pytest.param("agent and forkserver", False, marks=pytest.mark.exhaustive),
        ("agent and forkserver", True),
        pytest.param("all", True, marks=pytest.mark.exhaustive),
    ],
)
def test_an_agent_that_does_not_respond_is_ended(stopped: str, kill: bool) -> None:
    """A stopped agent answers nothing, as one that hangs. The ranks' helpers have own sessions."""
    gang = hm.launch(plain_ranks.family, np=2)
    until(gang, said(gang, "batch"))
    agent = next(agent for agent in local_agents.pool().all if agent.gang == gang.id)
    mark = processes.AGENT, agent.marks[processes.AGENT]
    family = set(leaks.marked(*mark))
    assert family > set(family_of(gang)) and agent.process.pid in family
    for pid in stopped_with(agent.process.pid, stopped, family):
        os.kill(pid, signal.SIGSTOP)
    gang.stop()
    if kill:
        gang.stop(kill=True)
    with pytest.raises(GangStoppedError, match="stopped by you"):
        ended(gang).raise_for_state()
    wait_until_gone(family)  # they were killed at the end
    wait_until(lambda: not leaks.marked(*mark))
    assert {rank.phase for rank in gang.ranks} == {"stopped"}
    why = f"(pid {agent.process.pid}) did not respond"
    assert why in notices_of(gang)
    assert not kill or noticed_after_s(gang, why) < 5


def stopped_with(agent: int, stopped: str, family: set[int]) -> set[int]:
    """Return the pids to stop, of which ``family`` has all."""
    if stopped == "all":
        return family
    forkservers = {
        process.pid
        for process in processes.processes(family)
        if process.ppid == agent
        and b"hydrogen_magic.node.agent.forkserver"
        in processes.read(f"/proc/{process.pid}/cmdline")
    }
    assert forkservers, "with the workers that it has forked in advance"
    return {agent} if stopped == "agent" else {agent, *forkservers}


def test_an_agent_that_lost_its_connection_ends_the_gang() -> None:
    gang = hm.launch(plain_ranks.family, np=2)
    until(gang, said(gang, "batch"))
    family = family_of(gang)
    (agent,) = local_agents.pool().all
    too_large = bytes(65 << 20)  # ZeroMQ drops the message, and the connection with it
    agent.hub.loop.call_soon_threadsafe(agent.hub.send, agent.keys.key, Ping(), too_large)
    ended(gang)
    with pytest.raises(hm.errors.HydrogenError, match="lost the connection to the kernel"):
        gang.raise_for_state()
    wait_until_gone(family)


def test_an_agent_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    local_agents.close()  # no warm one
    monkeypatch.setenv("PYTHONHASHSEED", "none")
    with pytest.raises(PlacementError, match=r"exit code 1\).*\n.*PYTHONHASHSEED must be"):
        hm.run(plain_ranks.rank, np=2)


def test_a_rank_that_has_left_a_collective_is_not_said_to_miss_it() -> None:
    error = failure_of(hm.launch(ranks.reduce_different_shapes, np=2))
    assert str(error).startswith("rank 0 left the all_reduce in which rank 1 waits: do shapes")
