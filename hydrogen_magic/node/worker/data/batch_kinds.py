"""Arrow rows as batches to train on: dicts of arrays or tensors, by column.

| column | NumPy | torch, JAX, TensorFlow |
|---|---|---|
| numbers, booleans | array | tensor; torch and JAX: their default type for float64 |
| lists of numbers of one length, at any depth; tensors | array with further dimensions | the same |
| dates and times | datetime64, timedelta64 | integers in the column's unit |
| decimals | float64 | as float64 |
| text, bytes and others | array of objects | list (TensorFlow: a tensor of strings) |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

_MOST_TAKEN_BYTES = (1 << 31) - 1
"""Of a column of text, bytes or lists: its offsets have 32 bits. Larger ones get those of 64."""


class ColumnError(ValueError):
    """A column has values that form no batch."""

    def __init__(self, name: str, problem: str, remedy: str, alternative: str = "") -> None:
        """``alternative``: to the remedy, for streams alone."""
        self.name, self.problem, self.remedy = name, problem, remedy
        super().__init__(
            f"hm.shard(): column {name!r} {problem}: {remedy} before hm.dataset(){alternative}"
        )

    def of_frame(self) -> ValueError:
        """Return it for a user who has a DataFrame, and has called neither function."""
        remedy = self.remedy.removesuffix(",")
        return ValueError(f"column {self.name!r} {self.problem}: {remedy} in the DataFrame")


@dataclass(frozen=True)
class BatchKind:
    """How batches are made: from blocks of many, since decoding has a fixed cost per column."""

    block: Callable[[Any], Any]
    """Rows of Arrow -> a block: a table, or a dict of arrays by column."""
    batch: Callable[[Any], Any]
    """A part of a block -> a batch."""


# ── blocks ───────────────────────────────────────────────────────────────────────────────────────


def cut(block: Any, start: int, stop: int) -> Any:
    """Return some rows of a block, as views."""
    if isinstance(block, dict):
        return {name: array[start:stop] for name, array in block.items()}
    return block.slice(start, stop - start)


def picked(block: Any, order: Any) -> Any:
    """Return copies of the rows with these numbers, an array."""
    if isinstance(block, dict):
        return {name: array[order] for name, array in block.items()}
    return _takeable(block).combine_chunks().take(order)


def _takeable(table: Any) -> Any:
    """Return a table whose columns PyArrow can take rows of: others have offsets of 32 bits, or are views."""
    import pyarrow as pa

    large = {
        pa.string(): pa.large_string(),
        pa.string_view(): pa.large_string(),
        pa.binary(): pa.large_binary(),
        pa.binary_view(): pa.large_binary(),
    }

    def cast(column: Any) -> Any:
        kind = column.type
        is_view = pa.types.is_string_view(kind) or pa.types.is_binary_view(kind)
        if not (is_view or column.nbytes > _MOST_TAKEN_BYTES):
            return column
        if pa.types.is_list(kind):
            return column.cast(pa.large_list(kind.value_field))
        return column.cast(large.get(kind, kind))

    columns = [cast(column) for column in table.columns]
    fields = zip(table.schema, columns, strict=True)
    schema = pa.schema([f.with_type(column.type) for f, column in fields], table.schema.metadata)
    return pa.table(columns, schema=schema)


def joined(first: Any, second: Any) -> Any:
    """Return the rows of both blocks."""
    if isinstance(first, dict):
        import numpy as np

        return {name: np.concatenate([array, second[name]]) for name, array in first.items()}
    import pyarrow as pa

    # A pool of more than 2 GiB of text has offsets of 64 bits, the one after it perhaps not.
    return pa.concat_tables([first, second], promote_options="permissive")


def check_shapes(block: Any, known: dict[str, Any]) -> None:
    """Raise ValueError if lists of a column differ in length from those in ``known``, of earlier blocks."""
    if isinstance(block, dict):
        for name, array in block.items():
            shape = array.shape[1:]
            if known.setdefault(name, shape) != shape:
                raise _without_lists(name) if 0 in (*shape, *known[name]) else _ragged(name)


def arrays_of(rows: Any) -> dict[str, Any]:
    """Return the columns of a table as NumPy arrays. Raises ColumnError for one that forms none."""
    columns = enumerate(rows.column_names)
    return {name: _array(_whole(rows.column(place)), name) for place, name in columns}


# ── batches ──────────────────────────────────────────────────────────────────────────────────────


def _to_numpy(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return arrays that may be written: those of Arrow's memory are read-only."""
    return {
        name: array if array.flags.writeable else array.copy() for name, array in arrays.items()
    }


