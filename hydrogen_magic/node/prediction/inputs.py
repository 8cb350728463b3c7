"""Arrow rows as the batches that ``predict`` takes.

A chunk is converted as a whole and then cut into batches: converting ten batches costs about as much as
converting one. (Numbers for pandas are converted batch by batch, see ``arrow_to_pandas``.) A batch never
shares memory with the rows it was made from: these may be the frame's own or in a shared buffer, and a
batch that fails is predicted again in parts.
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
from hydrogen_magic.node.prediction.arrow_types import is_list_of_numbers, is_number, plain_rows
from hydrogen_magic.node.prediction.block_rows import BlockRows
from hydrogen_magic.node.prediction.chunking import in_groups
from hydrogen_magic.node.prediction.column_names import refuse_repeated
from hydrogen_magic.node.prediction.ndarray_columns import array_of, shaped

_FOR_TORCH = {"uint16": np.int32, "uint32": np.int64}
"""Unsigned types that torch supports only in part."""


class BatchConverter:
    """Converts rows to the kind of batch that one ``predict`` takes."""

    def __init__(self, kind: str, module: Any = None) -> None:
        self._kind = kind
        self._module = module
        self._empty: tuple[pa.Schema, Any] | None = None
        """A schema and its ``arrow_to_pandas.empty_of_numbers``."""

    def batches(
        self,
        rows: pa.RecordBatch | BlockRows,
        first_row: int,
        bounds: Sequence[tuple[int, int]],
    ) -> Iterator[Any]:
        """Yield the rows within each of ``bounds``, which are consecutive.

        ``first_row``: number of the first of ``rows``, for the index of pandas. Raises InferError with
        the column that cannot be converted, if possible before the first batch.
        """
        if isinstance(rows, BlockRows) and not self._takes_blocks(rows):
            rows = rows.to_batch()
        found = self._numbers(rows)
        if found is not None:
            index = arrow_to_pandas.index_of(rows, first_row)
            return arrow_to_pandas.numbers(found[0], index, bounds, found[1])
        begin, end = bounds[0][0], bounds[-1][1]
        rows, first_row = rows.slice(begin, end - begin), first_row + begin
        own = copied(rows) if self._kind in _SHARING else rows
        bounds = [(start - begin, stop - begin) for start, stop in bounds]
        try:
            whole = self._convert(own, first_row, 0, end - begin)
        except Exception:  # only one of the batches may be the cause
            return (self._convert(own, first_row, start, stop) for start, stop in bounds)
        return in_groups(lambda start, stop: _cut(whole, start, stop), bounds)

    def _takes_blocks(self, rows: BlockRows) -> bool:
        is_array = self._kind in (kinds.ARRAY, kinds.TENSOR)
        return self._kind == kinds.PANDAS or (is_array and rows.layout.is_one_block)

    def _numbers(self, rows: pa.RecordBatch | BlockRows) -> tuple[Any, Any] | None:
        """Return an array (columns, rows) and an empty DataFrame if ``rows`` are one block for pandas."""
        if self._kind != kinds.PANDAS:
            return None
        if isinstance(rows, BlockRows):
            layout = rows.layout
            return (rows.blocks[0].T, layout.like) if layout.is_one_block else None
        schema = rows.schema
        if self._empty is None or not schema.equals(self._empty[0], check_metadata=True):
            self._empty = schema, arrow_to_pandas.empty_of_numbers(schema)
        empty = self._empty[1]
        if empty is None or any(column.null_count for column in rows.columns):
            return None
        return np.stack([column.to_numpy() for column in rows.columns]), empty

    def _convert(
        self, rows: pa.RecordBatch | BlockRows, first_row: int, start: int, stop: int
    ) -> Any:
        if self._kind in _WITH_UNIQUE_NAMES:
            remedy = "rename one, or annotate predict's batch as pandas DataFrame or pa.Table"
            refuse_repeated(rows.schema.names, "the frame has", remedy)
        part = rows.slice(start, stop - start)
        if self._kind == kinds.PANDAS:
            return arrow_to_pandas.whole(part, first_row + start)
        if self._kind not in _OF_ARROW and isinstance(part, pa.RecordBatch):
            part = plain_rows(part, is_polars=self._kind == kinds.POLARS)
        if self._module is None:
            return _CONVERSIONS[self._kind](part)
        convert = _FOR_MODULES.get(self._kind, _CONVERSIONS[self._kind])
        return ModuleInput(self._module).moved(convert(part))


def _cut(value: Any, start: int, stop: int) -> Any:
    """Return the rows of a batch of any kind."""
    if isinstance(value, dict):
        return {name: part[start:stop] for name, part in value.items()}
    return arrow_to_pandas.part(value, start, stop) if hasattr(value, "iloc") else value[start:stop]


# ── polars ───────────────────────────────────────────────────────────────────────────────────────


def _to_polars(rows: pa.RecordBatch) -> Any:
    import polars as pl

    columns = [_for_polars(column) for column in rows.columns]
    return pl.from_arrow(pa.Table.from_arrays(columns, names=rows.schema.names))


def _for_polars(column: pa.Array) -> pa.Array:
    """Return a column in a form that Polars can read, without extension types."""
    if isinstance(column.type, pa.BaseExtensionType):
        column = column.storage
    if pa.types.is_fixed_size_list(column.type) and column.null_count:
        # Polars cannot read a part of such a column.
        return column.take(pa.array(range(len(column)), pa.int64()))
    return column


# ── arrays and tensors ───────────────────────────────────────────────────────────────────────────


def _to_arrays(rows: pa.RecordBatch) -> dict[str, Any]:
    found = {}
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        array = array_of(column, name)
        has_lists = is_list_of_numbers(getattr(column, "dictionary", column).type)
        found[name] = _writable_cells(array) if has_lists else _writable(array)
    return found


def _writable(array: Any) -> Any:
    return array if array.flags.writeable else array.copy()


def _writable_cells(array: Any) -> Any:
    """Return an array that may be written, and so may the arrays in it if lists differ in length."""
    if array.dtype != object:
        return _writable(array)
    for place, cell in enumerate(array):
        if isinstance(cell, np.ndarray):
            array[place] = _writable_cells(cell)
    return array


def _array(rows: pa.RecordBatch | BlockRows) -> Any:
    """Return the only column of lists with its shape, or the columns of numbers side by side."""
    if isinstance(rows, BlockRows):
        return np.array(rows.blocks[0], order="C")
    places = _numeric_places(rows.schema)
    names = rows.schema.names  # a new list for each access
    arrays = [shaped(rows.column(place), names[place]) for place in places]
    if is_list_of_numbers(rows.column(places[0]).type):
        return arrays[0]
    return np.column_stack(arrays)


def _numeric_places(schema: pa.Schema) -> list[int]:
    """Return which columns are the input: the only one of lists, else all of numbers."""
    listed = [place for place, found in enumerate(schema.types) if is_list_of_numbers(found)]
    if len(listed) > 1:
        names = ", ".join(repr(schema.names[place]) for place in listed)
        raise InferError(
            f"the columns {names} are lists of numbers, so each is its own tensor: annotate predict's"
            " batch as dict[str, torch.Tensor] or dict[str, np.ndarray]"
        )
    places = listed or [place for place, found in enumerate(schema.types) if is_number(found)]
    if not places:
        columns = ", ".join(f"{field.name} {field.type}" for field in list(schema)[:10])
        raise InferError(
            f"predict takes numbers, but no column has numbers ({columns or 'no columns'}): annotate its"
            " batch as pandas DataFrame, pa.Table or dict[str, np.ndarray]"
        )
    return places


def tensor_of(array: Any) -> Any:
    """Return a tensor in its own memory; float64 becomes torch's default type."""
    import torch

    tensor = exact_tensor_of(array)
    is_double = tensor is not None and tensor.dtype == torch.float64
    return tensor.to(torch.get_default_dtype()) if is_double else tensor


