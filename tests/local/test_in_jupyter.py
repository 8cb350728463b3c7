"""Cells in real Jupyter kernels: what a front end gets, and the ends by interrupt, restart and crash."""

from __future__ import annotations

import os
import re
import signal
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hydrogen_magic as hm
from hydrogen_magic.core import processes
from hydrogen_magic.driver.placements import local_agents
from tests.gangs import ended, wait_until_gone
from tests.jupyter import PATIENCE_S, Cell, Kernel

pytestmark = pytest.mark.usefixtures("warm_agents")

REDUCE = textwrap.dedent(
    """
    %%distributed --np 2
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    int(ones)
    """
).lstrip()

FAMILY = textwrap.dedent(
    """
    %%distributed --np 2 --grace 600
    import multiprocessing, subprocess, time
    context = multiprocessing.get_context("fork")
    for _ in range(2):
        context.Process(target=time.sleep, args=(1000,), daemon=True).start()
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("training", flush=True)
    time.sleep(1000)
    """
).lstrip()
"""Two ranks with processes as DataLoader starts them, and a helper in a session of its own."""


@pytest.fixture(scope="module")
def shared_kernel(warm_agents: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """The kernel of all tests."""
    folder = tmp_path_factory.mktemp("notebooks")
    kernel = Kernel(folder / "home", folder)
    try:
        kernel.load()
        yield kernel
    finally:
        kernel.shut_down()


@pytest.fixture
def kernel(shared_kernel: Kernel) -> Iterator[Kernel]:
    yield shared_kernel
    if shared_kernel.is_busy:  # with the cell of a test that failed
        shared_kernel.restart(now=True)
        shared_kernel.load()


RUNNING = """
import hydrogen_magic
[id for id, gang in hydrogen_magic.driver.known_gangs.gangs().items() if not gang.wait(0)]
"""


# ── two notebooks ────────────────────────────────────────────────────────────────────────────────


def all_reduced() -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return int(ones)


def test_two_notebooks_at_once(kernel: Kernel) -> None:
    """The kernel, and this process; the first test: the kernel has no agent yet."""
    local_agents.close()
    for _ in range(2):  # agents that start, and those that are there
        cell = kernel.start(REDUCE)
        gang = ended(hm.launch(all_reduced, np=2))
        assert (kernel.finish(cell).value, gang.results) == ("2", [2, 2])


# ── what comes back ──────────────────────────────────────────────────────────────────────────────


def test_value_output_and_names_come_back_once(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed --np 2 --out y\nimport os\nprint('hi')\ny = 7\ny + 1")
    assert sorted(cell.stream().splitlines()) == ["[0] hi", "[1] hi"]
    assert cell.stream("stderr") == ""
    assert cell.value == "8"
    assert "2 ranks · succeeded" in cell.block
    assert kernel.value("y") == "7"
    silent = kernel.run("%%distributed\n5;")
    assert silent.value is None and not silent.error
    listed = kernel.run("%gang")
    assert ">SUCCEEDED</td>" in listed.html and listed.block.startswith("gang  name ")


def test_output_of_a_detached_gang_stays_under_its_own_cell(kernel: Kernel, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first = kernel.run(
        "%%distributed --np 1 --detach\nimport pathlib, time\nprint('waits', flush=True)\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\nprint('first')"
    )
    kernel.until(first, lambda: "waits" in first.stream())
    second = kernel.start(
        f"import contextlib, hydrogen_magic, io\nopen({str(go)!r}, 'w').close()\nprint('second')\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    hydrogen_magic.driver.known_gangs.gangs().popitem()[1].wait()"
    )
    kernel.finish(second)
    kernel.until(first, lambda: "succeeded" in first.block)
    assert first.stream().splitlines() == ["waits", "first"]
    assert second.stream().splitlines() == ["second"]


def test_threads_and_forks_of_the_kernel_change_nothing(kernel: Kernel) -> None:
    """CUDA and data loaders leave such in a kernel: threads that run, and children forked from it."""
    kernel.run(
        "import multiprocessing, threading, time\n"
        "busy = True\n"
        "def work():\n"
        "    while busy: time.sleep(0.01)\n"
        "threads = [threading.Thread(target=work) for _ in range(3)]\n"
        "for thread in threads: thread.start()\n"
        "pool = multiprocessing.get_context('fork').Pool(2)\n"
    )
    try:
        assert kernel.run(REDUCE).value == "2"
        assert kernel.value("pool.map(abs, [-1, -2])") == "[1, 2]"
        assert kernel.value("sum(t.is_alive() for t in threads)") == "3"
    finally:
        kernel.run("busy = False\npool.terminate()\npool.join()\n[t.join() for t in threads]")


# ── displays of ranks ────────────────────────────────────────────────────────────────────────────

SHOWS = textwrap.dedent(
    """
    %%distributed --np 2
    %matplotlib inline
    import matplotlib.pyplot as plt
    from IPython.display import HTML, Markdown, clear_output, update_display
    if hm.rank() == 0:
        print("first")
        handle = display(HTML("<b>old</b>"), display_id="note")
        print("second")
        update_display(HTML("<b>new</b>"), display_id="note")
        display({"text/html": token, "text/plain": "masked"}, raw=True)
        display(Markdown("*note*"))
    else:
        display("only printed")
    plt.plot([1, 2, 3])
    plt.show()
    plt.plot([3, 2, 1]);
    """
).lstrip()


def outputs_of(cell: Cell) -> list[str]:
    """Return what ranks printed and displayed, in order: text, or MIME types."""
    found = []
    for kind, content in cell.messages:
        if kind == "stream":
            found += content["text"].splitlines()
        elif kind.endswith("display_data") and "gang" not in content["data"]["text/plain"]:
            rich = [each for each in content["data"] if each != "text/plain"]
            found.append(f"{kind} {' '.join(rich)} {content['data'].get('text/html', '')}".strip())
    return found


def test_displays_and_figures_appear_below_the_cell_in_order(kernel: Kernel) -> None:
    kernel.run("import os, hydrogen_magic as hm\nos.environ['MY_TOKEN'] = token = 'correct horse'")
    cell = kernel.run(SHOWS)
    assert not cell.error, cell.error
    found = outputs_of(cell)
    assert "[1] 'only printed'" in found
    assert "update_display_data text/html <b>new</b>" in found, "its place does not matter"
    assert [each for each in found if not each.startswith(("[1]", "update"))] == [
        "[0] first",
        "display_data text/html <b>old</b>",
        "[0] second",
        "display_data text/html ***",
        "display_data text/markdown",
        "display_data image/png",
        "display_data image/png",
    ]


def test_a_cell_that_fails_shows_its_figures(kernel: Kernel) -> None:
    cell = kernel.run("%%distributed --np 1\nimport matplotlib.pyplot as plt\nplt.plot([1])\n1 / 0")
    assert "ZeroDivisionError" in cell.error
    assert "display_data image/png" in outputs_of(cell)


def test_displays_of_other_ranks_and_of_a_detached_gang(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%distributed --np 2 --display all --detach\nimport os\n"
        "display({'text/html': os.environ['RANK'], 'text/plain': ''}, raw=True)"
    )
    kernel.run("print('another cell')")

    def displays() -> list[dict[str, str]]:
        return [c["data"] for kind, c in cell.messages if kind == "display_data"]

    # The block comes first.
    html = {"0", "1"}
    kernel.until(cell, lambda: html <= {data.get("text/html") for data in displays()})
    kernel.until(cell, lambda: "succeeded" in cell.block)
    shown = displays()
    for rank in sorted(html):
        label = shown.index({"text/plain": f"rank {rank}"})
        assert shown[label + 1]["text/html"] == rank


def test_a_flood_of_displays_costs_neither_the_gang_nor_its_last_frame(kernel: Kernel) -> None:
    cell = kernel.run(
        "%%distributed --np 1\nfrom IPython.display import clear_output\n"
        "for frame in range(3000):\n    clear_output(wait=True)\n"
        "    display({'text/html': 'x' * 10_000 + str(frame), 'text/plain': ''}, raw=True)"
    )
    assert not cell.error, cell.error
    shown = [c["data"].get("text/html", "") for kind, c in cell.messages if "display" in kind]
    frames = [text for text in shown if text.startswith("xxx")]
    assert frames[-1].endswith("x2999")
    assert len(frames) < 1000, "frames that no one could see are skipped"
    assert len([1 for kind, _ in cell.messages if kind == "display_data"]) == 2, "block and frame"


# ── input ────────────────────────────────────────────────────────────────────────────────────────


def test_the_debugger_of_each_rank_uses_the_input_line_while_peers_wait(kernel: Kernel) -> None:
    cell = kernel.start(
        "%%distributed --np 2\nimport torch, torch.distributed as dist\n"
        'dist.init_process_group("gloo")\nscale = 10 * (dist.get_rank() + 1)\n'
        "breakpoint()\n"
        "total = torch.tensor(scale)\ndist.all_reduce(total)\n"
        'group = dist.group.WORLD._get_backend(torch.device("cpu"))\n'
        "int(total), group.options._timeout.days"
    )
    lines = {"[0] (Pdb) ": ["scale = 100", "p scale + 1", "c"], "[1] (Pdb) ": ["c"]}
    for _ in range(4):  # any rank may be first
        prompt = kernel.prompt()
        rank = f"rank {prompt[1]}"
        kernel.until(cell, lambda rank=rank: f"{rank}  cpu  waiting for input" in cell.block)
        kernel.answer(lines[prompt].pop(0))
    kernel.until(cell, lambda: "[0] 101" in cell.stream())
    # Since Python 3.13 it shows the line of the call, since 3.14 in colours.
    shown = re.sub("\x1b.*?m", "", cell.stream())
    assert "<Cell In[" in shown and ("= torch.tensor(scale)" in shown or "-> breakpoint()" in shown)
    assert kernel.finish(cell).value == "(120, 1)", "peers of a debugged rank wait a day"


def test_a_rank_that_fails_is_debugged_while_its_peers_wait(kernel: Kernel) -> None:
    cell = kernel.start(
        "%%distributed --np 2 --pdb\nimport torch, torch.distributed as dist\n"
        'dist.init_process_group("gloo")\nscale = dist.get_rank()\n'
        "if scale == 1:\n    [][scale]\ndist.barrier()"
    )
    assert kernel.type("p 'found', scale + 41") == "[1] (Pdb) "
    kernel.until(cell, lambda: "[1] ('found', 42)" in cell.stream())
    kernel.type("q")
    kernel.finish(cell)
    assert "rank 1 failed: IndexError: list index out of range" in cell.error, cell.error
    unseen = kernel.finish(kernel.start("%pdb on\n", has_input=False))
    cell = kernel.finish(kernel.start("%%distributed --np 1\n1 / 0", has_input=False))
    kernel.run("%pdb off")
    assert not unseen.error and "--pdb: input() needs a front end" in cell.stream("stderr")
    assert "rank 0 failed: ZeroDivisionError" in cell.error, cell.error


def test_debug_looks_at_the_rank_of_a_session_that_failed(kernel: Kernel) -> None:
    """It stays there until the rank runs another cell."""
    shared = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
    failing = "scale = dist.get_rank()\ndef pick(n): return [][n]\nif scale == 1: pick(scale)\n"
    cell = kernel.run(f"%%distributed --np 2 --session look\n{shared}{failing}dist.barrier()")
    assert "rank 1 failed: IndexError" in cell.error, cell.error
    for _ in range(2):
        cell = kernel.start("%debug")
        assert kernel.type("p n + 41, scale") == "[1] (Pdb) "
        kernel.until(cell, lambda cell=cell: "[1] (42, 1)" in cell.stream())
        kernel.until(cell, lambda cell=cell: "rank 1 is waiting for input" in cell.block)
        kernel.type("q")
        assert not kernel.finish(cell).error, cell.error
        assert "IndexError: list index out of range" in cell.stream("stderr")
    assert kernel.run("%%distributed --session look\ndist.barrier()\nscale").value == "0"
    assert "nothing to debug" in kernel.run("%debug").stream("stderr")
    kernel.run("%gang end look")
    assert "the ranks of session 'look' have ended" in kernel.run("%debug").stream("stderr")


def test_debug_without_a_session(kernel: Kernel) -> None:
    """The second refusal is for the same reason, and an error of the notebook is IPython's."""
    kernel.run("%%distributed --np 1\n1 / 0")
    for _ in range(2):
        refused = kernel.run("%debug").stream("stderr")
        assert re.search(r"ranks of gang \w+ have ended.* --pdb.* --session", refused), refused
    kernel.run("number = 41\n[][number]")
    cell = kernel.start("%debug")
    assert kernel.type("p number + 1") == "ipdb> "
    kernel.type("q")
    assert "42" in kernel.finish(cell).stream()


def test_ranks_that_may_not_open_the_debugger_go_on(kernel: Kernel, tmp_path: Path) -> None:
    cell = kernel.start(
        "%%distributed --np 2 --ranks 1 --pdb\nimport pathlib, pdb, time\nimport hydrogen_magic as hm\n"
        f"through = pathlib.Path({str(tmp_path / 'through')!r})\n"
        "breakpoint()\npdb.set_trace()\n"
        "if hm.rank() == 1:\n    through.touch()\n    time.sleep(1000)\n"
        "while not through.exists(): time.sleep(0.01)\n1 / 0"
    )
    for _ in range(2):
        assert kernel.type("c") == "[1] (Pdb) "
    kernel.finish(cell)
    assert "rank 0 failed: ZeroDivisionError" in cell.error, cell.error


def test_a_rank_that_fails_because_of_its_peer_is_not_debugged(kernel: Kernel) -> None:
    """It notices the end of the connection while the peer's own exception is still unwinding."""
    cell = kernel.start(
        "%%distributed --np 2 --pdb\nimport time, torch.distributed as dist\n"
        'dist.init_process_group("gloo")\ntry:\n    if dist.get_rank() == 1: 1 / 0\n'
        "    dist.barrier()\nfinally:\n    if dist.is_initialized() and dist.get_rank() == 1:\n"
        "        dist.destroy_process_group()\n        time.sleep(1.5)"
    )
    assert kernel.type("q") == "[1] (Pdb) "
    kernel.finish(cell)
    assert "rank 1 failed: ZeroDivisionError" in cell.error, cell.error
    assert "[0]" not in cell.stream() + cell.stream("stderr")


def test_input_is_read_once_and_passwords_are_not_recorded(kernel: Kernel) -> None:
    cell = kernel.start(
        "%%distributed --np 1\nimport getpass\nprint('above', end='')\n"
        "[input('name: '), getpass.getpass(), len(input())]"
    )
    assert kernel.type("Ada") == "name: "
    assert "above" in cell.stream() or kernel.until(cell, lambda: "above" in cell.stream()) is None
    assert kernel.type("pass word") == "Password: "
    kernel.type("\x04")
    kernel.finish(cell)
    assert "EOFError: EOF when reading a line" in cell.error
    name = cell.block.split()[1]
    assert "pass word" not in (kernel.home / "runs" / name / "events.jsonl").read_text()


def test_without_an_input_line_the_error_says_so(kernel: Kernel) -> None:
    cell = kernel.finish(kernel.start("%%distributed --np 1\ninput()", has_input=False))
    assert "input() needs a front end with an input line" in cell.error, cell.error
    kernel.run("%%distributed --np 1 --detach --name background\nbreakpoint()")
    waited = kernel.run("%gang wait background")
    assert "run it by %%distributed without --detach" in waited.error, waited.error


@pytest.mark.parametrize("how", ["interrupt", "failure of a peer"])
def test_a_gang_can_end_while_a_rank_asks(kernel: Kernel, tmp_path: Path, how: str) -> None:
    fail = tmp_path / "fail"
    cell = kernel.start(
        "%%distributed --np 2\nimport os, pathlib, time\n"
        "if os.environ['RANK'] == '0':\n    import pdb; pdb.set_trace()\n"
        f"while not pathlib.Path({str(fail)!r}).exists(): time.sleep(0.01)\n1 / 0"
    )
    kernel.until(cell, lambda: "rank 0 is waiting for input" in cell.block)
    fail.touch() if how == "failure of a peer" else kernel.interrupt()
    kernel.finish(cell)
    error = "GangStoppedError" if how == "interrupt" else "RankFailedError"
    assert cell.error.startswith(error), cell.error
    gang = "list(hydrogen_magic.gangs().values())[-1]"
    exited = kernel.value(f"import hydrogen_magic; {gang}.ranks[0].exited.signal_name")
    assert exited == "''", "the debugger leaves SIGINT to the rank"


# ── interrupts ───────────────────────────────────────────────────────────────────────────────────

LISTENING = textwrap.dedent(
    """
    %%distributed --np 2
    import os, signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to a rank that seems not to react
    print("ready", flush=True)
    info = signal.sigwaitinfo({signal.SIGINT})
    more = signal.sigtimedwait({signal.SIGINT}, 0.2)
    print("from the agent" if info.si_pid == os.getppid() else info, more, flush=True)
    raise KeyboardInterrupt
    """
).lstrip()

STUBBORN = textwrap.dedent(
    """
    %%distributed --np 2 --grace 600
    import time
    print("ready", flush=True)
    while True:
        try:
            time.sleep(1000)
        except KeyboardInterrupt:
            print("no", flush=True)
    """
).lstrip()


def both_say(kernel: Kernel, cell: Cell, text: str) -> None:
    kernel.until(cell, lambda: cell.stream().count(text) >= 2)


def test_an_interrupt_stops_the_gang_and_what_is_queued(kernel: Kernel) -> None:
    cell = kernel.start(LISTENING)
    queued = kernel.start("print('must not run')")
    both_say(kernel, cell, "ready")
    kernel.interrupt()
    kernel.finish(cell)
    assert cell.stream().count("from the agent None") == 2, cell.stream()
    assert cell.error.startswith("GangStoppedError\n") and "stopped by you" in cell.error
    assert "Traceback" not in cell.error
    assert kernel.reply(cell)["status"] == "error"
    assert kernel.reply(queued)["status"] == "aborted"
    assert kernel.run(REDUCE).value == "2"


def test_an_interrupt_stops_a_sweep_and_its_queue(kernel: Kernel, tmp_path: Path) -> None:
    """The comparison under the cell shows that, and stays: a picture that needs no page."""
    kernel.run("import hydrogen_magic as hm\nlr = 1")
    body = "import time\nfor step in range(3):\n    hm.log(loss=lr)\ntime.sleep(1000)"
    cell = kernel.start(f"%%distributed --np 2 --grace 600 --sweep lr=1,2,*range(3, 20)\n{body}")
    kernel.until(cell, lambda: re.search(r"RUNNING.* 1 +1$", cell.block, re.M))
    assert "QUEUED" in cell.block
    kernel.interrupt()
    kernel.finish(cell)
    assert "GangStoppedError: the sweep was stopped: 19 stopped" in cell.error
    assert cell.block.count("STOPPED") == 19 and "QUEUED" not in cell.block
    assert cell.html.count('alt="loss: 1 to 1') == 1 and "sweep of 19 runs" in cell.html
    assert kernel.value(RUNNING) == "[]"


def test_an_interrupt_ends_the_cell_of_a_session_and_a_second_one_the_session(
    kernel: Kernel,
) -> None:
    kernel.run("%%distributed --np 2 --session lab\nkept = 1")
    cell = kernel.start(
        "%%distributed --session lab\nimport time\nprint('ready', flush=True)\ntime.sleep(1000)"
    )
    both_say(kernel, cell, "ready")
    kernel.interrupt()
    assert "stopped by you" in kernel.finish(cell).error
    assert kernel.run("%%distributed --session lab\nkept").value == "1"
    cell = kernel.start(STUBBORN.replace("--np 2", "--session lab"))
    both_say(kernel, cell, "ready")
    kernel.interrupt()
    both_say(kernel, cell, "no")
    kernel.interrupt()
    assert "stopped by you" in kernel.finish(cell).error
    assert "no session is running" in kernel.run("%gang end lab").stream("stderr")


@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.01, 0.02, 0.04, 0.08])
def test_an_interrupt_while_it_launches_leaves_no_gang(kernel: Kernel, delay_s: float) -> None:
    cell = kernel.start("%%distributed --np 2\nimport time\ntime.sleep(1000)")
    kernel.until(cell, lambda: any(kind == "execute_input" for kind, _ in cell.messages))
    time.sleep(delay_s)  # some moment of the launch
    kernel.interrupt()
    kernel.finish(cell)
    assert kernel.value(RUNNING) == "[]"


def test_a_comparison_is_updated_while_its_runs_go_on(kernel: Kernel, tmp_path: Path) -> None:
    go = tmp_path / "go"
    kernel.run("import hydrogen_magic as hm\nlr = 0.1")
    done = kernel.run("%%distributed --np 2 --name first\nhm.log(loss=lr)")
    assert not done.error, done.error
    kernel.run("lr = 0.2")
    kernel.run(
        "%%distributed --np 2 --name second --detach\nimport pathlib, time\nhm.log(loss=lr)\n"
        f"while not pathlib.Path({str(go)!r}).exists():\n    time.sleep(0.05)\nhm.log(loss=0.125)"
    )
    compared = kernel.run("%gang compare first second")
    shown = compared.block.splitlines()
    assert re.match(r"first \(\w+\) +SUCCEEDED .* 0.1 ", shown[1]), shown
    assert re.match(r"second \(\w+\) +(PENDING|RUNNING)", shown[2]), shown
    go.touch()
    kernel.until(compared, lambda: "0.125" in compared.block and "RUNNING" not in compared.block)
    assert "SUCCEEDED" in compared.block.splitlines()[2]


# ── clients come and go ──────────────────────────────────────────────────────────────────────────


def test_a_gang_goes_on_without_a_client(kernel: Kernel, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first = kernel.second_client()
    started = first.run(
        "%%distributed --np 2 --detach\nimport hydrogen_magic as hm, pathlib\n"
        f"while not pathlib.Path({str(go)!r}).exists():\n"
        "    hm.log(loss=0.5)\n    for _ in range(10): print('x' * 10_000)\n"
        "hm.rank() + 40"
    )
    name = started.value.partition("Gang ")[2].partition(":")[0]  # type: ignore[union-attr]
    first.until(started, lambda: "not shown here" in started.stream())
    first.close()
    before = kernel.rss_bytes()
    log = kernel.home / "runs" / name / "rank-0.log"
    mark = log.stat().st_size + (60 << 20)
    deadline = time.monotonic() + PATIENCE_S
    while log.stat().st_size < mark:
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
    grown = kernel.rss_bytes() - before
    second = kernel.second_client()
    try:
        shown = second.run(f"%gang show {name}").stream()
        go.touch()
        assert second.run(f"%gang wait {name}").value == "40"
    finally:
        second.close()
    assert "2 ranks · running" in shown and "loss 0.5" in shown
    assert grown < 30 << 20, grown


# ── the end of kernels ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "how",
    [
        # test_kernel_deaths ends kernels by signals of every kind
        pytest.param("restart now", marks=pytest.mark.exhaustive),
        "restart",
        "crash",
    ],
)
def test_the_gang_ends_with_its_kernel_and_the_next_one_runs(kernel: Kernel, how: str) -> None:
    hub = kernel.value(
        "from hydrogen_magic.driver.placements import local_agents; local_agents.hub()._directory"
    )
    cell = kernel.start(FAMILY)
    kernel.until(cell, lambda: cell.stream().count("training") == 2)
    family = [process.pid for process in processes.descendants(kernel.pid)]
    sockets = Path(hub.strip("'"))
    assert (sockets / "hub").exists()
    assert len(family) >= 10, "agent, forkserver, and two ranks with three children each"
    if how == "crash":
        os.kill(kernel.pid, signal.SIGSEGV)
        kernel.revive()
    else:
        kernel.restart(now=how == "restart now")
    wait_until_gone(family)
    assert not sockets.exists()
    # jupyter_client interrupts first, so that the gang may end in order before the kernel does.
    assert "1 earlier run was stopped when the kernel ended" in kernel.load()
    assert kernel.run("%reload_ext hydrogen_magic").stream() == "", "reported once"


def test_a_gang_that_the_user_stopped_is_not_reported(kernel: Kernel) -> None:
    cell = kernel.start("%%distributed --np 2\nimport time; print('ready'); time.sleep(1000)")
    both_say(kernel, cell, "ready")
    kernel.interrupt()
    kernel.finish(cell)
    kernel.run("# a later cell: the restart interrupts this one")
    kernel.restart(now=False)
    assert kernel.load() == ""


def test_a_kernel_that_is_shut_down_while_a_child_lingers_ends_in_order(
    kernel: Kernel, tmp_path: Path
) -> None:
    """As with Spark's JVM, for whose end ipykernel waits until Jupyter kills it: no exit handler runs."""
    ignore = (
        "import signal, sys; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN);"
        " print(1); sys.stdin.read()"
    )
    kernel.run(
        "import subprocess, sys, pathlib, pandas, hydrogen_magic as hm\n"
        f"child = subprocess.Popen([sys.executable, '-uc', {ignore!r}], stdin=-1, stdout=-1)\n"
        "child.stdout.readline()\n"
        "handle = hm.dataset(pandas.DataFrame({'x': [1]}))"
    )
    folders = kernel.home / "datasets"
    assert any(folders.rglob("*.parquet"))
    cell = kernel.run(
        "%%distributed --np 2 --detach\nimport pathlib, time\n"
        f"mark = pathlib.Path({str(tmp_path)!r}, f'rank-{{hm.rank()}}')\n"
        "try:\n    mark.write_text('begun')\n    time.sleep(1000)\n"
        "finally:\n    mark.write_text('cleaned up')"
    )
    name = cell.value.partition("Gang ")[2].partition(":")[0]  # type: ignore[union-attr]
    marks = [tmp_path / f"rank-{rank}" for rank in range(2)]
    deadline = time.monotonic() + PATIENCE_S
    while not all(mark.exists() for mark in marks):
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
    kernel.restart(now=False)
    assert [mark.read_text() for mark in marks] == ["cleaned up"] * 2
    assert not any(folders.rglob("*.parquet"))
    kernel.load()
    assert "its kernel ended" in kernel.run(f"%gang show {name}").block
