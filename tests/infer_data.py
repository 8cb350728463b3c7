"""Tables of Arrow as hypothesis draws them, and when two of their columns hold the same."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

BERLIN = pa.timestamp("us", "Europe/Berlin")
DECIMAL = pa.decimal128(12, 2)
WHOLE = (
    pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64(),
)  # fmt: skip
FLOATS = (pa.float32(), pa.float64())
TEXTS = (pa.string(), pa.large_string())
TIMES = (pa.date32(), pa.timestamp("ms"), pa.timestamp("us"), BERLIN, pa.duration("us"))
FLAT = (*WHOLE, *FLOATS, pa.bool_(), *TEXTS, pa.binary(), *TIMES, pa.time64("us"), DECIMAL)
SHAPED = (pa.list_(pa.float32(), 3), pa.list_(pa.list_(pa.int16(), 2), 2))
NESTED = (
    pa.list_(pa.int64()),
    pa.large_list(pa.string()),
    pa.struct([("x", pa.float64()), ("tags", pa.list_(pa.string()))]),
)
ENCODED = (pa.dictionary(pa.int32(), pa.string()),)
MAPS = (pa.map_(pa.string(), pa.int32()),)
EVERYTHING = (*FLAT, *SHAPED, *NESTED, *ENCODED, *MAPS, pa.null())


def values(kind: pa.DataType, nulls: bool = True) -> st.SearchStrategy[Any]:
    """Return a strategy for cells of type ``kind``; ``nulls``: whether they, and their parts, may be."""
    found = st.none() if pa.types.is_null(kind) else _present(kind, nulls)
    return st.none() | found if nulls else found


def _present(kind: pa.DataType, nulls: bool) -> st.SearchStrategy[Any]:
    types = pa.types
    if types.is_integer(kind):
        bits = kind.bit_width - (1 if types.is_signed_integer(kind) else 0)
        return st.integers(-(2**bits) if types.is_signed_integer(kind) else 0, 2**bits - 1)
    if types.is_floating(kind):
        return st.floats(width=kind.bit_width)
    if types.is_decimal(kind):
        most = 10 ** (kind.precision - kind.scale) - 1
        return st.decimals(-most, most, places=kind.scale).map(_with_scale(kind.scale))
    if types.is_dictionary(kind):
        return st.sampled_from(["a", "b", "ü"])
    if types.is_fixed_size_list(kind):
        item = values(kind.value_type, False)
        return st.lists(item, min_size=kind.list_size, max_size=kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind):
        return st.lists(values(kind.value_type, nulls), max_size=3)
    if types.is_struct(kind):
        return st.fixed_dictionaries({part.name: values(part.type, nulls) for part in kind})
    if types.is_map(kind):
        keys = st.lists(values(kind.key_type, False), max_size=3, unique=True)
        return keys.map(lambda found: [(key, len(key)) for key in found])
    return _PLAIN[str(kind).partition("[")[0]]


def _with_scale(scale: int) -> Any:
    return lambda value: decimal.Decimal(value).quantize(decimal.Decimal(1).scaleb(-scale))


_MOMENTS = st.datetimes(dt.datetime(1901, 1, 1), dt.datetime(2099, 1, 1))
_TEXT = st.text(string.ascii_letters + "äß語\0'\"`\n", max_size=5)
_PLAIN: dict[str, st.SearchStrategy[Any]] = {
    "bool": st.booleans(),
    "string": _TEXT,
    "large_string": _TEXT,
    "binary": st.binary(max_size=5),
    "date32": st.dates(dt.date(1901, 1, 1), dt.date(2099, 1, 1)),
    "timestamp": _MOMENTS.map(
        lambda moment: moment.replace(microsecond=moment.microsecond // 1000 * 1000)
    ).map(lambda moment: moment.replace(tzinfo=dt.timezone.utc)),
    "duration": st.timedeltas(dt.timedelta(-9999), dt.timedelta(9999)),
    "time64": st.times(),
}


@st.composite
def tables(
    draw: st.DrawFn, kinds: Sequence[pa.DataType], *, nulls: bool = True, max_rows: int = 30
) -> pa.Table:
    """Draw a table of one to three columns ``c0``… of ``kinds``, whose memory is laid out at random.

    Columns may start inside a longer one, and be of several chunks.
    """
    n_rows = draw(st.integers(0, max_rows))
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3))
    columns = {}
    for place, kind in enumerate(chosen):
        skipped = draw(st.integers(0, 9))
        cells = draw(
            st.lists(
                values(kind, nulls and draw(st.booleans())),
                min_size=n_rows + skipped,
                max_size=n_rows + skipped,
            )
        )
        cut = draw(st.integers(0, n_rows))
        whole = array(cells, kind).slice(skipped)
        columns[f"c{place}"] = pa.chunked_array([whole.slice(0, cut), whole.slice(cut)], kind)
    return pa.table(columns)


def array(cells: list[Any], kind: pa.DataType) -> pa.Array:
    """Return ``cells`` as an array of type ``kind``; times without zone are taken as they are."""
    if pa.types.is_timestamp(kind) and kind.tz is None:
        cells = [cell and cell.replace(tzinfo=None) for cell in cells]
    if pa.types.is_dictionary(kind):
        return pa.array(cells, kind.value_type).cast(kind)
    return pa.array(cells, kind)


def cuts(table: pa.Table, sizes: Sequence[int]) -> Iterator[tuple[int, pa.Table]]:
    """Yield first row and rows of consecutive parts of ``table``, of ``sizes`` by turns."""
    first_row = turn = 0
    while first_row < table.num_rows:
        size = sizes[turn % len(sizes)]
        yield first_row, table.slice(first_row, size)
        first_row, turn = first_row + size, turn + 1


def alike(one: Any, other: Any, *, nan_is_null: bool = False) -> bool:
    """Return whether two cells, or lists of them, are the same; NaN is like NaN, and 0 not like 0.0."""
    if nan_is_null:
        one, other = (None if _is_nan(cell) else cell for cell in (one, other))
    if _is_nan(one) and _is_nan(other):
        return True
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(
            alike(a, b, nan_is_null=nan_is_null) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            alike(one[key], other[key], nan_is_null=nan_is_null) for key in one
        )
    return type(one) is type(other) and bool(one == other)


def _is_nan(cell: Any) -> bool:
    return isinstance(cell, float) and math.isnan(cell)


def write(path: Path, first: int, n_rows: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"a": range(first, first + n_rows)}), path, row_group_size=5)
    return path
