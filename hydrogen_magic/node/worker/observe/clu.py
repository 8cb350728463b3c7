"""Observer of CLU's metric writers, which JAX programs use: scalars become curves.

The outermost writer is observed, on every rank: writers that it calls, also in threads, are not, nor are
summaries of TensorFlow or TensorBoard that those make.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker.observe import helpers
from hydrogen_magic.node.wrapping import wraps


def attach(module: ModuleType) -> None:
    """Patch ``write_scalars`` of all writers; ``module`` is ``clu.metric_writers``."""
    for kind in vars(module).values():
        if isinstance(kind, type) and "write_scalars" in vars(kind):
            kind.write_scalars = helpers.claiming(kind.write_scalars, _see)  # type: ignore[attr-defined]


def attach_to_pools(module: ModuleType) -> None:
    """Have a pool's threads know what is recorded already; ``module`` is ``clu.asynclib``."""
    original = module.Pool.__call__

    @wraps(original)
    def __call__(self: Any, function: Callable[..., Any]) -> Any:  # noqa: N807
        return original(self, helpers.claiming(function) if helpers.is_claimed() else function)

    module.Pool.__call__ = __call__


@helpers.safely
def _see(writer: Any, step: Any, scalars: Any) -> None:
    helpers.log(scalars, step)
