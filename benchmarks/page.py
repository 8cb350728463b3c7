"""Page: what the live view costs in JupyterLab, how fast its page answers, and how old its values are.

    python benchmarks/page.py
    python benchmarks/page.py --only paced --seconds 20

Eight ranks log four metrics, at 1,000 points a second each or as fast as they can, with the view and
with ``--quiet`` in turn (A B B A). The browser draws on the machine that the ranks run on: on a small
one it takes from the ranks what it would take from nobody elsewhere, so its share is printed too.

Answer: from a click on the page to the frame after the one that has what was clicked for. Age: from
``hm.log`` on a rank to now, of the values that the table of ranks shows half a second after each click.
Ranks, kernel and the others: seconds of CPU, of the seconds they were watched.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psutil
from _common import chosen, in_turn, lacks
from _results import Table, parse_arguments, report

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import run_log

NP = 8
N_CLICKS = 20
AGE_GOAL_MS = 1000
WARM_UP_S = 3.0
"""From a cell's start until all its ranks log."""
MB = 1e6

LOGGED = """%%distributed --np {np} {option}
import time
import hydrogen_magic as hm
done, start_s, elapsed_s = 0, time.monotonic(), 0.0
while (elapsed_s := time.monotonic() - start_s) < {seconds}:
    until = {until}
    for step in range(done, until):
        hm.log(step, loss=1 / (step + 1), accuracy=step % 997, lr=1e-3, clock=time.time() % 100)
    done = until
    {rest}
"""
WAYS = {
    "paced": ("int(elapsed_s * 1000)", "time.sleep(0.005)"),
    "unpaced": ("done + 100", "pass"),
}
"""How far a rank has got by now, and what it does then."""
TITLES = {
    "paced": "ranks that log 1,000 steps a second each",
    "unpaced": "ranks that log as fast as they can",
}

WATCH = """
window.answers = [];
window.tasks = [];
new PerformanceObserver((list) => {
  for (const task of list.getEntries()) window.tasks.push([task.startTime, task.duration]);
}).observe({type: "longtask"});
document.addEventListener("click", (event) => {
  const button = event.target.closest(".hm button");
  if (!button) return;
  const look = () => button.ariaExpanded ?? button.ariaPressed;
  const before = look();
  const wait = () => requestAnimationFrame(() => {
    if (look() === before) return wait();
    requestAnimationFrame(() => window.answers.push(performance.now() - event.timeStamp));
  });
  wait();
}, true);
"""
AGES_MS = """(table) => {
  const at = [...table.tHead.rows[0].cells].findIndex((cell) => cell.title === "clock");
  return [...table.tBodies[0].rows].map((row) => {
    const ageMs = Math.round((Date.now() % 100_000) - 1000 * row.cells[at].textContent);
    return ageMs < -50_000 ? ageMs + 100_000 : ageMs;
  });
}
"""
"""The ages of the clock values in a table of ranks; these values start again at 0 every 100 s."""


@dataclass(frozen=True)
class Used:
    """What was used so far, or between two moments."""

    at_s: float
    ranks_s: float
    """With their agent."""
    kernel_s: float
    server_s: float
    browser_s: float
    driver_s: float
    """What clicks, and listens to the websockets: nobody has that."""
    n_bytes: float
    """That came to the page by websocket."""

    def since(self, before: Used) -> Used:
        """Return what was used each second since then."""
        seconds = self.at_s - before.at_s
        names = [each.name for each in fields(self)]
        grown = {name: getattr(self, name) - getattr(before, name) for name in names}
        return Used(**{name: value / seconds for name, value in grown.items()})


@dataclass(frozen=True)
class Measured:
    """One run of the cell."""

    used: Used
    """Each second."""
    n_logged: int
    n_kept: int
    """Points that reached the kernel: of ranks that log too fast the oldest are dropped."""
    answers_ms: list[float]
    ages_ms: list[float]
    longest_ms: float
    """Task of the page's thread."""


class Bench:
    """A JupyterLab with one notebook, and who uses what of the machine."""

    def __init__(self, notebook: Any, server_pid: int) -> None:
        self._notebook = notebook
        self._page = notebook.page
        self._n_bytes = 0
        self._server = psutil.Process(server_pid)
        self._page.on("websocket", lambda socket: socket.on("framereceived", self._count))

    def _count(self, payload: bytes | str) -> None:
        self._n_bytes += len(payload)

    def used(self) -> Used:
        (kernel,) = self._server.children()
        mine = psutil.Process().children(recursive=True)
        browser = [each for each in mine if "chrom" in _name(each)]
        driver = [psutil.Process(), *(each for each in mine if _name(each) == "node")]
        ranks = kernel.children(recursive=True)
        return Used(
            time.monotonic(),
            ranks_s=_sum_s(ranks),
            kernel_s=_sum_s([kernel]),
            server_s=_sum_s([self._server]),
            browser_s=_sum_s(browser),
            driver_s=_sum_s(driver),
            n_bytes=self._n_bytes,
        )

    def measure(self, cell: str, watched_s: float, *, is_shown: bool) -> Measured:
        from tests.browser.gangs import Run

        known = frozenset(run_log.recent_ids())
        self._notebook.start(cell)
        self._wait(WARM_UP_S)
        before, began_ms = self.used(), self._page.evaluate("performance.now()")
        ages: list[float] = []
        if is_shown:
            ages = self._click_for(cell, watched_s)
        else:
            self._wait(watched_s)
        used = self.used().since(before)
        answers, longest = self._page.evaluate(
            """(began) => {
              const found = [window.answers, Math.max(0,
                ...window.tasks.filter((task) => task[0] >= began).map((task) => task[1]))];
              window.answers = [];
              return found;
            }""",
            began_ms,
        )
        self._notebook.finish(cell)
        points = Run(known).all(ev.Metrics)
        last = {event.rank: event.steps[-1] for event in points}
        n_kept = sum(len(event.steps) for event in points)
        assert len(last) == NP and len(answers) == N_CLICKS * is_shown, (last, answers)
        return Measured(used, sum(last.values()) + NP, n_kept, answers, ages, longest)

    def _click_for(self, cell: str, seconds: float) -> list[float]:
        """Click on what changes most: charts folded and drawn anew, and drawn in another way.

        Returns the ages of values that the page shows.
        """
        curves = self._notebook.widget(cell).locator(".hm-curves")
        fold = curves.locator(".hm-fold")
        ways = [fold, fold] + [curves.get_by_role("button", name=n) for n in ("mean", "both")]
        end_s = time.monotonic() + seconds
        table = self._notebook.widget(cell).locator(".hm-ranks-table")
        ages: list[float] = []
        for number in range(N_CLICKS):
            ways[number % len(ways)].click()
            self._wait((end_s - time.monotonic()) / (N_CLICKS - number))
            ages += table.evaluate(AGES_MS)
        return ages

    def _wait(self, seconds: float) -> None:
        self._page.wait_for_timeout(max(0.0, seconds) * 1000)


