"""Converts one column of a result of ``predict``, of any library, to an Arrow array."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from hydrogen_magic.node.prediction.arrow_copies import copied_column
from hydrogen_magic.node.prediction.schema_unify import MisfitError
from hydrogen_magic.serialization.pickling_errors import describe

__all__ = ["array_from", "is_a", "is_single", "of_tensor", "rows_in"]

_SINGLE = (str, bytes, bool, int, float, complex, type(None), np.generic)
_PLAIN = {str, bytes, bool, int, float, type(None), dict}
"""Types of cells that need no conversion."""
_MOST_DIGITS = 38


def is_a(value: Any, library: str, name: str) -> bool:
    """Return whether ``value`` is of a library's class; the library is not imported for this."""
    found = getattr(sys.modules.get(library), name, None)
    return found is not None and isinstance(value, found)


def is_single(value: Any) -> bool:
    """Return whether ``value`` is a single value instead of a column."""
    if isinstance(value, _SINGLE):
        return True
    if hasattr(value, "shape"):
        return False
    return not (isinstance(value, (Iterable, pa.Array)) or hasattr(value, "__array__"))


def rows_in(frame: Any, n_rows: int) -> None:
    """Raise MisfitError if a DataFrame does not have ``n_rows`` rows."""
    if len(frame) != n_rows:
        raise MisfitError(
            f"predict returned {len(frame):,} rows ({describe(frame)}) for the {n_rows:,} rows it "
            "was given: return one row per input row"
        )


def array_from(value: Any, n_rows: int, name: str, field: pa.Field | None) -> pa.Array:
    """Return column ``name`` as an array of any length.

    ``field``: known properties of the column; None: none. Raises MisfitError if Arrow has no type for the
    values.
    """
    try:
        return _settled(_array(value, n_rows, field))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise MisfitError(
            f"predict returned column {name!r} ({_described(value)}) with values that have no "
            f"common type ({error})"
        ) from error


def _described(value: Any) -> str:
    kind = getattr(value, "dtype", None)
    return describe(value) if kind is None else f"{describe(value)} of {kind}"


def _array(value: Any, n_rows: int, field: pa.Field | None) -> pa.Array:
    if isinstance(value, pa.ChunkedArray):
        return copied_column(_one_chunk(value))
    if isinstance(value, pa.Array):
        return copied_column(value)
    if is_a(value, "polars", "Series"):
        return copied_column(_one_chunk(value.to_arrow()))
    if is_a(value, "pandas", "Series") or is_a(value, "pandas", "Index"):
        return _from_pandas(value)
    if is_a(value, "pandas.api.extensions", "ExtensionArray"):
        return _from_pandas(sys.modules["pandas"].Series(value))
    if is_a(value, "torch", "Tensor"):
        value = of_tensor(value)
    if isinstance(value, (list, tuple, range)):
        return _of_objects(list(value), field, is_pandas=False)
    if hasattr(value, "__array__"):
        return _of_numpy(value, n_rows, field)
    raise TypeError("a column is a list, an array, a tensor or a Series")


def _one_chunk(column: Any) -> pa.Array:
    combined = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(combined, pa.ChunkedArray):  # an old pyarrow, or over 2 GiB of text
        return combined.chunk(0) if combined.num_chunks == 1 else pa.concat_arrays(combined.chunks)
    return combined


# ── by library ───────────────────────────────────────────────────────────────────────────────────


def _from_pandas(value: Any) -> pa.Array:
    values = value.array
    if value.dtype == object:
        return _of_objects(list(value), None, is_pandas=True)
    if isinstance(value.dtype, np.dtype):
        # Not np.array, which leaves the copy to pandas: before pandas 3, that gives a view to NumPy
        # 2.
        return pa.array(_copied(np.asarray(value)), from_pandas=True)
    return copied_column(_one_chunk(pa.array(values, from_pandas=True)))