def exact_tensor_of(array: Any) -> Any:
    """Return a tensor in its own memory with the same values."""
    import torch

    if array is None:
        return None
    array = np.asarray(array, dtype=_FOR_TORCH.get(str(array.dtype)))
    owned = array if array.flags.writeable and array.base is None else array.copy()
    return torch.from_numpy(owned)


def _to_tensors(rows: pa.RecordBatch, convert: Callable[[Any], Any] = tensor_of) -> dict[str, Any]:
    """Return a tensor for each column of numbers or lists of them; a list of tensors if they are ragged."""
    found = {}
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if is_number(field.type):
            found[field.name] = convert(shaped(column, field.name))
        elif is_list_of_numbers(field.type):
            array = array_of(column, field.name)
            is_ragged = array.dtype == object
            found[field.name] = list(map(convert, array)) if is_ragged else convert(array)
    return found


class ModuleInput:
    """Moves tensors to a module's device, in the type of its parameters."""

    def __init__(self, module: Any) -> None:
        import torch

        parameters = [*module.parameters(), *module.buffers()]
        floats = [part.dtype for part in parameters if part.is_floating_point()]
        self._device = parameters[0].device if parameters else torch.device("cpu")
        self.dtype = floats[0] if floats else torch.get_default_dtype()
        self._has_indices = _begins_with_embedding(module)

    def moved(self, value: Any) -> Any:
        """Return the tensors in a dict or list; other values stay as they are."""
        import torch

        if isinstance(value, dict):
            return {name: self.moved(part) for name, part in value.items()}
        if isinstance(value, list):
            return [self.moved(part) for part in value]
        if not isinstance(value, torch.Tensor):
            return value
        is_index = self._has_indices and not value.is_floating_point()
        return value.to(device=self._device, dtype=torch.int64 if is_index else self.dtype)


def _begins_with_embedding(module: Any) -> bool:
    """Return whether the input of the first layer is indices."""
    import torch

    owners = (part for part in module.modules() if any(True for _ in part.parameters(False)))
    return isinstance(next(owners, None), (torch.nn.Embedding, torch.nn.EmbeddingBag))


_CONVERSIONS: dict[str, Callable[[pa.RecordBatch], Any]] = {
    kinds.TABLE: lambda rows: pa.Table.from_batches([rows]),
    kinds.RECORD_BATCH: lambda rows: rows,
    kinds.POLARS: _to_polars,
    kinds.ARRAY: lambda rows: _writable(_array(rows)),
    kinds.ARRAYS: _to_arrays,
    kinds.TENSOR: lambda rows: tensor_of(_array(rows)),
    kinds.TENSORS: _to_tensors,
}
_FOR_MODULES: dict[str, Callable[[pa.RecordBatch], Any]] = {
    kinds.TENSOR: lambda rows: exact_tensor_of(_array(rows)),
    kinds.TENSORS: lambda rows: _to_tensors(rows, exact_tensor_of),
}
"""Those whose float64 values are still to get the type of a module, which may be float64."""
_SHARING = {kinds.PANDAS, kinds.TABLE, kinds.RECORD_BATCH, kinds.POLARS, kinds.ARRAYS}
"""Kinds whose conversion may share memory with the rows; for arrays, the cells of structs do."""
_OF_ARROW = {kinds.TABLE, kinds.RECORD_BATCH}
_WITH_UNIQUE_NAMES = {kinds.POLARS, kinds.ARRAYS, kinds.TENSORS}
