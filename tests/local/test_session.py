"""Sessions on this machine: ranks that stay between cells."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from hydrogen_magic.capture import versions
from hydrogen_magic.driver import known_gangs, launcher
from hydrogen_magic.driver import session as sessions
from hydrogen_magic.driver.placements import agent_client, local
from hydrogen_magic.errors import (
    CaptureError,
    GangStoppedError,
    HydrogenError,
    OptionValueError,
    RankFailedError,
    ResultError,
)
from tests.gangs import (
    PATIENCE_S,
    ended,
    notices_of,
    until,
    wait_until,
    wait_until_gone,
)
from tests.result_checks import details_of

pytestmark = pytest.mark.usefixtures("warm_agents")

IMPORTS = (
    "import os, sys, time\nimport torch, torch.distributed as dist\nimport hydrogen_magic as hm"
)
JOIN = "dist.init_process_group('gloo')\n"


class Cells:
    """Runs cells in a shell."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.run(IMPORTS)

    def run(self, text: str) -> Any:
        done = self.shell.run_cell(text, store_history=True)
        done.raise_error()
        return done.result

    def on_ranks(self, text: str, options: str = "") -> Any:
        """Run a cell in the session ``lab`` of two ranks."""
        return self.run(f"%%distributed --session lab --quiet {options}\n{text}")

    def all_ranks(self, expression: str) -> list[Any]:
        """Return the value of an expression on both ranks, by the session's process group."""
        gather = f"found = [None] * 2; dist.all_gather_object(found, {expression})\nfound"
        found: list[Any] = self.on_ranks(gather)
        return found


@pytest.fixture
def cells(notebook_shell: InteractiveShell) -> Any:
    yield Cells(notebook_shell)
    for session in sessions.sessions():
        session.end()
    wait_until(lambda: not sessions.sessions())


