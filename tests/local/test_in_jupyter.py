"""Cells in real Jupyter kernels: what a front end gets, and how interrupts, restarts and crashes end."""

from __future__ import annotations

import os
import select
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest
from jupyter_core.utils import ensure_event_loop

from hydrogen_magic import processes
from tests.jupyter import Cell, Kernel, alive, gone_within

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
    %%distributed --np 2
    import subprocess, torch, torch.distributed as dist
    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 1_000_000
        def __getitem__(self, index):
            return index
    dist.init_process_group("gloo")
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    for n, batch in enumerate(torch.utils.data.DataLoader(Data(), num_workers=2)):
        dist.all_reduce(torch.ones(1))
        if n == 10:
            print("training", flush=True)
    """
).lstrip()
"""Two ranks as users have them: with DataLoader workers, and a helper in a session of its own."""


@pytest.fixture(scope="module", autouse=True)
def jupyter_loop() -> None:
    """Make jupyter_core's event loop, which stays for good, before anybody looks for leaks."""
    ensure_event_loop()


@pytest.fixture(scope="module")
def kernel(warm_agents: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One kernel for all tests that need only one."""
    folder = tmp_path_factory.mktemp("notebooks")
    kernel = Kernel(folder / "home", folder)
    try:
        kernel.load()
        yield kernel
    finally:
        kernel.shut_down()


@pytest.fixture
def other_kernel(warm_agents: None, tmp_path: Path) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path / "home", tmp_path)
    try:
        kernel.load()
        yield kernel
    finally:
        kernel.shut_down()


RUNNING = """
import hydrogen_magic
[id for id, gang in hydrogen_magic.runner.gangs().items() if not gang.wait(0)]
"""


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


def test_output_of_a_detached_gang_stays_under_its_own_cell(kernel: Kernel, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first = kernel.run(
        "%%distributed --np 1 --detach\nimport pathlib, time\nprint('waits', flush=True)\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\nprint('first')"
    )
    kernel.until(first, lambda: "waits" in first.stream())
    second = kernel.start(
        f"import hydrogen_magic\nopen({str(go)!r}, 'w').close()\nprint('second')\n"
        "hydrogen_magic.runner.gangs().popitem()[1].wait()"
    )
    kernel.finish(second)
    kernel.until(first, lambda: "succeeded" in first.block)
    assert first.stream().splitlines() == ["waits", "first"]
    assert second.stream().splitlines() == ["second"]


def test_threads_and_forks_of_the_kernel_change_nothing(kernel: Kernel) -> None:
    """What CUDA and data loaders leave in a kernel: threads that run, and children forked from it."""
    kernel.run(
        "import multiprocessing, threading\n"
        "busy = True\n"
        "def spin():\n"
        "    while busy: pass\n"
        "threads = [threading.Thread(target=spin) for _ in range(3)]\n"
        "for thread in threads: thread.start()\n"
        "pool = multiprocessing.get_context('fork').Pool(2)\n"
    )
    try:
        assert kernel.run(REDUCE).value == "2"
        assert kernel.value("pool.map(abs, [-1, -2])") == "[1, 2]"
        assert kernel.value("sum(t.is_alive() for t in threads)") == "3"
    finally:
        kernel.run("busy = False\npool.terminate()\npool.join()\n[t.join() for t in threads]")


# ── interrupts ───────────────────────────────────────────────────────────────────────────────────

LISTENING = textwrap.dedent(
    """
    %%distributed --np 2
    import os, signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    print("ready", flush=True)
    info = signal.sigwaitinfo({signal.SIGINT})
    more = signal.sigtimedwait({signal.SIGINT}, 0.2)
    print("from the agent" if info.si_pid == os.getppid() else info, more, flush=True)
    raise KeyboardInterrupt
    """
).lstrip()

STUBBORN = textwrap.dedent(
    """
    %%distributed --np 2 --grace 100
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


def test_a_second_interrupt_kills(kernel: Kernel) -> None:
    cell = kernel.start(STUBBORN)
    both_say(kernel, cell, "ready")
    kernel.interrupt()
    both_say(kernel, cell, "no")
    begun = time.monotonic()
    kernel.interrupt()
    kernel.finish(cell)
    assert time.monotonic() - begun < 1.0
    assert "stopped by you" in cell.error
    assert kernel.value("1 + 1") == "2"


def test_ten_interrupts_are_no_more_than_two(kernel: Kernel) -> None:
    """However many of them the system makes one."""
    cell = kernel.start(STUBBORN.replace("--grace 100", "--grace 1"))
    both_say(kernel, cell, "ready")
    for _ in range(10):
        kernel.interrupt()
    kernel.finish(cell)
    assert "stopped by you" in cell.error
    assert kernel.run(REDUCE).value == "2"


@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.01, 0.02, 0.04, 0.08])
def test_an_interrupt_while_it_launches_leaves_no_gang(kernel: Kernel, delay_s: float) -> None:
    cell = kernel.start("%%distributed --np 2\nimport time\ntime.sleep(1000)")
    kernel.until(cell, lambda: any(kind == "execute_input" for kind, _ in cell.messages))
    time.sleep(delay_s)  # any moment of the launch
    kernel.interrupt()
    kernel.finish(cell)
    assert kernel.value(RUNNING) == "[]"


