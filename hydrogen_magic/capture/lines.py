"""The lines of a cell: as Python counts them, and those of IPython as ``transform_cell`` produces them."""

from __future__ import annotations

import ast
import functools
import operator
import re
import string
from collections.abc import Mapping
from typing import Any

from hydrogen_magic.core import syntax
from hydrogen_magic.core.library_types import loaded
from hydrogen_magic.serialization.code_names import names_in_source

_CODE_MAGICS = {"time", "timeit", "capture", "prun", "memit", "mprun", "lprun", "pinfo", "pinfo2"}
"""Magics whose line or body is Python; the last two are ``name?`` and ``name??``."""
_RANK_MAGICS = {"distributed", "infer"}
_BINDING_MAGICS = {"load_ext", "pylab", "run", "store"}
"""Magics that bind names which their line does not show."""
_SHELL_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)")


def python_lines(source: str) -> list[str]:
    """Return the lines of ``source`` as Python counts them: ``str.splitlines`` also splits at form feeds."""
    return re.split("\r\n|\r|\n", source)


def cell_labels(namespace: Mapping[str, Any]) -> dict[str, str]:
    """Return what IPython calls the cells of its notebook, oldest first, by the file names of their code."""
    shell_of = namespace.get("get_ipython")
    shell = shell_of() if callable(shell_of) else None
    if shell is None:
        return {}
    # Private, and IPython's only place for it.
    numbers = getattr(shell.compile, "_filename_map", None)
    if numbers is None:  # IPython 7, as in Colab
        history, name_of = shell.history_manager, shell.compile.get_code_name
        inputs = enumerate(zip(history.input_hist_raw, history.input_hist_parsed, strict=False))
        numbers = {name_of(raw, f"{code}\n", number): number for number, (raw, code) in inputs}
    in_order = sorted(numbers.items(), key=operator.itemgetter(1))
    return {filename: f"Cell In[{number}]" for filename, number in in_order}


@functools.lru_cache(maxsize=4096)
def code_in(source: str) -> tuple[str, ...]:
    """Return the source of a cell, and the Python in its magics: the body of a ``%%time`` cell is a text."""
    calls = [node for node in ast.walk(syntax.parsed(source)) if isinstance(node, ast.Call)]
    inner = (text for call in calls for text in code_in_magics(call))
    return (source, *(each for code in inner for each in code_in(code)))


def names_in_magic(node: ast.Call) -> list[str]:
    """Return the names inside the texts of a transformed ``!`` or ``%`` line."""
    code = _code_texts(node)
    if code:
        return [name for text in code for name in _names_in_code(text)]
    return [name for text in _magic_texts(node) for name in _names_in_template(text)]


def code_in_magics(node: ast.Call) -> list[str]:
    """Return the Python in ``%time f(x)`` or a ``%%time`` cell, from their transformed call."""
    return [_as_python(text) for text in _code_texts(node)]


def _code_texts(node: ast.Call) -> list[str]:
    """Return the line and the body of such a call as typed: with options, and lines of IPython."""
    texts = _run_magic(node)
    return texts[1:] if texts and texts[0] in _CODE_MAGICS else []


def _as_python(text: str) -> str:
    """Return the line or body of a magic as IPython transforms it, from where it is Python."""
    manager = loaded("IPython.core.inputtransformer2", "TransformerManager")
    if manager and not syntax.parsed(text).body:
        text = manager().transform_cell(text)
    n_words = len(text.split()) if text.startswith("-") else 0  # options, such as ``-s cumulative``
    rests = (text.split(maxsplit=n)[-1] for n in range(n_words))
    return next((rest for rest in rests if syntax.parsed(rest).body), text)


def names_read_by_ranks(node: ast.Call) -> list[str]:
    """Return the names in the body of a ``%%distributed`` or ``%%infer`` cell, from its transformed call."""
    texts = _run_magic(node)
    return names_in_source(texts[-1]) if texts and texts[0] in _RANK_MAGICS else []


def assigning_code(node: ast.Call) -> list[str]:
    """Return the same without that of ``%timeit``, whose names are local."""
    return [] if _magic_texts(node)[:1] == ["timeit"] else code_in_magics(node)


def binds_unknown_names(node: ast.Call) -> bool:
    """Whether it is the transformed call of a magic such as ``%run``, whose script binds names."""
    texts = _run_magic(node)
    return bool(texts) and texts[0] in _BINDING_MAGICS


def _run_magic(node: ast.Call) -> list[str]:
    """Return the name of a magic that is run, its line and its body; empty for other calls."""
    runs = isinstance(node.func, ast.Attribute) and node.func.attr.startswith("run_")
    return _magic_texts(node) if runs else []


def _magic_texts(node: ast.Call) -> list[str]:
    function = node.func
    if (
        isinstance(function, ast.Attribute)
        and isinstance(function.value, ast.Call)
        and isinstance(function.value.func, ast.Name)
        and function.value.func.id == "get_ipython"
    ):
        values = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
        return [value for value in values if isinstance(value, str)]
    return []


def _names_in_template(text: str) -> list[str]:
    names = _SHELL_VARIABLE.findall(text)
    try:
        fields = [name for _, name, _, _ in string.Formatter().parse(text) if name]
    except ValueError:  # braces of the shell itself
        fields = []
    for expression in fields:
        names += _names_in_code(expression)
    return names


def _names_in_code(text: str) -> list[str]:
    return names_in_source(text) or re.findall(r"[A-Za-z_]\w*", text)  # options before the code
