"""Horovod on a rank of a session: see :mod:`hydrogen_magic.node.worker.group_recovery`.

A shutdown by one rank ends the waits of all ranks, whose background threads agree on it.
"""

from __future__ import annotations

import sys
from typing import Any


class _State:
    """What is known of this process's Horovod; the caller has no place for it."""

    must_join = False
    """Horovod was shut down to release the rank."""


_process = _State()


def release() -> bool:
    """Make collectives of this process fail; return whether Horovod was initialized."""
    horovod = _initialized()
    if horovod is None:
        return False
    _process.must_join = True
    horovod.shutdown()
    return True


def leave() -> None:
    """Shut Horovod down."""
    release()


def join() -> list[str]:
    """Initialize Horovod again if it was shut down to release the rank. Returns texts for the user."""
    if _process.must_join:
        sys.modules["horovod.torch"].init()
        forget()
    return []


def forget() -> None:
    """Do not initialize Horovod again."""
    _process.must_join = False


def is_joined() -> bool:
    """Return whether Horovod is initialized, or was shut down to release the rank."""
    return _process.must_join or _initialized() is not None


def n_collectives() -> int:
    """Return 0: Horovod's ranks agree on every collective before it begins."""
    return 0


def _initialized() -> Any:
    horovod = sys.modules.get("horovod.torch")
    return horovod if horovod is not None and horovod.is_initialized() else None
