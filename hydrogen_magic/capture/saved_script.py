"""``--save``: the cell and the names it captures, written as the source of a ``torchrun`` script."""

from __future__ import annotations

import ast
import io
import os
import pickle
import shlex
import types
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import cloudpickle

from hydrogen_magic.capture.definitions import (
    check_definition,
    has_source,
    is_lambda_elsewhere,
    source_of,
)
from hydrogen_magic.capture.lines import python_lines
from hydrogen_magic.capture.modules import imported_modules, local_paths
from hydrogen_magic.capture.pickler import notebook_name
from hydrogen_magic.capture.required_names import MAX_POSSIBLE_BYTES, RequiredNames
from hydrogen_magic.capture.scopes import reads_in_source
from hydrogen_magic.capture.values import CellText
from hydrogen_magic.core import syntax
from hydrogen_magic.errors import CaptureError
from hydrogen_magic.node.dataset_handle import DatasetHandle
from hydrogen_magic.node.worker.plain_values import is_plain
from hydrogen_magic.serialization.code_names import imported_names
from hydrogen_magic.serialization.pickling_errors import NullFile, RefusedError, explain

_MARKER = (
    "# Written by hydrogen_magic --save: running the cell with --save again replaces this file.\n"
)
_LONGEST_LITERAL = 2000
"""Characters; longer values are easier to read in a separate file."""


def write(
    path: str | os.PathLike[str], cell: CellText, needs: RequiredNames, launcher: str
) -> tuple[Path, ...]:
    """Write the cell with what ``needs`` found as a script; return the files.

    The second is ``PATH.data.pkl``, if there are values that a script cannot hold.
    ``launcher``: command that starts it, named in its first line; may be empty.

    Raises CaptureError if an object has no source, if a line of the cell is IPython's, if one of the two
    files exists and is not ours, or if they cannot be written.
    """
    target = Path(path)
    replaced = _replaced(target)
    body, futures = _body(cell)
    parts = _ScriptParts(needs, target)
    run = f": {launcher} {shlex.quote(target.name)}" if launcher else ""
    text = _MARKER + f'"""{cell.label} as a script{run}"""\n\n'
    text += parts.text(body, futures) + f"\n# ── {cell.label} ──\n\n" + body
    _check_syntax(target, text)
    has_data_of_ours = parts.data_place in replaced
    files = {target: text.encode()}
    if parts.data:
        if parts.data_path.exists() and not has_data_of_ours:
            raise _not_ours(target, parts.data_path)
        files[parts.data_path] = parts.data
    try:
        _write(files)
    except OSError as error:
        raise CaptureError(f"--save {target}: it cannot be written ({error.strerror})") from error
    if has_data_of_ours and not parts.data:
        parts.data_path.unlink(missing_ok=True)
    return tuple(files)


def _replaced(target: Path) -> str:
    """Return the script of ours that will be replaced, or an empty text."""
    if not target.parent.is_dir():
        raise CaptureError(f"--save {target}: there is no directory {target.parent}")
    if not target.exists():
        return ""
    text = target.read_text(encoding="utf-8", errors="replace")
    if not text.startswith(_MARKER):
        raise _not_ours(target, target)
    return text


def _not_ours(target: Path, path: Path) -> CaptureError:
    return CaptureError(
        f"--save {target}: {path} exists and was not written by --save; choose another name, or delete it "
        "first"
    )


def _write(files: Mapping[Path, bytes]) -> None:
    """Write all of the files or, if one does not fit on the disk, none."""
    partial = {path: path.with_name(path.name + ".partial") for path in files}
    try:
        for path, data in files.items():
            partial[path].write_bytes(data)
        for path in files:
            os.replace(partial[path], path)
    finally:
        for each in partial.values():
            each.unlink(missing_ok=True)


