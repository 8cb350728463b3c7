"""Rows of Arrow as what ``predict`` takes.

A chunk is converted whole and its batches are slices of that: a conversion costs about as much for
ten batches as for one. (Numbers for pandas go batch by batch, see ``for_pandas``.) Nothing that
``predict`` is given has the memory of the rows it was made from: those may be the frame's own, or lie
where the next chunk will, and a batch that fails is tried again in parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from hydrogen_magic.errors import InferError
from hydrogen_magic.node.prediction import annotations as kinds
from hydrogen_magic.node.prediction import arrow_to_pandas
from hydrogen_magic.node.prediction.arrow_copies import copied
from hydrogen_magic.node.prediction.arrow_types import is_list_of_numbers, is_number
from hydrogen_magic.node.prediction.chunking import in_groups
from hydrogen_magic.node.prediction.ndarray_columns import array_of, shaped

__all__ = ["Inputs"]

_NARROW = 64
"""Columns of which some thousand rows fit into a core's own cache."""
_ROWS_OF_NARROW = 4096
_ROWS_OF_WIDE = 512

_FOR_TORCH = {"uint16": np.int32, "uint32": np.int64}
"""torch has these unsigned numbers in name only."""


class Inputs:
    """Turns rows into what one ``predict`` takes."""

    def __init__(self, kind: str, module: Any = None) -> None:
        self._of_kind = _CONVERSIONS.get(kind)
        self._module = module
        self._cut = _CUTS.get(kind, _cut_by_slice)
        self._is_named = kind in (kinds.POLARS, kinds.ARRAYS, kinds.TENSORS)
        self._kind = kind
        self._numbers_like: tuple[pa.Schema, Any] | None = None
        """A schema, and the empty frame that ``arrow_to_pandas.empty_of_numbers`` makes of it."""

    def _like(self, rows: pa.RecordBatch) -> Any:
        """Return an empty frame like ``rows`` where they are one block of numbers for pandas, else None."""
        if self._kind != kinds.PANDAS or any(column.null_count for column in rows.columns):
            return None
        schema = rows.schema
        known = self._numbers_like
        if known is None or not schema.equals(known[0], check_metadata=True):
            self._numbers_like = known = schema, arrow_to_pandas.empty_of_numbers(schema)
        return known[1]

    def batches(
        self, rows: pa.RecordBatch, first_row: int, bounds: Sequence[tuple[int, int]]
    ) -> Iterator[Any]:
        """Yield the rows within each of ``bounds``, which follow each other, as ``predict`` takes them.

        ``first_row``: number of the first of ``rows``, for a pandas index. Raises InferError naming the
        column that cannot be given so, before the first batch where that is the case.
        """
        like = self._like(rows)
        if like is not None:
            return arrow_to_pandas.numbers(rows, first_row, bounds, like)
        begin, end = bounds[0][0], bounds[-1][1]
        rows, first_row = rows.slice(begin, end - begin), first_row + begin
        own = copied(rows) if self._kind in _SHARING else rows
        bounds = [(start - begin, stop - begin) for start, stop in bounds]
        try:
            whole = self._convert(own, first_row, 0, end - begin)
        except Exception:  # one batch's fault
            return (self._convert(own, first_row, start, stop) for start, stop in bounds)
        return in_groups(lambda start, stop: self._cut(whole, start, stop), bounds)

    def _convert(self, rows: pa.RecordBatch, first_row: int, start: int, stop: int) -> Any:
        if self._is_named:
            self._refuse_repeated_names(rows.schema.names)
        part = rows.slice(start, stop - start)
        if self._of_kind is None:
            return arrow_to_pandas.whole(part, first_row + start)
        value = self._of_kind(part)
        return value if self._module is None else _for_module(value, self._module)

    def _refuse_repeated_names(self, names: Sequence[str]) -> None:
        if len(set(names)) < len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise InferError(
                f"the frame has two columns {repeated!r}, and predict takes a {self._kind}, which"
                " cannot: rename one, or let it take a pandas DataFrame or a pa.Table"
            )


