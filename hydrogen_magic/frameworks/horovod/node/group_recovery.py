"""Horovod on a rank of a session: see :mod:`hydrogen_magic.node.worker.session.group_recovery`.

A shutdown by one rank ends the waits of all ranks, whose background threads agree on it.
"""

from __future__ import annotations

import sys
from typing import Any

_WAITS_S = 3.0
"""Much longer than the exchange of a step takes."""


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


def n_entered(waited_s: float) -> int:
    """Return 1 for a rank that has waited for seconds in a collective of all ranks.

    There is no number of them: Horovod's ranks agree on every collective before it begins. One that all
    ranks have begun, if only asynchronously, takes less. Those of process sets may be of other ranks.
    """
    if waited_s < _WAITS_S or _initialized() is None:
        return 0
    return int(_n_process_sets() == 1)


def _n_process_sets() -> int:
    """Return their number, with that of all ranks; 0 if unknown."""
    sets: Any = sys.modules.get("horovod.common.process_sets")
    try:
        return len(sets._basics._get_process_set_ids_and_ranks())
    except (AttributeError, RuntimeError):  # private, and changed meanwhile
        return 0


def _initialized() -> Any:
    horovod = sys.modules.get("horovod.torch")
    return horovod if horovod is not None and horovod.is_initialized() else None
