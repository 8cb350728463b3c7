"""Clear errors for Horovod in a gang of another rendezvous.

Without its variables, Horovod takes a rank for the only one: every rank would train alone without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker import api
from hydrogen_magic.node.worker.reporting import reporter as _reporter
from hydrogen_magic.node.wrapping import wraps


def attach(module: ModuleType, replace: Callable[[Any, Callable[..., Any]], None]) -> None:
    """Have ``hvd.init`` of ``module``, which is ``horovod.torch``, say when it leaves a rank alone.

    ``replace``: installs a wrapped function wherever Horovod has the original.
    """
    original = module.init

    @wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _warn_if_alone(module.size())
        return result

    replace(original, init)


def _warn_if_alone(size: int) -> None:
    if size == 1 < api.world_size() and api.rank() == 0:
        _reporter.notice(
            "warning",
            f"hvd.init() found no other rank, so each of the {api.world_size()} trains by itself:"
            " launch the gang with `--with horovod`",
        )
