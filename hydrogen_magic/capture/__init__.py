"""From a cell of the notebook to a closure that a rank can run.

     serialization.code_names          reachable: names that
     (DefiniteAssignment: names           functions read
      assigned before a read)                   │
               ▼                                ▼
cell text ── scopes ─► names it reads ── required_names ─► values, imports, errors
                                                             │         │
                                      local modules ◄── stream ─► pickles, one per name
                                            └───────────┬──────────────┘
                                                     Captured
"""

from __future__ import annotations
import __future__

import ast
import functools
import os
import re
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydrogen_magic.capture import params, saved_script
from hydrogen_magic.capture.build import Builder
from hydrogen_magic.capture.callers import code_of_callers
from hydrogen_magic.capture.imports import Imports, imported_names
from hydrogen_magic.capture.lines import cell_labels, python_lines
from hydrogen_magic.capture.modules import (
    find_without_importing,
    imported_modules,
    is_installed,
)
from hydrogen_magic.capture.reachable import reads_of
from hydrogen_magic.capture.required_names import RequiredNames, similar
from hydrogen_magic.capture.scopes import ScopeAnalysis, analyse
from hydrogen_magic.capture.session_cell import SessionCapture
from hydrogen_magic.capture.values import Captured, CapturedItem, CellText
from hydrogen_magic.core import syntax
from hydrogen_magic.core.job import DEFAULT_MAX_CLOSURE_BYTES
from hydrogen_magic.errors import CaptureError, OptionTypeError
from hydrogen_magic.serialization.closure import ClosureManifest, bundle
from hydrogen_magic.serialization.payload import Payload

__all__ = [
    "Captured",
    "CapturedItem",
    "CellText",
    "SessionCapture",
    "capture_call",
    "capture_cell",
    "capture_script",
    "write_script",
]

_RUNS_TEXT = {"eval", "get_ipython"}
"""Functions that run a text, or a magic, which may assign names."""


def capture_cell(
    cell: CellText,
    namespace: Mapping[str, Any],
    history: Sequence[str] = (),
    *,
    out: Sequence[str] = (),
    max_closure_bytes: int = DEFAULT_MAX_CLOSURE_BYTES,
    ranks_have_gpu: bool = False,
    seed: int | None = None,
    session: SessionCapture | None = None,
) -> Captured:
    """Return ``cell`` with everything that it uses from the notebook.

    ``namespace``: the notebook's names. ``history``: sources of earlier cells, oldest first, for their
    import statements. ``out``: names to bring back. ``seed``: rank r seeds its random numbers with
    ``seed + r``. ``session``: the session whose ranks run the cell; what they have is not sent again.

    Raises CaptureError if a name is undefined or a value cannot be sent, SyntaxError if the cell is not
    valid Python.
    """
    code = cell.transform(cell.body)
    offset = cell.first_line - 1 + _leading_blank_lines(cell.body)
    session = replace(session, where=cell.label) if session else None
    scope, needs = _required_names(cell, code, offset, namespace, history, out, session)
    on_ranks = session.on_ranks if session else ()
    _check_out(out, scope, {*namespace, *on_ranks})
    header = ClosureManifest(
        "cell",
        code=code,
        filename=cell.filename,
        line_offset=offset,
        futures=tuple(dict.fromkeys(needs.imports.futures)),
        out=tuple(out),
        sources={cell.filename: cell.visible},
        seed=seed,
    )
    builder = Builder(needs, max_closure_bytes, ranks_have_gpu, scope, out, session)
    builder.add_names()
    may_assign_any = scope.has_unknown_names or not _RUNS_TEXT.isdisjoint(scope.attributes)
    return replace(
        builder.finish(header, {cell.filename: cell.label}),
        source=cell.body,
        assigned=None if may_assign_any else scope.assigned,
    )


def capture_call(
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    max_closure_bytes: int = DEFAULT_MAX_CLOSURE_BYTES,
    ranks_have_gpu: bool = False,
    session: SessionCapture | None = None,
) -> Captured:
    """Return the call ``function(*args, **kwargs)`` with everything that it uses from ``__main__``.

    Raises CaptureError as :func:`capture_cell` does, and TypeError if ``function`` is not callable.
    """
    if not callable(function):
        raise OptionTypeError(f"{function!r} is not callable")
    namespace = sys.modules["__main__"].__dict__
    if session is not None:
        session = replace(session, where=f"{getattr(function, '__qualname__', function)}()")
    on_ranks = session.on_ranks if session else ()
    needs = RequiredNames(namespace, Imports(()), cell_labels(namespace), on_ranks=on_ranks)
    _add_pushed(needs, session)
    call = (function, tuple(args), dict(kwargs))
    needs.add_reads(call)
    needs.check()
    builder = Builder(
        needs, max_closure_bytes, ranks_have_gpu, session=session, callers=code_of_callers(function)
    )
    builder.add_names()
    builder.add_call(call)
    return builder.finish(ClosureManifest("call"), {})


def capture_script(
    target: str, args: Sequence[str], *, as_module: bool, seed: int | None = None
) -> Captured:
    """Return a script (or, ``as_module``, a module) with its arguments.

    Raises CaptureError if there is none of that name.
    """
    file = Path(target)
    if as_module:
        file = _file_of_module(target)
    elif not file.is_file():
        near = similar(Path(target).name, [p.name for p in _siblings(Path(target))])
        hint = f"; did you mean {near[0]}?" if near else ""
        here = os.readlink("/proc/self/cwd")  # also of a directory that was deleted, and says so
        raise CaptureError(f"there is no script {target} in {here}{hint}")
    kind = "module" if as_module else "script"
    header = ClosureManifest(kind, target=target, args=tuple(args), seed=seed)
    return Captured(
        bundle(header, Payload(b"")),
        (),
        _imports_of_script(file),
        {},
        (),
        params=params.of_arguments(args),
    )


