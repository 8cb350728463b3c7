"""Observer of ``torch.save``, ``torch.load`` and ``torch.distributed.checkpoint``."""

from __future__ import annotations

from types import ModuleType

from hydrogen_magic.node.worker.observe.span_recording import replace

_SAVE, _LOAD = "save checkpoint", "load checkpoint"


def attach(module: ModuleType) -> None:
    """Record saving and loading; ``module`` is ``torch.serialization``."""
    replace(module, "torch", {"save": _SAVE, "load": _LOAD})


def attach_to_distributed(module: ModuleType) -> None:
    """Do the same for ``state_dict_saver`` or ``state_dict_loader`` of distributed checkpoints."""
    names = {
        "save": _SAVE,
        "async_save": _SAVE,
        "save_state_dict": _SAVE,
        "load": _LOAD,
        "load_state_dict": _LOAD,
    }
    replace(module, "torch.distributed.checkpoint", names)
