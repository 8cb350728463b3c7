"""One column that ``predict`` returned, from any library, as an Arrow array."""

from __future__ import annotations

import datetime as dt
import math
import numbers
import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import accumulate, chain
from typing import Any

import numpy as np
import pyarrow as pa

from hydrogen_magic.core.library_types import is_a
from hydrogen_magic.node.prediction.arrow_copies import copied_column
from hydrogen_magic.node.prediction.arrow_types import NESTED, family, plain, with_parts
from hydrogen_magic.node.prediction.schema_unify import MisfitError
from hydrogen_magic.serialization.object_paths import describe

_SINGLE = (str, bytes, bool, int, float, complex, type(None), np.generic)
_PARTS: dict[str, tuple[type, ...]] = {
    "list": (list, tuple, np.ndarray),
    "map": (list, tuple, np.ndarray, dict),
    "struct": (tuple, dict),
}
"""Types of values with parts, by the family of their Arrow type."""
_PLAIN = {str, bytes, bool, int, float, type(None), dict}
"""Types of values that Arrow reads as they are."""
_MAX_DIGITS = 38
_COARSE = {"m": ("W", "D", "h", "m"), "M": ("h", "m")}
"""Units of NumPy's times that Arrow lacks."""


def is_single(value: Any) -> bool:
    """Return whether ``value`` is one value, not a column of values."""
    if isinstance(value, _SINGLE):
        return True
    is_column = isinstance(value, (Iterable, pa.Array)) or hasattr(value, "__array__")
    return not (hasattr(value, "shape") or is_column)


def array_from(
    value: Any, n_rows: int, name: str, field: pa.Field | None, *, as_text: bool = False
) -> pa.Array:
    """Return column ``name`` as an array of any length.

    ``field``: the column in the schema so far, if known. ``as_text``: return values for which Arrow has no
    type as text. Raises MisfitError for other such values.
    """
    try:
        return _unordered(plain(_array(value, n_rows, field)))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        texts = _texts(value) if as_text else None
        if texts is not None:
            return texts
        dtype = getattr(value, "dtype", None)
        shown = describe(value) if dtype is None else f"{describe(value)} of {dtype}"
        raise MisfitError(
            f"predict returned column {name!r} ({shown}) with values for which Arrow has no"
            f" common type ({error})",
            remedy="convert them to one type, such as text",
        ) from error


def _array(value: Any, n_rows: int, field: pa.Field | None) -> pa.Array:
    if is_a(value, "polars", "Series"):
        # Arrow has no type for objects; Polars would give their addresses in memory.
        value = value.to_list() if str(value.dtype) == "Object" else value.to_arrow()
    if isinstance(value, (pa.Array, pa.ChunkedArray)):
        return copied_column(_one_chunk(value))
    if is_a(value, "pandas.api.extensions", "ExtensionArray"):
        value = sys.modules["pandas"].Series(value)
    if is_a(value, "pandas", "Series") or is_a(value, "pandas", "Index"):
        return _from_pandas(value, field)
    if is_a(value, "torch", "Tensor"):
        value = of_tensor(value)
    if isinstance(value, (list, tuple, range)):
        return _of_objects(list(value), field, is_pandas=False)
    if hasattr(value, "__array__"):
        return _of_numpy(value, n_rows, field)
    raise TypeError("a column is a list, an array, a tensor or a Series")


def _one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    chunks = column.chunks or [pa.array([], column.type)]
    return chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)


def _texts(column: Any) -> pa.Array | None:
    """Return the text of each value, None if this is no column or a value has no text of its own."""
    if is_a(column, "torch", "Tensor"):
        column = of_tensor(column)
    if is_a(column, "polars", "Series"):
        column = column.to_list()
    if hasattr(column, "__array__") and hasattr(column, "tolist"):
        column = column.tolist()  # NumPy shortens the text of an array
    if not isinstance(column, (list, tuple, range)) or not all(map(_has_text, column)):
        return None
    texts = (None if _is_missing(value) else str(value) for value in column)
    # Not every text of Python is valid in UTF-8.
    return pa.array(
        [None if text is None else text.encode("utf-8", "backslashreplace") for text in texts],
        pa.binary(),
    ).cast(pa.string())


def _has_text(value: Any) -> bool:
    """Return whether its class says how it is shown, other than by its place in memory."""
    kind: Any = type(value)
    return kind.__str__ is not object.__str__ or kind.__repr__ is not object.__repr__


