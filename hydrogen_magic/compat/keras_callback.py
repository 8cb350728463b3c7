"""What every callback for Keras has, by its interface: Keras itself need not be installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class KerasCallback:
    """A callback for Keras 2 and 3 that does nothing: subclasses define the hooks that they need."""

    def __init__(self) -> None:
        self.model: Any = None
        self.params: Mapping[str, Any] = {}

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Set Keras's parameters of the training: ``epochs``, ``steps``."""
        self.params = params

    def set_model(self, model: Any) -> None:
        """Set the trained model."""
        self.model = model

    def _implements_train_batch_hooks(self) -> bool:
        """Called by Keras 2, since this class is not derived from its callback."""
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    _implements_predict_batch_hooks = _implements_test_batch_hooks

    def __getattr__(self, name: str) -> Callable[..., None]:
        # Keras calls some twenty hooks, and newer versions may call more.
        if name.startswith("on_"):
            return _nothing
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Hook for events that are not handled."""


_nothing._is_default = True  # type: ignore[attr-defined]  # Keras's mark of hooks it need not wait for
