"""Notebooks of others: whether their cells mean the same on ranks.

    python benchmarks/public_notebooks.py FOLDER a.ipynb https://host/b.ipynb

Each notebook runs twice, in fresh processes and in copies of its folder: plainly, and with each cell first by
``%%distributed --np 2`` and then plainly in the same notebook. Compared is what rank 0 has with what that
notebook then has: the names that the cell mentions or changes (``--out``), its value, its printed text, its
displays, or its exception. Both get the same seeds, by ``--seed``.

| column | cells |
|---|---|
| same | all of that is the same |
| raise | raise the same exception plainly and on ranks |
| vary | differ between the two plain runs (times, own generators); on ranks, types and shapes are the same |
| refused | were refused before any rank started |
| failed | failed on ranks alone |
| warned | differ, and the user got a warning |
| differ | differ without a warning: a fault of the package, or to be explained |
| other | are not Python (``%%bash``), or empty |

Those that vary, were refused, failed or differ are listed, and the exit code is 1 if some differ without a
warning. Figures and objects that cannot be pickled count by their types, and gradients do not count, since
they are not sent. ``PYTHONHASHSEED=0`` keeps the order of sets.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _results import Table, parse_arguments, report

KINDS = ("same", "raise", "vary", "refused", "failed", "warned", "differ", "other")
_CELLS = Path(__file__).with_name("_notebook_cells.py")
_LISTED = ("vary", "refused", "failed", "warned", "differ")
_MAX_SHOWN = 200
Record = dict[str, Any]
"""A line that ``_notebook_cells.py`` has written: a cell."""


@dataclass(frozen=True)
class Verdict:
    kind: str
    """One of :data:`KINDS`."""
    why: str = ""


def main() -> None:
    run = parse_arguments(
        __doc__.splitlines()[0], packages=("torch", "ipython"), more=_add_arguments
    )
    rows = []
    with tempfile.TemporaryDirectory(prefix="hydrogen-notebooks-") as folder:
        for name, path in found_notebooks(run.notebooks, Path(folder)):
            verdicts = compared(path, run.np, run.limit)
            rows.append(row(name, verdicts))
            print(f"\n{name}: {rows[-1][1:]}", flush=True)
            for number, (source, verdict) in enumerate(verdicts, 1):
                if verdict.kind in _LISTED:
                    print_verdict(number, source, verdict)
    rows.append(
        ["all", *(sum(column) for column in zip(*(each[1:] for each in rows), strict=True))]
    )
    columns = {"": "", "cells": "", **dict.fromkeys(KINDS, "")}
    report(
        run, Table("public_notebooks", f"cells on {run.np} ranks beside plain runs", columns, rows)
    )
    if rows[-1][1 + len(KINDS) - 1]:
        sys.exit(1)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("notebooks", nargs="+", help="folders, files or URLs of notebooks")
    parser.add_argument("--np", type=int, default=2, help="number of ranks, default 2")
    parser.add_argument(
        "--limit", type=float, default=600.0, metavar="S",
        help="end each of the two runs after S seconds, default 600: cells after that do not count",
    )  # fmt: skip


def found_notebooks(places: Sequence[str], downloads: Path) -> Iterator[tuple[str, Path]]:
    """Yield names and paths of all notebooks; those of URLs are downloaded."""
    for place in places:
        if place.startswith(("http://", "https://")):
            path = downloads / str(len([*downloads.iterdir()])) / place.rpartition("/")[2]
            path.parent.mkdir()
            with urllib.request.urlopen(place, timeout=60) as answer:
                path.write_bytes(answer.read())
            yield place, path
        elif Path(place).is_dir():
            for path in sorted(Path(place).rglob("*.ipynb")):
                if ".ipynb_checkpoints" not in path.parts:
                    yield str(path.relative_to(place)), path
        else:
            yield place, Path(place)


def compared(notebook: Path, np: int, limit_s: float) -> list[tuple[str, Verdict]]:
    """Return the source of each cell that was reached, and how it compares."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        plain = run_cells(notebook, Path(folder, "plain"), limit_s)
        ranks = run_cells(notebook, Path(folder, "ranks"), limit_s, "--np", str(np),
                          "--plain", str(Path(folder, "plain", "record.jsonl")))  # fmt: skip
        return [
            (second["source"], verdict(first, second))
            for first, second in zip(plain, ranks, strict=False)
        ]


