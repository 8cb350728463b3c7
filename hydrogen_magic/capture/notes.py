"""Notes for the user on what ranks do not get with objects of earlier cells, and what does not come back.

Ranks do not get seeds, graphs of autograd and types of arrays.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from hydrogen_magic.capture.lines import code_in
from hydrogen_magic.core import syntax
from hydrogen_magic.core.library_types import is_a
from hydrogen_magic.serialization.code_names import CODE
from hydrogen_magic.serialization.importable import is_main

_SEED_CALL = re.compile(r"([\w.]+\.)?(?!(get|load|read|make)_)(\w*_)?seed(_\w+)?")


# ── seeds ──────────────────────────────────────────────────────────────────────────────────────────


def seed_note(cells: Sequence[str], names: Set[str]) -> str:
    """Return what seeds in the notebook's ``cells`` mean for ranks; empty if there are none.

    It is empty, too, if the ranks seem to seed by themselves. ``names``: those in the code that they run.
    """
    calls = list(dict.fromkeys(call for source in cells for call in _seed_calls(source)))
    if not calls or any("seed" in name for name in names):
        return ""
    return (
        f"the notebook called {' and '.join(calls[:3])}, which does not seed the ranks: each rank draws"
        " different random numbers in each run; --seed N seeds rank r with N + r, and a call inside the"
        " cell seeds all ranks equally"
    )


@functools.lru_cache(maxsize=4096)
def _seed_calls(source: str) -> tuple[str, ...]:
    """Return the calls with arguments, outside of functions, of what has ``seed`` in its name."""
    nodes = (node for code in code_in(source) for node in _run_at_once(syntax.parsed(code)))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return tuple(
        ast.unparse(call)
        for call in calls
        if (call.args or call.keywords) and _SEED_CALL.fullmatch(ast.unparse(call.func))
    )


def _run_at_once(node: ast.AST) -> Iterator[ast.AST]:
    """Yield ``node`` and what is in it, except for functions: the notebook may never call them."""
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _run_at_once(child)


# ── graphs ─────────────────────────────────────────────────────────────────────────────────────────


def graph_note(values: Mapping[str, Any], names: Set[str]) -> str:
    """Return what ``backward()`` on a loss of an earlier cell means; empty if there is none.

    ``names``: those in the code that the ranks run. Only variables are looked at: tensors with a graph
    inside other objects are often leftovers, as in modules with ``weight_norm``.
    """
    if names.isdisjoint(("backward", "grad")):
        return ""
    found = [
        name
        for name, value in values.items()
        if is_a(value, "torch", "Tensor") and value.grad_fn is not None
    ]
    if not found:
        return ""
    return (
        f"computed in the notebook, and sent without the autograd graph: {_listed(found)}; backward() does "
        "not reach the parameters: compute the loss inside the cell"
    )


# ── Accelerate ─────────────────────────────────────────────────────────────────────────────────────


def process_note(names: Sequence[str]) -> str:
    """Return that the values of ``names`` do not join the ranks; empty if there are none."""
    if not names:
        return ""
    listed = _listed([name or "the call" for name in names])
    return (
        f"Accelerate has made {listed} for the notebook's process alone: ranks that train with it do not "
        "train together; create TrainingArguments, Accelerator and Trainer inside the cell"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names[:3])


# ── functions and classes ────────────────────────────────────────────────────────────────────────


def definition_note(namespace: Mapping[str, Any], out: Iterable[str]) -> str:
    """Return that the notebook's functions and classes stay as they are; empty if ``out`` names none."""
    found = [
        name
        for name in sorted(out)
        if isinstance(value := namespace.get(name), CODE)
        and is_main(value)
        and value.__qualname__ == name
    ]
    if not found:
        return ""
    return (
        f"--out {', '.join(f'`{name}`' for name in found)}: functions and classes of the notebook are not "
        "updated, and attributes that ranks set on them do not come back: return the values, or keep them in "
        "an object"
    )


def outdated_note(outdated: Mapping[str, str]) -> str:
    """Return a class that its statement may not make again on ranks; empty if there is none.

    ``outdated``: names of such classes, and a name that each of them has read and that was assigned since.
    """
    name, read = next(iter(outdated.items()), ("", ""))
    if not name:
        return ""
    return (
        f"the class `{name}` has read `{read}`, which has been assigned since: the ranks rebuild the class"
        " from its attributes, which its base does not see; run its cell again"
    )


# ── JAX ────────────────────────────────────────────────────────────────────────────────────────────


def jax_note(n_arrays: int, names: Set[str]) -> str:
    """Return what ``n_arrays`` of JAX are on the ranks; empty without any, or if the cell converts arrays.

    ``names``: those in the code that the ranks run.
    """
    if n_arrays == 0 or "asarray" in names:
        return ""
    return (
        "jax.Arrays of the notebook are read-only NumPy arrays on the ranks: their operators compute with"
        " NumPy (int32 / 2 is float64), and methods such as .at are missing; x = jax.numpy.asarray(x)"
        " in the cell makes a jax.Array"
    )
