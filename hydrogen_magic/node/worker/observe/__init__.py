"""Observers, which record a rank's activity automatically: one file for each library.

An observer is attached right after the import of its library's module: a rank that does not use tqdm has no
cost. Libraries that are already loaded are observed at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from hydrogen_magic.horovod.node import observe
from hydrogen_magic.node.worker.observe import (
    accelerate,
    backward,
    checkpoint,
    collectives,
    dataloader,
    forward,
    keras,
    lightning,
    metrics,
    optimizer,
    tensorboard,
    tqdm,
    transformers,
)

__all__ = ["install"]

_OBSERVERS: dict[str, Callable[[ModuleType], None]] = {
    "tqdm.std": tqdm.attach,
    "tqdm.notebook": tqdm.attach_to_notebook,
    "torch.optim.optimizer": optimizer.attach,
    "torch.nn.modules.module": forward.attach,
    "torch.autograd": backward.attach,
    "torch.nn.parallel.distributed": backward.attach_to_ddp,
    "torch.utils.data.dataloader": dataloader.attach,
    "torch.serialization": checkpoint.attach,
    "torch.distributed.checkpoint.state_dict_saver": checkpoint.attach_to_distributed,
    "torch.distributed.checkpoint.state_dict_loader": checkpoint.attach_to_distributed,
    "torch.distributed.distributed_c10d": collectives.attach,
    "horovod.torch": observe.attach,
    "torch.utils.tensorboard.writer": tensorboard.attach,
    "tensorboardX.writer": tensorboard.attach,
    "lightning.pytorch.trainer.trainer": lightning.attach,
    "pytorch_lightning.trainer.trainer": lightning.attach,
    "transformers.trainer": transformers.attach,
    "transformers.integrations.integration_utils": transformers.attach_to_integrations,
    "accelerate.accelerator": accelerate.attach,
    "keras.callbacks": keras.attach,
}
"""Module -> function that attaches the observer."""


def install() -> None:
    """Attach the observers to imported libraries, and to others when they are imported. A second call has
    no effect.
    """
    if any(isinstance(finder, _ObserverFinder) for finder in sys.meta_path):
        return
    pending = dict(_OBSERVERS)
    for name in _OBSERVERS:
        module = sys.modules.get(name)
        if module is not None:
            _attach(pending.pop(name), module)
    sys.meta_path.insert(0, _ObserverFinder(pending))


def _attach(observer: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        observer(module)
    except Exception as error:  # another version of a library must not break the user's import
        metrics.cannot_observe(module.__name__, error)


class _ObserverFinder(MetaPathFinder):
    """Delegates to the other finders, and calls the observer after the module has run."""

    def __init__(self, pending: dict[str, Callable[[ModuleType], None]]) -> None:
        self._pending = pending

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._pending:
            return None
        if fullname == "tqdm.notebook":
            return tqdm.notebook_spec()
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find else None
            if spec is not None:
                self._call_after(spec.loader, fullname)
                return spec
        return None

    def _call_after(self, loader: Loader | None, fullname: str) -> None:
        """Wrap ``exec_module`` of this loader instance, so that the module's loader is unchanged."""
        if loader is None:
            return

        def exec_module(module: ModuleType) -> None:
            run(module)
            # A loader may serve several modules (of a zip), or a module may be loaded again.
            observer = self._pending.pop(fullname, None) if module.__name__ == fullname else None
            if observer is not None:
                _attach(observer, module)

        try:
            run = loader.exec_module
            loader.exec_module = exec_module  # type: ignore[method-assign]
        except AttributeError:
            return  # a loader that cannot be wrapped: its module is not observed