def _is_missing(value: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return value is None or (pandas is not None and pandas.isna(value) is True)


# ── by library ───────────────────────────────────────────────────────────────────────────────────


def _from_pandas(value: Any, field: pa.Field | None) -> pa.Array:
    if value.dtype == object:
        return _of_objects(list(value), field, is_pandas=True)
    if isinstance(value.dtype, np.dtype):
        # Not np.array, which leaves the copy to pandas; before version 3 it returns a view.
        return pa.array(_copied(np.asarray(value)), from_pandas=True)
    array = _one_chunk(pa.array(value.array, from_pandas=True))
    if isinstance(array.type, pa.BaseExtensionType):
        raise TypeError(f"{value.dtype} is a type of pandas alone")
    return copied_column(array)


def of_tensor(tensor: Any) -> Any:
    """Return a tensor's values as a NumPy array; types that NumPy does not have become float32."""
    tensor = tensor.detach()
    if tensor.layout is not sys.modules["torch"].strided:
        tensor = tensor.to_dense()
    tensor = tensor.cpu().resolve_conj().resolve_neg()
    try:
        return tensor.numpy()
    except TypeError:  # bfloat16 and the 8-bit floats
        return tensor.float().numpy()


def _of_numpy(value: Any, n_rows: int, field: pa.Field | None) -> pa.Array:
    array = value if isinstance(value, np.ma.MaskedArray) else np.asarray(value)
    if array.dtype.type.__module__ == "ml_dtypes":  # JAX's bfloat16 and small types
        array = array.astype(np.int8 if "int" in array.dtype.name else np.float32)
    wanted = _shape_of(field)
    if n_rows == 1 and array.shape != (1, *wanted) and array.shape == wanted:
        array = array[np.newaxis]  # a batch of one row, squeezed
    if array.ndim == 2 and array.shape[1] == 1 and wanted != (1,):
        array = array[:, 0]
    if array.dtype == object:
        return _of_objects(list(array), field, is_pandas=True)
    mask = np.ma.getmaskarray(array).ravel() if isinstance(array, np.ma.MaskedArray) else None
    result = pa.array(_supported(_copied(array).ravel()), mask=mask)
    for axis in range(array.ndim - 1, 0, -1):
        kind, length = pa.list_(result.type, array.shape[axis]), math.prod(array.shape[:axis])
        result = pa.FixedSizeListArray.from_buffers(kind, length, [None], children=[result])
    return result


def _copied(array: Any) -> Any:
    """Return a copy in Arrow's memory.

    The copy exists until the chunk is done. Among the large blocks that a model allocates for every
    batch, it would make malloc place these elsewhere each time, where they are not in the CPU's caches.
    """
    if array.dtype.hasobject or not array.nbytes:
        return np.array(array, copy=True, order="C")
    own = np.frombuffer(pa.allocate_buffer(array.nbytes), array.dtype).reshape(array.shape)
    own[...] = array
    return own


def _shape_of(field: pa.Field | None) -> tuple[int, ...]:
    """Return the shape of a column's values, if its type has one."""
    sizes: list[int] = []
    kind = None if field is None else field.type
    while kind is not None and pa.types.is_fixed_size_list(kind):
        sizes.append(kind.list_size)
        kind = kind.value_type
    return tuple(sizes)


def _supported(flat: Any) -> Any:
    """Return an array in native byte order, with times in units that Arrow has."""
    dtype = flat.dtype
    if not dtype.isnative:
        flat = flat.astype(dtype.newbyteorder("="))
    if dtype.kind in "mM" and np.datetime_data(dtype)[0] in _COARSE[dtype.kind]:
        flat = flat.astype(f"{dtype.kind}8[s]")
    return flat


# ── Python objects ───────────────────────────────────────────────────────────────────────────────


def _of_objects(values: list[Any], field: pa.Field | None, *, is_pandas: bool) -> pa.Array:
    """Return one row per value, in the type that Arrow infers.

    Never in a known type: inside structs and lists, Arrow cuts off what does not fit.
    """
    if values and all(isinstance(value, (np.datetime64, np.timedelta64)) for value in values):
        return pa.array(_supported(np.array(values)))  # of one unit
    is_plain = set(map(type, values)) <= _PLAIN
    rows = values if is_plain else [_readable(value) for value in values]
    kind = None if field is None else field.type
    is_nested = kind is not None and family(kind) in NESTED
    if is_nested and "map<" in str(kind):  # Arrow would infer a struct from dicts
        with suppress(pa.ArrowException, TypeError, ValueError):
            return _in_parts(rows, kind, is_pandas)
    try:
        array = _inferred(rows, is_pandas)
    except pa.ArrowException:
        if not is_nested:
            raise
        return _in_parts(rows, kind, is_pandas)
    check_times(rows, array.type)
    wide = _widened(array.type)
    return array if wide == array.type else array.cast(wide)


def _in_parts(rows: list[Any], kind: pa.DataType, is_pandas: bool) -> pa.Array:
    """Return rows of a nested type that Arrow does not infer: pairs of a map, tuples of a struct."""

    def part(values: Iterable[Any], of: pa.DataType | None) -> pa.Array:
        field = None if of is None else pa.field("", of)
        return _of_objects(list(values), field, is_pandas=is_pandas)

    # A dict is no list of its keys, and a list no struct by its places.
    is_null = [not isinstance(row, _PARTS[family(kind)]) for row in rows]
    pa.array(
        [row for row, of in zip(rows, is_null, strict=True) if of], pa.null(), from_pandas=True
    )
    if pa.types.is_struct(kind):
        known = {field.name: field.type for field in kind}
        dicts = [
            {} if missing else row if isinstance(row, dict) else dict(zip(known, row, strict=True))
            for row, missing in zip(rows, is_null, strict=True)
        ]
        names = list(dict.fromkeys([*known, *(name for row in dicts for name in row)]))
        parts = [part((row.get(name) for row in dicts), known.get(name)) for name in names]
        return pa.StructArray.from_arrays(parts, names, mask=pa.array(is_null, pa.bool_()))
    lists = [() if missing else row for row, missing in zip(rows, is_null, strict=True)]
    starts = [0, *accumulate(map(len, lists))]
    missing = np.array([*is_null, False])
    offsets = pa.array(starts, pa.int32(), mask=missing)
    if pa.types.is_map(kind):
        pairs = [pair for row in lists for pair in (row.items() if isinstance(row, dict) else row)]
        keys = part((key for key, _ in pairs), kind.key_type)
        return pa.MapArray.from_arrays(offsets, keys, part((v for _, v in pairs), kind.item_type))
    return pa.ListArray.from_arrays(offsets, part(chain.from_iterable(lists), kind.value_type))


def _inferred(rows: list[Any], is_pandas: bool) -> pa.Array:
    try:
        array = _one_chunk(pa.array(rows, from_pandas=is_pandas))
    except (ValueError, pa.ArrowTypeError):  # pd.NA or NaT, or NaN for a missing text
        if is_pandas:
            raise
        array = _one_chunk(pa.array(rows, from_pandas=True))
    kind = exact_type(array.type, rows)
    return array if kind == array.type else _one_chunk(pa.array(rows, kind, from_pandas=True))


def exact_type(kind: pa.DataType, values: Iterable[Any]) -> pa.DataType:
    """Return an inferred type, with nanoseconds if a value needs them: Arrow infers microseconds."""
    has_times = "[us" in str(kind)
    return _with_nanoseconds(kind) if has_times and any(map(_has_nanoseconds, values)) else kind


def _with_nanoseconds(kind: pa.DataType) -> pa.DataType:
    """Return a type that Arrow has inferred with nanoseconds in place of microseconds."""
    if pa.types.is_timestamp(kind):
        return pa.timestamp("ns", kind.tz)
    if pa.types.is_duration(kind):
        return pa.duration("ns")
    return with_parts(kind, _with_nanoseconds) or kind


def _has_nanoseconds(value: Any) -> bool:
    """Return whether a time of pandas is finer than those of Python, for which Arrow takes it."""
    if isinstance(value, dict):
        return any(map(_has_nanoseconds, value.values()))
    if isinstance(value, np.ndarray) and value.dtype != object:
        return False
    if isinstance(value, (list, tuple, np.ndarray)):
        return any(map(_has_nanoseconds, value))
    if isinstance(value, dt.timedelta):
        return bool(getattr(value, "nanoseconds", 0))
    return isinstance(value, dt.datetime) and getattr(value, "nanosecond", 0) > 0


def check_times(values: Iterable[Any], kind: pa.DataType) -> None:
    """Raise TypeError if Arrow would change values to give them its inferred type ``kind``.

    It cuts off the time of a datetime that comes after a date, and takes naive datetimes for UTC beside
    others. Numbers after a time become times since 1970, and texts after bytes become bytes.
    """
    if not any(word in str(kind) for word in ("date", "time", "duration", "binary")):
        return
    of_family = family(kind)
    if of_family == "bytes":
        if any(isinstance(value, str) for value in values):
            raise TypeError("some are bytes, others text")
        return
    if of_family in ("date", "timestamp", "time", "duration"):
        values = list(values)
        if any(map(_is_number, values)):
            raise TypeError("some are times, others numbers")
        # NaT is a datetime, too; it differs from itself.
        times = [each for each in values if isinstance(each, dt.datetime) and each == each]
        if times and of_family == "date":
            raise TypeError("some are dates, others have a time")
        if len({time.tzinfo is None for time in times}) > 1:
            raise TypeError("some times have a time zone, others do not")
        return
    rows: list[Any] = [row for row in values if isinstance(row, (list, tuple, dict, np.ndarray))]
    if of_family == "struct":
        for part in kind:
            check_times([row.get(part.name) for row in rows], part.type)
    elif of_family == "list":
        check_times(chain.from_iterable(rows), kind.value_type)


def _is_number(value: Any) -> bool:
    """Whether it is a number, not NaN in the place of a missing value."""
    is_number = isinstance(value, numbers.Number) and not isinstance(value, np.timedelta64)
    return is_number and bool(value == value)


def _readable(value: Any) -> Any:
    """Return a value with tensors as arrays, and arrays of several dimensions as lists."""
    if is_a(value, "torch", "Tensor"):
        value = of_tensor(value)
    return value.tolist() if isinstance(value, np.ndarray) and value.ndim != 1 else value


def _widened(kind: pa.DataType) -> pa.DataType:
    """Return a type with room for the decimals of other batches."""
    if pa.types.is_decimal128(kind):
        return pa.decimal128(_MAX_DIGITS, kind.scale)
    return with_parts(kind, _widened) or kind


def _unordered(array: pa.Array) -> pa.Array:
    """Return a dictionary array with int32 indices and no order; other batches may have more values."""
    if family(array.type) != "dictionary":
        return array
    return array.cast(pa.dictionary(pa.int32(), array.type.value_type))