def of_tensor(tensor: Any) -> Any:
    """Return a tensor's values as NumPy; types that NumPy lacks become float32."""
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
    wanted = _shape_of(field)
    if n_rows == 1 and array.shape != (1, *wanted) and array.shape == wanted:
        array = array[np.newaxis]  # a batch of one row, squeezed
    if array.ndim == 2 and array.shape[1] == 1 and wanted != (1,):
        array = array[:, 0]
    if array.dtype == object:
        return _of_objects(list(array), field, is_pandas=True)
    mask = np.ma.getmaskarray(array).ravel() if isinstance(array, np.ma.MaskedArray) else None
    flat = _known_to_arrow(_copied(array).ravel())
    found = pa.array(flat, mask=mask)
    for size in reversed(array.shape[1:]):
        length = len(found) // size if size else array.shape[0]
        kind = pa.list_(found.type, size)
        found = pa.FixedSizeListArray.from_buffers(kind, length, [None], children=[found])
    return found


def _copied(array: Any) -> Any:
    """Return a copy in Arrow's memory.

    It exists until the chunk is done. Among the large blocks that a model allocates and frees in every
    batch, it would move their addresses each time, and cause cache misses.
    """
    if array.dtype.hasobject or not array.nbytes:
        return np.array(array, copy=True, order="C")
    own = np.frombuffer(pa.allocate_buffer(array.nbytes), array.dtype).reshape(array.shape)
    own[...] = array
    return own


def _shape_of(field: pa.Field | None) -> tuple[int, ...]:
    """Return the shape of a column's cells, if its type determines it."""
    sizes: list[int] = []
    kind = None if field is None else field.type
    while kind is not None and pa.types.is_fixed_size_list(kind):
        sizes.append(kind.list_size)
        kind = kind.value_type
    return tuple(sizes)


def _known_to_arrow(flat: Any) -> Any:
    """Return ``flat`` with bytes in native order and times in units of Arrow."""
    kind = flat.dtype
    if not kind.isnative:
        flat = flat.astype(kind.newbyteorder("="))
    if kind.kind in "mM" and np.datetime_data(kind)[0] in ("h", "m"):
        flat = flat.astype(f"{kind.kind}8[s]")
    return flat


# ── Python's own objects ─────────────────────────────────────────────────────────────────────────


def _of_objects(values: list[Any], field: pa.Field | None, *, is_pandas: bool) -> pa.Array:
    """Return one row per value; Arrow infers their type, which may be known for nested ones."""
    is_plain = set(map(type, values)) <= _PLAIN
    rows = values if is_plain else [_as_arrow_reads(value) for value in values]
    try:
        array = _inferred(rows, is_pandas)
    except pa.ArrowException:
        if field is None or not pa.types.is_nested(field.type):
            raise
        return pa.array(rows, type=field.type, from_pandas=is_pandas)
    if field is not None and _is_known_record(array.type, field.type):
        return pa.array(rows, type=field.type, from_pandas=is_pandas)
    wide = _widened(array.type)
    return array if wide == array.type else array.cast(wide)


def _is_known_record(have: pa.DataType, want: pa.DataType) -> bool:
    """Return whether dicts lack some keys of their struct, as dicts may."""
    if not (pa.types.is_struct(have) and pa.types.is_struct(want)):
        return False
    names = {part.name for part in want}
    return {part.name for part in have} < names


def _inferred(rows: list[Any], is_pandas: bool) -> pa.Array:
    try:
        return _one_chunk(pa.array(rows, from_pandas=is_pandas))
    except pa.ArrowInvalid:
        if is_pandas:
            raise
        return _one_chunk(pa.array(rows, from_pandas=True))  # pd.NA, or NaN for a missing text


def _as_arrow_reads(value: Any) -> Any:
    """Return a cell with tensors as arrays, arrays of several dimensions as lists."""
    if is_a(value, "torch", "Tensor"):
        value = of_tensor(value)
    if isinstance(value, np.ndarray) and value.ndim != 1:
        return value.tolist()
    return value


def _widened(found: pa.DataType) -> pa.DataType:
    """Return a type with room for the decimals of other batches."""
    types = pa.types
    if types.is_decimal128(found):
        return pa.decimal128(_MOST_DIGITS, found.scale)
    if types.is_list(found):
        return pa.list_(_widened(found.value_type))
    if types.is_struct(found):
        return pa.struct([(part.name, _widened(part.type)) for part in found])
    return found


def _settled(array: pa.Array) -> pa.Array:
    """Return a dictionary's indices as int32: their width depends on their number in a batch."""
    found = array.type
    if not pa.types.is_dictionary(found) or found.index_type == pa.int32():
        return array
    return array.cast(pa.dictionary(pa.int32(), found.value_type, found.ordered))