def _sum_s(processes: Iterable[psutil.Process]) -> float:
    return sum(map(_cpu_s, processes))


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.Error:
        return ""


@contextmanager
def opened(cells: list[str]) -> Iterator[Bench]:
    """Open a notebook of these cells in a JupyterLab of its own, and load the extension."""
    from playwright.sync_api import sync_playwright

    from tests.browser.gangs import LOAD
    from tests.browser.page import NotebookPage, Seen, launch, write_notebook
    from tests.browser.server import Server

    with tempfile.TemporaryDirectory(prefix="hydrogen-bench-") as folder:
        server = Server(Path(folder))
        os.environ["HYDROGEN_MAGIC_HOME"] = str(server.runs.parent)
        try:
            with sync_playwright() as playwright, launch(playwright) as browser:
                context = browser.new_context(viewport={"width": 1280, "height": 1000})
                context.add_init_script(WATCH)
                notebook = NotebookPage(context, server, Seen())
                bench = Bench(notebook, server.pid)
                notebook.open(write_notebook(server.notebooks / "page.ipynb", [LOAD, *cells]))
                notebook.run(LOAD)
                yield bench
                context.close()
                server.end_kernels()
        finally:
            server.stop()


def run(way: str, seconds: float, rounds: int) -> tuple[list[Measured], list[Measured]]:
    """Return what was measured with the view and with ``--quiet``."""
    until, rest = WAYS[way]
    cells = {
        is_shown: LOGGED.format(
            np=NP, option="" if is_shown else "--quiet", seconds=seconds, until=until, rest=rest
        )
        for is_shown in (True, False)
    }
    shown: list[Measured] = []
    quiet: list[Measured] = []
    watched_s = seconds - WARM_UP_S - 1.0
    with opened([*cells.values()]) as bench:
        for number in range(rounds):
            for is_shown in in_turn((True, False), number):
                found = bench.measure(cells[is_shown], watched_s, is_shown=is_shown)
                (shown if is_shown else quiet).append(found)
                print(f"  {way}, round {number + 1}: {found}", file=sys.stderr, flush=True)
    return shown, quiet


def table_of(way: str, shown: list[Measured], quiet: list[Measured]) -> Table:
    answers = [ms for each in shown for ms in each.answers_ms]
    ages = [ms for each in shown for ms in each.ages_ms]
    seen = {
        "answer to a click, ms": statistics.median(answers),
        "slowest answer, ms": max(answers),
        "longest task of the page, ms": max(each.longest_ms for each in shown),
        "age of the values shown, ms": statistics.median(ages),
        f"oldest value, ms (goal: {AGE_GOAL_MS})": max(ages),
    }
    rows = [[name, value, None, None] for name, value in seen.items()]
    for name in ("ranks", "kernel", "server", "browser", "driver"):
        rows.append(_row(f"{name}, % of a core", _medians(f"{name}_s", shown, quiet), 100))
    rows.append(_row("to the page, kB/s", _medians("n_bytes", shown, quiet), 1 / 1000))
    for name in ("n_logged", "n_kept"):
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(shown, quiet, strict=True)]
        views, quiets = (statistics.median(each) / MB for each in zip(*pairs, strict=True))
        more = 100 * (statistics.median(a / b for a, b in pairs) - 1)
        rows.append([f"points {name[2:]}, millions", views, quiets, f"{more:.1f} %"])
    columns = {"": "", "view": "", "quiet": "", "difference": ""}
    return Table(f"page_{way}", TITLES[way], columns, rows)


def _medians(name: str, *runs: list[Measured]) -> list[float]:
    return [statistics.median(getattr(each.used, name) for each in run) for run in runs]


def _row(name: str, medians: list[float], scale: float) -> list[Any]:
    view, quiet = (median * scale for median in medians)
    return [name, view, quiet, view - quiet]


def main() -> None:
    asked = parse_arguments(
        __doc__.splitlines()[0],
        rounds=2,
        quick_rounds=1,
        packages=("torch", "jupyterlab"),
        more=lambda parser: parser.add_argument(
            "--seconds", type=float, default=15.0, help="that the ranks log"
        ),
    )
    missing = lacks("playwright") or lacks("jupyterlab")
    if missing:
        sys.exit(f"benchmarks/page.py needs what the tests in a browser need: {missing}")
    print(f"page: np {NP}, {asked.machine}", flush=True)
    for way in chosen(WAYS, asked.only):
        report(asked, table_of(way, *run(way, asked.seconds, asked.rounds)))


if __name__ == "__main__":
    main()
