"""How Spark's Python workers import the package that they are sent."""

from __future__ import annotations

import importlib.machinery
import io
import sys
import zipfile
from pathlib import Path

import pytest

from hydrogen_magic.driver.placements.remote import packaging
from hydrogen_magic.node.spark.inference_task import _Zip

ROOT = "/hydrogen_magic.zip/hydrogen_magic"


def compilations(packed: bytes | str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the paths of the sources that are compiled for two modules of the package."""
    found: list[str] = []

    def compiled(loader: _Zip, data: bytes, path: str) -> object:
        found.append(path)
        return source_to_code(loader, data, path)

    source_to_code = importlib.machinery.SourceFileLoader.source_to_code
    monkeypatch.setattr(_Zip, "source_to_code", compiled)
    importer = _Zip(packed)
    for name, file in (("node", "node/__init__.py"), ("errors", "errors.py")):
        spec = importer.find_spec(f"hydrogen_magic.{name}")
        assert spec is not None and spec.origin == f"{ROOT}/{file}"
        code = importer.get_code(spec.name)
        assert code is not None and code.co_filename == spec.origin, "in tracebacks"
        assert importer.is_package(spec.name) == (name == "node")
    return found


def test_bytecode_of_the_same_python_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "package.zip").write_bytes(packaging.compiled())
    for packed in (packaging.compiled(), str(tmp_path / "package.zip")):
        assert compilations(packed, monkeypatch) == []


def test_another_python_compiles_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = packaging.compiled()
    monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
    assert compilations(packed, monkeypatch) == [f"{ROOT}/node/__init__.py", f"{ROOT}/errors.py"]


def test_the_bytecode_is_beside_the_same_sources() -> None:
    with (
        zipfile.ZipFile(io.BytesIO(packaging.code())) as sources,
        zipfile.ZipFile(io.BytesIO(packaging.compiled())) as both,
    ):
        names = sources.namelist()
        assert [name for name in both.namelist() if "__pycache__" not in name] == names
        assert len(both.namelist()) == 2 * len(names)
        assert all(sources.read(name) == both.read(name) for name in names)
