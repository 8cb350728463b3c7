"""The code blocks of the documentation, and how those of a page run as the cells of one notebook.

:mod:`tests.site_pages` says what each page needs for that.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from IPython.core.interactiveshell import InteractiveShell

from hydrogen_magic import __main__ as command_line
from hydrogen_magic.driver.datasets import folders

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SHELL = ("", "bash")
"""Languages of blocks with commands for a terminal."""
_FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^ *```$", re.M | re.S)
_SEVERAL = re.compile(
    r"\b(dist|hm|hvd|Trainer|accelerate|deepspeed|jax|keras|spark|infer|breakpoint)\b"
)
"""In cells whose ranks work together, or on parts of the data. Others run on one, if no output is shown."""
_IN_THE_TEST = (
    (r"--np [3-9]\b", "--np 2"),
    (r"(?<=[\"'=])/(mnt/shared|shared|data)\b", r"{folder}/\1"),
)
"""What runs in place of large numbers of ranks, and of folders that the reader's machine has."""
_VARYING = (
    (r"\x1b\[[0-9;]*m", ""),
    (
        r"(Read error|Connection closed by peer) \[127\.0\.0\.1\]:\d+(: .*reset by peer)?",
        "lost peer",
    ),
    # A rank may be stopped before its own error arrives.
    (r"( was stopped\.) +\(rank \d+: RuntimeError: lost peer\)", r"\1"),
    (r"\bgang [0-9a-f]{4}\b", "gang ID"),
    (r"\b[\d.]+ (s|[kMG]?B)\b", r"N \1"),
    (r" and \d GPUs?\b", ""),
    (r" +", " "),
)
"""What differs in the output of a cell from run to run, and on the cluster of the tests, which has GPUs."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    shown: str = ""
    """The output that follows a cell immediately."""

    def find(self, by_part: Mapping[str, str]) -> str:
        """Return the value of the key that is a part of the text; empty without one."""
        return next((value for part, value in by_part.items() if part in self.text), "")


def blocks(path: Path) -> Iterator[Block]:
    """Yield the blocks of a page; the output of a cell is part of its block."""
    page = path.read_text()
    found = list(_FENCE.finditer(page))
    outputs = {
        cell: output
        for cell, output in pairwise(found)
        if (cell[2], output[2]) == ("python", "text")
        and not page[cell.end() : output.start()].strip()
    }
    for each in found:
        if each not in outputs.values():
            shown = _dedented(outputs[each]) if each in outputs else ""
            yield Block(each[2], _dedented(each), shown)


def _dedented(fence: re.Match[str]) -> str:
    return re.sub(rf"^{fence[1]}", "", fence[3], flags=re.M)


@dataclass(frozen=True)
class Page:
    """A page, and what its blocks need to run here. Blocks are named by a part of their text."""

    name: str
    """Path of the file."""
    set_up: str = ""
    """Cells that run first, with a line ``# %%`` between two."""
    changes: Mapping[str, str] = field(default_factory=dict)
    """Part of a block -> what runs in its place."""
    before: Mapping[str, str] = field(default_factory=dict)
    """Block -> cells that run before it."""
    shown_by: Mapping[str, str] = field(default_factory=dict)
    """Block of output -> cells that print it."""
    then: str = ""
    """Cells that run last, and check results."""
    not_run: Mapping[str, str] = field(default_factory=dict)
    """Block -> why it does not run here."""
    slow: Sequence[str] = ()
    """Blocks that run in ``make test-all`` only."""
    needs: Sequence[str] = ()
    """Modules without which the page is skipped."""
    marks: Sequence[pytest.MarkDecorator] = ()

    @cached_property
    def blocks(self) -> list[Block]:
        return list(blocks(ROOT / self.name))

    def params(self) -> Iterator[Any]:
        """Yield the arguments of tests: this page, and whether its slow blocks run."""
        marks = [*self.marks, *([pytest.mark.exhaustive] if self.slow else [])]
        if self.slow:
            yield pytest.param(self, False, id=self.name, marks=self.marks)
        yield pytest.param(self, True, id=self.name + " whole" * bool(self.slow), marks=marks)


