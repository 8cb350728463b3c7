"""Arrow rows as pandas DataFrames.

Numbers of one type are copied batch by batch, just before ``predict`` is called, into DataFrames that were
made ahead; everything else is converted a chunk at a time. After a model has run, neither our code nor our
data is in the CPU's caches: a DataFrame that is made between two batches takes ten times as long as one of
several made together.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from hydrogen_magic.node.prediction.arrow_types import plain_rows
from hydrogen_magic.node.prediction.block_rows import BlockRows
from hydrogen_magic.node.prediction.chunking import in_groups, one_batch
from hydrogen_magic.node.prediction.exact_cells import exact_cells, has_inexact_items
from hydrogen_magic.node.prediction.ndarray_columns import shaped


def nullable_dtype(kind: pa.DataType) -> Any:
    """Return the dtype of pandas for integers and booleans with nulls, None for any other type."""
    import pandas as pd

    if pa.types.is_boolean(kind):
        return pd.BooleanDtype()
    if not pa.types.is_integer(kind):
        return None
    return pd.api.types.pandas_dtype(str(kind).replace("uint", "UInt").replace("int", "Int"))


def whole(rows: pa.RecordBatch | BlockRows, first_row: int) -> Any:
    """Return rows as a DataFrame; ``first_row``: number of the first one, see :func:`index_of`.

    Integers and booleans with nulls get nullable dtypes, and are Python objects inside nested types:
    floats would change their values, and their dtype would differ between batches. Times in nanoseconds are
    Python objects there, too.
    """
    import pandas as pd

    if isinstance(rows, BlockRows):
        return _of_blocks(rows, first_row)
    index = index_of(rows, first_row)
    rows = plain_rows(_without_index(rows))
    frame = pa.Table.from_batches([rows]).to_pandas(use_threads=False)
    # Other dtypes are those of the frame, which its metadata restores.
    is_numpy = [isinstance(dtype, np.dtype) for dtype in frame.dtypes]
    for place, (field, column) in enumerate(zip(rows.schema, rows.columns, strict=True)):
        if isinstance(field.type, pa.FixedShapeTensorType):
            cells = pd.Series(list(shaped(column, field.name)), dtype=object, index=frame.index)
            frame.isetitem(place, cells)
        elif has_inexact_items(column):
            cells = pd.Series(exact_cells([column]), dtype=object, index=frame.index)
            frame.isetitem(place, cells)
        elif has_zoned_categories(field.type):
            frame.isetitem(place, with_zone(frame.iloc[:, place], column))
        elif column.null_count and is_numpy[place] and nullable_dtype(field.type) is not None:
            frame.isetitem(place, column.to_pandas(types_mapper=nullable_dtype).array)
    frame.index = index
    return frame


def _without_index(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows without the columns that become the index of a DataFrame."""
    levels, _, metadata = _stored_levels(rows.schema)
    in_index = {level.get("column") for level in levels} - {None}
    if not in_index:
        return rows
    places = [place for place, name in enumerate(rows.schema.names) if name not in in_index]
    return rows.select(places).replace_schema_metadata(metadata)


def has_zoned_categories(kind: pa.DataType) -> bool:
    """Return whether values are categories that are times with a time zone."""
    return pa.types.is_dictionary(kind) and getattr(kind.value_type, "tz", None) is not None


def with_zone(categories: Any, column: pa.Array) -> Any:
    """Return a categorical Series, made of ``column``, with the time zone that PyArrow leaves out."""
    import pandas as pd

    return categories.cat.rename_categories(pd.Index(column.dictionary.to_pandas()))


def part(frame: Any, start: int, stop: int) -> Any:
    """Return rows ``start`` to ``stop`` of a DataFrame without a copy."""
    # A shallow copy: pandas 2 would warn if predict adds a column to a slice.
    cut = frame.iloc[start:stop].copy(deep=False)
    cut.columns = frame.columns.view()  # predict may set its name
    return cut


# ── the index ────────────────────────────────────────────────────────────────────────────────────


def index_of(rows: pa.RecordBatch | BlockRows, first_row: int) -> Any:
    """Return the index of rows; it counts them from ``first_row`` on if the frame has no other one."""
    import pandas as pd

    if isinstance(rows, BlockRows):
        names = rows.layout.index
        levels = _series(rows.levels)
    else:
        stored, metadata, _ = _stored_levels(rows.schema)
        names = [level["name"] for level in stored]
        in_rows = [level["column"] for level in stored if "column" in level]
        columns = iter(_series(rows.select(in_rows).replace_schema_metadata(metadata)))
        ends = first_row, first_row + rows.num_rows
        levels = [next(columns) if "column" in each else _range(each, *ends) for each in stored]
    if not levels:
        return pd.RangeIndex(first_row, first_row + rows.num_rows)
    # With its dtype: pandas would infer one from objects.
    levels = [pd.Index(level, dtype=level.dtype) for level in levels]
    if len(levels) == 1:
        return levels[0].rename(names[0])
    return pd.MultiIndex.from_arrays(levels, names=names)