_CHANGES_ENVIRONMENT = re.compile(
    r"environ\[[^\]]*\]\s*=[^=]|environ\.(setdefault|update|pop)|putenv"
)


def _imports_of_script(file: Path) -> tuple[str, ...]:
    """Return the modules to import in advance for a script: installed modules that it imports.

    Empty if the script changes the environment, possibly on purpose before an import.
    """
    try:
        text = file.read_text()
        tree = syntax.parse(text)
    except (OSError, SyntaxError, ValueError):  # the rank reports it, or it is not Python source
        return ()
    if _CHANGES_ENVIRONMENT.search(text):
        return ()
    roots = {name.partition(".")[0] for name in imported_modules(tree)}
    return tuple(sorted(filter(is_installed, roots)))


def _file_of_module(target: str) -> Path:
    spec = find_without_importing(target)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_without_importing(f"{target}.__main__")
        target = f"{target}.__main__"
    if spec is None:
        raise CaptureError(f"there is no module {target}; `-m` takes a module name, without .py")
    return Path(spec.origin or "")


def _siblings(path: Path) -> list[Path]:
    folder = path.parent
    return list(folder.glob("*.py")) if folder.is_dir() else []


def write_script(
    path: str | os.PathLike[str],
    cell: CellText,
    namespace: Mapping[str, Any],
    history: Sequence[str] = (),
    *,
    launcher: str = "",
) -> tuple[Path, ...]:
    """Write ``cell`` and the names it uses from the notebook as a script; return the files.

    The first line of the script names the command ``launcher`` that starts it.

    Values that cannot be written as source go into ``NAME.data.pkl`` beside it. Raises CaptureError if an
    object has no source, or if ``path`` exists and was not written by this function.
    """
    code = cell.transform(cell.body)
    offset = cell.first_line - 1 + _leading_blank_lines(cell.body)
    _, needs = _required_names(cell, code, offset, namespace, history)
    return saved_script.write(path, cell, needs, launcher)


# ── the cell's text ──────────────────────────────────────────────────────────────────────────────


def _required_names(
    cell: CellText,
    code: str,
    offset: int,
    namespace: Mapping[str, Any],
    history: Sequence[str],
    out: Sequence[str] = (),
    session: SessionCapture | None = None,
) -> tuple[ScopeAnalysis, RequiredNames]:
    """Return the names that the cell reads; raise CaptureError if one is undefined."""
    imports, labels = Imports(history), cell_labels(namespace)
    tree, compiled = _compile(code, cell.filename, offset, imports.futures)

    @functools.cache
    def called(name: str) -> list[str]:
        return [use.read.name for use in reads_of(namespace.get(name), namespace)]

    scope = analyse(tree, compiled, called)
    on_ranks = session.on_ranks if session else ()
    unknown = scope.has_unknown_names
    needs = RequiredNames(namespace, imports, labels, scope.assigned, unknown, on_ranks)
    needs.imported = imported_names(tree)
    needs.unsure = scope.unsure
    for read in scope.reads:
        may_lack = (read.line, read.name) in scope.guarded
        needs.add(read.name, _where(read.line, code, offset), read.assigned, may_lack)
    if scope.possible_reads:
        possible = RequiredNames(namespace, imports, labels, scope.assigned, on_ranks=on_ranks)
        for read in scope.possible_reads:
            possible.add(read.name, _where(read.line, code, offset), read.assigned, may_lack=True)
        needs.add_possible(possible)
    for name in out:  # the cell may change it through an alias only
        if name in namespace and name not in scope.assigned:
            needs.add(name, "--out")
    _add_pushed(needs, session)
    needs.check()
    return scope, needs


def _add_pushed(needs: RequiredNames, session: SessionCapture | None) -> None:
    for name in session.push if session else ():
        if name in needs.on_ranks and name not in needs.namespace:
            raise CaptureError(
                f"--push {name}: only the ranks of the session have this name; define it in the notebook, "
                "or drop --push"
            )
        needs.add(name, "--push")


def _compile(
    code: str, filename: str, offset: int, futures: Sequence[str]
) -> tuple[ast.Module, types.CodeType]:
    """Compile the cell as a rank does; a SyntaxError has the line numbers of the visible cell.

    ``futures``: the notebook's ``from __future__`` features.
    """
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    for feature in futures:
        flags |= getattr(__future__, feature).compiler_flag
    try:
        tree = syntax.parse(code, filename, flags=flags)
        with syntax.without_warnings():
            compiled = compile(tree, filename, "exec", flags, dont_inherit=True)
    except SyntaxError as error:
        error.text = error.text or "".join(python_lines(code)[(error.lineno or 1) - 1 :][:1])
        error.lineno = (error.lineno or 1) + offset
        if error.end_lineno is not None:
            error.end_lineno += offset
        raise
    assert isinstance(tree, ast.Module)
    return tree, compiled


def _leading_blank_lines(body: str) -> int:
    """Return how many lines IPython drops at the start of a cell."""
    lines = python_lines(body)
    return next((place for place, line in enumerate(lines) if line.strip()), 0)


def _where(line: int, code: str, offset: int) -> str:
    lines = python_lines(code)
    text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
    return f"line {line + offset}: {text}"


def _check_out(out: Sequence[str], scope: ScopeAnalysis, namespace: Collection[str]) -> None:
    for name in out:
        if name in scope.assigned or name in namespace or scope.has_unknown_names:
            continue
        near = similar(name, [*scope.assigned, *namespace])
        hint = f"; did you mean `{near[0]}`?" if near else ""
        raise CaptureError(f"`{name}` (--out) is never assigned in the cell{hint}")
