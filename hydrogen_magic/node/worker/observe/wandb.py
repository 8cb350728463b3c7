"""Observer of Weights & Biases: numbers that a cell logs to a run become curves, over the run's steps.

A dict among them makes a curve of each of its entries, ``name.entry``, as in W&B. The notebook's process logs
to the run of ``--track wandb``; only ranks are observed.
"""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker.observe import helpers

_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Run -> step of its next call without one. To ask W&B for it would take a message to another process."""


def attach(module: ModuleType) -> None:
    """Patch ``Run.log``, which is also ``wandb.log``; ``module`` is ``wandb.sdk.wandb_run``."""
    module.Run.log = helpers.followed(module.Run.log, _see)


@helpers.safely
def _see(
    _: None, run: Any, data: Any, step: Any = None, commit: bool | None = None, *__: Any, **___: Any
) -> None:
    at = _steps.get(run, 0) if step is None else step
    _steps[run] = at + 1 if commit or (commit is None and step is None) else at
    if not helpers.is_claimed():
        helpers.log(dict(helpers.flattened(data, ".")), at)