def test_a_cell_that_cannot_be_launched_leaves_the_sessions_as_they_are(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise HydrogenError("there is no place for the output of the ranks")

    def run_without_place(options: str) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(launcher, "_new_run", refuse)
            with pytest.raises(HydrogenError, match="there is no place"):
                cells.on_ranks("1", options)

    run_without_place("--np 1")
    assert sessions.sessions() == []
    assert cells.on_ranks("x = hm.world_size()\nx", "--np 2") == 2
    run_without_place("")
    assert cells.on_ranks("x") == 2


def test_later_cells_run_on_the_same_ranks_with_their_variables(cells: Cells) -> None:
    cells.run("x = 3\ndef f(): return x + 1")
    pid = cells.on_ranks(JOIN + "y = [x]\nz = f()\nos.getpid()", "--np 2")
    cells.run("x = 4\ndef f(): return x + 100")
    assert cells.on_ranks("y.append(x)\n(os.getpid(), y, z, f())") == (pid, [3, 4], 4, 104)
    assert cells.all_ranks("hm.rank()") == [0, 1], "the process group is still joined"
    cells.on_ranks("history = [1, 2]")
    assert cells.on_ranks("history[-1]") == 2, "which is no magic of the notebook"
    assert cells.on_ranks("del z\ny = len(y)", "--out y") is None
    assert cells.shell.user_ns["y"] == 2
    with pytest.raises(CaptureError, match="`z`"):
        cells.on_ranks("z")


def test_a_signal_between_cells_is_handled_in_the_next_one(cells: Cells) -> None:
    """Its handler may raise, as that of torch's DataLoader does when a worker was killed."""
    cells.run(
        "import signal, time\n"
        "def late(number, frame): raise TimeoutError('the step took too long')\n"
    )
    handle = "import os\nsignal.signal(signal.SIGALRM, late)\nx = 3\nos.getpid()"
    pid = cells.on_ranks(handle, "--np 1")
    os.kill(pid, signal.SIGALRM)
    with pytest.raises(RankFailedError, match="TimeoutError: the step took too long"):
        cells.on_ranks("x")
    assert cells.on_ranks("x, os.getpid()") == (3, pid)


def test_displays_outlast_their_cell(cells: Cells, capsys: pytest.CaptureFixture[str]) -> None:
    """An update is seen below a later cell; what comes back displays in the notebook."""
    define = "def show(text): display(text)\nhandle = display('first', display_id=True)"
    cells.on_ranks(define, "--np 1 --out show,handle")
    cells.on_ranks("handle.update('second')")
    assert capsys.readouterr().out.splitlines() == ["'first'", "'second'"]
    with capture_output() as captured:
        cells.run("from IPython.display import HTML\nshow(HTML('<b>third</b>'))")
        cells.run("handle.update(HTML('<i>fourth</i>'))")
    shown = [output.data["text/html"] for output in captured.outputs]
    assert shown == ["<b>third</b>", "<i>fourth</i>"]


def test_sharded_results_of_each_cell_come_home(cells: Cells) -> None:
    """The process group stays, with what earlier cells have told there. Not from some of its ranks."""
    cells.run("from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh")
    cells.on_ranks(
        JOIN + "whole = torch.arange(8.0)\n"
        "part = distribute_tensor(whole, init_device_mesh('cpu', (2,)), [Shard(0)])",
        "--np 2",
    )
    for _ in range(2):
        assert cells.on_ranks("part", "--out part").tolist() == list(range(8))
        assert cells.shell.user_ns["part"].tolist() == list(range(8))
    with pytest.raises(ResultError, match="this cell does not run on all ranks"):
        cells.on_ranks("part", "--ranks 0")


def test_a_failing_cell_costs_neither_ranks_nor_variables(cells: Cells) -> None:
    """The peer waits in a collective, and later in the backward pass of DDP, until it is released.

    What uses the default group has the new one then: hooks of DDP, a sharded optimizer, and variables.
    """
    begin = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
n_buckets = 0
def hook(group, bucket):
    global n_buckets
    n_buckets += 1
    return allreduce_hook(group, bucket)
group, printing = dist.group.WORLD, sys.excepthook
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
net.register_comm_hook(group, hook)
opt = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=1.0)
"""
    step = "net(torch.ones(1, 2)).sum().backward(); opt.step()\n"
    pid = cells.on_ranks(f"{JOIN}{begin}{step}os.getpid()", "--np 2")
    for n_earlier, wait in enumerate(("dist.all_reduce(torch.ones(1))", step), start=1):
        with pytest.raises(RankFailedError) as caught:
            cells.on_ranks(f"if hm.rank() == 1:\n    raise ValueError('bad batch')\n{wait}")
        assert (caught.value.rank, "bad batch" in caught.value.report) == (1, True)
        assert str(caught.value).count("rank 1") == 1, "as before"
        reduce = "t = torch.ones(1); dist.all_reduce(t, group=group)\n"
        found = "n_buckets, float(t), sys.excepthook is printing, os.getpid()"
        assert cells.on_ranks(step + reduce + found) == (n_earlier + 1, 2.0, True, pid)
        assert cells.all_ranks("hm.rank()") == [0, 1]


def test_a_cell_that_all_ranks_fail_leaves_the_process_group_alone(cells: Cells) -> None:
    """A typo should not cost the groups that the user has made."""
    cells.on_ranks(JOIN + "pair = dist.new_group([0, 1])", "--np 2")
    with pytest.raises(RankFailedError):
        cells.on_ranks("torch.one(1)")
    reduced = "t = torch.ones(1)\ndist.all_reduce(t, group=pair)\nt.item()"
    assert cells.on_ranks(reduced) == 2.0


def test_a_cell_that_joins_and_leaves_can_be_run_again(cells: Cells) -> None:
    """By torch alone, ranks wait for addresses of an earlier group after a few times."""
    join = "    dist.init_process_group('gloo', timeout=timedelta(seconds=20))\n"
    leave = "    t = torch.ones(1)\n    dist.all_reduce(t)\n    dist.destroy_process_group()\n"
    again = f"from datetime import timedelta\nfor n in range(6):\n{join}{leave}t.item()"
    for _ in range(2):
        assert cells.on_ranks(again, "--np 2") == 2.0


def test_a_model_stays_wrapped_when_the_notebook_changes_its_copy(cells: Cells) -> None:
    """``--out`` brings it back without its wrapper; without that, ranks would train models of their own."""
    cells.run("model = torch.nn.Linear(1, 1)")
    wrap = "DDP = torch.nn.parallel.DistributedDataParallel\nmodel = DDP(model)\n"
    made = "made = DDP(torch.nn.Linear(1, 1)); opt = torch.optim.SGD(made.parameters())\n"
    cells.on_ranks(JOIN + wrap + made, "--np 2")
    cells.on_ranks("model, made", "--out model,made")
    cells.run("with torch.no_grad():\n    model.weight.fill_(3); made.weight.fill_(4)")
    weights = "model.module.weight.item(), made.module.weight.item()"
    is_attached = "made.module.weight is opt.param_groups[0]['params'][0]"
    assert cells.on_ranks(f"{weights}, {is_attached}") == (3, 4, True)


def test_a_rank_that_ends_its_cell_early_is_found(cells: Cells) -> None:
    """Its peer waits in a collective, and in a backward pass, which no observer sees."""
    model = "net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))\n"
    pid = cells.on_ranks(JOIN + model + "os.getpid()", "--np 2")
    step = "net(torch.ones(1, 2)).sum().backward()"
    reduce = "dist.all_reduce(torch.ones(1))"
    for wait, name in ((reduce, "all_reduce"), (step, "collective")):
        with pytest.raises(RankFailedError) as caught:
            cells.on_ranks(f"if hm.rank() == 0:\n    {wait}")
        entered = f"rank 1 never entered the {name} its peers were waiting in"
        assert str(caught.value).startswith(f"{entered} (rank 1 had already finished)")
        report = caught.value.report
        assert "rank 0 was waiting here:" in report and ", line 3, in <module>" in report, report
        assert cells.on_ranks(f"{reduce}\nos.getpid()") == pid
    alone = "if hm.rank() == 0:\n    time.sleep(2.5)\n"
    assert cells.on_ranks(f"{reduce}\n{alone}1") == 1, "not in a collective"


def test_a_collective_in_a_cell_on_some_ranks_is_found(cells: Cells) -> None:
    """Also the one of DDP's forward pass. Ranks may exchange data in pairs, and join a group of their own."""
    model = "model = torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(2))\n"
    step = "model(torch.ones(4, 2))"
    cells.on_ranks(JOIN + model + step, "--np 3")
    for wait, name in (("dist.barrier()", "barrier"), (step, "collective")):
        with pytest.raises(RankFailedError) as caught:
            cells.on_ranks(wait, "--ranks 1")
        never = f"ranks 0 and 2 never entered the {name} their peers were waiting in"
        text = "the cell leaves ranks 0 and 2 out: run it on all ranks, or call the `module` of a DDP model"
        assert str(caught.value) == f"{never} ({text})"
        assert cells.on_ranks(f"{step}.shape[0]") == 4
    swap = "t = torch.ones(1)\ndist.send(t, 1) if hm.rank() == 0 else dist.recv(t, 0)\n"
    own = "dist.destroy_process_group()\nstore = dist.HashStore()\n"
    own += "dist.init_process_group('gloo', store=store, rank=0, world_size=1)\ndist.barrier()\n"
    wait = "time.sleep(2.5)\nmodel.module(torch.ones(4, 2)).shape[0]"
    assert cells.on_ranks(swap + wait, "--ranks 0,1") == 4
    assert cells.on_ranks(own + wait, "--ranks 1") == 4


