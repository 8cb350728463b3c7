"""The cells of one notebook in a shell of this process, on ranks and plainly; run by ``public_notebooks.py``.

    python benchmarks/_notebook_cells.py NOTEBOOK.ipynb RECORD.jsonl [--plain RECORD.jsonl --np 2]

Each cell is a line of the record. With ``--plain``, the record of an earlier run, each cell runs on ranks
first, on copies of the notebook's values, and then plainly. Both get the same seeds.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from _digests import Described, describe

_KEEPS_PYTHON = ("%%time", "%%timeit", "%%capture", "%%prun")
"""Cell magics whose cell is Python, with the names of the notebook."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}")
_LARGE_FOLDER_BYTES = 100 << 20
"""The files beside a notebook are copied before each cell."""


@dataclass
class Ran:
    """What a cell has left behind."""

    names: dict[str, Described] = field(default_factory=dict)
    value: Described | None = None
    text: str = ""
    """Standard output."""
    errors: str = ""
    """Standard error."""
    displays: list[str] = field(default_factory=list)
    error: str = ""
    """The type of the exception that it raised, empty without one."""


@dataclass
class OnRanks(Ran):
    refusal: str = ""
    """Why no rank was started."""
    report: str = ""
    """Of a gang that failed."""
    warnings: list[str] = field(default_factory=list)
    """Those that the user sees, including what could not be brought back."""


@dataclass
class Cell:
    number: int
    source: str
    plain: Ran
    ranks: OnRanks | None = None
    """None for a cell that is not Python."""
    changed: list[str] = field(default_factory=list)
    """Names whose values the plain run has changed."""


def sources_of(notebook: Path) -> list[str]:
    """Return the code cells of a notebook of any format."""
    found = json.loads(notebook.read_text())
    cells = found.get("cells") or [
        c for sheet in found.get("worksheets", []) for c in sheet["cells"]
    ]
    texts = [c.get("source", c.get("input", "")) for c in cells if c["cell_type"] == "code"]
    return [text if isinstance(text, str) else "".join(text) for text in texts]


def is_python(source: str) -> bool:
    """Whether no cell magic changes the language of the cell."""
    first = source.lstrip()
    return not first.startswith("%%") or first.split()[0] in _KEEPS_PYTHON


class Notebook:
    """The shell, and what its cells print and display."""

    def __init__(self) -> None:
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config

        # Without a database of the history, whose thread and file are not needed.
        shell: Any = InteractiveShell
        shell.enable_gui = lambda self, gui=None: None  # as in a kernel: the base class refuses it
        self.shell: Any = shell.instance(config=Config({"HistoryManager": {"enabled": False}}))
        self._silence()
        with contextlib.suppress(ImportError):
            self.shell.run_line_magic("matplotlib", "inline")
        self._hidden = set(self.shell.user_ns)

    def _silence(self) -> None:
        """Keep what a page would show from being printed, and what cells print for the record."""
        self._displays: list[str] = []
        # The same objects for all cells, as in a kernel: handlers of ``logging`` refer to them.
        self._stdout, self._stderr = sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        hook = self.shell.displayhook
        hook.write_output_prompt = lambda: None
        hook.write_format_data = lambda data, metadata=None: None
        self.shell._showtraceback = lambda *traceback: None
        self.shell.display_pub.publish = self._publish
        self.shell.display_pub.clear_output = lambda wait=False: self._displays.clear()

    def _publish(self, data: Mapping[str, Any], *_: Any, **__: Any) -> None:
        self._displays.append(displayed(data))

    def names(self) -> dict[str, Any]:
        """Return the names of the notebook's user."""
        found = self.shell.user_ns.items()
        return {k: v for k, v in found if k not in self._hidden and not k.startswith("_")}

    def run(self, source: str) -> Ran:
        """Run a cell plainly."""
        self._displays.clear()
        for stream in (self._stdout, self._stderr):  # such as what a gang has printed
            stream.seek(0)
            stream.truncate()
        done = self.shell.run_cell(source, store_history=True)
        error = done.error_before_exec or done.error_in_exec
        return Ran(
            described(self.names()),
            None if done.result is None else describe(done.result),
            comparable(self._stdout.getvalue()),
            comparable(self._stderr.getvalue()),
            [*self._displays],
            "" if error is None else type(error).__name__,
        )

    @contextlib.contextmanager
    def next_cell(self, source: str) -> Iterator[None]:
        """Show the history with this cell as its last one, as while it runs."""
        number, history = self.shell.execution_count, self.shell.history_manager
        history.store_inputs(number, source)
        try:
            yield
        finally:
            del history.input_hist_parsed[number:], history.input_hist_raw[number:]


def described(names: Mapping[str, Any]) -> dict[str, Described]:
    return {name: describe(value) for name, value in names.items()}


def displayed(data: Mapping[str, Any]) -> str:
    """Return a display as text: the kinds of its data, and a digest of its picture, or its plain text."""
    picture = data.get("image/png")
    if picture is not None:
        content = picture if isinstance(picture, bytes) else base64.b64decode(picture)
        shown = hashlib.blake2b(content, digest_size=8).hexdigest()
    else:
        shown = comparable(str(data.get("text/plain", "")))
    return f"{' '.join(sorted(data))}: {shown}"


def comparable(text: str) -> str:
    """Return printed text without what differs between any two processes."""
    lines = [line.rsplit("\r", 1)[-1] for line in text.replace("\r\n", "\n").split("\n")]
    folder = re.escape(os.getcwd())
    return _ADDRESS.sub("0x…", re.sub(rf"(/private)?{folder}", "…", "\n".join(lines))).rstrip()


