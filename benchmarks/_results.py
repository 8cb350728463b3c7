"""Arguments and tables of the benchmarks: printed and, with ``--save``, written for ``docs/benchmarks.md``.

``python -m docs.generated`` writes the saved tables into that page.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["RESULTS", "Run", "Table", "heading", "parse_arguments", "report", "shown"]

RESULTS = Path(__file__).with_name("results")
IDLE_PERCENT = 10
"""Of all cores: what may be in use when something begins that is saved for the documentation."""
IDLE_WAIT_S = 180.0
Cell = str | float | None


@dataclass(frozen=True)
class Table:
    """What one benchmark has measured."""

    name: str
    """Of its file."""
    title: str
    columns: dict[str, str]
    """Heading -> unit."""
    rows: list[list[Cell]]
    left_out: dict[str, str] = field(default_factory=dict)
    """First cell of a row that is missing -> why."""


class Run(argparse.Namespace):
    """The arguments of a benchmark, and the machine before it began."""

    home: tempfile.TemporaryDirectory[str]
    """Has the records of runs, which would otherwise take the place of the user's own."""
    rounds: int
    quick: bool
    only: Sequence[str]
    save: Path | None
    packages: Sequence[str]
    load_before: float

    def record(self) -> dict[str, Any]:
        """Return where, when and by which command something was measured."""
        command = [f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
        return {
            "command": f"python {shlex.join(command)}",
            "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
            "machine": {"cores": os.cpu_count(), "cpu": _cpu(), **_versions(self.packages)},
            "load_before": self.load_before,
            "load_after": _load(),
        }

    @property
    def machine(self) -> str:
        """One line about where this is measured."""
        import torch

        return f"{os.cpu_count()} cores, torch {torch.__version__}, load {self.load_before} at the start"


def parse_arguments(
    description: str,
    rounds: int = 0,
    quick_rounds: int = 0,
    *,
    packages: Sequence[str] = ("torch",),
    more: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> Run:
    """Parse what all benchmarks have and what ``more`` adds; ``rounds`` is set in every case.

    ``packages``: those whose versions are saved with the tables. Without ``rounds`` there is no ``--rounds``.
    """
    parser = argparse.ArgumentParser(description=description)
    if rounds:
        parser.add_argument("--rounds", type=int, help=f"default {rounds}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller sizes")
    parser.add_argument("--only", nargs="+", default=(), help="what has this in its name")
    parser.add_argument(
        "--save", type=Path, nargs="?", const=RESULTS, metavar="FOLDER",
        help="write the tables as JSON, by default those of docs/benchmarks.md",
    )  # fmt: skip
    more(parser)
    run = parser.parse_args(namespace=Run(packages=packages))
    if rounds:
        run.rounds = run.rounds or (quick_rounds if run.quick else rounds)
    run.home = tempfile.TemporaryDirectory(prefix="hydrogen-bench-", ignore_cleanup_errors=True)
    os.environ["HYDROGEN_MAGIC_HOME"] = run.home.name
    if run.save == RESULTS:
        _wait_until_idle()
    run.load_before = _load()
    return run


def report(run: Run, table: Table) -> None:
    """Print a table, and save it if that was asked for."""
    if table.rows:
        print(f"\n{table.title}\n\n{_text(table)}", flush=True)
    for name, why in table.left_out.items():
        print(f"{name}: not measured: {why}", flush=True)
    if table.rows and run.save is not None:
        run.save.mkdir(parents=True, exist_ok=True)
        rows = [[_rounded(cell) for cell in row] for row in table.rows]
        found = {**asdict(table), "rows": rows, **run.record()}
        del found["name"]
        (run.save / f"{table.name}.json").write_text(json.dumps(found, indent=1) + "\n")


def heading(name: str, unit: str) -> str:
    """Return the head of a column."""
    return f"{name}, {unit}" if name and unit else name or unit


def shown(cell: Cell) -> str:
    """Return a cell as text: three digits of a number that was measured."""
    if not isinstance(cell, float):
        return "" if cell is None else f"{cell:,}" if isinstance(cell, int) else cell
    digits = 2 - math.floor(math.log10(abs(cell))) if cell else 0
    text = f"{cell:,.{min(6, max(0, digits))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _text(table: Table) -> str:
    head = [heading(*column) for column in table.columns.items()]
    rows = [[shown(cell) for cell in row] for row in table.rows]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(_aligned(line, widths)) + " |" for line in lines)


def _aligned(line: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for number, (text, width) in enumerate(zip(line, widths, strict=True)):
        yield text.rjust(width) if number else text.ljust(width)


def _rounded(cell: Cell) -> Cell:
    return float(f"{cell:.4g}") if isinstance(cell, float) else cell


def _wait_until_idle() -> None:
    """Wait for the end of what would be measured, too. Raises SystemExit if the machine stays busy."""
    import psutil

    deadline_s = time.monotonic() + IDLE_WAIT_S
    while (busy := psutil.cpu_percent(interval=1.0)) > IDLE_PERCENT:
        if time.monotonic() > deadline_s:
            sys.exit(f"--save needs an idle machine: {busy:.0f} % of its cores are in use")


def _load() -> float:
    return round(os.getloadavg()[0], 1)


def _cpu() -> str:
    """Return the model of the CPU, which ``platform`` does not know on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (models or [platform.machine()])[0].replace("(R)", "").replace("(TM)", "")


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # said by the rows that are left out
            continue
    return found