def test_the_workers_of_a_data_loader_stay(cells: Cells) -> None:
    loader = """class Pids(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, n): return os.getpid()
loader = torch.utils.data.DataLoader(Pids(), num_workers=2, persistent_workers=True)
"""
    pids = "sorted({int(pid) for pid in loader})"
    first = cells.on_ranks(f"{loader}{pids}", "--np 2")
    assert len(first) == 2 and cells.on_ranks("os.getpid()") not in first
    assert cells.on_ranks(pids) == first


def test_children_odd_objects_and_streams_of_cells_cost_nothing(cells: Cells) -> None:
    """A sparse tensor has no ``nbytes``, a proxy of nothing no class; all variables are looked at."""
    fork = "pid = os.fork()\nif pid == 0:\n    raise ValueError('of a child')\n"
    assert cells.on_ranks(fork + "os.waitpid(pid, 0)[1]", "--np 2") == 1 << 8, "a child is no rank"
    sparse = "import weakref\nkept, sparse = 1, torch.eye(3).to_sparse()\n"
    proxy = "class Other: __module__ = None\nother = Other()\nproxy = weakref.proxy(Other())\n"
    exits = "class Exits:\n    def __reduce__(self): sys.exit(4)\nexits = Exits()\n"
    cells.on_ranks(sparse + proxy + exits + "globals()[1] = 2")
    assert cells.on_ranks("kept, sparse.shape[0]") == (1, 3)
    with pytest.raises(ResultError, match="SystemExit"):
        cells.on_ranks("pass", "--out exits")
    tee = "class Tee:\n    def write(self, text): sys.__stdout__.write(text)\nsys.stdout = Tee()\n"
    cells.on_ranks(tee + "!true\ndisplay(kept)")  # it has no flush
    assert cells.on_ranks("kept") == 1
    cells.on_ranks("for name in [*globals()]:\n    if name != 'kept': globals().pop(name)")
    assert cells.on_ranks("kept") == 1


