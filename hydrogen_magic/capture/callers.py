"""The script and the local modules that call ranks: like cells, their code may have changed other modules."""

from __future__ import annotations

import functools
import inspect
import linecache
import sys
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydrogen_magic.capture.imports import Statement, import_statements
from hydrogen_magic.capture.modules import local_paths
from hydrogen_magic.serialization.importable import names_of

_MOST_WRAPPERS = 100


@dataclass(frozen=True)
class Code:
    """Sources, and the global names that they use."""

    sources: Sequence[str]
    names: Mapping[str, Any]
    is_on_ranks: bool = True
    """Ranks have this code. Of others, they may lack what values need: they get plain values only."""

    def value_of(self, name: str) -> Any:
        """Return the value of a name, which a function may import for itself; None if it has none."""
        if name in self.names:
            return self.names[name]
        return next((found.value() for found in self._imports if found.name == name), None)

    def importing(self, name: str, value: Any) -> list[Statement]:
        """Return the last import statement that binds ``name`` to ``value``, if there is one."""
        return [statement for statement in self._imports if statement.gives(name, value)][-1:]

    @functools.cached_property
    def _imports(self) -> list[Statement]:
        return [found for source in self.sources for found in import_statements(source)]


def code_of_callers(function: Any) -> list[Code]:
    """Return the code of the script, and of the local modules of ``function`` and of those on the stack."""
    main = vars(sys.modules["__main__"])
    on_ranks = {id(names): names for names in (main, _globals_of(function) or main)}
    found = {**on_ranks}
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        found[id(frame.f_globals)] = frame.f_globals
        frame = frame.f_back
    is_local = functools.cache(local_paths)
    roots = ((names, str(names.get("__name__")).partition(".")[0]) for names in found.values())
    called = [names for names, root in roots if names is main or is_local(root)]
    texts = ((_source(names, names is main), names) for names in called)
    return [Code([text], names, id(names) in on_ranks) for text, names in texts if text]


def _globals_of(function: Any) -> dict[str, Any]:
    """Return the contents of the module of a function, a class, or a callable object; empty if unknown.

    Objects are not asked for attributes, since their classes may answer anything.
    """
    for _ in range(_MOST_WRAPPERS):
        inner = _wrapped(function)
        if inner is None:
            break
        function = inner
    if isinstance(function, types.FunctionType):
        return function.__globals__
    home = function if isinstance(function, type) else type(function)
    return names_of(str(home.__module__))


def _wrapped(function: Any) -> Any:
    if issubclass(type(function), functools.partial):
        return function.func
    if isinstance(function, types.MethodType):
        return function.__func__
    return inspect.getattr_static(function, "__wrapped__", None)


def _source(names: dict[str, Any], is_main: bool) -> str:
    file = names.get("__file__")
    if isinstance(file, str):
        return "".join(linecache.getlines(file, names))
    arguments = sys.orig_argv if is_main else []
    return "".join(arguments[arguments.index("-c") + 1 :][:1]) if "-c" in arguments else ""
