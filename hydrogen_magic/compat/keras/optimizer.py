"""``DistributedOptimizer``: any optimizer of Keras, with gradients that are averaged over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydrogen_magic.compat.keras import collectives


def DistributedOptimizer(optimizer: Any, name: str | None = None) -> Any:  # noqa: N802 # Horovod's name
    """Return an optimizer like ``optimizer`` that averages gradients over all ranks before it applies them.

    Args:
        optimizer: an optimizer of Keras 3 that has no state yet; a new one is made of its configuration.
        name: its name; None: that of ``optimizer``.

    Its class has the name of the optimizer's, so that saved models load without this package.
    """
    kind = type(optimizer)
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    averaging: Any = type(kind.__name__, (_Averaging, kind), body)
    config = optimizer.get_config()
    return averaging.from_config({**config, "name": name or config["name"]})


class _Averaging:
    """Averages gradients before they are applied."""

    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        found = [gradient for gradient in grads if gradient is not None]
        collectives.exchange().average_gradients(found)
        super().apply(grads, trainable_variables)  # type: ignore[misc]
