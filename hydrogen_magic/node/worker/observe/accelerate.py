"""Values of ``Accelerator.log`` become curves, on every rank and without any tracker.

Accelerate itself passes the values to trackers on the main process only. A dict among them makes a curve of
each of its entries, ``name/entry``, as in its TensorBoard tracker.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker.observe import helpers


def attach(module: ModuleType) -> None:
    """Patch ``Accelerator.log``; ``module`` is ``accelerate.accelerator``."""
    module.Accelerator.log = helpers.claiming(module.Accelerator.log, _see)


@helpers.safely
def _see(accelerator: Any, values: Mapping[str, Any], step: Any = None, *_: Any, **__: Any) -> None:
    helpers.log(dict(helpers.flattened(values, "/")), step)
