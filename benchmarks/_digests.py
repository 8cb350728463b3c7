"""Digests of values, equal in two processes for equal values.

Arrays, tensors and frames count by their contents, functions by their code, and all other objects by what
pickle would send. Objects that cannot be pickled (locks, generators), and figures, count by their types.
"""

from __future__ import annotations

import dis
import hashlib
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), range, slice)
_OPAQUE = ("matplotlib", "mpl_toolkits", "IPython", "weakref", "threading", "_thread")
"""Packages whose objects count by their types alone."""
_CACHES = ("_cache", "_item_cache", "__weakref__", "__dict__", "__module__", "__doc__")
_WITHOUT_IDENTITY = (tuple, frozenset, types.ModuleType)


class Described(NamedTuple):
    """What is compared of a value."""

    form: str
    """Its type, and shape or length if it has one."""
    digest: str
    shown: str
    """The beginning of its text."""


def describe(value: Any) -> Described:
    digest = _Digest()
    try:
        digest.add(value)
    except RecursionError:  # what it has seen so far depends on the depth that was left
        digest = _Digest()
    return Described(_form(value), digest.hex(), _shown(value))


def _form(value: Any) -> str:
    kind = type(value)
    if kind is types.ModuleType:
        return "module"
    shape = _attribute(value, "shape")
    if shape is None and kind in (list, tuple, dict, set, frozenset):
        shape = len(value)
    return " ".join(map(str, filter(None, (kind.__name__, shape, _attribute(value, "dtype")))))


def _attribute(value: Any, name: str) -> Any:
    """Return a property of an array, a tensor or a frame."""
    if type(value).__module__.partition(".")[0] not in (
        "numpy",
        "torch",
        "pandas",
        "polars",
        "jaxlib",
    ):
        return None
    found = getattr(value, name, None)
    return None if callable(found) else found


def _shown(value: Any) -> str:
    try:
        return repr(value)[:120]
    except Exception as error:  # of any class
        return f"<{type(value).__name__}: {type(error).__name__}>"


