"""The package as a zip, for machines that do not have it: what agents and ranks need of it."""

from __future__ import annotations

import functools
import io
import zipfile
from importlib.util import find_spec
from pathlib import Path

__all__ = ["code", "source", "task_source"]

_PACKAGE = Path(__file__).parents[2]
_NOT_THERE = {"views", "placements", "capture", "infer", "magics.py", "notebook.py",
              "manage.py", "runner.py", "conductor.py", "handle.py", "assignment.py", "profiling.py",
              "doctor.py", "metrics.py", "timeline.py", "profiles.py", "arguments"}  # fmt: skip
"""The notebook's side."""
_STAMP = (2020, 1, 1, 0, 0, 0)
"""One time for all: equal files make an equal zip."""


@functools.cache
def code() -> bytes:
    """Return a zip of ``hydrogen_magic`` without the notebook's side, and of ``cloudpickle``.

    cloudpickle goes along so that ranks unpickle with what the closure was pickled with.
    """
    found = find_spec("cloudpickle")
    assert found is not None and found.origin is not None
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(_PACKAGE.rglob("*.py")):
            inner = path.relative_to(_PACKAGE)
            if inner.parts[0] not in _NOT_THERE:
                _add(archive, f"hydrogen_magic/{inner.as_posix()}", path)
        for path in sorted(Path(found.origin).parent.glob("*.py")):
            _add(archive, f"cloudpickle/{path.name}", path)
    return packed.getvalue()


def _add(archive: zipfile.ZipFile, name: str, path: Path) -> None:
    archive.writestr(zipfile.ZipInfo(name, _STAMP), path.read_bytes(), zipfile.ZIP_DEFLATED)


def source(module: str) -> str:
    """Return the text of a module of ours; empty for no name."""
    found = find_spec(module) if module else None
    return "" if found is None or found.origin is None else Path(found.origin).read_text()


@functools.cache
def task_source() -> str:
    """Return the text of what runs in a Spark task."""
    return (Path(__file__).parent / "task.py").read_text()