def run_cells(notebook: Path, folder: Path, limit_s: float, *options: str) -> list[Record]:
    """Run a notebook in a copy of its folder; return the cells that it has finished within the limit."""
    folder.mkdir()
    shutil.copytree(notebook.parent, folder / "work", symlinks=True)
    record = folder / "record.jsonl"
    fixed = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "MPLBACKEND": ""}
    root = str(Path(__file__).parents[1])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(_CELLS), str(notebook.absolute()), str(record), *options]
    with Path(folder, "output.txt").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=folder / "work", env={**os.environ, **fixed, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            print(f"{notebook.name}: ended after {limit_s:g} s", file=sys.stderr)
        finally:
            process.kill()  # its ranks end with it
            process.wait()
    if process.returncode not in (0, -9):
        raise RuntimeError(Path(folder, "output.txt").read_text()[-4000:])
    return [json.loads(line) for line in record.read_text().splitlines()]


# ── the comparison ───────────────────────────────────────────────────────────────────────────────


def verdict(first: Record, second: Record) -> Verdict:
    """Compare a cell on ranks with the plain run after it; ``first`` is the earlier plain run."""
    ranks, plain = second["ranks"], second["plain"]
    if ranks is None:
        return Verdict("other")
    if ranks["refusal"]:
        # A plain run that fails has told the user, too.
        return Verdict("raise" if plain["error"] else "refused", ranks["refusal"])
    if ranks["error"] and not plain["error"]:
        return Verdict("failed", f"{ranks['error']}: {ranks['report']}")
    varying = {one.part for one in differences(first["plain"], plain, ranks["names"])}
    found = [*differences(ranks, plain, ranks["names"])]
    wrong = [one for one in found if one.part not in varying or one.is_of_form]
    if wrong:
        notes = " | ".join(ranks["warnings"])
        return Verdict("warned" if notes else "differ", "; ".join([*map(str, wrong), notes]))
    if plain["error"]:
        return Verdict("raise")
    return Verdict("vary", ", ".join(varying)) if found or varying else Verdict("same")


@dataclass(frozen=True)
class Difference:
    part: str
    """A name, or what else there is to compare."""
    ours: str
    theirs: str
    is_of_form: bool = False
    """The types or the shapes differ."""

    def __str__(self) -> str:
        return f"{self.part}: {self.ours[:_MAX_SHOWN]!r}, plainly {self.theirs[:_MAX_SHOWN]!r}"


def differences(ours: Record, theirs: Record, names: Sequence[str]) -> Iterator[Difference]:
    """Yield how a cell differs; of names only those in ``names``."""
    if ours["error"] != theirs["error"]:
        yield Difference("exception", ours["error"], theirs["error"], is_of_form=True)
        return
    if not theirs["error"]:  # ranks bring nothing back after a failure
        for name in names:
            yield from of_value(f"`{name}`", ours["names"].get(name), theirs["names"].get(name))
        if theirs["value"] is not None:  # a cell that ends in `;` has none to show
            yield from of_value("value", ours["value"], theirs["value"])
        yield from of_text("displays", "\n".join(ours["displays"]), "\n".join(theirs["displays"]))
    if lines_of(ours) != lines_of(theirs):  # the plain shell shows errors of `!` lines on stdout
        yield from of_text("printed text", ours["text"], theirs["text"])


def lines_of(ran: Record) -> list[str]:
    """Return all lines of a cell, whatever the stream and the order of the streams."""
    return sorted([*ran["text"].splitlines(), *ran["errors"].splitlines()])


def of_value(
    part: str, ours: Sequence[str] | None, theirs: Sequence[str] | None
) -> Iterator[Difference]:
    missing = ("nothing", "", "nothing")
    form, digest, shown = ours or missing
    their_form, their_digest, their_text = theirs or missing
    if form != their_form:
        yield Difference(part, f"{form} {shown}", f"{their_form} {their_text}", is_of_form=True)
    elif digest != their_digest:
        yield Difference(part, shown, their_text)


def of_text(part: str, ours: str, theirs: str) -> Iterator[Difference]:
    if ours == theirs:
        return
    lines, their_lines = ours.splitlines(), theirs.splitlines()
    same = sum(1 for _ in _common_start(lines, their_lines))
    yield Difference(part, "\n".join(lines[same:]), "\n".join(their_lines[same:]))


def _common_start(ours: Sequence[str], theirs: Sequence[str]) -> Iterator[str]:
    for line, other in zip(ours, theirs, strict=False):
        if line != other:
            return
        yield line


# ── tables ───────────────────────────────────────────────────────────────────────────────────────


def row(name: str, verdicts: Sequence[tuple[str, Verdict]]) -> list[Any]:
    counts = Counter(verdict.kind for _, verdict in verdicts)
    return [name, len(verdicts), *(counts[kind] for kind in KINDS)]


def print_verdict(number: int, source: str, verdict: Verdict) -> None:
    print(f"  cell {number} {verdict.kind}: {verdict.why}", flush=True)
    for line in source.strip().splitlines()[:8]:
        print(f"    | {line}", flush=True)


if __name__ == "__main__":
    main()
