"""What ranks that train by Keras exchange."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any


class Exchange(ABC):
    """The exchanges of one backend. Without other ranks there is nothing to exchange."""

    keeps_momentum_fixed = False
    """The optimizer's momentum is compiled into a step, and cannot be changed between steps."""

    @abstractmethod
    def init(self) -> None:
        """Join the other ranks; no effect if this rank has joined."""

    @abstractmethod
    def shutdown(self) -> None:
        """Leave the other ranks."""

    @abstractmethod
    def average_gradients(self, gradients: Sequence[Any]) -> None:
        """Replace each gradient by its mean over all ranks, which pass gradients of the same shapes."""

    @abstractmethod
    def average(self, values: Sequence[float]) -> Sequence[float]:
        """Return the mean over all ranks of each number."""

    @abstractmethod
    def broadcast(self, variables: Sequence[Any], root_rank: int) -> None:
        """Give variables of Keras the values of rank ``root_rank``."""

    @abstractmethod
    def before_change(self, model: Any) -> None:
        """Prepare a change of the optimizer's variables while ``model`` is fitted."""
