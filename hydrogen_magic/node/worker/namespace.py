"""The notebook's names on a rank: restored into ``__main__``, used by the cell, returned as results."""

from __future__ import annotations
import __future__

import ast
import asyncio
import builtins
import contextlib
import difflib
import importlib
import inspect
import io
import os
import pickle
import re
import runpy
import sys
import types
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import filterfalse
from pathlib import Path
from typing import Any

from hydrogen_magic.core import syntax
from hydrogen_magic.node.worker import module_importer, seeding, settings, spawn
from hydrogen_magic.node.worker.inference import file_names
from hydrogen_magic.node.worker.interactive import ipython_shell
from hydrogen_magic.node.worker.observe.dataloader import note_sent
from hydrogen_magic.node.worker.results.result_pickler import ResultPickler
from hydrogen_magic.node.worker.session.session_names import RankNames
from hydrogen_magic.serialization.bindings import take_writers
from hydrogen_magic.serialization.closure import ClosureManifest, ModuleSource, Setting, unbundle
from hydrogen_magic.serialization.code_names import names_bound_by
from hydrogen_magic.serialization.identity import RankObjects, updating
from hydrogen_magic.serialization.payload import Payload

_NOT_IN_MAIN = re.compile(
    r"Can't get attribute '([\w.]+)' on <module '__main__'|module '__main__' has no attribute '(\w+)'"
)
"""The error of pickle for a class or function of the notebook that this process lacks; from Python 3.15 on
the second one."""
_VALUE = "__hydrogen_magic_value__"
"""Temporary name for the value of the last expression; no user code contains it."""
_IMPORTS = "<imports of the notebook>"
"""File of its import statements in tracebacks."""
_ACCUMULATORS = (
    "what ranks add to an accumulator of Spark stays on each rank: return it as the value of the cell, or "
    "log it with hm.log"
)
_KEEP = "make sure that the first rank assigns it and does not delete it, or leave it out of --out"


def load(
    closure: Payload, module: types.ModuleType | None = None, names: RankNames | None = None
) -> LoadedClosure:
    """Restore a closure into ``__main__``, or into ``module`` for a rank inside the kernel.

    ``names``: what the rank has of earlier cells of its session.

    In its own process, a rank also gets the notebook's current local modules, and child processes that know
    the notebook's classes. Raises exceptions of importing and unpickling.
    """
    header, body = unbundle(closure)
    loaded = LoadedClosure(header, module or sys.modules["__main__"], module is None, names)
    with loaded.as_main():
        loaded.restore(body)
    return loaded


@contextlib.contextmanager
def _noting(name: str) -> Iterator[None]:
    """Add to an exception that the value of ``name`` could not be unpickled; empty: the call."""
    try:
        yield
    except Exception as error:  # unpickling runs the classes' own code
        what, remedy = f"the notebook's `{name}`", "it can be created inside the cell"
        if not name:
            what, remedy = "the call", "its arguments can be created inside the function"
        has_remedy = not isinstance(error, (ImportError, MemoryError))
        advice = f"; {remedy} instead" if has_remedy else ""
        _add_note(error, f"raised while the rank restored {what}{advice}")
        raise


def _add_note(error: Exception, note: str) -> None:
    vars(error).setdefault("__notes__", []).append(note)  # Python 3.10 has no add_note()


