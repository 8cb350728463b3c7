"""Observer of ``tf_keras``, which is Keras 2: what it does otherwise than Keras 3."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from hydrogen_magic.node.worker.observe import keras
from hydrogen_magic.node.wrapping import wraps


def attach(module: ModuleType) -> None:
    """Make every ``CallbackList`` call our callback too; ``module`` is ``tf_keras.src.callbacks``."""
    keras.attach(module, _Keras2Hooks)


def attach_to_models(module: ModuleType) -> None:
    """Mark a verbosity that the user did not choose; ``module`` is ``tf_keras.src.engine.training``."""
    models: Any = module
    original = models._get_verbosity

    @wraps(original)
    def marked(verbose: Any, strategy: Any) -> Any:
        found = original(verbose, strategy)
        return keras.Automatic(found) if verbose == "auto" else found

    models._get_verbosity = marked


class _Keras2Hooks(keras.KerasHooks):
    def joined(self, callbacks: Any) -> None:
        # Decided when the list was made, by the callbacks that it had.
        for mode in ("train", "test", "predict"):
            setattr(callbacks, f"_should_call_{mode}_batch_hooks", True)

    def means(self, logs: Any) -> Mapping[str, Any]:
        """Keras sums them over the replicas, except for those of the end of an epoch."""
        found: Mapping[str, Any] = logs or {}
        if self.model is None:
            return found
        n = self.model.distribute_strategy.num_replicas_in_sync
        if n == 1 or self.model.distribute_reduction_method != "auto":
            return found
        summed = set(self.model.metrics_names)
        return {name: value / n if name in summed else value for name, value in found.items()}

    def steps_done(self) -> int:
        optimizer = getattr(self.model, "optimizer", None)
        return 0 if optimizer is None else int(optimizer.iterations.numpy())