def test_a_report_names_the_earlier_cells_of_a_session(cells: Cells) -> None:
    cells.on_ranks("def helper(v):\n    return v / 0", "--np 2")
    with pytest.raises(RankFailedError) as caught:
        cells.on_ranks("helper(3)")
    assert re.search(r"^  Cell In\[\d+\], line 3, in helper$", caught.value.report, re.MULTILINE)


@pytest.mark.parametrize(
    ("end", "others", "why"),
    [
        ("os.kill(os.getpid(), 9)", "time.sleep(1000)", "rank 1 was killed by SIGKILL"),
        ("os._exit(3)", "time.sleep(1000)", "rank 1 exited with status 3"),
        (
            "raise ValueError",
            "while True:\n    try: time.sleep(1000)\n    except KeyboardInterrupt: pass",
            "rank 0 was killed by SIGKILL when the cell was stopped",
        ),
    ],
)
def test_a_rank_that_dies_ends_the_session_and_the_report_names_its_variables(
    end: str, others: str, why: str, cells: Cells
) -> None:
    cells.on_ranks("weights = torch.ones(3)", "--np 2")
    (session,) = sessions.sessions()
    with pytest.raises(RankFailedError, match="rank 1"):
        cells.on_ranks(f"if hm.rank() == 1:\n    {end}\n{others}", "--grace 0.5")
    assert "lost with its ranks: weights" in session.loss and not sessions.sessions()
    said = f"'lab' has ended: its ranks have ended with a cell: {why}; lost .*: weights"
    with pytest.raises(CaptureError, match=said):
        cells.on_ranks("weights", "--np 2")


def test_a_stop_ends_the_cell_and_a_second_one_the_session(cells: Cells) -> None:
    pid = cells.on_ranks(JOIN + "os.getpid()", "--np 2")
    wait = "if hm.rank() == 0:\n    dist.all_reduce(torch.ones(1))\ntime.sleep(1000)"
    gang = cells.on_ranks(wait, "--detach")
    until(gang, lambda: gang.ranks[0].waiting_in)
    gang.stop()
    assert ended(gang).state == "STOPPED"
    assert (cells.on_ranks("os.getpid()"), cells.all_ranks("hm.rank()")) == (pid, [0, 1])
    stubborn = "while True:\n    try: time.sleep(1000)\n    except KeyboardInterrupt: pass"
    gang = cells.on_ranks(stubborn, "--detach --grace 1000")
    until(gang, lambda: all(rank.phase == "running" for rank in gang.ranks))
    gang.stop()
    gang.stop(kill=True)
    assert ended(gang).state == "STOPPED" and "session 'lab' has ended" in notices_of(gang)
    wait_until_gone([pid])


def test_a_stop_while_results_are_packed_ends_the_cell_alone(cells: Cells) -> None:
    """The classes' own code may take long, for each of them and each time."""
    slow = "class Slow:\n    def __getstate__(self): time.sleep(60)\n"
    pid = cells.on_ranks(f"{slow}a, b = Slow(), Slow(); os.getpid()", "--np 2")
    gang = cells.on_ranks("[a, b]", "--out a,b --detach")
    wait_until(lambda: "packing `a`" in details_of(gang))
    gang.stop()
    assert gang.wait(60) and gang.state == "STOPPED"
    assert cells.on_ranks("os.getpid()") == pid


def test_results_of_earlier_cells_are_released_without_a_garbage_collection(cells: Cells) -> None:
    """It comes rarely: torch alone has hundreds of thousands of objects that do not change."""
    imports = (
        "import gc, weakref, torch.distributed.tensor"  # with it, ranks look for sharded tensors
    )
    cells.on_ranks(f"{imports}\ngc.collect(); gc.disable(); made = []", "--np 2")
    gc.collect()
    gc.disable()
    try:
        brought = []
        for _ in range(8):
            cells.on_ranks("found = torch.ones(2); made.append(weakref.ref(found))", "--out found")
            brought.append(weakref.ref(cells.shell.user_ns["found"]))
        on_rank = cells.on_ranks("sum(each() is not None for each in made)")
        # The kernel keeps small results of the last four gangs.
        assert on_rank == 1 and [each() for each in brought[1:3]] == [None, None]
    finally:
        gc.enable()


