"""The package as a zip, for machines that do not have it: what agents and ranks need of it."""

from __future__ import annotations

import functools
import io
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

__all__ = ["code", "source"]

_PACKAGE = Path(__file__).parents[3]
_SENT = ("core", "serialization", "transport", "node", "horovod/node", "compat")
"""Packages that agents and ranks import, with ``errors``."""
_STAMP = (2020, 1, 1, 0, 0, 0)
"""One time for all: equal files make an equal zip."""


@functools.cache
def code() -> bytes:
    """Return a zip of what agents and ranks need of ``hydrogen_magic``, and of ``cloudpickle``.

    cloudpickle goes along so that ranks unpickle with what the closure was pickled with.
    """
    found = find_spec("cloudpickle")
    assert found is not None and found.origin is not None
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(_sent_files()):
            _add(archive, f"hydrogen_magic/{path.relative_to(_PACKAGE).as_posix()}", path)
        for path in sorted(Path(found.origin).parent.glob("*.py")):
            _add(archive, f"cloudpickle/{path.name}", path)
    return packed.getvalue()


def _sent_files() -> Iterator[Path]:
    yield _PACKAGE / "__init__.py"
    yield _PACKAGE / "errors.py"
    yield _PACKAGE / "testing" / "__init__.py"
    yield _PACKAGE / "testing" / "ranks.py"
    yield _PACKAGE / "horovod" / "__init__.py"
    for package in _SENT:
        yield from (_PACKAGE / package).rglob("*.py")


def _add(archive: zipfile.ZipFile, name: str, path: Path) -> None:
    archive.writestr(zipfile.ZipInfo(name, _STAMP), path.read_bytes(), zipfile.ZIP_DEFLATED)


def source(module: str) -> str:
    """Return the text of a module of ours; empty for no name."""
    found = find_spec(module) if module else None
    return "" if found is None or found.origin is None else Path(found.origin).read_text()
