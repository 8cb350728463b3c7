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
from hydrogen_magic.driver.placements.spark.spark_session import Session
from hydrogen_magic.serialization import payload
from hydrogen_magic.serialization.payload import Payload

_last: weakref.WeakKeyDictionary[Any, SentCell] = weakref.WeakKeyDictionary()
"""SparkSession -> the last cell, which need not be sent again.

Spark deletes the broadcast of an earlier one when no DataFrame needs it any more. It is not destroyed: a
lazy DataFrame may load it on an executor at any time.
"""
_sending = threading.Lock()
"""Threads, such as those of CrossValidator, change it; a cell that several of them use is sent once."""


@dataclass(frozen=True)
class SentCell:
    """A cell that executors can load, for ``inference_task.serve``."""

    package: Any
    """Broadcast variable, or name of a file."""
    closure: Any
    package_digest: str
    closure_digest: str


def send(session: Session, closure: Payload) -> SentCell:
    """Send the package and ``closure`` to the session's executors, unless the last ones were equal."""
    package_digest = hashlib.sha256(packaging.code()).hexdigest()
    closure_digest = payload.digest(closure)
    with _sending:
        last = _last.get(session.spark)
        if last is not None and last.package_digest == package_digest:
            package = last.package
        else:
            package = _send_package(session, packaging.compiled(), package_digest)
        if last is not None and last.closure_digest == closure_digest:
            sent = last.closure
        else:
            sent = _send_closure(session, closure, closure_digest)
        cell = _last[session.spark] = SentCell(package, sent, package_digest, closure_digest)
        return cell


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
