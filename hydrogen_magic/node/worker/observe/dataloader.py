"""Observer of the waits for data: the start of a DataLoader's iterator, and every batch."""

from __future__ import annotations

from types import ModuleType

from hydrogen_magic.node.worker.observe.span_recording import recorded

_WAIT = "data wait"


def attach(module: ModuleType) -> None:
    """Record the waits; ``module`` is ``torch.utils.data.dataloader``."""
    iterator = module._BaseDataLoaderIter
    iterator.__next__ = recorded(_WAIT, iterator.__next__)
    module.DataLoader.__iter__ = recorded(_WAIT, module.DataLoader.__iter__)
