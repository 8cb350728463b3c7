"""The kind of batch that ``predict`` takes, from the annotation of its first parameter.

No library is imported for it: a class is recognized by its name. An annotation that is text (``from
__future__ import annotations``) is evaluated in the globals of ``predict``; the usual short names of
libraries stand for imports that were not captured.
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

from hydrogen_magic.core.lazy_annotations import signature_of
from hydrogen_magic.errors import InferError

PANDAS = "pd.DataFrame"
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
_ITERATORS = (collections.abc.Iterator, collections.abc.Iterable, collections.abc.Generator)
_SUPPORTED = (
    "use a pandas DataFrame (the default), pa.Table, pa.RecordBatch, pl.DataFrame, np.ndarray,"
    " dict[str, np.ndarray], torch.Tensor, dict[str, torch.Tensor], or an Iterator of one of these"
)
_MODULES = {"pd": "pandas", "pa": "pyarrow", "pl": "polars", "np": "numpy"}
_MODULES |= {name: name for name in (*_MODULES.values(), "torch", "typing", "collections")}
_MODULE_OF_CLASS = {"Tensor": "torch"} | dict.fromkeys(
    ("Iterator", "Iterable", "Generator"), "collections.abc"
)


@dataclass(frozen=True)
class BatchType:
    """The argument of ``predict``."""

    kind: str
    """One of the kinds above."""
    is_stream: bool = False
    """It is called once with an iterator over batches, not with each batch."""


def batch_type_of(function: Callable[..., Any], default: str = PANDAS) -> BatchType:
    """Return what ``function`` takes; ``default``: the kind if it is not annotated.

    Raises InferError if it cannot be called with one argument, or its annotation is not supported.
    """
    parameter = _only_parameter(function)
    if parameter is None or parameter.annotation is inspect.Parameter.empty:
        return BatchType(default)
    annotation = parameter.annotation
    try:
        if isinstance(annotation, str):
            annotation = _evaluated(annotation, function)
        return _batch_type(annotation, default, parameter)
    except InferError:
        if inspect.ismethod(function):  # such as model.predict, which the user cannot annotate
            return BatchType(default)
        raise


def _only_parameter(function: Callable[..., Any]) -> inspect.Parameter | None:
    """Return the parameter for the batch; None if Python does not know it."""
    try:
        signature = signature_of(function)
    except (TypeError, ValueError):  # built in
        return None
    try:
        signature.bind(None)
    except TypeError as error:
        raise InferError(
            f"predict{signature} cannot be called with one argument, the batch ({error}): write def"
            " predict(batch), and use variables of the notebook for everything else"
        ) from None
    first = next(iter(signature.parameters.values()))
    return None if first.kind in (first.VAR_POSITIONAL, first.VAR_KEYWORD) else first


def _batch_type(annotation: Any, default: str, parameter: inspect.Parameter) -> BatchType:
    annotation = _bare(annotation)
    is_stream = (typing.get_origin(annotation) or annotation) in _ITERATORS
    if is_stream:
        annotation = next(iter(typing.get_args(annotation)), Any)
    kind = default if _is_any(annotation) else _kind_of(annotation)
    if kind is None:
        shown = f"{parameter.name}: {inspect.formatannotation(parameter.annotation)}"
        raise InferError(f"predict({shown}) has an unsupported batch type: {_SUPPORTED}")
    return BatchType(kind, is_stream)


def _is_any(annotation: Any) -> bool:
    return annotation in (Any, object) or isinstance(annotation, typing.TypeVar)


def _bare(annotation: Any) -> Any:
    """Return ``annotation`` without ``Annotated`` and aliases made by ``type``."""
    annotation = getattr(annotation, "__value__", annotation)
    return typing.get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation


def _kind_of(annotation: Any) -> str | None:
    """Return the kind of an annotation, or None."""
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
    names = ((base.__module__.partition(".")[0], base.__name__) for base in origin.__mro__)
    return next((_CLASSES[name] for name in names if name in _CLASSES), None)


# ── annotations that are text ────────────────────────────────────────────────────────────────────


def _evaluated(text: str, function: Callable[..., Any]) -> Any:
    names = _AnnotationNames(_globals_of(function))
    try:
        found = eval(text, {"__builtins__": {}}, names)
        return eval(found, {"__builtins__": {}}, names) if isinstance(found, str) else found
    except Exception as error:
        raise InferError(
            f"predict's annotation {text!r} cannot be evaluated ({type(error).__name__}: {error});"
            f" {_SUPPORTED}"
        ) from error


class _AnnotationNames(dict[str, Any]):
    """The names of the notebook, Python's builtins, and the usual names of libraries."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            return getattr(builtins, name)
        if name in _MODULES:
            return importlib.import_module(_MODULES[name])
        return getattr(importlib.import_module(_MODULE_OF_CLASS[name]), name)


def _globals_of(function: Any) -> dict[str, Any]:
    """Return the globals of a function, method, instance or partial."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, (types.FunctionType, types.BuiltinFunctionType)):
        function = getattr(type(function).__call__, "__func__", type(function).__call__)
    return getattr(inspect.unwrap(function), "__globals__", {})
