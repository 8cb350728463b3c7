"""Optimizer steps, by torch's own hook for all optimizers."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hydrogen_magic.worker import reporter as _reporter

__all__ = ["attach"]


def attach(module: ModuleType) -> None:
    """Count the steps of every optimizer; ``module`` is ``torch.optim.optimizer``.

    A step that ``GradScaler`` skips is not taken, and not counted.
    """
    torch = module.torch  # only half imported as yet: nothing of it may be asked for now

    def on_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return  # traced into the user's graph, our counters would make it compile every step
        reporter = _reporter.current()
        if reporter is not None:
            reporter.step_done(id(optimizer))

    module.register_optimizer_step_post_hook(on_step)
