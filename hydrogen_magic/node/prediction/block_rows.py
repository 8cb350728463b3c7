"""Rows of a pandas frame: columns of one type of number are one array, all others are Arrow columns.

    frame ── view ─► BlockRows ── one copy ─► shared buffer ── view ─► BlockRows ── one copy ─► batch

Each step takes as long for three thousand columns of numbers as for one. A rank gets the labels of the
columns once.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from hydrogen_magic.node.prediction.arrow_types import size_bytes
from hydrogen_magic.node.prediction.chunking import one_batch


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """The columns of a frame, and which of them are in blocks."""

    names: list[str]
    """Names of all columns, in the order of the frame."""
    like: Any
    """An empty DataFrame with the frame's labels and ``attrs``."""
    dtypes: list[Any]
    """The type of each block."""
    places: list[Any]
    """For each block, the places of its columns in the frame, as an array of integers."""
    others: Any
    """Places of the columns without a block."""
    table: pa.Schema
    """The columns without a block, then the levels of the index."""
    index: list[Any]
    """Names of the levels of the frame's index; empty if it only counts rows, or Arrow cannot hold it."""

    def __getstate__(self) -> dict[str, Any]:
        """Without the cached properties: pickling a schema of many columns takes far longer than the rest."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def order(self) -> Any:
        """For each column of the frame, its number among the columns of all blocks and then the others."""
        return np.argsort(np.concatenate([*self.places, self.others]))

    @property
    def is_one_block(self) -> bool:
        """Whether all columns are numbers of one type."""
        return len(self.places) == 1 and not len(self.others)

    @cached_property
    def schema(self) -> pa.Schema:
        """All columns."""
        kinds = [
            pa.from_numpy_dtype(dtype)
            for dtype, places in zip(self.dtypes, self.places, strict=True)
            for _ in places
        ]
        kinds += self.table.types
        order = self.order.tolist()
        types = [(name, kinds[n]) for name, n in zip(self.names, order, strict=True)]
        return pa.schema(types, metadata=self.table.metadata)


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Consecutive rows. Has the members of ``pyarrow.Table`` that chunks and batches need."""

    layout: BlockLayout
    num_rows: int
    blocks: list[Any] = field(repr=False)
    """Arrays (rows, columns), with the strides that the frame has."""
    table: Any = field(repr=False)
    """The other columns and the index, as a ``pyarrow.Table``."""

    @property
    def levels(self) -> pa.RecordBatch:
        """The levels of the index."""
        return one_batch(self.table.select(self.table.column_names[len(self.layout.others) :]))

    @property
    def schema(self) -> pa.Schema:
        return self.layout.schema

    @property
    def nbytes(self) -> int:
        return size_bytes(self.table) + sum(int(block.nbytes) for block in self.blocks)

    def slice(self, offset: int, length: int | None = None) -> BlockRows:
        end = self.num_rows if length is None else min(self.num_rows, offset + length)
        blocks = [block[offset:end] for block in self.blocks]
        return BlockRows(self.layout, end - offset, blocks, self.table.slice(offset, end - offset))

    def column(self, place: int) -> pa.Array:
        number = int(self.layout.order[place])
        for block in self.blocks:
            if number < block.shape[1]:
                return pa.array(block[:, number])
            number -= block.shape[1]
        return self.table.column(number).combine_chunks()

    def select(self, names: list[str]) -> pa.RecordBatch:
        """Return some columns, as Arrow arrays."""
        places = {name: place for place, name in enumerate(self.layout.names)}
        arrays = [self.column(places[name]) for name in names]
        return pa.RecordBatch.from_arrays(arrays, names, metadata=self.table.schema.metadata)

    def to_batch(self) -> pa.RecordBatch:
        """Return the same rows with an Arrow array for each column."""
        rows = replace(self, blocks=[np.asfortranarray(block) for block in self.blocks])
        columns = [rows.column(place) for place in range(len(self.layout.names))]
        if not columns:
            return one_batch(self.table.select([]))  # without the index
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def concatenated(parts: list[Any]) -> Any:
    """Return tables, or block rows, below each other."""
    if len(parts) == 1 or not isinstance(parts[0], BlockRows):
        return parts[0] if len(parts) == 1 else pa.concat_tables(parts)
    blocks = [np.concatenate(each) for each in zip(*(part.blocks for part in parts), strict=True)]
    n_rows = sum(part.num_rows for part in parts)
    return BlockRows(parts[0].layout, n_rows, blocks, pa.concat_tables([p.table for p in parts]))