def _body(cell: CellText) -> tuple[str, list[str]]:
    """Return the cell as plain Python and its imports from ``__future__``, which begin a file.

    Raises CaptureError for other lines.
    """
    body = cell.body if cell.body.endswith("\n") else cell.body + "\n"
    try:
        with syntax.without_warnings():
            compile(body, cell.filename, "exec", dont_inherit=True)
        found = [n for n in syntax.parse(body).body if isinstance(n, ast.ImportFrom)]
        own = [node for node in found if node.module == "__future__"]
        return _without(body, own), [alias.name for node in own for alias in node.names]
    except SyntaxError as error:
        line = (error.lineno or 1) + cell.first_line - 1
        text = "".join(python_lines(body)[(error.lineno or 1) - 1 :][:1]).strip()
        raise CaptureError(
            f"line {line} (`{text}`) is not plain Python and cannot be saved in a script: `!` and "
            "`%` lines and top-level `await` work only in a notebook; rewrite the line or drop "
            "--save"
        ) from error


def _without(body: str, nodes: Iterable[ast.stmt]) -> str:
    """Return code without some of its statements, as many lines as before."""
    lines = python_lines(body)
    for node in nodes:
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        for at in range(first, last):
            data = lines[at].encode()
            start = node.col_offset if at == first else 0
            end = node.end_col_offset if at == last - 1 else len(data)
            rest = data[end:].lstrip(b" ;") if start == 0 else data[end:]
            lines[at] = (data[:start] + rest).decode()
    return "\n".join(lines)


def _is_literal(value: Any) -> bool:
    try:
        if not is_plain(value, with_sets=True):
            return False
        text = repr(value)
        return len(text) <= _LONGEST_LITERAL and bool(ast.literal_eval(text) == value)
    except (ValueError, SyntaxError):
        return False


