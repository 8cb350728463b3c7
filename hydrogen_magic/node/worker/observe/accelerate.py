"""Values of ``Accelerator.log`` become curves, on every rank and without any tracker.

Accelerate itself passes the values to trackers on the main process only. A dict among them makes a curve of
each of its entries, ``name/entry``, as in its TensorBoard tracker.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker.observe import metrics


def attach(module: ModuleType) -> None:
    """Patch ``Accelerator.log``; ``module`` is ``accelerate.accelerator``."""
    original = module.Accelerator.log

    @functools.wraps(original)
    def log(self: Any, *args: Any, **kwargs: Any) -> Any:
        _see(*args, **kwargs)
        with metrics.claimed():
            return original(self, *args, **kwargs)

    module.Accelerator.log = log


@metrics.safely
def _see(values: Mapping[str, Any], step: Any = None, *_: Any, **__: Any) -> None:
    metrics.log(dict(metrics.flattened(values, "/")), step)