def test_peers_wait_for_a_rank_that_may_ask(cells: Cells) -> None:
    """Groups that exist wait longer, but only while that cell runs."""
    pytest.importorskip("torch", "2.7", "the timeout of a group of torch 2.6 cannot be changed")
    second = "timeout=datetime.timedelta(seconds=1)"
    # Ranks may start, and import torch, more than a second apart.
    cells.on_ranks("import datetime\ndist.is_initialized()", "--np 2")
    cells.on_ranks(f"dist.init_process_group('gloo', {second})")
    late = "if hm.rank() == 1: time.sleep(1.5)\ndist.all_reduce(torch.ones(1))\n"
    cells.on_ranks(
        f"if hm.rank() == 2: breakpoint()\n{late}groups = dist.group.WORLD, dist.new_group()"
    )
    cells.on_ranks("groups = *groups, dist.new_group()")
    options = "group._get_backend(torch.device('cpu')).options"
    seconds = cells.on_ranks(f"[{options}._timeout.total_seconds() for group in groups]")
    assert seconds == [1, 1800, 1800]


def test_names_of_a_cell_that_still_runs_are_not_called_undefined(cells: Cells) -> None:
    gang = cells.on_ranks("later = 1\ntime.sleep(1000)", "--np 2 --detach")
    until(gang, lambda: all(rank.phase == "running" for rank in gang.ranks))
    remedy = f"wait for it with %gang wait {gang.id}, or stop it with %gang stop {gang.id}"
    with pytest.raises(HydrogenError, match=f"session 'lab' runs another cell: {remedy}"):
        cells.on_ranks("later")
    gang.stop()
    ended(gang)
    assert cells.on_ranks("later") == 1


def test_a_cell_that_ends_before_it_begins_or_with_its_session(cells: Cells) -> None:
    cells.on_ranks("kept = 1", "--np 2")
    is_launched = threading.Event()
    launcher.hub().loop.call_soon_threadsafe(is_launched.wait)
    gang = cells.on_ranks("kept = 2", "--detach")
    gang.stop()
    is_launched.set()
    assert ended(gang).state == "STOPPED"
    assert cells.on_ranks("kept") == 1, "the stopped cell has not begun"
    gang = cells.on_ranks("time.sleep(1000)", "--detach")
    until(gang, lambda: all(rank.phase == "running" for rank in gang.ranks))
    cells.run("%gang end lab")
    gang.wait()
    with pytest.raises(GangStoppedError, match="stopped by %gang end"):
        gang.raise_for_state()
    text = "session 'lab' has ended: ended by %gang end; lost with its ranks: kept"
    assert text in notices_of(gang)


