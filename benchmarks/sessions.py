"""Sessions: cells on two ranks that stay, beside other tools whose ranks stay, all on this machine.

    python benchmarks/sessions.py --rounds 5
    python benchmarks/sessions.py --only hydrogen_magic --what call    # our calls alone

Each tool has a Jupyter kernel of its own, whose ranks have joined a Gloo group. Times are those of a front
end: from sending a cell to the kernel until its reply has arrived.

- call: a cell that reduces one number over all ranks, until the value of rank 0.
- push, pull: an array of 1 GB (``--quick``: 100 MB) from the notebook to both ranks, and from rank 0 to the
  notebook; a new one each time.
- interrupt: rank 0 waits in an all_reduce that rank 1 never enters; from the kernel's interrupt to the value
  of the next call.
- failure: the same, with a rank 1 that raises; from sending the failing cell to the value of the next call.
  If it has not ended after ten seconds, the kernel is interrupted.

If the next call does not return within ten seconds, kernel and ranks are started again, as their user would
do. These seconds are counted; two columns have the restarts and the part of the time that was such a wait.
jupyter-distributed has no notebook process beside its ranks: nothing is pushed or pulled. nbdistributed is
left out: its shutdown kills processes of other programs by their name.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from _common import Peer, chosen, lacks, peer_table, round_robin, timed, warm_up
from _results import Run, parse_arguments, report
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

from hydrogen_magic.core import processes

PRODUCT = "hydrogen_magic"
NP = 2
GOAL_S = 0.020
STUCK_S = 10.0
"""Time after which a cell that should end is given up."""
_START_S = 120.0
_SETTLE_S = 4.0
"""After the starts: tools may go on in the background. Ours prepares for a gang beside the session."""
_MARK = "HYDROGEN_MAGIC_BENCHMARK"
"""Environment variable of a kernel and all processes that it has started."""
_LONG_S = 300.0
N_CALLS = 10
"""Calls in each round."""
_BLOCKED_S = 1.5
"""Time after which rank 0 waits in its collective."""
ANSWER = 42.0

IMPORTS = "import sys, time\nimport numpy, torch\nimport torch.distributed as dist\n"
JOIN = "dist.init_process_group('gloo')\n"
REDUCE = f"total = torch.full((1,), {ANSWER / NP})\ndist.all_reduce(total)\ntotal.item()"
ALONE = "if dist.get_rank() == 0:\n    dist.all_reduce(torch.ones(1))\n"
BLOCK = f"{ALONE}time.sleep(1000)"
FAIL = f"{ALONE}raise ValueError('bad batch')"
MAKE = f"found = numpy.full({{size}}, {ANSWER})"


@dataclass(frozen=True)
class Way:
    """One tool. Texts are cells; ``{size}`` stands for the number of elements of an array."""

    name: str
    module: str
    """What has to be installed."""
    start: tuple[str, ...]
    """Cells that start ranks and let them join."""
    reduce: str
    block: str
    fail: str
    make: str
    """Make ``found`` on the ranks."""
    push: str = ""
    pull: str = ""
    kernel: str = "ipykernel_launcher"
    """Module of the kernel."""
    env: tuple[tuple[str, str], ...] = ()


def by_magic(name: str, module: str, magic: str, start: tuple[str, ...], **more: Any) -> Way:
    """Return a tool whose cells begin with a magic, or, without one, run on the ranks by themselves."""
    join, reduce, block, fail, make = (
        f"{magic}{text}" for text in (IMPORTS + JOIN, REDUCE, BLOCK, FAIL, MAKE)
    )
    return Way(name, module, (*start, join), reduce, block, fail, make, **more)


PX_START = f"""
import ipyparallel
cluster = ipyparallel.Cluster(n={NP}, engine_launcher_class="local", log_level=50)
clients = cluster.start_and_connect_sync()
ranks = clients[:]
def rank_environment(rank, port):
    import os
    os.environ.update(RANK=str(rank), WORLD_SIZE="{NP}", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
import socket
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
ranks.map_sync(rank_environment, range({NP}), [port] * {NP})
"""
MONARCH_START = textwrap.dedent(
    f"""
    import os, socket
    from monarch.actor import Actor, endpoint, this_host, current_rank

    class Rank(Actor):
        @endpoint
        def join(self, port):
            rank = current_rank().rank
            os.environ.update(
                RANK=str(rank), WORLD_SIZE="{NP}", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
            )
            dist.init_process_group("gloo")

        @endpoint
        def reduce(self):
            total = torch.full((1,), {ANSWER / NP})
            dist.all_reduce(total)
            return total.item()

        @endpoint
        def block(self):
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(1))
            time.sleep(1000)

        @endpoint
        def fail(self):
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(1))
            raise ValueError("bad batch")

        @endpoint
        def make(self, size):
            self.found = numpy.full(size, {ANSWER})

        @endpoint
        def put(self, found):
            self.found = found

        @endpoint
        def get(self):
            return self.found

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = this_host().spawn_procs({{"ranks": {NP}}}).spawn("ranks", Rank)
    ranks.join.call(port).get()
    """
)
WAYS = (
    by_magic(
        PRODUCT,
        "hydrogen_magic",
        f"%%distributed --session --np {NP}\n",
        (IMPORTS + "%load_ext hydrogen_magic",),
        push="%%distributed --session --push array\narray[-1]",
        pull="%%distributed --session --out found\npass",
    ),
    by_magic(
        "ipyparallel",
        "ipyparallel",
        "%%px\n",
        (IMPORTS, PX_START),
        push="ranks.push({'array': array}, block=True)",
        pull="found = ranks.pull('found', targets=0, block=True)",
    ),
    by_magic(
        "jupyter-distributed",
        "jupyter_distributed",
        "",
        (),
        kernel="jupyter_distributed.kernel",
        env=(("JUPYTER_DISTRIBUTED_WORLD_SIZE", str(NP)),),
    ),
    Way(
        "Monarch",
        "monarch.actor",
        (IMPORTS, MONARCH_START),
        "[value for _, value in ranks.reduce.call().get()]",
        "ranks.block.call().get()",
        "ranks.fail.call().get()",
        "ranks.make.call({size}).get()",
        push="ranks.put.call(array).get()",
        pull="found = ranks.slice(ranks=0).get.call_one().get()",
    ),
)


class Notebook:
    """A kernel with the ranks of one tool."""

    def __init__(self, way: Way, folder: Path) -> None:
        self.way = way
        self.restarts = 0
        self.waited_s = 0.0
        """For cells that were given up."""
        argv = [sys.executable, "-m", way.kernel, "-f", "{connection_file}"]
        spec = {"argv": argv, "language": "python", "display_name": way.name, "env": dict(way.env)}
        path = folder / "kernels" / way.name / "kernel.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(spec))
        self._specs = KernelSpecManager(kernel_dirs=[str(folder / "kernels")])
        self._folder = folder
        self._mark = secrets.token_hex(8)
        self._manager: Any = None
        self._client: Any = None

    def start(self) -> None:
        environ = {**os.environ, _MARK: self._mark}
        self._manager = KernelManager(kernel_name=self.way.name, kernel_spec_manager=self._specs)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._manager.start_kernel(env=environ, cwd=str(self._folder), **quiet)
        self._client = self._manager.blocking_client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=_START_S)
        for cell in self.way.start:
            self.run(cell, _START_S)
        self.call(_START_S)

    def close(self) -> None:
        if self._client is not None:
            self._client.stop_channels()
            self._manager.shutdown_kernel()  # not at once: some tools end their ranks then
            self._client = None
        processes.kill_marked(_MARK, {self._mark})  # others leave them when the kernel is stuck

    def call(self, limit_s: float = STUCK_S) -> None:
        """Run a collective on all ranks. Raises RuntimeError without its value."""
        shown = self.run(self.way.reduce, limit_s)
        if str(ANSWER) not in shown:
            raise RuntimeError(f"the cell returned {shown}")

    def run(self, cell: str, limit_s: float = _LONG_S) -> str:
        """Run a cell; return what it has shown. Raises TimeoutError, RuntimeError if it fails."""
        shown: list[Any] = []
        try:
            reply = self._client.execute_interactive(
                cell,
                timeout=limit_s,
                allow_stdin=False,
                output_hook=lambda message: shown.append(message["content"]),
            )
        except TimeoutError:
            self.waited_s += STUCK_S
            raise
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"{reply['content'].get('evalue')}: {shown}")
        return str(shown)

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def call_again(self) -> None:
        """Run a collective on all ranks, by new ones if these do not answer."""
        try:
            self.call()
        except (RuntimeError, TimeoutError):
            self.restarts += 1
            self.close()
            self.start()


# ── what is measured ─────────────────────────────────────────────────────────────────────────────


def call(notebook: Notebook) -> float:
    return timed(notebook.call)


def push(size: int, notebook: Notebook) -> float:
    notebook.run(f"array = numpy.full({size}, {ANSWER})")
    return timed(lambda: notebook.run(notebook.way.push))


def pull(size: int, notebook: Notebook) -> float:
    notebook.run(notebook.way.make.format(size=size))
    return timed(lambda: notebook.run(notebook.way.pull))


def then_small(move: Callable[[int, Notebook], float], size: int, notebook: Notebook) -> float:
    """Move an array, then one number in its place: the arrays of all tools would not fit into memory."""
    seconds = move(size, notebook)
    move(1, notebook)
    return seconds


def interrupt(notebook: Notebook) -> float:
    """Interrupt from a thread, since this one waits for the cell."""
    began: list[float] = []

    def stop() -> None:
        began.append(time.monotonic())
        notebook.interrupt()

    timer = threading.Timer(_BLOCKED_S, stop)
    timer.start()
    with contextlib.suppress(RuntimeError, TimeoutError):
        notebook.run(notebook.way.block, _BLOCKED_S + STUCK_S)
    timer.join()
    notebook.call_again()
    return time.monotonic() - began[0]


def failure(notebook: Notebook) -> float:
    def fail() -> None:
        try:
            notebook.run(notebook.way.fail, STUCK_S)
        except TimeoutError:
            notebook.interrupt()
        except RuntimeError:  # as it should
            pass
        notebook.call_again()

    return timed(fail)


@dataclass(frozen=True)
class Measurement:
    """One table: what is done, and the cell of a tool that it needs."""

    title: str
    measure: Callable[[Notebook], float]
    needs: str
    n_times: int = 1
    """In each round."""
    waits: bool = False
    """Whether the time may be mostly :data:`STUCK_S`: a ratio of such times says nothing."""


def measurements(size: int) -> dict[str, Measurement]:
    return {
        "call": Measurement(
            f"call to rank 0's value (goal: {1000 * GOAL_S:.0f} ms)", call, "reduce", N_CALLS
        ),
        "push": Measurement(
            f"{8 * size / 1e9:g} GB from the notebook to both ranks",
            partial(then_small, push, size),
            "push",
        ),
        "pull": Measurement(
            f"{8 * size / 1e9:g} GB from rank 0 to the notebook",
            partial(then_small, pull, size),
            "pull",
        ),
        "interrupt": Measurement(
            "interrupt of a blocked all_reduce to the next value", interrupt, "block", waits=True
        ),
        "failure": Measurement(
            "a cell that fails on one rank to the next value", failure, "fail", waits=True
        ),
    }


def main() -> None:
    names = [*measurements(0)]
    run = parse_arguments(
        __doc__.splitlines()[0],
        rounds=5,
        quick_rounds=2,
        packages=("torch", "ipyparallel", "jupyter-distributed", "torchmonarch"),
        more=lambda parser: parser.add_argument(
            "--what", nargs="+", default=names, choices=names, help="which times; default all"
        ),
    )
    size = 10**7 // 8 * (10 if run.quick else 100)
    print(f"sessions: np {NP}, {run.machine}", flush=True)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hydrogen-bench-")))
        names = chosen([way.name for way in WAYS], run.only)
        notebooks = [Notebook(way, folder) for way in WAYS if way.name in names]
        for notebook in notebooks:
            stack.callback(notebook.close)
        starts = [
            Peer(each.way.name, partial(timed, each.start), lacks(each.way.module))
            for each in notebooks
        ]
        warm_up(starts)
        time.sleep(_SETTLE_S)
        for name in run.what:
            measure(run, name, measurements(size)[name], notebooks, starts)


def measure(
    run: Run, name: str, what: Measurement, notebooks: list[Notebook], starts: list[Peer]
) -> None:
    """Measure one table. ``starts``: what is missing to start each notebook."""
    peers = []
    for notebook, start in zip(notebooks, starts, strict=True):
        notebook.restarts, notebook.waited_s = 0, 0.0
        lacking = start.missing or ("" if getattr(notebook.way, what.needs) else "has no such cell")
        peers.append(Peer(start.name, partial(what.measure, notebook), lacking))
    round_robin(peers, run.rounds * what.n_times)
    more: dict[str, dict[str, float]] = {}
    if what.waits:
        more["restarts"] = {each.way.name: each.restarts for each in notebooks}
        more["s of waiting in each"] = {
            each.way.name: each.waited_s / run.rounds for each in notebooks
        }
    floor = "" if what.waits else PRODUCT
    report(run, peer_table(f"sessions_{name}", what.title, peers, floor, more))


if __name__ == "__main__":
    main()
