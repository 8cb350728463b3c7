"""Tables of the reference, made from the package: options, commands and settings.

``python -m docs.generated`` writes them into the pages, between two marks; a test compares them.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path

from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.notebook.arguments import GANG_COMMANDS, distributed, infer
from hydrogen_magic.notebook.magics import Distributed

__all__ = ["PAGES", "TABLES", "options", "with_tables"]

PAGES = sorted((Path(__file__).parent / "reference").glob("*.md"))
_TABLE = re.compile(r"(<!-- table: ([\w %]+?) -->\n).*?(?=<!-- end of table -->)", re.S)


def with_tables(text: str) -> str:
    """Return a page with its tables as they should be. Raises KeyError for an unknown table."""
    return _TABLE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]]()}\n\n", text)


def options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, str]]:
    """Yield each option of a parser as written, its description and its default."""
    for action in parser._actions:
        if action.option_strings:
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
    cells, scripts = (list(options(distributed._parser(is_cell))) for is_cell in (True, False))
    rows = [*cells, *(row for row in scripts if row not in cells)]
    return _table("option|meaning|default", ((f"`{name}`", *rest) for name, *rest in rows))


def _command_table() -> str:
    def rows() -> Iterator[tuple[str, str]]:
        for name, text in GANG_COMMANDS.items():
            arguments, colon, meaning = text.partition(": ")
            is_argument = colon and arguments.startswith(("ID", "[NAME]"))
            line = f"%gang {name} {arguments}" if is_argument else f"%gang {name}"
            yield f"`{line}`", meaning if is_argument else text

    return _table("line|meaning", rows())


def _setting_table() -> str:
    def rows() -> Iterator[tuple[str, str, str]]:
        for name, trait in sorted(Distributed.class_own_traits(config=True).items()):
            default = trait.default_value
            shown = "" if default is None else str(default)
            yield f"`Distributed.{name}`", trait.help, shown

    return _table("setting|meaning|default", rows())


TABLES: dict[str, Callable[[], str]] = {
    "options of %distributed": _distributed_table,
    "options of %%infer": lambda: _option_table(infer._parser()),
    "commands of %gang": _command_table,
    "settings": _setting_table,
}
"""Name in a mark -> the function that makes the table."""


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(with_tables(page.read_text()))
