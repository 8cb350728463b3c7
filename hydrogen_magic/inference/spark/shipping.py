"""Sends the package and the cell with its model to every executor once.

Classic sessions broadcast them, with their digests: Spark copies a broadcast from executor to executor, and
deletes it by itself. Spark Connect has no broadcast, so they are files of the session.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydrogen_magic.driver.placements.remote import packaging
from hydrogen_magic.driver.placements.spark.session import Session
from hydrogen_magic.serialization import payload
from hydrogen_magic.serialization.payload import Payload

_MAX_CELLS = 8
"""Cells that need not be sent again; lazy DataFrames keep their own."""
_KEPT_BYTES = 1 << 30
"""Their total size: each takes disk of the driver and of every executor. The last one may be larger."""

_packages: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
"""SparkSession -> digest -> broadcast variable or name of a file."""
_cells: weakref.WeakKeyDictionary[Any, dict[str, _KeptCell]] = weakref.WeakKeyDictionary()
"""SparkSession -> digest -> cell; the newest is the last."""
_sending = threading.Lock()
"""Threads, such as those of CrossValidator, change both; a cell that several of them use is sent once."""


@dataclass(frozen=True)
class _KeptCell:
    sent: Any
    """Broadcast variable, or name of a file."""
    nbytes: int
    """0 for a file: it stays as long as the session, whatever is kept here."""


@dataclass(frozen=True)
class SentCell:
    """A cell that executors can load, for ``inference_task.serve``."""

    package: Any
    """Broadcast variable, or name of a file."""
    closure: Any
    package_digest: str
    closure_digest: str


def send(session: Session, closure: Payload) -> SentCell:
    """Send the package and ``closure`` to the session's executors, unless they have equal ones."""
    code = packaging.code()
    digests = hashlib.sha256(code).hexdigest(), payload.digest(closure)
    with _sending:
        packages = _packages.setdefault(session.spark, {})
        if digests[0] not in packages:
            packages[digests[0]] = _send_package(session, packaging.compiled(), digests[0])
        cells = _cells.setdefault(session.spark, {})
        cell = cells.pop(digests[1], None) or _KeptCell(
            _send_closure(session, closure, digests[1]), 0 if session.is_connect else closure.nbytes
        )
        cells[digests[1]] = cell
        _forget_old(cells)
        return SentCell(packages[digests[0]], cell.sent, *digests)


def _forget_old(cells: dict[str, _KeptCell]) -> None:
    """Let go of the oldest cells; Spark deletes a broadcast when no DataFrame needs it any more.

    It is not destroyed: a lazy DataFrame may load it on an executor at any time.
    """
    while len(cells) > 1 and (
        len(cells) > _MAX_CELLS or sum(cell.nbytes for cell in cells.values()) > _KEPT_BYTES
    ):
        del cells[next(iter(cells))]


def _send_package(session: Session, code: bytes, digest: str) -> Any:
    if not session.is_connect:
        return session.spark.sparkContext.broadcast((digest, code))
    with tempfile.TemporaryDirectory(prefix="hydrogen-") as folder:
        # By its bytes: another kernel on the same session may have compiled other ones.
        path = Path(folder) / f"hydrogen_magic-{hashlib.sha256(code).hexdigest()[:16]}.zip"
        path.write_bytes(code)
        return _add_file(session, path)


def _send_closure(session: Session, closure: Payload, digest: str) -> Any:
    if not session.is_connect:
        own = payload.copied(closure)
        return session.spark.sparkContext.broadcast((digest, (own.pickled, own.buffers)))
    fd = payload.to_memfd(closure)
    with tempfile.TemporaryDirectory(prefix="hydrogen-") as folder, os.fdopen(fd, "rb") as memory:
        path = Path(folder) / f"hydrogen_magic-{digest[:16]}.parcel"
        with path.open("wb") as file:
            shutil.copyfileobj(memory, file, 1 << 20)
        return _add_file(session, path)


def _add_file(session: Session, path: Path) -> str:
    session.spark.addArtifacts(str(path), file=True)
    return path.name
