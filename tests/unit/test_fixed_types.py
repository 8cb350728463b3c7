"""Predictions in types that are fixed before the rows: nothing changes silently, nothing else is lost."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import re
from typing import Any

import pyarrow as pa
import pytest

from hydrogen_magic.node.prediction import fixed_types
from hydrogen_magic.node.prediction.ddl import spark_schema
from hydrogen_magic.node.prediction.fixed_types import fits, fixed, with_reasons

MIDNIGHT = dt.datetime(2026, 1, 2)
FAR_S = 10**13
"""A time that neither Python nor Spark has."""
STRUCT, LIST_OF_US = pa.struct({"a": pa.int64()}), pa.list_(pa.duration("us"))
NOTHING = [None, None]
NANOSECONDS = pa.array([1767323045678901234], pa.timestamp("ns"))


def converted(
    values: Any, kind: pa.DataType, as_text: bool = True
) -> tuple[list[Any], dict[int, str]]:
    found, reasons = fixed(pa.table({"y": values}), pa.schema({"y": kind}), as_text=as_text)
    assert found.schema.field("y").type == kind
    return found.column("y").to_pylist(), reasons


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        ([3.0, None, math.nan], pa.int64(), [3, None, None]),
        ([None, None], pa.int64(), [None, None]),
        ([1, 0], pa.bool_(), [True, False]),
        ([1, 2**40], pa.float64(), [1.0, 2.0**40]),
        (["3", None], pa.int32(), [3, None]),
        ([3, None], pa.string(), ["3", None]),
        ([True, None], pa.float64(), [1.0, None]),
        (NANOSECONDS, pa.timestamp("us"), [dt.datetime(2026, 1, 2, 3, 4, 5, 678901)]),
        (pa.array([[1500]], pa.list_(pa.duration("ns"))), LIST_OF_US, [[dt.timedelta(0, 0, 1)]]),
        (pa.array([3600], pa.time32("s")), pa.string(), ["01:00:00"]),
    ],
)
def test_what_can_be_kept_is(values: list[Any], kind: pa.DataType, expected: list[Any]) -> None:
    assert converted(values, kind) == (expected, {})


@pytest.mark.parametrize(
    ("values", "kind", "expected", "said"),
    [
        ([1.0, 0.5], pa.int64(), [1, None], r'0.5 in column .y., which is bigint .*"y double"'),
        ([1, 2], pa.bool_(), [True, None], r'2 in column .y., which is boolean .*"y bigint"'),
        ([7, 2**40], pa.int32(), [7, None], r'which is int .*"y bigint"'),
        (["3", "three"], pa.int64(), [3, None], r"'three' in column .*\"y string\""),
        ([1, 2**53 + 1], pa.float64(), [1.0, None], "which is double"),
        ([1.0, 1e300], pa.float32(), [1.0, None], r"which is float .*\"y double\""),
        (["7", "007"], pa.int64(), [7, None], "returned '007' in column"),
        ([None, MIDNIGHT], pa.int64(), NOTHING, "2026-01-02 00:00:00 in .*y timestamp_ntz"),
        ([None, MIDNIGHT], pa.date32(), NOTHING, "which is date"),
        ([None, MIDNIGHT], pa.timestamp("us", "UTC"), NOTHING, "which is timestamp for"),
        (pa.array([7, 2**63 + 5], pa.uint64()), pa.int64(), [7, None], r"5813 .*decimal\(20, 0\)"),
        (
            [None, decimal.Decimal(10) ** 45],
            pa.decimal128(38, 0),
            NOTHING,
            f"{10**45} .*return text",
        ),
        (pa.array([None, FAR_S], pa.timestamp("s")), pa.timestamp("us"), NOTHING, f"{FAR_S}"),
        ([None, {"a": 1, "b c": 2}], STRUCT, NOTHING, r"y struct<a: bigint, `b c`: bigint>"),
        ([None, "x" * 9999], pa.int64(), NOTHING, "x" * 9999),
    ],
)
def test_other_values_are_missing_with_a_reason(
    values: list[Any], kind: pa.DataType, expected: list[Any], said: str
) -> None:
    found, reasons = converted(values, kind)
    assert found == expected and reasons.keys() == {1}
    assert re.search(said, reasons[1])


@pytest.mark.parametrize(("value", "kind"), [("3", pa.int64()), (3, pa.string())])
def test_text_and_numbers_differ_unless_errors_are_collected(value: Any, kind: pa.DataType) -> None:
    found, reasons = converted([value], kind, as_text=False)
    assert found == [None] and reasons.keys() == {0}


def test_values_that_fit_by_their_type_are_not_read() -> None:
    """Such as those of embeddings: the files of a run may have more than one machine can read."""
    times = pa.array([1], pa.timestamp("ns"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixed_types, "_converted", lambda *given, **options: None)
        assert fits(pa.array([[1.0]], pa.list_(pa.float32(), 1)), pa.list_(pa.float32()))
        assert fits(times, pa.timestamp("us")) and fits(times, pa.string())
        for kind in (pa.timestamp("s"), pa.duration("ms"), pa.list_(pa.timestamp("ms", "UTC"))):
            values = pa.nulls(1, kind)
            assert not fits(values, spark_schema(pa.schema({"y": kind})).types[0])


def test_reasons_are_in_the_column_of_errors() -> None:
    table = pa.table({"y": [1, 2, 3], "error": ["no", None, None]})
    table = table.set_column(1, "error", table.column("error").cast(pa.string()))
    found = with_reasons(table, {0: "not this", 2: "why"})
    assert found.column("error").to_pylist() == ["no", None, "why"]