class LoadedClosure:
    """A closure on a rank, ready to run."""

    def __init__(
        self,
        header: ClosureManifest,
        module: types.ModuleType,
        own_process: bool,
        names: RankNames | None = None,
    ) -> None:
        self.is_script = header.kind in ("script", "module")
        """It is a script or module: ``run`` may end with SystemExit and has no value."""
        self.warnings: list[str] = []
        """Failures of imports for side effects and of settings; the same on all ranks of a host."""
        self.settings: list[Setting] = list(header.settings)
        """The notebook's settings, which a rank applies in its own process."""
        self._header = header
        self._module = module
        self._own_process = own_process
        self._names = names
        self._call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None = None
        self._shared: dict[str, Any] = {}
        # Not by weak references, with which torch.utils.swap_tensors refuses a tensor.
        self._objects = RankObjects({})

    @contextlib.contextmanager
    def as_main(self) -> Iterator[None]:
        """Make the rank's module ``__main__``; permanently in its own process."""
        before = sys.modules["__main__"], warnings.formatwarning
        sys.modules["__main__"] = self._module
        warnings.formatwarning = partial(_format_warning, self._header.labels)
        try:
            yield
        finally:
            if not self._own_process:
                sys.modules["__main__"], warnings.formatwarning = before

    # ── restoring ────────────────────────────────────────────────────────────────────────────────

    def restore(self, body: Payload) -> None:
        """Restore modules, imports and names."""
        if self.is_script:
            return
        header, namespace = self._header, self._module.__dict__
        namespace.setdefault("__builtins__", builtins)
        for filename, text in header.sources.items():
            module_importer.show_source(filename, text)
        if self._names is not None and header.session is not None:
            self._names.match(header.session)
        if self._names is not None:  # before modules that were edited are loaded again
            labels = {*header.names, *(setting.label for setting in header.settings)}
            self._names.settings.undo_others(labels, self.warnings.append)
        if self._own_process:
            self._install_modules()
        ipython_shell.provide(header.provided, namespace, own_process=self._own_process)
        self._apply_settings(filter(settings.concerns_imports, header.settings))
        self._replay_imports(namespace)
        self._apply_settings(filterfalse(settings.concerns_imports, header.settings))
        n_before = _n_accumulators()
        self._read_names(body, namespace)
        if _n_accumulators() > n_before:
            self.warnings.append(_ACCUMULATORS)

    def _install_modules(self) -> None:
        modules: Mapping[str, ModuleSource] = self._header.modules
        if self._names is None:
            module_importer.install(modules)
        else:
            self.warnings += self._names.finder.update(modules)
            modules = self._names.finder.modules
        spawn.install(replace(self._header, modules=dict(modules)))

    def _apply_settings(self, chosen: Iterable[Setting]) -> None:
        if not self._own_process:
            return
        if self._names is None:
            settings.apply(chosen, self.warnings.append)
        else:
            digests = self._header.session.settings if self._header.session else {}
            self._names.settings.apply(chosen, digests, self.warnings.append)

    def _replay_imports(self, namespace: dict[str, Any]) -> None:
        for line in self._header.imports:
            scope = namespace if line.binds else {}
            try:
                exec(compile(line.text, _IMPORTS, "exec"), scope)
            except Exception as error:  # modules run arbitrary code on import
                if line.required:
                    module_importer.show_source(_IMPORTS, line.text)
                    raise
                raised = f"{type(error).__name__}: {error}"
                self.warnings.append(
                    f"`{line.text}` (from an earlier cell) failed on the ranks: {raised}"
                )
        for name in self._header.submodules:
            with contextlib.suppress(ImportError):  # imported in the kernel, possibly unused here
                importlib.import_module(name)

    def _read_names(self, body: Payload, namespace: dict[str, Any]) -> None:
        take_writers()
        read = partial(self._values, body)
        if self._names is not None and self._header.session is not None:
            self.warnings += self._names.receive(read, self._header.session)
            return
        with updating(self._objects):
            for name, value in read():
                namespace[name] = value
        self._shared = take_writers()

    def _values(
        self, body: Payload, before: Callable[[str], None] = lambda name: None
    ) -> Iterator[tuple[str, Any]]:
        """Unpickle the names and their values; settings are applied where they stand.

        ``before``: called with each name before its value is unpickled.
        """
        unpickler = pickle.Unpickler(io.BytesIO(body.pickled), buffers=body.buffers)
        if self._header.has_module_objects:
            unpickler.load()
        for name in self._header.names:
            before(name)
            with _noting(name):
                value = unpickler.load()
            if type(value) is Setting:
                self.settings.append(value)
                self._apply_settings([value])
            elif name:
                note_sent(value)
                yield name, value
            else:
                self._call = value
                for argument in (*value[1], *value[2].values()):
                    note_sent(argument)

    # ── running ──────────────────────────────────────────────────────────────────────────────────

    def run(self) -> Any:
        """Run the cell, the call or the script; return its value.

        Raises its exceptions; SystemExit passes through.
        """
        if self._header.seed is not None:
            seeding.seed(self._header.seed + int(os.environ.get("RANK", "0")))
        runs = {"cell": self._run_cell, "call": self._run_call}
        with self.as_main():
            try:
                return runs.get(self._header.kind, self._run_script)()
            except (NameError, AttributeError) as error:
                if note := self._note_on(error):
                    _add_note(error, note)
                raise

    def _note_on(self, error: NameError | AttributeError) -> str:
        """Return that a name of the notebook was left out; empty for other errors."""
        if isinstance(error, AttributeError):  # of pickle, for a class that a file refers to
            found = _NOT_IN_MAIN.match(str(error))
            if found is None:
                return ""
            name = (found[1] or found[2]).partition(".")[0]
            return (
                f"`{name}` was not sent, since the cell does not use it: if the notebook defines it, write"
                f" `{name}` in a line of the cell, before the object is loaded"
            )
        kind = self._header.unsent.get(error.name or "")
        if kind is None or isinstance(error, UnboundLocalError):
            return ""
        return (
            f"the notebook's `{error.name}`, a {kind}, was not sent: it cannot be pickled or is large,"
            " and the cell seemed not to need it; assign it in the cell before it is read"
        )

    def _run_cell(self) -> Any:
        namespace = self._module.__dict__
        code = self._compiled()
        if self._names is not None:
            self._names.begin(self._header)
        result = eval(code, namespace)
        if inspect.iscoroutine(result):
            self._await(result)
        if self._names is not None:
            self._names.complete(names_bound_by(code))
        return namespace.pop(_VALUE, None)

    def _compiled(self) -> types.CodeType:
        header = self._header
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        for feature in header.futures:
            flags |= getattr(__future__, feature).compiler_flag
        code = "\n" * header.line_offset + header.code
        tree = syntax.parse(code, header.filename, flags=flags, warns=True)
        assert isinstance(tree, ast.Module)
        _keep_last_value(tree)
        compiled = compile(tree, header.filename, "exec", flags, dont_inherit=True)
        assert isinstance(compiled, types.CodeType)
        return compiled

    def _run_call(self) -> Any:
        assert self._call is not None
        if self._names is not None:
            self._names.begin(self._header)
        function, args, kwargs = self._call
        value = function(*args, **kwargs)
        return self._await(value) if inspect.iscoroutine(value) else value

    def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end; in a session on the loop that has the tasks of earlier cells."""
        if self._names is None or not self._own_process:
            return _await(coroutine)
        return self._names.loop.run(coroutine)

    def _run_script(self) -> None:
        header = self._header
        sys.argv = [header.target, *header.args]
        if header.kind == "module":
            self._put_folder_first(os.getcwd())
            runpy._run_module_as_main(header.target)  # type: ignore[attr-defined]
            return
        path = os.path.abspath(header.target)
        self._put_folder_first(os.path.dirname(path))
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        namespace = self._module.__dict__
        namespace.update(__file__=path, __cached__=None, __builtins__=builtins)
        exec(code, namespace)

    def _put_folder_first(self, folder: str) -> None:
        if self._own_process:
            module_importer.put_folder_first(folder)
        else:  # the modules of this process are the kernel's
            sys.path.insert(0, folder)

    def calls(self, function: Callable[..., Any]) -> bool:
        """Whether it is a call of this function."""
        return self._call is not None and self._call[0] is function

    def code(self) -> Iterator[str]:
        """Yield the source of the cell or script, and of functions of the notebook that it uses."""
        yield self._header.code
        yield from self._header.sources.values()
        if self._header.kind == "script":
            yield Path(self._header.target).read_text("utf-8", "replace")

    @property
    def is_seeded(self) -> bool:
        """Whether :meth:`run` seeds the generators of random numbers."""
        return self._header.seed is not None

    def texts(self) -> Iterator[str]:
        """Yield texts that may name files: those among values and arguments, and those in the code."""
        known = self._module.__dict__
        values = [known[name] for name in self._header.names if name in known]
        yield from file_names.in_values([self._call, values])
        for code in (*self.code(), *(module.source for module in self._header.modules.values())):
            yield from file_names.in_code(code)

    def predict(self, value: Any) -> Any:
        """Return the function for every batch: the cell's ``predict``, or the value of the call.

        ``value``: the result of :meth:`run`. None if the cell defined no such name.
        """
        return value if self._header.kind == "call" else self._module.__dict__.get("predict")

    # ── results ──────────────────────────────────────────────────────────────────────────────────

    @property
    def is_cell(self) -> bool:
        """Whether the value is that of a cell's last expression, not of a call."""
        return self._header.kind == "cell"

    def variables(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the variables named by ``--out``, and the reason for each one that is missing."""
        namespace = self._module.__dict__
        found = {name: namespace[name] for name in self._header.out if name in namespace}
        missing = [name for name in self._header.out if name not in namespace]
        return found, {name: self._why_missing(name) for name in missing}

    def _why_missing(self, name: str) -> str:
        names = [known for known in self._module.__dict__ if known[:1] != "_"]
        near = difflib.get_close_matches(name, names, n=3)
        hint = f" (similar names: {', '.join(near)})" if near else ""
        return f"`{name}` (--out) is not defined after the cell{hint}; {_KEEP}"

    def result_pickler(self, *args: Any) -> ResultPickler:
        """Return a pickler for results; use it inside :meth:`as_main`."""
        if self._names is not None:
            return self._names.result_pickler(*args)
        return ResultPickler(*args, shared=self._shared, originals=self._objects.numbered())


def _n_accumulators() -> int:
    """Return how many accumulators of Spark this process has."""
    return len(getattr(sys.modules.get("pyspark.accumulators"), "_accumulatorRegistry", ()))


def _format_warning(
    labels: Mapping[str, str],
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    line: str | None = None,
) -> str:
    """Format a warning as Python does, with the names that users know for cells."""
    text = _python_format(message, category, filename, lineno, line)
    where = f"{labels.get(filename, filename)}, line {lineno}:"
    return text.replace(f"{filename}:{lineno}:", where, 1) if filename in labels else text


_python_format = warnings.formatwarning


def _await(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end; on a thread inside the kernel, whose own loop is running."""
    if asyncio._get_running_loop() is None:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def _keep_last_value(tree: ast.Module) -> None:
    """Turn the last expression into an assignment, for :meth:`LoadedClosure.run`."""
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = tree.body[-1]
        target = ast.copy_location(ast.Name(_VALUE, ast.Store()), last)
        tree.body[-1] = ast.copy_location(ast.Assign([target], last.value), last)
