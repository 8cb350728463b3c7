"""Gangs cannot be nested: a rank cannot start a gang."""

from __future__ import annotations

import os

from hydrogen_magic.core.processes import COOKIE
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.node.worker import api
from hydrogen_magic.node.worker.reporting import reporter


def is_rank() -> bool:
    """Return whether this is a rank, or a process started by a rank."""
    return reporter.current() is not None or COOKIE in os.environ


def refuse_nested() -> None:
    """Raise PlacementError on a rank, and in a process started by a rank."""
    if is_rank():
        raise PlacementError(
            f"a rank cannot start a gang (this is rank {api.rank()}); start it from the notebook"
        )
