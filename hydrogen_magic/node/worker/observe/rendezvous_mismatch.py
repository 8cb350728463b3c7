"""Clear errors for Horovod in a torch gang, and for torch's process group in a Horovod gang.

Without the variables of Horovod, a rank takes itself for the only one: every rank would train alone without
an error. torch requires a variable that a Horovod gang does not have.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker import api
from hydrogen_magic.node.worker import reporter as _reporter

__all__ = ["attach_to_horovod", "explained"]


def attach_to_horovod(
    module: ModuleType, replace: Callable[[Any, Callable[..., Any]], None]
) -> None:
    """Make ``hvd.init`` of ``module``, which is ``horovod.torch``, report when it leaves a rank alone.

    ``replace``: installs a wrapped function wherever Horovod has the original.
    """
    original = module.init

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _warn_if_alone(module.size())
        return result

    replace(original, init)


def _warn_if_alone(size: int) -> None:
    reporter = _reporter.current()
    if reporter is not None and size == 1 < api.world_size() and api.rank() == 0:
        reporter.notice(
            "warning",
            f"hvd.init() found no other rank, so each of the {api.world_size()} ranks trains on "
            "its own: launch the gang with `--with horovod`",
        )


def explained(init_process_group: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's ``init_process_group`` with an error that explains a missing ``MASTER_ADDR``."""

    @functools.wraps(init_process_group)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return init_process_group(*args, **kwargs)
        except ValueError as error:
            if "MASTER_ADDR" not in str(error) or "HOROVOD_SIZE" not in os.environ:
                raise
            raise ValueError(
                "init_process_group() finds no torch rendezvous in a gang launched `--with "
                "horovod`: call hvd.init() instead, or launch the gang `--with torch`"
            ) from error

    return call
