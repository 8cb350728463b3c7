"""Tables of the pages: options, commands and settings from the package, and what benchmarks have saved.

``python -m docs.generated`` writes them into the pages, between two marks, and the README's times; a test
compares them.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks._results import RESULTS, heading, shown
from hydrogen_magic import plugins
from hydrogen_magic.__main__ import COMMANDS
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.notebook.arguments import distributed, gang, infer
from hydrogen_magic.notebook.arguments.gang import GANG_COMMANDS
from hydrogen_magic.notebook.magics import Distributed

__all__ = ["PAGES", "TABLES", "measured", "options", "terminal_commands", "with_tables"]

_HERE = Path(__file__).parent
PAGES = [
    _HERE.parent / "README.md",
    _HERE / "benchmarks.md",
    _HERE / "internals" / "large-gangs.md",
    _HERE / "internals" / "public-notebooks.md",
    *sorted((_HERE / "reference").glob("*.md")),
]
_TABLE = re.compile(r"(<!-- table: ([\w %]+?) -->\n).*?(?=<!-- end of table -->)", re.S)
_BENCHMARK = "benchmark "


def with_tables(text: str, results: Path = RESULTS) -> str:
    """Return a page with its tables as they should be. Raises KeyError for an unknown table."""

    def table(name: str) -> str:
        if name.startswith(_BENCHMARK):
            return _benchmark_tables(measured(name.removeprefix(_BENCHMARK), results))
        return TABLES[name]()

    text = _TABLE.sub(lambda found: f"{found[1]}\n{table(found[2])}\n\n", text)
    return _with_times(text, results)


def options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, str]]:
    """Yield each option of a parser as written, its description and its default, without hidden ones."""
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            yield _as_written(action), action.help or "", _default(action)


def _as_written(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    if action.nargs == 0:
        return names
    metavar = str(action.metavar or "…")
    return f"{names} [{metavar}]" if action.nargs == "?" else f"{names} {metavar}"


def _default(action: argparse.Action) -> str:
    defaults = {field.name: field.default for field in (*fields(JobSpec), *fields(InferOptions))}
    value = defaults.get({"on": "placement"}.get(action.dest, action.dest))
    if action.nargs == 0 or value in (None, MISSING, (), ""):
        return ""
    if action.dest.endswith("_bytes"):
        return f"{int(str(value)) / 2**30:g} GiB"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g} s" if action.dest.endswith("_s") else str(value)


def _table(head: str, rows: Iterator[tuple[str, ...]]) -> str:
    columns = head.split("|")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def _option_table(parser: argparse.ArgumentParser) -> str:
    rows = ((f"`{name}`", text, default) for name, text, default in options(parser))
    return _table("option|meaning|default", rows)


def _distributed_table() -> str:
    """Return the options of cells, and those that only scripts have."""
    cells, scripts = (
        list(options(distributed.distributed_parser(is_cell))) for is_cell in (True, False)
    )
    rows = [*cells, *(row for row in scripts if row not in cells)]
    return _table("option|meaning|default", ((f"`{name}`", *rest) for name, *rest in rows))


def _command_table() -> str:
    rows = (
        (f"`{f'%gang {verb} {arguments}'.rstrip()}`", meaning)
        for verb, (arguments, meaning) in GANG_COMMANDS.items()
    )
    return _table("line|meaning", rows)


def _command_option_table() -> str:
    rows = (
        (f"`%gang {verb}`", f"`{name}`", text)
        for verb in GANG_COMMANDS
        for name, text, _ in options(gang.gang_parser(verb))
    )
    return _table("command|option|meaning", rows)


def _terminal_table() -> str:
    rows = (
        (f"`python -m hydrogen_magic {name}`", text) for name, text in terminal_commands().items()
    )
    return _table("command|meaning", rows)


def terminal_commands() -> dict[str, str]:
    """Return every command of ``python -m hydrogen_magic`` and its meaning."""
    modules = {name: main.partition(":")[0] for name, main in plugins.commands().items()}
    setups = (
        pair
        for name, module in sorted(modules.items())
        if module.startswith("hydrogen_magic.")
        for pair in subcommands(name, import_module(module).parser())
    )
    return {**COMMANDS, **dict(setups)}


def subcommands(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Yield each sub-command of a parser and each of its options, with their descriptions."""
    [group] = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    for listed in group._choices_actions:
        yield f"{name} {listed.dest}", listed.help or ""
        for action in group.choices[listed.dest]._actions:
            option = _as_written(action) if action.option_strings else f"{action.metavar} …"
            if not option.startswith("-h"):
                yield f"{name} {listed.dest} {option}", action.help or ""


