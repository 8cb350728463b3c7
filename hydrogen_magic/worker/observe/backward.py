"""Backward passes: ``torch.autograd.backward``, which ``Tensor.backward`` calls too."""

from __future__ import annotations

from types import ModuleType

from hydrogen_magic.worker.observe.recorded import replace

__all__ = ["attach"]


def attach(module: ModuleType) -> None:
    """Record the outermost backward passes; ``module`` is ``torch.autograd``."""
    replace(module, "torch.autograd", {"backward": "backward"})
