"""How Spark's Python workers import the package that they are sent."""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path

import pytest

from hydrogen_magic.driver.placements.remote import packaging
from hydrogen_magic.node.spark.inference_task import _Zip

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
