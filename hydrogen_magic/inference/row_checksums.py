"""A checksum of all values of some rows, whatever their layout in memory is.

Rows that are equal have the same one, though their chunks, offsets or dictionaries, or the bytes under their
nulls, are others.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import types

from hydrogen_magic.node.prediction.block_rows import BlockRows

_OFFSETS = {
    pa.string(): np.int32,
    pa.binary(): np.int32,
    pa.large_string(): np.int64,
    pa.large_binary(): np.int64,
}
"""Types of the offsets of text and bytes."""


def checksum(rows: Any) -> int:
    """Return the checksum of a ``pyarrow.Table`` or of ``BlockRows``."""
    found, table = 0, rows
    if isinstance(rows, BlockRows):
        table = rows.table
        for block in rows.blocks:
            found = zlib.crc32(np.ascontiguousarray(block.T), found)
        for column in table.columns:
            if types.is_dictionary(column.type):  # predict sees the codes of pandas' categories
                found = _of_array(column.combine_chunks().dictionary, found)
    parts = table.to_batches()
    if len(parts) > 1:
        parts = table.combine_chunks().to_batches()  # one, unless an array would be too large
    for part in parts:
        found = _of_batch(part, found)
    return found


def _of_batch(batch: pa.RecordBatch, found: int) -> int:
    """Return the checksum of a batch after values with the checksum ``found``.

    Columns of one type of number are one array if none has nulls: a call for each takes three times as long.
    """
    by_type: dict[pa.DataType, list[int]] = {}
    for place, kind in enumerate(batch.schema.types):
        by_type.setdefault(kind, []).append(place)
    for kind, places in by_type.items():
        if len(places) > 1 and (types.is_integer(kind) or types.is_floating(kind)):
            with suppress(pa.ArrowTypeError):  # there are nulls
                numbers = batch.select(places).to_tensor(row_major=False).to_numpy()
                found = zlib.crc32(numbers.T, found)
                continue
        found = _of_each(map(batch.column, places), found)
    return found


def _of_array(array: pa.Array, found: int) -> int:
    """Return the checksum of an array after values with the checksum ``found``."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _of_array(array.storage, found)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return _of_array(array.cast(pa.large_binary()), found)
    if array.null_count and not types.is_union(kind):
        found = zlib.crc32(array.is_valid().to_numpy(zero_copy_only=False), found)
        array = array.drop_null()
    return _of_values(array, found) if len(array) else found


def _of_values(array: pa.Array, found: int) -> int:
    """Return the same for values without nulls, of which there are some."""
    kind = array.type
    if types.is_dictionary(kind):
        if kind.ordered:
            found = _of_array(array.dictionary, found)
        numbered = array.indices.dictionary_encode()  # 0, 1, … in the order in which they occur
        used = array.dictionary.take(numbered.dictionary)
        return _of_each([numbered.indices, used], found)
    if types.is_boolean(kind):
        return zlib.crc32(array.to_numpy(zero_copy_only=False), found)
    if types.is_struct(kind):
        return _of_each(array.flatten(), found)
    if types.is_fixed_size_list(kind):
        return _of_array(array.flatten(), found)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        ends = array.offsets.to_numpy()
        parts = [array.keys, array.items] if types.is_map(kind) else [array.values]
        parts = [part.slice(ends[0], ends[-1] - ends[0]) for part in parts]
        return _of_each(parts, zlib.crc32(np.diff(ends), found))
    if kind in _OFFSETS:
        _, offsets, data = array.buffers()
        ends = np.frombuffer(offsets, _OFFSETS[kind])[array.offset :][: len(array) + 1]
        found = zlib.crc32(np.diff(ends), found)
        return found if data is None else zlib.crc32(data[ends[0] : ends[-1]], found)
    try:
        width = kind.bit_width // 8
    except ValueError:  # unions, runs, views of lists
        return zlib.crc32(repr(array.to_pylist()).encode(errors="surrogatepass"), found)
    start = array.offset * width
    return zlib.crc32(array.buffers()[1][start : start + len(array) * width], found)


def _of_each(arrays: Iterable[pa.Array], found: int) -> int:
    for array in arrays:
        found = _of_array(array, found)
    return found