def _check_syntax(target: Path, text: str) -> None:
    try:
        with syntax.without_warnings():
            compile(text, str(target), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise CaptureError(
            f"--save {target}: the cell does not compile as part of a script ({error.msg}: "
            f"`{(error.text or '').strip()}`)"
        ) from error


class _ScriptParts:
    """The notebook's part of the script, in a valid order."""

    def __init__(self, needs: RequiredNames, target: Path) -> None:
        self.needs = needs
        self.data_path = target.with_name(target.stem + ".data.pkl")
        self.data_place = f"Path(__file__).with_name({self.data_path.name!r})"
        self.target = target
        self.data = b""
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.literals: dict[str, str] = {}
        self.pickled: dict[str, Any] = {}

    def text(self, body: str, futures: Iterable[str]) -> str:
        """Return imports, literals, definitions and pickled values as source.

        ``futures``: those of the body.
        """
        self._sort()
        early, late = self._split_definitions()
        imports = self.needs.imports
        names = dict.fromkeys([*imports.futures, *futures])
        lines = [f"from __future__ import {name}" for name in names]
        used = [statement for statement, _ in self.needs.statements.values()]
        modules = imported_modules(syntax.parse(body))
        used += imports.for_side_effects(self.needs.read, modules)
        lines += self._path_lines([*modules, *(statement.module for statement in used)])
        lines += [statement.text for statement in imports.order(used)]
        if "display" in self.needs.provided_by_ranks:
            lines += ["", "display = print"]
        lines += ["", *(f"{name} = {text}" for name, text in self.literals.items()), ""]
        lines += ["\n" + self.sources[name] for name in early]
        lines += self._loading(early, late)
        return "\n".join(lines) + "\n"

    def _sort(self) -> None:
        """Decide for every name whether it is written as source, as a literal, or pickled."""
        self._add_all()
        if self.pickled:
            self._pickle()
        for name in self.sources:
            defined = self.values[name].__name__
            if defined in self.literals or defined in self.pickled:
                raise CaptureError(
                    f"`{name}` cannot be saved: it was defined as `{defined}`, which has another value now; "
                    "define it under its own name"
                )

    def _add_all(self) -> None:
        """Add the requested names, those that their sources need in turn, and those that may be needed."""
        self._add_needed()
        for name, why in list(self.needs.possible.items()):
            if name not in self.needs.values and self._can_be_saved(name):
                self.needs.add(name, why, may_lack=True)  # its import, if there is one
                with suppress(CaptureError):
                    self._add_needed()

    def _add_needed(self) -> None:
        while rest := [name for name in self.needs.values if name not in self.values]:
            for name in rest:
                value = self.needs.namespace[name]
                if name in self.needs.unsure and not self._can_be_saved(name):
                    self.values[name] = value  # most likely the cell replaces it
                else:
                    self._add(name, value)

    def _can_be_saved(self, name: str) -> bool:
        """Whether a value can be written that the cell may not need."""
        value = self.needs.namespace[name]
        if has_source(value):
            return self._has_known_source(value)
        sink = NullFile()
        pickler = _SavePickler(sink, self.needs.namespace)
        try:
            pickler.dump(value)
        except Exception:  # pickling runs the classes' own code
            return False
        is_small = name not in self.needs.assigned or sink.nbytes <= MAX_POSSIBLE_BYTES
        return is_small and all(map(self._has_known_source, pickler.referred))

    def _has_known_source(self, value: Any) -> bool:
        name = value.__qualname__.partition(".")[0]
        return bool(self.needs.imports.definition(name) or source_of(value))

    def _add(self, name: str, value: Any) -> None:
        self.values[name] = value
        if has_source(value) and not is_lambda_elsewhere(name, value):
            self._add_source(name, value)
        elif _is_literal(value):
            self.literals[name] = repr(value)
        else:
            self.pickled[name] = value

    def _add_source(self, name: str, value: Any) -> None:
        is_earlier = self.needs.namespace.get(value.__name__, value) is not value
        known = None if is_earlier else self.needs.imports.definition(value.__name__)
        source = known or source_of(value)
        if source is None:
            raise CaptureError(
                f"`{name}` cannot be saved: its source is not available; define it with `def` or "
                "`class` in a cell"
            )
        check_definition(name, value, source, self.needs.namespace)
        if value.__name__ not in (name, "<lambda>"):
            source += f"\n{name} = {value.__name__}\n"
        # An earlier definition comes first: in the end, its name means the present one.
        own = {name: source}
        self.sources = {**own, **self.sources} if is_earlier else {**self.sources, **own}
        for read in reads_in_source(source):  # including decorators, which nothing else reads
            self._request(read, f"in the source of {name}", may_lack=True)

    def _request(self, name: str, why: str, *, may_lack: bool = False) -> None:
        """Request a name, and what its functions read: the cell may assign that before it calls them."""
        known = {*self.needs.values} if may_lack else {name, *self.needs.values}
        self.needs.add(name, why, may_lack=may_lack)
        self.needs.unsure |= self.needs.assigned.intersection(self.needs.values) - known

    def _pickle(self) -> None:
        """Try to pickle the values; the source of the classes they refer to is written."""
        pickler = _SavePickler(NullFile(), self.needs.namespace)
        try:
            pickler.dump(self.pickled)
        except Exception as error:  # pickling runs the classes' own code
            name = next(filter(self._cannot_be_pickled, self.pickled), "values")
            value = self.pickled.get(name, self.pickled)
            raise CaptureError(explain(name, value, error, pickler.last)) from error
        before = len(self.pickled)
        for obj in pickler.referred:
            self._request(obj.__qualname__.partition(".")[0], "a captured value's class")
        self._add_all()
        if len(self.pickled) > before:
            self._pickle()

    def _cannot_be_pickled(self, name: str) -> bool:
        try:
            _SavePickler(NullFile(), self.needs.namespace).dump(self.pickled[name])
        except Exception:  # pickling runs the classes' own code
            return True
        return False

    def _split_definitions(self) -> tuple[list[str], list[str]]:
        """Return definitions in dependency order: those before the pickled values, those after."""
        order: list[str] = []
        needed = {
            name: reads_in_source(source, at_end=False) for name, source in self.sources.items()
        }

        def visit(name: str) -> None:
            if name in order or name in visiting or name not in needed:
                return
            visiting.add(name)
            for other in needed[name]:
                visit(other)
            order.append(name)

        visiting: set[str] = set()
        for name in self.sources:
            visit(name)
        late: list[str] = []
        for name in order:
            if any(other in self.pickled or other in late for other in needed[name]):
                late.append(name)
        return [name for name in order if name not in late], late

    def _path_lines(self, modules: list[str]) -> list[str]:
        """Return code that makes local modules importable that are not beside the script."""
        for value in self.values.values():
            if isinstance(value, types.FunctionType):
                modules += imported_names(value.__code__)
        paths = [p for m in modules for p in local_paths(m.partition(".")[0])]
        folders = dict.fromkeys(str(p.parent) for p in paths)
        folders.pop(str(self.target.resolve().parent), None)
        lines = [f"sys.path.insert(0, {folder!r})" for folder in folders]
        return ["import sys", "", *lines, ""] if lines else []

    def _loading(self, early: Sequence[str], late: Sequence[str]) -> list[str]:
        """Return code that loads the pickled values, each before the definitions that need it.

        One pickler writes all of them, so that they share objects.
        """
        if not self.pickled:
            return ["\n" + self.sources[name] for name in late]
        file = io.BytesIO()
        pickler = _SavePickler(file, self.needs.namespace)
        rest, known, waiting = dict(self.pickled), {*early}, set[str]()
        file_opened = f"_hydrogen_pathlib.{self.data_place}.open('rb')"
        lines = ["", "import pathlib as _hydrogen_pathlib", "import pickle as _hydrogen_pickle", ""]
        lines.append(f"_hydrogen_values = _hydrogen_pickle.Unpickler({file_opened})")

        def load(names: Iterable[str]) -> None:
            part = {name: rest.pop(name) for name in names}
            pickler.dump(part)
            unknown = {one.__qualname__.partition(".")[0] for one in pickler.referred} & {*late}
            for name in sorted(unknown - known):
                raise CaptureError(
                    f"`{name}` cannot be saved: its definition needs {', '.join(map(repr, part))}, whose "
                    f"values need `{name}`"
                )
            values = "_hydrogen_values.load().values()"
            lines.extend([f"({', '.join(part)},) = {values}  # of the notebook", ""])

        def is_ready(name: str) -> bool:
            trial = _SavePickler(NullFile(), self.needs.namespace)
            trial.dump(rest[name])
            return not {one.__qualname__.partition(".")[0] for one in trial.referred} & waiting

        for name in late:
            needed = reads_in_source(self.sources[name], at_end=False)
            if any(each in rest for each in needed):
                # The others, too: code that runs at a definition may read them.
                waiting = {*late} - known
                load([each for each in rest if each in needed or is_ready(each)])
            lines.append("\n" + self.sources[name])
            known.add(name)
        if rest:
            load([*rest])
        self.data = file.getvalue()
        return lines


class _SavePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles values for a script: objects with a name in the notebook have the same name in the script."""

    def __init__(self, file: Any, namespace: Mapping[str, Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.namespace = namespace
        self.referred: list[Any] = []
        self.last: Any = None

    def reducer_override(self, obj: Any) -> Any:
        self.last = obj
        if isinstance(obj, DatasetHandle) and obj.is_temporary:
            raise RefusedError(
                obj,
                "its data is deleted with the notebook",
                "write the frame as Parquet yourself, and make the handle with hm.dataset(path)",
            )
        is_code = issubclass(type(obj), (type, types.FunctionType))
        if is_code and notebook_name(obj, self.namespace):
            self.referred.append(obj)
            return obj.__qualname__
        return super().reducer_override(obj)