# ── on ranks ─────────────────────────────────────────────────────────────────────────────────────


class Ranks:
    """Runs cells of the notebook on ranks."""

    def __init__(self, notebook: Notebook, np: int) -> None:
        self._notebook = notebook
        self._np = np
        notebook.shell.run_line_magic("load_ext", "hydrogen_magic")

    def run(self, source: str, names: Iterable[str], seed: int) -> OnRanks:
        """Run a cell in a copy of the working directory; bring these names back."""
        from hydrogen_magic.driver import known_gangs, launcher

        out = ",".join(names)
        line = f"--np {self._np} --detach --quiet --seed {seed}{out and f' --out {out}'}"
        launcher._shown_hints.clear()  # of a kernel each is shown once: here each cell has its own
        with self._notebook.next_cell(f"%%distributed {line}\n{source}"), copied_folder():
            try:
                self._notebook.shell.run_cell_magic("distributed", line, source)
                gang = [*known_gangs.gangs().values()][-1]  # a cell that ends in `;` returns none
                gang.wait()
            except Exception as error:  # every refusal is a result
                return OnRanks(refusal=f"{type(error).__name__}: {error}")
            return self._of(gang, out.split(",") if out else [])

    def _of(self, gang: Any, names: Iterable[str]) -> OnRanks:
        from hydrogen_magic.core import events as ev

        found, printed = OnRanks(), {"stdout": "", "stderr": ""}
        culprit = gang.snapshot().culprit or 0  # it alone has certainly got as far as its exception
        for event in gang.events():
            if isinstance(event, ev.Notice) and event.level != "info":
                found.warnings.append(event.text)
            elif isinstance(event, ev.Output) and event.rank == culprit:
                printed[event.stream] += event.text
            elif isinstance(event, ev.Display) and event.rank == 0:
                self._show(found.displays, event)
        found.text, found.errors = comparable(printed["stdout"]), comparable(printed["stderr"])
        if gang.state != "SUCCEEDED":
            return self._failed(found, gang)
        self._bring(found, gang, names)
        return found

    def _show(self, displays: list[str], event: Any) -> None:
        if event.action.startswith("clear"):
            displays.clear()
        else:
            displays.append(displayed(event.data))

    def _failed(self, found: OnRanks, gang: Any) -> OnRanks:
        state = gang.snapshot()
        failure = None if state.culprit is None else state.ranks[state.culprit].failure
        found.error = "?" if failure is None else failure.error.type.rpartition(".")[2]
        found.report = f"{state.reason}"
        return found

    def _bring(self, found: OnRanks, gang: Any, names: Iterable[str]) -> None:
        for name in names:
            with warned(found):
                found.names[name] = describe(gang.out[name])
        with warned(found):
            found.value = None if gang.result is None else describe(gang.result)


@contextlib.contextmanager
def warned(found: OnRanks) -> Iterator[None]:
    """Count the refusal of a result as a warning."""
    from hydrogen_magic.errors import ResultError

    try:
        yield
    except ResultError as error:
        found.warnings.append(str(error))


@contextlib.contextmanager
def copied_folder() -> Iterator[None]:
    """Work in a copy of the working directory: the plain run must not find files of the ranks."""
    here = Path.cwd()
    nbytes = sum(file.stat().st_size for file in here.rglob("*") if file.is_file())
    if nbytes > _LARGE_FOLDER_BYTES:
        yield
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        shutil.copytree(here, Path(folder, here.name), symlinks=True)
        os.chdir(Path(folder, here.name))
        try:
            yield
        finally:
            os.chdir(here)


def wanted_names(
    cell: Mapping[str, Any], source: str, transform: Callable[[str], str]
) -> list[str]:
    """Return what to bring back: the names that the cell mentions, and all that its plain run changes.

    ``cell``: the record of that run. Modules are not values.
    """
    body = source.lstrip().partition("\n")[2] if source.lstrip().startswith("%%") else source
    mentioned: set[str] = set(cell["changed"])
    with contextlib.suppress(SyntaxError):
        tree = ast.parse(transform(body))
        mentioned |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    there = cell["plain"]["names"]
    return sorted(name for name in mentioned & {*there} if there[name][0] != "module")


# ── the run ──────────────────────────────────────────────────────────────────────────────────────


def run(notebook: Path, record: Path, plain: Path | None, np: int) -> None:
    from hydrogen_magic.node.worker import seeding

    shown = Notebook()
    ranks = None if plain is None else Ranks(shown, np)
    before: dict[str, str] = {}
    earlier = [] if plain is None else [json.loads(line) for line in plain.read_text().splitlines()]
    with record.open("w", buffering=1) as lines:
        for number, source in enumerate(sources_of(notebook), 1):
            on_ranks = None
            if ranks is not None and number > len(earlier):
                break  # the plain run was ended here
            if ranks is not None and is_python(source) and source.strip():
                names = wanted_names(earlier[number - 1], source, shown.shell.transform_cell)
                on_ranks = ranks.run(source, names, number)
            seeding.seed(number)  # as rank 0 is
            cell = Cell(number, source, shown.run(source), on_ranks)
            digests = {name: found.digest for name, found in cell.plain.names.items()}
            cell.changed = [name for name in digests if before.get(name) != digests[name]]
            before = digests
            lines.write(json.dumps(asdict(cell)) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("record", type=Path)
    parser.add_argument("--plain", type=Path)
    parser.add_argument("--np", type=int, default=2)
    given = parser.parse_args()
    sys.path[0] = ""  # as in a kernel
    try:
        run(given.notebook, given.record, given.plain, given.np)
    finally:
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


if __name__ == "__main__":
    main()
