"""Notes for the user on what ranks do not get with the objects of earlier cells (seeds, graphs, gradients,
types of arrays and registrations), and on what does not come back.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from hydrogen_magic.core import syntax
from hydrogen_magic.core.library_types import is_a
from hydrogen_magic.serialization.code_names import CODE
from hydrogen_magic.serialization.pickler import is_main

_SEED_CALL = re.compile(r"([\w.]+\.)?(?!(get|load|read|make)_)(\w*_)?seed(_\w+)?")
_DRAW_NOTHING = {*sys.stdlib_module_names, "cloudpickle", "hydrogen_magic"} - {"random"}
_REGISTERS = re.compile(r"register(_\w+)?|add_safe_globals|custom_op")
_USERS = {
    "register_keras_serializable": {
        "load_model",
        "model_from_json",
        "deserialize_keras_object",
        "deserialize",
    },
    "add_safe_globals": {"load"},
}
"""What alone looks for what these register. Keras models of the notebook bring their custom objects."""
_OF_TQDM = ("progress_apply", "progress_map", "progress_applymap", "progress_transform")
"""Methods that ``tqdm.pandas()`` gives the classes of pandas."""
_PARTS_OF_LIBRARIES = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


# ── seeds ──────────────────────────────────────────────────────────────────────────────────────────


def seed_note(
    cells: Sequence[str], called: Iterable[str], names: Set[str], modules: Iterable[str]
) -> str:
    """Return what seeds in the notebook's ``cells`` mean for ranks; empty if there are none.

    It is empty, too, if the ranks seed by themselves or cannot draw random numbers. ``called``: the functions
    that the cell calls. ``names``: those in functions of the notebook that ranks get. ``modules``: those that
    the ranks use.
    """
    calls = list(dict.fromkeys(call for source in cells for call in _seed_calls(source)))
    if not calls or _seeds_itself(called, names) or not any(map(_may_draw, modules)):
        return ""
    return (
        f"the notebook called {' and '.join(calls[:3])}, which does not seed the ranks: each rank draws"
        " different random numbers in each run; --seed N seeds rank r with N + r, and a call inside the"
        " cell seeds all ranks equally"
    )


def _seeds_itself(called: Iterable[str], names: Set[str]) -> bool:
    if any(map(_SEED_CALL.fullmatch, called)):
        return True
    # Of a function, only the names are known: `args.seed` seeds nothing.
    return {"random", "seed"} <= names or any(
        name != "seed" and _SEED_CALL.fullmatch(name) for name in names
    )


def _may_draw(module: str) -> bool:
    return module.partition(".")[0] not in _DRAW_NOTHING


@functools.lru_cache(maxsize=4096)
def _seed_calls(source: str) -> tuple[str, ...]:
    """Return the calls with arguments, outside of functions, of what has ``seed`` in its name."""
    calls = [node for node in _run_at_once(syntax.parsed(source)) if isinstance(node, ast.Call)]
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


# ── graphs and gradients ───────────────────────────────────────────────────────────────────────────


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


def gradient_note(values: Mapping[str, Any], names: Set[str], in_cell: Sequence[str]) -> str:
    """Return that gradients of an earlier cell stay behind; empty if the cell makes its own, or uses none.

    ``values``: those with gradients. ``names``: those in the code that the ranks run; ``in_cell``: those of
    the cell itself, in order.
    """
    if "autograd" in names:  # torch.autograd.grad()
        return ""
    is_zeroed = {"grad", "zero_", "backward"} <= {*in_cell}
    if "backward" in names and not (
        is_zeroed and in_cell.index("grad") < in_cell.index("backward")
    ):
        return ""
    reads = not names.isdisjoint(("grad", "clip_grad_norm_", "clip_grad_value_"))
    if not (reads or "step" in names):
        return ""
    found = [name for name in values if reads or is_a(values[name], "torch.optim", "Optimizer")]
    if not found:
        return ""
    return (
        f"gradients of the notebook are not sent: those of {_listed(found)} are None on the ranks; call "
        "backward() inside the cell"
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


# ── registrations ──────────────────────────────────────────────────────────────────────────────────


@dataclass
class SentDefinitions:
    """The notebook's functions and classes that ranks get."""

    names: set[str] = field(default_factory=set)
    with_decorators: set[str] = field(default_factory=set)
    """Classes whose decorators ranks execute."""
    in_decorators: set[str] = field(default_factory=set)
    """Names in these decorators, with attributes."""