def _to_torch(arrays: dict[str, Any]) -> dict[str, Any]:
    from hydrogen_magic.node.prediction.inputs import tensor_of

    return {name: _converted(array, name, tensor_of) for name, array in arrays.items()}


def exact_tensors_of(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a batch of NumPy arrays, without the conversion of float64."""
    from hydrogen_magic.node.prediction.inputs import exact_tensor_of

    return {name: _converted(array, name, exact_tensor_of) for name, array in arrays.items()}


def _to_jax(arrays: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _converted(array, name, partial(_jax_array, name)) for name, array in arrays.items()
    }


def _jax_array(name: str, array: Any) -> Any:
    """Return an array of JAX, which without ``jax_enable_x64`` truncates integers of 64 bits to 32."""
    import jax.numpy as jnp

    found = jnp.asarray(array)
    if found.dtype.itemsize < array.itemsize and array.dtype.kind in "iu" and array.size:
        held = jnp.iinfo(found.dtype)
        if array.min() < held.min or array.max() > held.max:
            raise ValueError(
                f"hm.shard(): column {name!r} has integers or times that {found.dtype} cannot hold, JAX's "
                f"type for {array.dtype}: call jax.config.update('jax_enable_x64', True) before, or cast the "
                "column before hm.dataset()"
            )
    return found


def _to_tf(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: _tf_tensor(name, _converted(array, name)) for name, array in arrays.items()}


def _tf_tensor(name: str, values: Any) -> Any:
    import tensorflow as tf

    try:
        return tf.convert_to_tensor(values)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"hm.shard(): column {name!r} has values that form no tensor of TensorFlow, such as nulls, lists "
            f"of different lengths or structs ({error}): fill or convert them before hm.dataset(), or use "
            "to_numpy()"
        ) from None


def _same(value: Any) -> Any:
    return value


KINDS = {
    "arrow": BatchKind(_same, _same),
    "numpy": BatchKind(arrays_of, _to_numpy),
    "torch": BatchKind(arrays_of, _to_torch),
    "jax": BatchKind(arrays_of, _to_jax),
    "tf": BatchKind(arrays_of, _to_tf),
}


# ── columns ──────────────────────────────────────────────────────────────────────────────────────


def _whole(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _array(column: Any, name: str) -> Any:
    import pyarrow as pa

    from hydrogen_magic.node.prediction.arrow_types import is_list_of_numbers
    from hydrogen_magic.node.prediction.ndarray_columns import array_of

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    if pa.types.is_time(kind):  # NumPy would have objects
        numbers = column.cast(pa.int32() if kind.bit_width == 32 else pa.int64())
        column = numbers.cast(pa.int64()).cast(pa.duration(kind.unit))
    if _lacks_values(column):
        raise ColumnError(
            name,
            f"is {kind} and has nulls, which only floats have a value for",
            "fill them, or cast the column to double,",
        )
    array = array_of(column, name)
    if array.dtype == object and is_list_of_numbers(kind):
        raise _ragged(name)
    return array


def _lacks_values(column: Any, has_nulls: bool = False) -> bool:
    """Return whether there are nulls among integers or booleans, also in lists or in the place of lists.

    As floats, they would make a batch of another type than the batches without a null.
    """
    from hydrogen_magic.node.prediction.arrow_types import family

    column = getattr(column, "storage", column)  # of a tensor
    has_nulls = has_nulls or column.null_count > 0
    if family(column.type) == "list":
        return _lacks_values(column.flatten(), has_nulls)
    return has_nulls and family(column.type) in ("integer", "boolean")


def _without_lists(name: str) -> ColumnError:
    problem = "has only nulls or empty lists in a row group, and longer lists in others, which form no tensor"
    return ColumnError(name, problem, "fill them", ", or use to_arrow()")


def _ragged(name: str) -> ColumnError:
    problem = "has lists of different lengths, which form no tensor"
    return ColumnError(name, problem, "pad them", ", or use to_arrow()")


def _converted(array: Any, name: str, convert: Callable[[Any], Any] = _same) -> Any:
    """Return numbers, dates and times as ``convert`` makes them of an array, other values as a list."""
    import numpy as np

    if array.dtype == object:
        return array.tolist()
    if array.dtype.kind in "mM":
        if np.isnat(array).any():
            raise ColumnError(
                name,
                f"is {array.dtype} and has nulls, which integers have no value for",
                "fill them",
                ", or use to_numpy(), which has NaT for them",
            )
        array = array.view("int64")
    return convert(array)
