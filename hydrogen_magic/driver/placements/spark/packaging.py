"""The package as a zip, for machines without it: the part that agents and ranks need."""

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
"""Packages that agents and ranks import, with the modules beside them at the root."""
_STAMP = (2020, 1, 1, 0, 0, 0)
"""A constant time: equal files make an equal zip."""


@functools.cache
def code() -> bytes:
    """Return a zip of the parts of ``hydrogen_magic`` for agents and ranks, and of ``cloudpickle``.

    cloudpickle is included so that ranks unpickle with the version that pickled the closure.
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
    yield from _PACKAGE.glob("*.py")
    yield _PACKAGE / "horovod" / "__init__.py"
    for package in _SENT:
        yield from (_PACKAGE / package).rglob("*.py")


def _add(archive: zipfile.ZipFile, name: str, path: Path) -> None:
    archive.writestr(zipfile.ZipInfo(name, _STAMP), path.read_bytes(), zipfile.ZIP_DEFLATED)


def source(module: str) -> str:
    """Return the source of one of our modules; empty for an empty name."""
    found = find_spec(module) if module else None
    return "" if found is None or found.origin is None else Path(found.origin).read_text()
