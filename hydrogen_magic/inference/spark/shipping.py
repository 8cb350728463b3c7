"""What every executor needs is sent to it once: the package, and the cell with its model.

Classic sessions broadcast it, which Spark spreads from executor to executor and forgets by itself.
Spark Connect has no broadcast: there it is a file of the session. A task carries neither.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydrogen_magic.driver.placements.spark import packaging
from hydrogen_magic.driver.placements.spark.session import Session
from hydrogen_magic.serialization import payload
from hydrogen_magic.serialization.payload import Payload

__all__ = ["SentCell", "send"]

_MOST_KEPT = 8
"""Cells whose broadcast is kept here to be used again; frames made with others keep theirs."""

_sent: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
"""SparkSession -> digest -> what a task finds it by."""


@dataclass(frozen=True)
class SentCell:
    """A cell that executors can get, for ``spark_task.serve``."""

    package: Any
    """Broadcast variable, or the name of a file."""
    closure: Any
    package_digest: str
    closure_digest: str


def send(session: Session, closure: Payload) -> SentCell:
    """Make the package and ``closure`` known to the session's executors; once for equal ones."""
    code = packaging.code()
    digests = hashlib.sha256(code).hexdigest(), payload.digest(closure)
    known = _sent.setdefault(session.spark, {})
    if digests[0] not in known:
        known[digests[0]] = _send_package(session, code, digests[0])
    sent = known.pop(digests[1], None) or _send_closure(session, closure, digests[1])
    known[digests[1]] = sent  # the last one is the newest
    for old in [digest for digest in known if digest != digests[0]][:-_MOST_KEPT]:
        del known[old]
    return SentCell(known[digests[0]], sent, *digests)


def _send_package(session: Session, code: bytes, digest: str) -> Any:
    if not session.is_connect:
        return session.spark.sparkContext.broadcast(code)
    with tempfile.TemporaryDirectory(prefix="hydrogen-") as folder:
        path = Path(folder) / f"hydrogen_magic-{digest[:16]}.zip"
        path.write_bytes(code)
        return _add_file(session, path)


def _send_closure(session: Session, closure: Payload, digest: str) -> Any:
    if not session.is_connect:
        own = payload.copied(closure)
        return session.spark.sparkContext.broadcast((own.pickled, own.buffers))
    fd = payload.to_memfd(closure)
    with tempfile.TemporaryDirectory(prefix="hydrogen-") as folder, os.fdopen(fd, "rb") as memory:
        path = Path(folder) / f"hydrogen_magic-{digest[:16]}.parcel"
        with path.open("wb") as file:
            shutil.copyfileobj(memory, file, 1 << 20)
        return _add_file(session, path)


def _add_file(session: Session, path: Path) -> str:
    session.spark.addArtifacts(str(path), file=True)
    return path.name