def _setting_table() -> str:
    def rows() -> Iterator[tuple[str, str, str]]:
        for name, trait in sorted(Distributed.class_own_traits(config=True).items()):
            default = trait.default_value
            shown = "" if default is None else str(default)
            yield f"`Distributed.{name}`", trait.help, shown

    return _table("setting|meaning|default", rows())


# ── benchmarks ───────────────────────────────────────────────────────────────────────────────────

Result = dict[str, Any]
"""A file that ``benchmarks/_results.py`` has written."""


def measured(name: str, results: Path = RESULTS) -> dict[str, Result]:
    """Return the saved table of this name; without one, all whose names begin with it."""
    alone = results / f"{name}.json"
    files = [alone] if alone.exists() else sorted(results.glob(f"{name}_*.json"))
    return {file.stem: json.loads(file.read_text()) for file in files}


def _benchmark_tables(found: dict[str, Result]) -> str:
    """Return tables as one, and below it what is missing and where they were measured."""
    if not found:
        return "Not measured yet."
    every = list(found.values())
    columns = list(dict.fromkeys(head for each in every for head in _heads(each)))
    rows: list[tuple[str, ...]] = []
    for each in every:
        for number, row in enumerate(each["rows"]):
            cells = dict(zip(_heads(each), map(shown, row), strict=True))
            title = "" if number else each["title"]
            rows.append((title, *(cells.get(head, "") for head in columns)))
    if len(every) > 1:
        table = _table("|".join(["", *columns]), iter(rows))
    else:
        title = every[0]["title"]
        table = f"{title[0].upper()}{title[1:]}:\n\n" + _table(
            "|".join(columns), (row[1:] for row in rows)
        )
    left_out = [
        f"{name} ({each['title']}): {why}" if len(every) > 1 else f"{name}: {why}"
        for each in every
        for name, why in each["left_out"].items()
    ]
    missing = [f"Not measured: {'; '.join(left_out)}."] if left_out else []
    return "\n\n".join([table, *missing, *_conditions(every)])


def _heads(result: Result) -> list[str]:
    return [heading(*column) for column in result["columns"].items()]


def _conditions(every: list[Result]) -> list[str]:
    """Return one line for each run: its command, date, machine and load."""
    runs: dict[str, list[float]] = {}
    for each in every:
        machine = dict(each["machine"])
        parts = [f"{machine.pop('cores')} cores", *filter(None, [machine.pop("cpu", None)])]
        parts += [f"{name} {version}" for name, version in machine.items()]
        run = f"`{each['command']}`, {each['date']}; {', '.join(parts)}"
        runs.setdefault(run, []).extend((each["load_before"], each["load_after"]))
    return [
        f"{run}; load {' to '.join(map(str, sorted({min(loads), max(loads)})))}."
        for run, loads in runs.items()
    ]


_README_TIMES = (
    ("launch", "hydrogen_magic, warm"),
    ("launch", "torchrun"),
    ("launch", "notebook_launcher"),
    ("launch", "TorchDistributor, local"),
    ("frameworks_horovod", "horovod.run"),
)
"""Columns of the README's comparison: table and row."""
_START_TIMES = {"ranks starts in ": "warm", "first one of a kernel in ": "cold"}
"""Words of the README before a time -> row of the table of launches."""


def _with_times(text: str, results: Path) -> str:
    """Return the README with the times that were measured."""
    seconds = [_median_s(table, row, results) for table, row in _README_TIMES]
    row = " | ".join("-" if each is None else f"{each:.2f} s" for each in seconds)
    text = re.sub(
        r"(?<=^\| call of a function to its result, ).*$",
        f"2 ranks, 1 all_reduce | {row} |",
        text,
        flags=re.M,
    )
    for words, name in _START_TIMES.items():
        start_s = _median_s("launch", f"hydrogen_magic, {name}", results)
        if start_s is not None:
            text = re.sub(rf"(?<={words})[\d.]+(?= s)", f"{start_s:.1f}", text)
    return text


def _median_s(table: str, row: str, results: Path) -> float | None:
    for result in measured(table, results).values():
        place = _heads(result).index("median, s")
        return next((float(each[place]) for each in result["rows"] if each[0] == row), None)
    return None


TABLES: dict[str, Callable[[], str]] = {
    "options of %distributed": _distributed_table,
    "options of %%infer": lambda: _option_table(infer.infer_parser()),
    "commands of %gang": _command_table,
    "options of %gang": _command_option_table,
    "commands of a terminal": _terminal_table,
    "settings": _setting_table,
}
"""Name in a mark -> the function that makes the table."""


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
