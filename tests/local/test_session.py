"""Sessions on this machine: ranks that stay between cells."""

from __future__ import annotations

from typing import Any

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from hydrogen_magic.driver import session as sessions
from hydrogen_magic.errors import CaptureError, RankFailedError
from tests.gangs import wait_until

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


def test_later_cells_run_on_the_same_ranks_with_their_variables(cells: Cells) -> None:
    cells.run("x = 3\ndef f(): return x + 1")
    pid = cells.on_ranks(JOIN + "y = [x]\nz = f()\nos.getpid()", "--np 2")
    cells.run("x = 4\ndef f(): return x + 100")
    assert cells.on_ranks("y.append(x)\n(os.getpid(), y, z, f())") == (pid, [3, 3], 4, 103)
    assert cells.all_ranks("hm.rank()") == [0, 1], "the process group is still joined"
    assert cells.on_ranks("del z\ny = len(y)", "--out y") is None
    assert cells.shell.user_ns["y"] == 2
    with pytest.raises(CaptureError, match="`z`"):
        cells.on_ranks("z")


def test_a_failing_cell_costs_neither_ranks_nor_variables(cells: Cells) -> None:
    """The peer waits in a collective, and later in the backward pass of DDP, until it is released."""
    model = "net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))\n"
    step = "net(torch.ones(1, 2)).sum().backward()\n"
    pid = cells.on_ranks(JOIN + model + step + "os.getpid()", "--np 2")
    for wait in ("dist.all_reduce(torch.ones(1))", step):
        with pytest.raises(RankFailedError) as caught:
            cells.on_ranks(f"if hm.rank() == 1:\n    raise ValueError('bad batch')\n{wait}")
        assert (caught.value.rank, "bad batch" in caught.value.report) == (1, True)
        assert cells.on_ranks(step + "float(net.module.weight.grad.sum()) != 0, os.getpid()") == (
            True,
            pid,
        )
        assert cells.all_ranks("hm.rank()") == [0, 1]


def test_a_rank_that_dies_ends_the_session_and_the_report_names_its_variables(cells: Cells) -> None:
    cells.on_ranks("weights = torch.ones(3)", "--np 2")
    (session,) = sessions.sessions()
    with pytest.raises(RankFailedError, match="rank 1"):
        cells.on_ranks("if hm.rank() == 1:\n    os.kill(os.getpid(), 9)\ntime.sleep(1000)")
    assert "ranks held weights" in session.loss and not sessions.sessions()
    with pytest.raises(CaptureError, match="`weights`"):
        cells.on_ranks("weights", "--np 2")


def test_another_number_of_ranks_is_refused(cells: Cells) -> None:
    cells.on_ranks("1", "--np 2")
    with pytest.raises(UsageError, match="session 'lab' was started with --np 2, not 3"):
        cells.on_ranks("1", "--np 3")
    assert cells.on_ranks("hm.world_size()") == 2
