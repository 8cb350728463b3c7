"""The process groups of a session's rank: released from a collective, and joined again for a later cell.

What this takes depends on the library of the rendezvous. The module that
:attr:`~hydrogen_magic.driver.rendezvous.Rendezvous.group_recovery` names has these functions:

- ``release()``: make the main thread's wait in a collective fail; called on another thread
- ``renew(is_whole)``: give up the groups; if ``is_whole``, join anew, by the current environment.
  Returns texts for the user
- ``n_collectives()``: how many collectives this rank has entered, to see whether all ranks agree
"""

from __future__ import annotations

import importlib
from typing import Any

from hydrogen_magic.core.messages import SessionCell


class ProcessGroups:
    """Those of this process. ``module``: see above; empty if the library cannot do this."""

    def __init__(self, module: str) -> None:
        self.are_released = False
        """They were given up during this cell."""
        self._library: Any = importlib.import_module(module) if module else None
        self._epoch = 0
        self._is_joined = True

    def release(self) -> None:
        """Make a wait in a collective fail. A second call in the same cell has no effect."""
        if self._library is not None and not self.are_released:
            # At once: the main thread may report it before the call returns.
            self.are_released = True
            self.are_released = bool(self._library.release())

    def renew(self, cell: SessionCell) -> list[str]:
        """Give up the groups of an earlier epoch, and join again once all ranks take part.

        Returns texts for the user.
        """
        self.are_released = False
        if cell.epoch == self._epoch and self._is_joined:
            return []
        self._epoch, self._is_joined = cell.epoch, cell.is_whole
        try:
            return [] if self._library is None else list(self._library.renew(cell.is_whole))
        except BaseException:  # interrupted while it joins, or a peer is missing: all join again
            self.are_released = True
            raise

    def n_collectives(self) -> int:
        """Return how many collectives this rank has entered, 0 if unknown."""
        return 0 if self._library is None else int(self._library.n_collectives())