def _series(rows: pa.RecordBatch) -> list[Any]:
    if not rows.num_columns:
        return []
    frame = whole(rows, 0)
    return [frame.iloc[:, place] for place in range(rows.num_columns)]


def _range(stored: Mapping[str, int], first_row: int, end: int) -> Any:
    """Return these rows of a RangeIndex."""
    import pandas as pd

    start, step = stored["start"], stored["step"]
    return pd.RangeIndex(start + first_row * step, start + end * step, step)


_Metadata = dict[bytes, bytes]


def _stored_levels(schema: pa.Schema) -> tuple[list[dict[str, Any]], _Metadata, _Metadata]:
    """Return the levels of the index in the metadata of pandas, and metadata for their and other columns."""
    levels, for_levels, for_others = _read_metadata((schema.metadata or {}).get(b"pandas", b"{}"))
    names = {None, *schema.names}
    return [level for level in levels if level.get("column") in names], for_levels, for_others


@functools.lru_cache(maxsize=4)
def _read_metadata(pandas: bytes) -> tuple[list[dict[str, Any]], _Metadata, _Metadata]:
    """Return the levels of the index, which have a name and a column or a range, and other metadata."""
    found = json.loads(pandas) or {}
    columns = found.get("columns", ())
    names = {each.get("field_name"): each["name"] for each in columns}
    in_columns = found.get("index_columns", ())
    levels = [
        {"name": names.get(level, level), "column": level} if isinstance(level, str) else level
        for level in in_columns
    ]
    # PyArrow reads this text for each batch.
    of_levels = [each for each in columns if each.get("field_name") in in_columns]
    for_levels = {"columns": of_levels, "index_columns": [], "column_indexes": []}
    for_others = {**found, "index_columns": []}
    metadata = [{b"pandas": json.dumps(each).encode()} for each in (for_levels, for_others)]
    return levels, metadata[0], metadata[1]


# ── numbers of one type ──────────────────────────────────────────────────────────────────────────


def empty_of_numbers(schema: pa.Schema) -> Any:
    """Return an empty DataFrame of the schema, None unless its columns are one block of numbers."""
    if len(set(schema.types)) != 1:
        return None
    kind = schema.types[0]
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return None
    import pandas as pd

    try:
        empty = schema.empty_table().to_pandas()
    except Exception:  # the metadata is invalid, which the conversion of the rows reports
        return None
    is_plain = set(empty.dtypes) == {np.dtype(kind.to_pandas_dtype())}
    is_whole = isinstance(empty.index, pd.RangeIndex) and empty.shape[1] == len(schema)
    return empty if is_plain and is_whole else None


def numbers(values: Any, index: Any, bounds: Sequence[tuple[int, int]], like: Any) -> Iterator[Any]:
    """Yield DataFrames of numbers of one type, in their own memory.

    ``values``: an array (columns, rows). ``index``: of these rows. ``like``: an empty DataFrame with their
    labels and ``attrs``.
    """
    import pandas as pd

    def empty(start: int, stop: int) -> tuple[Any, Any, Any]:
        part = values[:, start:stop]
        block = np.empty_like(part)  # in the same order, so that copying it is fast
        frame = pd.DataFrame(block.T, index=index[start:stop], copy=False)
        return part, block, _labelled(frame, like)

    for part, block, frame in in_groups(empty, bounds):
        block[...] = part
        yield frame


def _labelled(frame: Any, like: Any) -> Any:
    frame.columns = like.columns.view()  # predict may set their name
    frame.attrs = copy.deepcopy(like.attrs)
    return frame


def _of_blocks(rows: BlockRows, first_row: int) -> Any:
    """Return rows as a DataFrame that shares the memory of their blocks."""
    import pandas as pd

    index = index_of(rows, first_row)
    parts = [pd.DataFrame(block, index=index, copy=False) for block in rows.blocks]
    if len(rows.layout.others) or not parts:
        others = rows.table.select(range(len(rows.layout.others)))
        parts.append(whole(one_batch(others), first_row).set_axis(index))
    order = rows.layout.order
    frame = parts[0] if len(parts) == 1 else pd.concat(parts, axis=1)
    is_ordered = bool((order[:-1] <= order[1:]).all())
    return _labelled(frame if is_ordered else frame.iloc[:, order], rows.layout.like)
