"""Counts of a rank's optimizer steps and collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class StepCounter:
    """Counts the optimizer steps of a rank."""

    def __init__(self) -> None:
        self.count = 0
        self.on_step: Callable[[], None] | None = None
        """Called after every step of an optimizer, by the stepping thread."""
        self._stepped: set[int] = set()
        self._n_taken = 0

    def add(self, optimizer: int) -> None:
        """Count a step of an optimizer; ``optimizer`` is its identity.

        A step is over when an optimizer steps again that has already stepped in it: of alternating
        optimizers (the two of a GAN) the busiest one counts, and consecutive ones add up.
        """
        if optimizer in self._stepped:
            self.count += 1
            self._stepped = {optimizer}
        else:
            self._stepped.add(optimizer)
            self.count = self.count or 1
        if (on_step := self.on_step) is not None:  # another thread may remove it
            on_step()

    def take_changed(self) -> int | None:
        """Return the count, None if it is the one of the last call."""
        if self.count == self._n_taken:
            return None
        self._n_taken = self.count
        return self._n_taken


class Collective(NamedTuple):
    """A collective that a rank has entered."""

    name: str
    number: int
    """Position among the collectives of this rank, from 1; 0 if ranks join or leave by it."""
    start_ns: int
    """On the gang's clock."""
    n_joins: int = 0
    """How often this rank has joined all ranks of its gang, this time included."""


class CollectiveTracker:
    """Counts the collectives that a rank enters, without those by which ranks join or leave."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.count = 0
        self.has_entered = False
        """Any, also one by which ranks join."""
        self.n_joins = 0
        """How often this rank has joined all ranks of its gang, or has begun to."""
        self.current: Collective | None = None
        self._now_ns = now_ns

    def enter(self, name: str, *, is_joining: bool = False, joins_all: bool = False) -> bool:
        """Note that a collective begins; False when it is a part of the current one.

        ``joins_all``: by it, the rank joins all ranks of its gang.
        """
        if self.current is not None:
            return False
        self.has_entered = True
        self.count += not is_joining
        self.n_joins += joins_all
        number = 0 if is_joining else self.count
        self.current = Collective(name, number, self._now_ns(), self.n_joins)
        return True

    def leave(self) -> Collective | None:
        """Note that the current collective is over for this rank, and return it."""
        left, self.current = self.current, None
        return left
