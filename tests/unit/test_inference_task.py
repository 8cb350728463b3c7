"""How Spark's Python workers import the package that they are sent, and which rows ``predict`` gets."""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from hydrogen_magic.driver.placements.remote import packaging
from hydrogen_magic.errors import InferError, OptionTypeError
from hydrogen_magic.inference.spark.function import _with_names
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.node.prediction.predictor import Predictor
from hydrogen_magic.node.spark.inference_task import _batch, _Zip
from hydrogen_magic.node.worker.inference import spark_inference

ROOT = "/hydrogen_magic.zip/hydrogen_magic"


@pytest.fixture
def packed() -> bytes:
    """The package with other sources than those of its bytecode."""
    changed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(packaging.compiled())) as old,
        zipfile.ZipFile(changed, "w") as new,
    ):
        for name in old.namelist():
            new.writestr(name, b"is_source = True" if name.endswith(".py") else old.read(name))
    return changed.getvalue()


def are_compiled(packed: bytes | str) -> list[bool]:
    """Return whether the sources of a package and of a module are compiled."""
    importer, found = _Zip(packed), []
    for name, file in (("node", "node/__init__.py"), ("errors", "errors.py")):
        spec = importer.find_spec(f"hydrogen_magic.{name}")
        assert spec is not None and spec.origin == f"{ROOT}/{file}"
        code = importer.get_code(spec.name)
        assert code is not None and code.co_filename == spec.origin, "in tracebacks"
        assert importer.is_package(spec.name) == (name == "node")
        found.append("is_source" in code.co_names)
    return found


def test_bytecode_of_the_same_python_is_used(packed: bytes, tmp_path: Path) -> None:
    (tmp_path / "package.zip").write_bytes(packed)
    for each in (packed, str(tmp_path / "package.zip")):
        assert are_compiled(each) == [False, False]


def test_another_python_compiles_the_sources(
    packed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
    assert are_compiled(packed) == [True, True]


def test_the_bytecode_is_beside_the_same_sources() -> None:
    with (
        zipfile.ZipFile(io.BytesIO(packaging.code())) as sources,
        zipfile.ZipFile(io.BytesIO(packaging.compiled())) as both,
    ):
        names = sources.namelist()
        assert [name for name in both.namelist() if "__pycache__" not in name] == names
        assert len(both.namelist()) == 2 * len(names)
        assert all(sources.read(name) == both.read(name) for name in names)
        assert {entry.date_time for entry in both.infolist()} == {packaging._STAMP}


def test_a_file_that_is_no_module_has_no_bytecode(tmp_path: Path) -> None:
    """Packages of plug-ins may have templates."""
    (tmp_path / "template.py").write_text("import {{ module }}")
    assert packaging._bytecode(tmp_path / "template.py") is None


# ── arguments of a function ──────────────────────────────────────────────────────────────────────


def vectors(*rows: dict[str, Any] | None) -> pa.StructArray:
    """Return vectors of Spark ML as Spark passes them."""
    indices, values = pa.list_(pa.int32()), pa.list_(pa.float64())
    parts = {"type": pa.int8(), "size": pa.int32(), "indices": indices, "values": values}
    return pa.array(rows, pa.struct(parts))


DENSE: Any = {"type": 1, "values": [1.0, 2.0]}
SPARSE: Any = {"type": 0, "size": 3, "indices": [1], "values": [5.0]}


@pytest.mark.parametrize("rows", [[DENSE, None], [SPARSE, None, DENSE]])
@pytest.mark.parametrize("names", [["v"], None])
def test_vectors_of_spark_ml_are_arrays(rows: list[Any], names: list[str] | None) -> None:
    """Also as the only argument in SQL, where they are structs themselves."""
    expected = [{id(DENSE): [1.0, 2.0], id(SPARSE): [0.0, 5.0, 0.0]}.get(id(row)) for row in rows]
    column = vectors(*rows)
    in_struct = _batch(pa.StructArray.from_arrays([column], ["v"]), names)
    assert in_struct.to_pydict() == {"v": expected}
    assert _batch(column, names).column(0).to_pylist() == expected
    (number, array) = _batch((pa.array(range(len(rows))), column), ["n", "v"]).columns
    assert (number.to_pylist(), array.to_pylist()) == ([*range(len(rows))], expected)


def test_a_struct_is_the_only_column_or_has_all_of_them() -> None:
    struct = pa.array([{"a": 1, "b": 2}, None], pa.struct({"a": pa.int64(), "b": pa.int64()}))
    assert _batch(struct, None).to_pydict() == {"a": [1, None], "b": [2, None]}
    assert _batch(struct, ["x", "y"]).num_columns == 2
    assert _batch(struct, ["s"]).column(0).to_pylist() == [{"a": 1, "b": 2}, None]
    passed = pa.StructArray.from_arrays([struct], ["s"])
    assert _batch(passed, ["s"]).column(0).to_pylist() == [{"a": 1, "b": 2}, None]


def test_a_function_is_called_with_as_many_columns_as_it_names() -> None:
    """The task would take two columns, in one struct, for the only one."""
    session: Any = SimpleNamespace(sql_module=lambda name: None, is_stopped=lambda: False)
    for names, columns in ((["v"], ("x", "y")), (["v", "w"], ("x",))):
        score = _with_names(lambda column: column, session, names)
        with pytest.raises(OptionTypeError, match=rf"with {len(columns)} column.* {len(names)} \("):
            score(*columns)


def test_a_predict_that_fails_without_rows_needs_a_schema() -> None:
    predictor = Predictor(lambda batch: [batch["x"].iloc[0]], InferOptions())
    with pytest.raises(InferError, match=r"no rows.*IndexError.*--schema") as caught:
        spark_inference._find_columns(predictor, pa.schema({"x": pa.int64()}))
    assert isinstance(caught.value.__cause__, IndexError), "whose lines are shown"


def test_an_error_of_a_function_names_its_argument() -> None:
    error = InferError("double, but --schema declares int64: return that type, or correct --schema")
    texts = [
        spark_inference.message_of(error, {"of_structs": is_function, "cells": {}})
        for is_function in (True, False)
    ]
    assert texts == [str(error).replace("--schema", "schema"), str(error)]


# ── time zones ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("java", "python"),
    [
        ("GMT+8", "+08:00"), ("UTC+08:00", "+08:00"), ("+8", "+08:00"), ("-0530", "-05:30"),
        ("Z", "UTC"), ("Europe/Berlin", "Europe/Berlin"), (None, None),
    ],
)  # fmt: skip
def test_a_zone_of_the_session_that_only_java_knows(java: str | None, python: str | None) -> None:
    kind, known = pa.timestamp("us", java), pa.timestamp("us", python)
    nested = pa.struct([pa.field("l", pa.list_(pa.field("element", kind, nullable=False)))])
    rows = pa.RecordBatch.from_pydict(
        {"at": pa.array([0, None], kind), "m": pa.array([[(1, 0)]] * 2, pa.map_(pa.int64(), kind)),
         "s": pa.array([{"l": [0]}, None], nested)},
    )  # fmt: skip
    ((_, chunk),) = spark_inference._chunks(iter([rows]), 4)
    assert chunk.schema.field("at").type == known
    assert not chunk.schema.field("s").type.field("l").type.value_field.nullable
    assert chunk.column("at").cast(pa.int64()).to_pylist() == [0, None]
    frame = chunk.to_pandas()
    assert [str(frame.s[0]["l"][0]), str(frame.m[0][0][1])] == [
        str(frame["at"][0])
    ] * 2 or java is None
