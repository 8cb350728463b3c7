"""Classes and functions that earlier cells have registered with a library, which ranks do not repeat."""

from __future__ import annotations

import ast
import functools
import re
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydrogen_magic.capture.settings import parsed, run_at_once
from hydrogen_magic.serialization.pickler import is_main

_REGISTERS = re.compile(r"register(_\w+)?")
_PARTS_OF_LIBRARIES = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


@dataclass(frozen=True)
class _Registration:
    """A call such as ``jax.tree_util.register_pytree_node(Point, …)``, or a decorator."""

    function: str
    """``jax.tree_util.register_pytree_node``"""
    names: tuple[str, ...]
    """What it may register: names of the notebook, and texts, such as the name of an accessor of pandas."""


def registration_note(
    cells: Sequence[str], namespace: Mapping[str, Any], sent: Collection[str], names: Iterable[str]
) -> str:
    """Return which registrations of the notebook the ranks lack; empty if the cell uses none of them.

    ``cells``: sources of earlier cells. ``sent``: names of the notebook's functions and classes that ranks
    get. ``names``: those in the code that the ranks run, which may register them itself.
    """
    used = set(names)
    for one in dict.fromkeys(found for source in cells for found in _registrations_in(source)):
        parts = one.function.split(".")
        library = namespace.get(parts[0])
        registered = [name for name in one.names if name in sent or name in used - {*namespace}]
        is_of_library = issubclass(type(library), _PARTS_OF_LIBRARIES) and not is_main(library)
        if registered and is_of_library and parts[-1] not in used:
            return (
                f"the notebook registered `{registered[0]}` by {one.function}(), and the ranks do not: call "
                "it inside the cell"
            )
    return ""


@functools.lru_cache(maxsize=4096)
def _registrations_in(source: str) -> tuple[_Registration, ...]:
    tree = parsed(source)
    calls = (node for node in run_at_once(tree) if isinstance(node, ast.Call))
    found = [registration for call in calls for registration in _of_call(call, ())]
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found += [one for each in node.decorator_list for one in _of_call(each, (node.name,))]
    return tuple(found)


def _of_call(node: ast.expr, names: tuple[str, ...]) -> Iterator[_Registration]:
    function = node.func if isinstance(node, ast.Call) else node
    text = ast.unparse(function)
    if not _REGISTERS.fullmatch(text.rpartition(".")[2]) or not re.fullmatch(r"[\w.]+", text):
        return
    if isinstance(node, ast.Call):
        for value in (*node.args, *(keyword.value for keyword in node.keywords)):
            if isinstance(value, ast.Name):
                names += (value.id,)
            elif isinstance(value, ast.Constant) and isinstance(value.value, str):
                names += (value.value,)
    yield _Registration(text, names)