@dataclass(frozen=True)
class _Registration:
    """A call such as ``jax.tree_util.register_pytree_node(Point, …)``, or a decorator."""

    function: str
    """``jax.tree_util.register_pytree_node``"""
    names: tuple[str, ...]
    """What it may register: names of the notebook, and texts, such as the name of an accessor of pandas, or
    ``library::operator`` of torch."""
    target: str = ""
    """The first of its arguments, if it is a name: an object that may be what gets the others."""
    decorated: str = ""
    """The function or class whose decorator it is."""


def registration_note(
    cells: Sequence[str],
    namespace: Mapping[str, Any],
    sent: SentDefinitions,
    names: Iterable[str],
    functions: Set[str],
) -> str:
    """Return which registrations of the notebook the ranks lack; empty if the cell uses none of them.

    ``cells``: sources of earlier cells. ``names``: those in the code that the ranks run, which may register
    them itself. ``functions``: those that the cell calls.
    """
    used = set(names)
    lacking: dict[str, str] = {}
    for one in dict.fromkeys(found for source in cells for found in _registrations_in(source)):
        parts = one.function.split(".")
        library = namespace.get(parts[0])
        registered = [
            name
            for name in one.names
            if (name in sent.names and one.decorated not in sent.with_decorators)
            or name in used - {*namespace}
            or ("::" in name and used.issuperset(name.split("::")))
        ]
        is_of_library = issubclass(type(library), _PARTS_OF_LIBRARIES) and not is_main(library)
        target = namespace.get(one.target, library)
        is_in_object = not issubclass(type(target), _PARTS_OF_LIBRARIES)  # which is sent with it
        is_needed = not used.isdisjoint(_USERS.get(parts[-1], used))
        is_lacking = registered and is_of_library and is_needed and not is_in_object
        if is_lacking and not _is_called(parts, used, functions):
            lacking.setdefault(one.function, registered[0])
    if lacking:
        listed = [f"`{name}` by {function}()" for function, name in lacking.items()]
        it = "it" if len(listed) == 1 else "them"
        return (
            f"the notebook registered {' and '.join(listed[:3])}, and the ranks do not: call {it} inside the"
            " cell"
        )
    return ""


def _is_called(parts: Sequence[str], used: Set[str], functions: Set[str]) -> bool:
    """Whether the code of the ranks calls a function itself. ``parts``: of its name, ``AutoModel.register``.

    If the cell calls functions of that name, it is one of these; otherwise another function may call it.
    """
    alike = [each for each in (name.split(".") for name in functions) if each[-1] == parts[-1]]
    lengths = [min(len(each), len(parts), 2) for each in alike]
    is_one = any(each[-n:] == [*parts[-n:]] for each, n in zip(alike, lengths, strict=True))
    return is_one if alike else parts[-1] in used


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


@functools.lru_cache(maxsize=4096)
def _registrations_in(source: str) -> tuple[_Registration, ...]:
    tree = syntax.parsed(source)
    calls = (node for node in _run_at_once(tree) if isinstance(node, ast.Call))
    found = [registration for call in calls for registration in _of_call(call)]
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found += [one for each in node.decorator_list for one in _of_call(each, node.name)]
    return tuple(found)


def _of_call(node: ast.expr, decorated: str = "") -> Iterator[_Registration]:
    names: tuple[str, ...] = (decorated,) if decorated else ()
    function = node.func if isinstance(node, ast.Call) else node
    text = ast.unparse(function)
    if text == "tqdm.pandas":
        yield _Registration(text, _OF_TQDM)
    if not _REGISTERS.fullmatch(text.rpartition(".")[2]) or not re.fullmatch(r"[\w.]+", text):
        return
    if isinstance(node, ast.Call):
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        values += [part for value in values if isinstance(value, ast.List) for part in value.elts]
        for value in values:
            if isinstance(value, ast.Name):
                names += (value.id,)
            elif isinstance(value, ast.Constant) and isinstance(value.value, str):
                names += (value.value,)
    first = node.args[0] if isinstance(node, ast.Call) and node.args else None
    target = first.id if isinstance(first, ast.Name) else ""
    yield _Registration(text, names, target, decorated)