# ── how batches are cut ──────────────────────────────────────────────────────────────────────────


def _cut_by_slice(value: Any, start: int, stop: int) -> Any:
    return value[start:stop]


def _cut_by_length(value: Any, start: int, stop: int) -> Any:
    return value.slice(start, stop - start)


def _cut_values(value: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {name: part[start:stop] for name, part in value.items()}


# ── polars ───────────────────────────────────────────────────────────────────────────────────────


def _to_polars(rows: pa.RecordBatch) -> Any:
    import polars as pl

    columns = [_for_polars(column) for column in rows.columns]
    return pl.from_arrow(pa.Table.from_arrays(columns, names=rows.schema.names))


def _for_polars(column: pa.Array) -> pa.Array:
    """Return a column as Polars can read it: no extension types."""
    if isinstance(column.type, pa.BaseExtensionType):
        column = column.storage
    if pa.types.is_fixed_size_list(column.type) and column.null_count:
        # Polars refuses part of such a column, taking the nulls' bits for another part's.
        return column.take(pa.array(range(len(column)), pa.int64()))
    return column


# ── arrays and tensors ───────────────────────────────────────────────────────────────────────────


def _to_arrays(rows: pa.RecordBatch) -> dict[str, Any]:
    found = {}
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        array = array_of(column, name)
        of_lists = is_list_of_numbers(getattr(column, "dictionary", column).type)
        is_ragged = array.dtype == object and of_lists
        found[name] = _with_owned_cells(array) if is_ragged else _owned(array)
    return found


def _owned(array: Any) -> Any:
    """Return an array that may be written: no view of Arrow's memory."""
    return array if array.flags.writeable else array.copy()


def _with_owned_cells(array: Any) -> Any:
    """Return an array of lists of different lengths, each of which may be written."""
    for place, cell in enumerate(array):
        if isinstance(cell, np.ndarray):
            array[place] = _with_owned_cells(cell) if cell.dtype == object else _owned(cell)
    return array


def _to_array(rows: pa.RecordBatch) -> Any:
    return _owned(_array(rows))


def _array(rows: pa.RecordBatch) -> Any:
    """Return the one column of lists with its shape, or the columns of numbers side by side."""
    places = _numeric_places(rows.schema)
    names = rows.schema.names  # made anew each time it is asked for
    arrays = [shaped(rows.column(place), names[place]) for place in places]
    if is_list_of_numbers(rows.column(places[0]).type):
        return arrays[0]
    if len(arrays) == 1:
        return arrays[0].reshape(-1, 1)
    return _side_by_side(arrays)


def _side_by_side(columns: list[Any]) -> Any:
    """Return columns as one array (rows, columns), each row's numbers next to each other.

    Some rows at a time, as the places of a column are far apart; a few columns are laid out in the
    cache and then turned, which is three times as fast.
    """
    kind = np.result_type(*columns)
    n_rows, n_columns = len(columns[0]), len(columns)
    matrix = np.empty((n_rows, n_columns), dtype=kind)
    is_narrow = n_columns <= _NARROW
    block = _ROWS_OF_NARROW if is_narrow else _ROWS_OF_WIDE
    turned = np.empty((n_columns, min(block, n_rows)), dtype=kind).T if is_narrow else None
    for start in range(0, n_rows, block):
        part = matrix[start : start + block]
        target = part if turned is None else turned[: len(part)]
        for place, column in enumerate(columns):
            target[:, place] = column[start : start + block]
        if turned is not None:
            part[:] = target
    return matrix


def _numeric_places(schema: pa.Schema) -> list[int]:
    """Return which columns are the input: the only one of lists, or else all of numbers."""
    listed = [place for place, found in enumerate(schema.types) if is_list_of_numbers(found)]
    if len(listed) > 1:
        names = ", ".join(repr(schema.names[place]) for place in listed)
        raise InferError(
            f"the columns {names} are lists of numbers, each a tensor of its own: let predict take"
            " dict[str, torch.Tensor] or dict[str, np.ndarray]"
        )
    places = listed or [place for place, found in enumerate(schema.types) if is_number(found)]
    if not places:
        said = ", ".join(f"{field.name} {field.type}" for field in list(schema)[:10])
        raise InferError(
            f"predict takes numbers, and the frame has no column of them ({said or 'no column'}):"
            " let it take a pandas DataFrame, a pa.Table or dict[str, np.ndarray]"
        )
    return places


def _to_tensor(rows: pa.RecordBatch) -> Any:
    return _tensor(_array(rows))


def _to_tensors(rows: pa.RecordBatch) -> dict[str, Any]:
    """Return a tensor for each column of numbers or of lists of them, a list of tensors where ragged."""
    found = {}
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if is_number(field.type):
            found[field.name] = _tensor(shaped(column, field.name))
        elif is_list_of_numbers(field.type):
            array = array_of(column, field.name)
            is_ragged = array.dtype == object
            found[field.name] = list(map(_tensor, array)) if is_ragged else _tensor(array)
    return found


def _tensor(array: Any) -> Any:
    """Return a tensor of an array's numbers in memory of its own; doubles in torch's default type."""
    import torch

    if array is None:
        return None
    array = np.asarray(array, dtype=_FOR_TORCH.get(str(array.dtype)))
    owned = array if array.flags.writeable and array.base is None else array.copy()
    tensor = torch.from_numpy(owned)
    return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor


def _for_module(value: Any, module: Any) -> Any:
    """Return tensors where the module's parameters are, in the type it computes in."""
    import torch

    parameters = [*module.parameters(), *module.buffers()]
    device = parameters[0].device if parameters else torch.device("cpu")
    floats = [part.dtype for part in parameters if part.is_floating_point()]
    dtype = floats[0] if floats else torch.get_default_dtype()
    keeps_whole = _begins_with_embedding(module)

    def move(part: Any) -> Any:
        if isinstance(part, list):
            return [move(item) for item in part]
        if not isinstance(part, torch.Tensor):
            return part
        is_index = keeps_whole and not part.is_floating_point()
        return part.to(device=device, dtype=torch.int64 if is_index else dtype)

    if isinstance(value, dict):
        return {name: move(part) for name, part in value.items()}
    return move(value)


def _begins_with_embedding(module: Any) -> bool:
    """Return whether the first layer looks up rows by whole numbers."""
    import torch

    owners = (part for part in module.modules() if any(True for _ in part.parameters(False)))
    return isinstance(next(owners, None), (torch.nn.Embedding, torch.nn.EmbeddingBag))


_CONVERSIONS: dict[str, Callable[[pa.RecordBatch], Any]] = {
    kinds.TABLE: lambda rows: pa.Table.from_batches([rows]),
    kinds.RECORD_BATCH: lambda rows: rows,
    kinds.POLARS: _to_polars,
    kinds.ARRAY: _to_array,
    kinds.ARRAYS: _to_arrays,
    kinds.TENSOR: _to_tensor,
    kinds.TENSORS: _to_tensors,
}
"""By kind; pandas wants to know the number of the first row too."""
_SHARING = {kinds.PANDAS, kinds.TABLE, kinds.RECORD_BATCH, kinds.POLARS, kinds.ARRAYS}
"""Kinds whose conversion leaves something where it is: of arrays, what structs hold."""
_CUTS: dict[str, Callable[[Any, int, int], Any]] = {
    kinds.PANDAS: arrow_to_pandas.part,
    kinds.TABLE: _cut_by_length,
    kinds.RECORD_BATCH: _cut_by_length,
    kinds.POLARS: _cut_by_length,
    kinds.ARRAYS: _cut_values,
    kinds.TENSORS: _cut_values,
}