def test_control_c_twice_in_a_terminal(tmp_path: Path) -> None:
    options = "--no-banner --simple-prompt --colors=NoColor --HistoryManager.enabled=False"
    terminal = pexpect.spawn(
        sys.executable, ["-m", "IPython", *options.split()], encoding="utf-8", timeout=60,
        cwd=tmp_path, dimensions=(40, 160),
    )  # fmt: skip
    try:
        terminal.expect_exact("In [1]: ")
        terminal.sendline("%load_ext hydrogen_magic")
        terminal.expect_exact("In [2]: ")
        # What is typed is echoed: it must not look like output.
        body = (
            STUBBORN.partition("\n")[2].replace('"ready"', '"rea" "dy"').replace('"no"', '"n" "o"')
        )
        terminal.sendline(f"get_ipython().run_cell_magic('distributed', '--grace 100', {body!r})")
        for _ in range(2):
            terminal.expect_exact("ready")
        terminal.sendintr()
        for _ in range(2):
            terminal.expect(r"no\r?\n")
        terminal.sendintr()
        terminal.expect_exact("In [3]: ", timeout=2)
        assert "GangStoppedError: stopped by you" in terminal.before
        terminal.sendline("exit()")
        terminal.expect(pexpect.EOF)
    finally:
        terminal.close(force=True)


# ── clients come and go ──────────────────────────────────────────────────────────────────────────


def test_a_gang_goes_on_without_a_client(other_kernel: Kernel, tmp_path: Path) -> None:
    go = tmp_path / "go"
    started = other_kernel.run(
        "%%distributed --np 2 --detach\nimport hydrogen_magic as hm, os, pathlib, time\n"
        f"while not pathlib.Path({str(go)!r}).exists():\n"
        "    hm.log(loss=0.5)\n    print('x' * 1000)\n"
        "hm.rank() + 40"
    )
    name = started.value.partition("Gang ")[2].partition(":")[0]  # type: ignore[union-attr]
    other_kernel.until(started, lambda: "not shown here" in started.stream())
    before = other_kernel.rss_bytes()
    log = tmp_path / "home" / "runs" / name / "rank-0.log"
    mark = log.stat().st_size + (100 << 20)
    other_kernel.close()
    deadline = time.monotonic() + 30
    while log.stat().st_size < mark:
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
    second = other_kernel.second_client()
    try:
        grown = other_kernel.rss_bytes() - before
        shown = second.run(f"%gang show {name}").stream()
        go.touch()
        assert second.run(f"%gang wait {name}").value == "40"
        assert "2 ranks · running" in shown and "loss 0.5" in shown
        assert grown < 50 << 20, grown
    finally:
        second.close()


# ── two notebooks ────────────────────────────────────────────────────────────────────────────────


def test_two_notebooks_at_once(kernel: Kernel, other_kernel: Kernel) -> None:
    for _ in range(3):
        cells = [each.start(REDUCE) for each in (kernel, other_kernel)]
        values = [
            each.finish(c).value for each, c in zip((kernel, other_kernel), cells, strict=True)
        ]
        assert values == ["2", "2"]


# ── the end of kernels ───────────────────────────────────────────────────────────────────────────


class Mourner:
    """Watches whether what descends from a kernel is gone within a second of the kernel's end."""

    def __init__(self, pid: int) -> None:
        self.family = [process.pid for process in processes.descendants(pid)]
        self._in_time: list[bool] = []
        self._kernel = os.pidfd_open(pid)
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._kernel, select.POLLIN)
        poll.poll(30_000)
        self._in_time.append(gone_within(self.family, 1.0))

    def check(self) -> None:
        self._thread.join()
        os.close(self._kernel)
        assert self._in_time == [True], alive(self.family)


@pytest.mark.parametrize("how", ["restart now", "restart", "crash", "shutdown"])
def test_the_gang_ends_with_its_kernel_and_the_next_one_runs(kernel: Kernel, how: str) -> None:
    hub = kernel.value("from hydrogen_magic.placements import agents; agents.hub()._directory")
    cell = kernel.start(FAMILY)
    kernel.until(cell, lambda: cell.stream().count("training") == 2)
    mourner = Mourner(kernel.pid)
    sockets = Path(hub.strip("'"))
    assert (sockets / "hub").exists()
    assert len(mourner.family) >= 10, "agent, template, and two ranks with three children each"
    if how == "crash":
        os.kill(kernel.pid, signal.SIGSEGV)
        kernel.revive()
    elif how == "shutdown":
        kernel.manager.shutdown_kernel(restart=True)
        kernel.revive()
    else:
        kernel.restart(now=how == "restart now")
    mourner.check()
    assert not sockets.exists()
    said = kernel.load()
    told = "1 earlier run was stopped when the kernel ended" in said
    # A polite end interrupts first: the gang mostly ends in order before the kernel does.
    assert told or (said == "" and how in ("restart", "shutdown")), said
    assert kernel.run("%reload_ext hydrogen_magic").stream() == "", "said once"