class Notebook:
    """A notebook in a folder of its own, whose cells are those of a page."""

    def __init__(
        self, shell: InteractiveShell, capsys: pytest.CaptureFixture[str], folder: Path
    ) -> None:
        self._shell = shell
        self._capsys = capsys
        self._folder = folder

    def run(self, page: Page, *, is_whole: bool = True) -> None:
        """Run the blocks in order. An error that the page does not show, or another output, fails."""
        for module in page.needs:
            pytest.importorskip(module)
        with _as_in_a_notebook(self._folder):
            self._run_cells(page.set_up)
            for block in page.blocks:
                if is_whole or not any(part in block.text for part in page.slow):
                    self._run_block(page, block)
            self._run_cells(page.then)

    def _run_block(self, page: Page, block: Block) -> None:
        if block.find(page.not_run):
            return
        self._run_cells(block.find(page.before))
        if block.language == "python":
            self._run_cells(self._here(page, block.text, block.shown), block.shown)
        elif block.language in SHELL:
            self._run_commands(self._here(page, block.text))
        elif block.language == "text":
            self._number_cells(block.text)
            self._run_cells(block.find(page.shown_by), block.text)

    def _run_commands(self, text: str) -> None:
        """Run the commands about gangs; ``tests/unit/test_site_code.py`` checks the others."""
        for line in text.splitlines():
            words = shlex.split(self._shell.var_expand(line), comments=True)
            if words[:4] == ["python", "-m", "hydrogen_magic", "gang"]:
                assert command_line.main(words[3:]) == 0

    def _here(self, page: Page, code: str, shown: str = "") -> str:
        for old, new in page.changes.items():
            code = code.replace(old, new)
        if not shown and not _SEVERAL.search(code):
            code = re.sub(r"--np \d\b", "--np 1", code)
        for pattern, instead in _IN_THE_TEST:
            code = re.sub(pattern, instead.format(folder=self._folder), code)
        return code

    def _number_cells(self, shown: str) -> None:
        """Give the next cells the numbers that an output has."""
        numbers = [int(number) for number in re.findall(r"Cell In\[(\d+)\]", shown)]
        if numbers:
            self._shell.execution_count = min(numbers)

    def _run_cells(self, cells: str, shown: str = "") -> None:
        """Run cells. They print what is shown, and raise errors that are shown only."""
        self._capsys.readouterr()
        values = [self._value_of(cell, shown) for cell in re.split(r"^# %%\n", cells, flags=re.M)]
        printed = _plain(self._capsys.readouterr().out + "\n".join(map(repr, values)))
        missing = [line for line in shown.splitlines() if _plain(line) not in printed]
        assert not missing, f"not printed: {missing}\n{printed}"

    def _value_of(self, cell: str, shown: str) -> Any:
        done = self._shell.run_cell(cell.strip(), store_history=True)
        error = done.error_before_exec or done.error_in_exec
        if error is not None and not _is_shown(error, shown):
            done.raise_error()
        return done.result


def _plain(text: str) -> str:
    """Return output without what differs from run to run."""
    for pattern, instead in _VARYING:
        text = re.sub(pattern, instead, text)
    return text.replace(socket.gethostname(), "vm").strip()


def _is_shown(error: BaseException, shown: str) -> bool:
    lines = getattr(error, "_render_traceback_", lambda: [str(error)])()
    report = _plain("\n".join(lines))
    return any(_plain(line) in report for line in shown.splitlines() if line.strip())


@contextmanager
def _as_in_a_notebook(folder: Path) -> Iterator[None]:
    """Find the modules of a folder, answer what asks, and undo what cells change in this process."""
    modules = set(sys.modules)
    with pytest.MonkeyPatch.context() as change, patch.dict(os.environ):
        change.chdir(folder)
        change.syspath_prepend(folder)
        change.setattr("builtins.input", lambda prompt="": "c")
        try:
            yield
        finally:
            folders.delete_all()
            for name in set(sys.modules) - modules:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                    del sys.modules[name]
