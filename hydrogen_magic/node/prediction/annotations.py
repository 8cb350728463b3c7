"""The batch type of ``predict``, from the annotation of its first parameter.

Nothing is imported for this: an annotation that is a class is recognized by its name, and a text
(``from __future__ import annotations``) is evaluated in the scope of ``predict``, with the usual short
names of libraries in place of imports that were not sent with it.
"""

from __future__ import annotations

import builtins
import collections.abc
import functools
import importlib
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hydrogen_magic.errors import InferError

__all__ = ["BatchType", "wanted_by"]

PANDAS = "pandas"
TABLE = "pa.Table"
RECORD_BATCH = "pa.RecordBatch"
POLARS = "pl.DataFrame"
ARRAY = "np.ndarray"
ARRAYS = "dict[str, np.ndarray]"
TENSOR = "torch.Tensor"
TENSORS = "dict[str, torch.Tensor]"

_CLASSES = {
    ("pandas", "DataFrame"): PANDAS,
    ("pyarrow", "Table"): TABLE,
    ("pyarrow", "RecordBatch"): RECORD_BATCH,
    ("polars", "DataFrame"): POLARS,
    ("numpy", "ndarray"): ARRAY,
    ("torch", "Tensor"): TENSOR,
}
_DICTS = {ARRAY: ARRAYS, TENSOR: TENSORS}
_ITERATORS = (
    collections.abc.Iterator,
    collections.abc.Iterable,
    collections.abc.Generator,
)
_TAKEN = (
    "a pandas DataFrame (also without annotation), pa.Table, pa.RecordBatch, pl.DataFrame,"
    " np.ndarray, dict[str, np.ndarray], torch.Tensor, dict[str, torch.Tensor], or an Iterator of"
    " one of these"
)
_USUAL_NAMES = {
    "pd": "pandas", "pa": "pyarrow", "pl": "polars", "np": "numpy",
    "pandas": "pandas", "pyarrow": "pyarrow", "polars": "polars", "numpy": "numpy",
    "torch": "torch", "typing": "typing", "collections": "collections.abc",
}  # fmt: skip
_USUAL_CLASSES = {
    "Tensor": "torch",
    "Iterator": "collections.abc",
    "Iterable": "collections.abc",
    "Generator": "collections.abc",
}


@dataclass(frozen=True)
class BatchType:
    """The argument of ``predict``."""

    kind: str
    """One of the kinds above."""
    is_stream: bool = False
    """Called once with an iterator over such batches, not with each batch."""


def wanted_by(function: Callable[..., Any], otherwise: str = PANDAS) -> BatchType:
    """Return the batch type of ``function``; ``otherwise``: the kind without an annotation.

    Raises InferError if it cannot be called with one argument, or has an unknown annotation.
    """
    parameter = _only_parameter(function)
    if parameter is None or parameter.annotation is inspect.Parameter.empty:
        return BatchType(otherwise)
    annotation = parameter.annotation
    try:
        if isinstance(annotation, str):
            annotation = _evaluated(annotation, function)
        return _read(annotation, otherwise, parameter)
    except InferError:
        if inspect.ismethod(function):  # model.predict: the user does not annotate it
            return BatchType(otherwise)
        raise


def _only_parameter(function: Callable[..., Any]) -> inspect.Parameter | None:
    """Return the parameter for the batch; None if Python does not know of any."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built in
        return None
    try:
        signature.bind(None)
    except TypeError as error:
        raise InferError(
            f"predict{signature} cannot be called with one argument, the batch ({error}): write "
            "def predict(batch), and use variables of the notebook for other inputs"
        ) from None
    first = next(iter(signature.parameters.values()))
    return None if first.kind in (first.VAR_POSITIONAL, first.VAR_KEYWORD) else first


# ── the annotation ───────────────────────────────────────────────────────────────────────────────


def _read(annotation: Any, otherwise: str, parameter: inspect.Parameter) -> BatchType:
    annotation = _bare(annotation)
    origin = typing.get_origin(annotation) or annotation
    if origin in _ITERATORS:
        items = [item for item in typing.get_args(annotation)[:1] if not _says_nothing(item)]
        kind = _kind_of(items[0]) if items else otherwise
        is_stream = True
    else:
        kind = otherwise if _says_nothing(annotation) else _kind_of(annotation)
        is_stream = False
    if kind is None:
        said = inspect.formatannotation(parameter.annotation)
        raise InferError(
            f"predict({parameter.name}: {said}) has an unsupported batch type; use one of {_TAKEN}"
        )
    return BatchType(kind, is_stream)


def _says_nothing(annotation: Any) -> bool:
    return annotation in (Any, object) or isinstance(annotation, typing.TypeVar)


def _bare(annotation: Any) -> Any:
    """Return ``annotation`` without ``Annotated`` and names given by ``type``."""
    annotation = getattr(annotation, "__value__", annotation)
    return typing.get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation


def _kind_of(annotation: Any) -> str | None:
    """Return the kind for an annotation, or None."""
    annotation = _bare(annotation)
    origin = typing.get_origin(annotation) or annotation
    if origin in (typing.Union, types.UnionType):
        kinds = [*filter(None, map(_kind_of, typing.get_args(annotation)))]
        return PANDAS if PANDAS in kinds else next(iter(kinds), None)
    if not isinstance(origin, type):
        return None
    if issubclass(origin, collections.abc.Mapping):
        items = typing.get_args(annotation)
        return _DICTS.get(_kind_of(items[1]) or "") if len(items) == 2 else ARRAYS
    return next(filter(None, map(_kind_of_class, origin.__mro__)), None)


def _kind_of_class(found: type) -> str | None:
    return _CLASSES.get((found.__module__.partition(".")[0], found.__name__))


# ── annotations that are text ────────────────────────────────────────────────────────────────────


def _evaluated(text: str, function: Callable[..., Any]) -> Any:
    names = _AnnotationNames(_globals_of(function))
    try:
        found = eval(text, {"__builtins__": {}}, names)
        return eval(found, {"__builtins__": {}}, names) if isinstance(found, str) else found
    except Exception as error:
        raise InferError(
            f"predict's annotation {text!r} cannot be evaluated ({type(error).__name__}: "
            f"{error}); use one of {_TAKEN}"
        ) from error


class _AnnotationNames(dict[str, Any]):
    """Names available to an annotation: the notebook's, Python's, and the usual ones of libraries."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            return getattr(builtins, name)
        if name in _USUAL_NAMES:
            return importlib.import_module(_USUAL_NAMES[name].partition(".")[0])
        if name in _USUAL_CLASSES:
            return getattr(importlib.import_module(_USUAL_CLASSES[name]), name)
        raise KeyError(name)


def _globals_of(function: Any) -> dict[str, Any]:
    """Return the names in scope of a function, method, instance or partial."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, (types.FunctionType, types.BuiltinFunctionType)):
        function = getattr(type(function).__call__, "__func__", type(function).__call__)
    return getattr(inspect.unwrap(function), "__globals__", {})