def _package(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


class _Digest:
    """Goes through a value and all that it refers to."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=12)
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []
        """Else another object might get the address of one that is known."""

    def put(self, *texts: object) -> None:
        for text in texts:
            data = text if isinstance(text, bytes) else str(text).encode("utf-8", "surrogatepass")
            self._hash.update(len(data).to_bytes(8, "big") + data)

    def hex(self) -> str:
        return self._hash.hexdigest()

    def add(self, *values: Any) -> None:
        for value in values:
            self._add(value)

    def _add(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            return self.put(kind.__name__, repr(value))
        if not isinstance(value, _WITHOUT_IDENTITY):
            number = self._seen.get(id(value))
            if number is not None:
                return self.put("again", number)
            self._seen[id(value)] = len(self._seen)
            self._kept.append(value)
        self.put(kind.__module__, kind.__qualname__)
        if _package(kind) not in _OPAQUE:
            self._content(value, kind)
        return None

    def _content(self, value: Any, kind: type) -> None:
        if kind in (list, tuple):
            return self.add(len(value), *value)
        if kind is dict:
            return self.add(len(value), *(one for item in value.items() for one in item))
        if kind in (set, frozenset):
            return self.put(*sorted(describe(one).digest for one in value))
        for base in kind.__mro__:
            rule = _RULES.get(f"{base.__module__}.{base.__qualname__}")
            if rule is not None:
                return rule(self, value)
        return self._reduced(value)

    def _reduced(self, value: Any) -> None:
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:  # it cannot be pickled
            return self.attributes(getattr(value, "__dict__", {}))
        self._kept.append(reduced)
        if isinstance(reduced, str):
            return self.put(reduced)
        function, arguments, state, *items = [*reduced, None, None, None][:5]
        self.put(getattr(function, "__qualname__", ""))
        self.add(arguments)
        self.attributes(state) if isinstance(state, dict) else self.add(state)
        return self.add(*([*each] if each is not None else None for each in items))

    def attributes(self, found: Any) -> None:
        named = {str(k): v for k, v in found.items() if k not in _CACHES}
        for name in sorted(named):
            self.put(name)
            self.add(named[name])


def _module(digest: _Digest, value: types.ModuleType) -> None:
    digest.put(value.__name__)


def _function(digest: _Digest, value: types.FunctionType) -> None:
    digest.put(value.__qualname__)
    if value.__module__ == "__main__":
        _code(digest, value.__code__)
        digest.add(value.__defaults__, value.__kwdefaults__, value.__annotations__)
        digest.add(*(_contents(cell) for cell in value.__closure__ or ()))
        digest.attributes(vars(value))


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _instructions(code: types.CodeType) -> Iterator[str]:
    """Yield what the code does, whether it was compiled with its cell or, as by IPython, by statements.

    Python calls ``random.random()`` by other instructions if ``import random`` is compiled with it.
    """
    for one in dis.get_instructions(code):
        is_place = one.opcode in dis.hasjrel or one.opcode in dis.hasjabs
        is_code = isinstance(one.argval, types.CodeType)
        yield one.opname.replace("LOAD_METHOD", "LOAD_ATTR")
        yield "" if is_place or is_code else repr(one.argval)


def _code(digest: _Digest, value: types.CodeType) -> None:
    digest.put(value.co_name, value.co_varnames, value.co_freevars, *_instructions(value))
    for constant in value.co_consts:
        _code(digest, constant) if isinstance(constant, types.CodeType) else digest.add(constant)


def _class(digest: _Digest, value: type) -> None:
    digest.put(value.__module__, value.__qualname__)
    if value.__module__ == "__main__":
        digest.put(*(base.__qualname__ for base in value.__mro__))
        hidden = ("_abc_impl", "__slotnames__", "__static_attributes__", "__firstlineno__")
        digest.attributes({k: v for k, v in vars(value).items() if k not in hidden})


def _array(digest: _Digest, value: Any) -> None:
    digest.put(value.dtype.str if value.dtype.names is None else value.dtype.descr, value.shape)
    if value.dtype.hasobject:
        digest.add(value.tolist())
    else:
        digest.put(value.tobytes())


def _masked(digest: _Digest, value: Any) -> None:
    _array(digest, value.filled())
    _array(digest, value.mask)


def _tensor(digest: _Digest, value: Any) -> None:
    import torch

    digest.put(value.dtype, tuple(value.shape), value.requires_grad, value.device, value.layout)
    dense = value.detach()
    if value.layout is not torch.strided:
        dense = dense.to_dense()
    flat = dense.cpu().resolve_conj().resolve_neg().contiguous().flatten()
    digest.put(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")


def _jax_array(digest: _Digest, value: Any) -> None:
    import numpy as np

    digest.put(value.dtype, value.shape)
    digest.put(np.asarray(value).tobytes() if value.dtype.kind != "V" else b"")


def _frame(digest: _Digest, value: Any) -> None:
    digest.add(value.columns, value.index, value.attrs)
    for number in range(value.shape[1]):
        _values(digest, value.iloc[:, number].array)


def _series(digest: _Digest, value: Any) -> None:
    digest.add(value.name, value.index, value.attrs)
    _values(digest, value.array)


def _index(digest: _Digest, value: Any) -> None:
    digest.add([*value.names], str(getattr(value, "freq", None)))
    _values(digest, value.array if value.nlevels == 1 else value.to_flat_index().array)


def _values(digest: _Digest, values: Any) -> None:
    digest.put(str(values.dtype))
    array = values.to_numpy() if hasattr(values, "to_numpy") else values
    digest.add([*values]) if array.dtype.hasobject else digest.put(array.tobytes())


def _polars(digest: _Digest, value: Any) -> None:
    digest.put(getattr(value, "schema", getattr(value, "dtype", "")))
    digest.add(value.to_dict(as_series=False) if hasattr(value, "to_dict") else value.to_list())


_RULES: dict[str, Callable[[_Digest, Any], None]] = {
    "builtins.module": _module,
    "builtins.function": _function,
    "builtins.code": _code,
    "builtins.type": _class,
    "builtins.builtin_function_or_method": lambda d, v: d.put(v.__qualname__),
    "builtins.method": lambda d, v: d.add(v.__func__, v.__self__),
    "builtins.staticmethod": lambda d, v: d.add(v.__func__),
    "builtins.classmethod": lambda d, v: d.add(v.__func__),
    "builtins.property": lambda d, v: d.add(v.fget, v.fset, v.fdel),
    "enum.Enum": lambda d, v: d.put(v.name),
    "numpy.ma.MaskedArray": _masked,
    "numpy.ndarray": _array,
    "numpy.dtype": lambda d, v: d.put(v),
    "torch.Tensor": _tensor,
    "torch._C.Generator": lambda d, v: d.add(v.get_state()),
    "jaxlib._jax.ArrayImpl": _jax_array,
    "pandas.DataFrame": _frame,
    "pandas.core.frame.DataFrame": _frame,
    "pandas.Series": _series,
    "pandas.core.series.Series": _series,
    "pandas.Index": _index,
    "pandas.core.indexes.base.Index": _index,
    "polars.dataframe.frame.DataFrame": _polars,
    "polars.series.series.Series": _polars,
    "re.Pattern": lambda d, v: d.put(v.pattern, v.flags),
}
"""By the names of classes, so that nothing is imported; the first class of an object's MRO counts."""