def test_cells_of_several_threads_are_launched_one_by_one(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second launch while the first has the session, but no gang yet; then a launch that fails."""
    closure_file = launcher.ClosureFile

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(launcher, "ClosureFile", closure_file)
        with pytest.raises(HydrogenError, match="session 'lab' runs another cell: wait for it"):
            cells.on_ranks("1")
        raise MemoryError("no memory for the closure")

    for cell in (2, 3):  # of a new session, and of one that has ranks
        monkeypatch.setattr(launcher, "ClosureFile", meanwhile)
        with pytest.raises(MemoryError):
            cells.on_ranks("0", "--np 2")
        assert cells.on_ranks(str(cell), "--np 2") == cell


def test_a_stopped_agent_keeps_the_ranks_until_it_continues(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a session's ranks it would be replaced after a moment."""
    monkeypatch.setattr(agent_client, "_KILL_RESPONSE_S", 0.2)
    monkeypatch.setattr(local, "_SILENCE_S", 1.0)
    agent = cells.on_ranks("kept = 1\nos.getppid()", "--np 2")
    os.kill(agent, signal.SIGSTOP)
    gang = cells.on_ranks("kept", "--detach")
    try:
        until(gang, lambda: "has not responded" in notices_of(gang))
    finally:
        os.kill(agent, signal.SIGCONT)
    assert gang.result == 1


def test_an_interrupt_while_variables_arrive_makes_no_conflict(
    cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    def note_brought_back(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        versions.note_brought_back(*args)

    cells.on_ranks("found = 1", "--np 2")
    monkeypatch.setattr(sessions, "note_brought_back", note_brought_back)
    with pytest.raises(KeyboardInterrupt):
        cells.on_ranks("found += 1", "--out found")
    assert cells.on_ranks("found") == cells.shell.user_ns["found"] == 2


def test_a_cell_on_some_ranks(cells: Cells) -> None:
    """The others stay as they are; the value is that of the first rank that takes part."""
    assert cells.on_ranks(JOIN + "n = 0\nhm.rank()", "--np 2") == 0
    assert cells.on_ranks("n = 5\nhm.rank(), hm.world_size()", "--ranks 1") == (1, 2)
    assert [*known_gangs.gangs().values()][-1].snapshot().reason == "1 rank finished"
    assert cells.all_ranks("n") == [0, 5]
    cells.on_ranks("own = 1", "--ranks 1 --out own")
    assert cells.run("own") == 1
    cells.run("del own")
    with pytest.raises(CaptureError, match="`own` is on rank 1 only"):
        cells.on_ranks("own")
    with pytest.raises(RankFailedError, match="rank 1"):
        cells.on_ranks("raise ValueError(own)", "--ranks 1")
    with pytest.raises(UsageError, match="has ranks 0 to 1"):
        cells.on_ranks("n", "--ranks 2")
    with pytest.raises(UsageError, match="session 'lab' was started with --np 2, not 3"):
        cells.on_ranks("n", "--np 3")
    cells.run("import hydrogen_magic as hm\ndef f(): return hm.rank()")
    with pytest.raises(OptionValueError, match="-1: session 'lab' has ranks 0 to 1"):
        cells.run("hm.run(f, session='lab', ranks=[-1], quiet=True)")
    with pytest.raises(UsageError, match="--display 3: session 'lab' has ranks 0 to 1"):
        cells.on_ranks("n", "--display 3")
    with pytest.raises(UsageError, match="there is no session 'other' yet"):
        cells.run("%%distributed --session other --ranks 0\n1")


def test_a_cell_without_rank_0_shows_the_warnings_of_the_ranks(cells: Cells) -> None:
    cells.run("class Slotted:\n    __slots__ = ('a',)")
    cells.on_ranks("kept = [Slotted()]", "--np 2")
    cells.run("class Slotted:\n    __slots__ = ('a', 'b')")
    cells.on_ranks("kept", "--ranks 1")
    assert "Slotted" in notices_of(list(known_gangs.gangs().values())[-1])


def test_a_setting_that_the_notebook_takes_back_is_taken_back_on_the_ranks(cells: Cells) -> None:
    cells.run("import decimal; context = decimal.getcontext(); context.prec = 5")
    try:
        cells.on_ranks(JOIN + "decimal.getcontext().rounding = 'ROUND_UP'", "--np 2")
        seen = "(decimal.getcontext().prec, decimal.getcontext().rounding)"
        assert cells.all_ranks(seen) == [(5, "ROUND_UP")] * 2
    finally:
        cells.run("context.prec = 28")
    assert cells.all_ranks(seen) == [(28, "ROUND_UP")] * 2


def test_what_ranks_have_set_in_modules_stays(cells: Cells, tmp_path: Path) -> None:
    module = tmp_path / "kept_in_session.py"
    module.write_text("MODEL, RATE, HOOKS, NET = None, 1, [], None\n")
    try:
        cells.run(
            f"sys.path.insert(0, {str(tmp_path)!r})\nimport decimal, kept_in_session as mylib"
        )
        cells.run(
            "def setup(): mylib.MODEL = 'built'\nnet = torch.nn.Linear(1, 1)\nmylib.NET = net"
        )
        cells.run("def note(): return 1\nmylib.RATE = 2\nmylib.HOOKS.append(note)")
        cells.run("decimal.getcontext().prec = 5")
        cells.on_ranks(
            "setup(); mylib.RATE, decimal.getcontext().prec = 3, 7\n"
            "mylib.HOOKS.append('rank'); mylib.NET.weight.data.fill_(8)",
            "--np 1",
        )
        cells.on_ranks("1")
        seen = (
            "(mylib.MODEL, mylib.RATE, decimal.getcontext().prec, len(mylib.HOOKS), "
            "mylib.NET.weight.item())"
        )
        assert cells.on_ranks(seen) == ("built", 3, 7, 2, 8)
        cells.run("mylib.RATE = 4")
        assert cells.on_ranks(seen) == ("built", 4, 7, 2, 8)
        module.write_text("MODEL, RATE, HOOKS, NET = None, 1, [], None  # edited\n")
        assert cells.on_ranks("(mylib.MODEL, mylib.RATE, len(mylib.HOOKS))") == (None, 4, 1)
    finally:
        cells.run("decimal.getcontext().prec = 28; del sys.path[0], sys.modules['kept_in_session']")


def test_an_object_of_a_module_under_another_name_stays_one(cells: Cells, tmp_path: Path) -> None:
    (tmp_path / "shared_in_session.py").write_text(
        "CONFIG = {'lr': 1}\ndef lr(): return CONFIG['lr']\n"
    )
    try:
        cells.run(f"sys.path.insert(0, {str(tmp_path)!r})\nimport shared_in_session as mylib")
        cells.run("config = mylib.CONFIG; config['lr'] = 2")
        seen = "(config['lr'], mylib.lr(), config is mylib.CONFIG)"
        assert cells.on_ranks(seen, "--np 2") == (2, 2, True)
        cells.on_ranks("config['lr'] = 3")
        assert cells.on_ranks(seen) == (3, 3, True)
        assert cells.on_ranks("mylib.lr()") == 3
        cells.run("config['lr'] = 4")
        assert cells.on_ranks(seen, "--push config") == (4, 4, True)
        cells.run("def rate(config=config): return config['lr']\nconfig['lr'] = 5")
        assert cells.on_ranks(f"rate(), *{seen}") == (5, 5, 5, True)
        cells.run("mylib.CONFIG = {'lr': 6}")
        assert cells.on_ranks("(config['lr'], mylib.lr())") == (5, 6), (
            "the notebook has another one"
        )
    finally:
        cells.run("del sys.path[0], sys.modules['shared_in_session']")


def test_tasks_of_a_cell_go_on_in_later_cells(cells: Cells, tmp_path: Path) -> None:
    cells.run(f"import asyncio, pathlib; left = {str(tmp_path / 'left')!r}")
    cells.on_ranks(
        "questions, answers = asyncio.Queue(), asyncio.Queue()\n"
        "async def answer():\n"
        "    try:\n"
        "        while True: answers.put_nowait(await questions.get() + 1)\n"
        "    finally: pathlib.Path(left).touch()\n"
        "async def ask(n):\n"
        "    questions.put_nowait(n)\n"
        "    return await answers.get()\n"
        "task = asyncio.create_task(answer())\n"
        "await asyncio.sleep(0)",
        "--np 1",
    )
    assert cells.on_ranks("asyncio.run(asyncio.sleep(0)); task.done()") is False
    assert cells.on_ranks("await ask(1)") == 2
    with pytest.raises(RankFailedError, match="ZeroDivisionError"):
        cells.on_ranks("await asyncio.sleep(0)\n1 / 0")
    gang = cells.on_ranks(
        "stopped = 0\ntry: await asyncio.sleep(1000)\nfinally: stopped = 1", "--detach"
    )
    until(gang, lambda: gang.ranks[0].phase == "running")
    gang.stop()
    assert ended(gang).state == "STOPPED"
    assert cells.on_ranks("(await ask(2), task.done())") == (3, False)
    assert cells.on_ranks("asyncio.get_event_loop().run_until_complete(ask(3))") == 4
    cells.run("%gang end lab")
    wait_until((tmp_path / "left").exists)


def test_ranks_end_when_one_of_them_ends_between_cells(cells: Cells) -> None:
    pids = cells.on_ranks(JOIN, "--np 2") or cells.all_ranks("os.getpid()")
    os.kill(pids[1], signal.SIGKILL)
    wait_until_gone(pids)
    wait_until(lambda: not sessions.sessions())
    gang = cells.on_ranks("1", "--np 2 --detach")
    assert "the last one ended: rank 1 ended while no cell ran" in notices_of(ended(gang))


def test_an_idle_session_ends_and_runs_exit_handlers(
    cells: Cells, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run(f"path = {str(tmp_path / 'left')!r}")
    leave = """import atexit, pathlib
atexit.register(pathlib.Path(path + str(hm.rank())).touch)
atexit.register(print, "saving");"""  # runs first, and must not fail
    pids = cells.on_ranks(JOIN + leave, "--np 2") or cells.all_ranks("os.getpid()")
    cells.run("%gang")
    assert re.search(r"\nlab +2 +local .* found, path", capsys.readouterr().out)
    cells.on_ranks("kept = 1", "--idle 0.2")
    wait_until(lambda: not sessions.sessions())
    wait_until_gone(pids)
    assert len(list(tmp_path.glob("left*"))) == 2
    gang = cells.on_ranks("1", "--np 2 --detach")
    assert "0.2 s without a cell; lost with its ranks: found, kept, path" in notices_of(ended(gang))
    cells.run("%gang end lab")
    assert "session 'lab' has ended" in capsys.readouterr().out
    with pytest.raises(UsageError, match="%gang end NAME: no session is running"):
        cells.run("%gang end")


def test_infer_runs_on_the_ranks_of_a_session(cells: Cells) -> None:
    cells.run("import pandas as pd\nframe = pd.DataFrame({'x': range(10)})")
    cells.on_ranks("scale = 3", "--np 2")
    pids = cells.on_ranks(JOIN) or cells.all_ranks("os.getpid()")
    predict = "def predict(batch): return {'y': batch['x'] * scale, 'pid': os.getpid()}"
    for body in (predict, "scale = 4"):  # the ranks have ``predict`` from the first cell
        cells.run(f"%%infer frame --session lab --quiet --batch-size 1 --out scored\n{body}")
        scored = cells.shell.user_ns["scored"]
        assert set(scored["pid"]) <= set(pids)
    assert list(scored["y"]) == [4 * x for x in range(10)]
    assert cells.all_ranks("scale") == [4, 4]
    with pytest.raises(UsageError, match="--resume cannot tell"):
        cells.run(f"%%infer frame --session lab --resume\n{predict}")
    cells.run("frame = pd.DataFrame({'x': range(1000)})")
    slow = "import time\ndef predict(batch):\n    time.sleep(0.05)\n    return {'y': batch['x']}"
    run = cells.run(f"%%infer frame --session lab --quiet --batch-size 1 --detach\n{slow}")
    wait_until(lambda: run.gang.snapshot().rows is not None and run.gang.snapshot().rows.done > 2)
    run.gang.stop()
    text = notices_of(ended(run.gang))
    assert len(run.result) > 2 and "of 1,000 rows finished; missing: row" in text
    assert "--resume" not in text


def test_the_ranks_that_infer_keeps_are_an_unnamed_session(
    cells: Cells, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends on request, after its time without a run, and for another gang; it gives no name to others."""
    cells.run("import pandas as pd\nframe = pd.DataFrame({'x': range(10)})")

    def infer(options: str = "") -> list[int]:
        body = "def predict(batch): return {'pid': os.getpid()}"
        cells.run(f"%%infer frame --np 1 --quiet --batch-size 1 --out scored {options}\n{body}")
        return list(set(cells.shell.user_ns["scored"]["pid"]))

    pids = infer()
    assert set(infer()) & set(pids)
    cells.run("%gang")
    assert re.search(r"\n%%infer +1 +local .* [MG]B", capsys.readouterr().out)
    cells.run("%gang end")
    assert "session '%%infer' has ended" in capsys.readouterr().out
    wait_until_gone(pids)
    pids = infer("--idle 0.2")
    wait_until(lambda: not sessions.sessions())
    wait_until_gone(pids)
    pids = infer()
    assert cells.on_ranks("hm.world_size()", "--np 2") == 2
    wait_until_gone(pids)
    assert [one.title for one in sessions.sessions()] == ["lab"]
    with pytest.raises(CaptureError) as caught:
        cells.run("%%distributed\nscored_by_nothing")
    assert "session" not in str(caught.value)


@pytest.mark.horovod
def test_horovod_is_initialized_again_after_a_failing_cell(cells: Cells) -> None:
    cells.run("import horovod.torch as hvd")
    pid = cells.on_ranks("hvd.init()\nos.getpid()", "--np 2 --with horovod")
    with pytest.raises(RankFailedError, match="rank 1 failed: ValueError"):
        cells.on_ranks("if hvd.rank() == 1: raise ValueError()\nhvd.allreduce(torch.ones(1))")
    reduced = "hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), os.getpid()"
    assert cells.on_ranks(reduced) == (2.0, pid)


def test_a_rank_that_leaves_init_process_group_prints_nothing(cells: Cells) -> None:
    """torch's C++ code would warn with a stack. Its level is that of before in the next cell."""
    join = "if hm.rank() == 1:\n    raise ValueError('bad batch')\n" + JOIN
    gang = cells.on_ranks(join, "--np 2 --detach")
    assert ended(gang).logs == {0: "", 1: ""}
    code = "import ctypes, os\nfile = os.path.join(os.path.dirname(torch.__file__), 'lib', 'libc10.so')\n"
    level = "ctypes.c_int.in_dll(ctypes.CDLL(file), 'FLAGS_caffe2_log_level').value"
    assert cells.on_ranks(JOIN + code + level) == 1


ENDS_WITH_AGENTS = """
import os
import hydrogen_magic as hm
from hydrogen_magic.driver import session as sessions
from hydrogen_magic.driver.placements import local_agents
from tests import gangs, plain_ranks
orphan = hm.run(plain_ranks.leave_orphan, np=1, session="held")
(held,) = sessions.sessions()
held.agents.on_lost = lambda why: None
assert gangs.alive([orphan])
local_agents.close()
gangs.wait_until_gone([orphan])
assert sessions.sessions() == []
assert hm.run(os.getpid, np=1, session="held") > 0
sessions.sessions()[0].end()
"""


def test_a_session_ends_with_all_agents_of_its_kernel() -> None:
    """Also if the loop is closed before it has handled the loss.

    In a process of its own: the agent of the other tests, which has imported torch, stays.
    """
    subprocess.run([sys.executable, "-c", ENDS_WITH_AGENTS], check=True, timeout=2 * PATIENCE_S)
