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


def renew(is_whole: bool) -> list[str]:
    """Shut Horovod down, and initialize it again if all ranks do. Returns texts for the user."""
    release()
    if _process.must_join and is_whole:
        sys.modules["horovod.torch"].init()
        _process.must_join = False
    return []


def n_collectives() -> int:
    """Return 0: Horovod's ranks agree on every collective before it begins."""
    return 0


def _initialized() -> Any:
    horovod = sys.modules.get("horovod.torch")
    return horovod if horovod is not None and horovod.is_initialized() else None
