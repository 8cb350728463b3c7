"""The process groups of a session's rank: released from a collective, and joined again for a later cell.

What this takes depends on the library of the rendezvous. The module that
:attr:`~hydrogen_magic.driver.rendezvous.Rendezvous.group_recovery` names has these functions:

- ``release()``: make the main thread's wait in a collective fail; called on another thread
- ``leave()``: give up the groups
- ``join()``: join the default group anew, by the current environment, if it was given up; returns texts for
  the user
- ``forget()``: do not join the default group again
- ``is_joined()``: whether this rank has the default group, or has given it up and not forgotten it
- ``n_entered(waited_s)``: how many collectives this rank has entered, to see whether all ranks agree. If
  there is no such number: 1 of a rank that has been inside of one for so long, if only the others can end
  that, otherwise 0
"""

from __future__ import annotations

import importlib
from typing import Any

from hydrogen_magic.core import messages as msg


class ProcessGroups:
    """Those of this process. ``module``: see above; empty if the library cannot do this."""

    def __init__(self, module: str) -> None:
        self.are_released = False
        """They were given up during this cell."""
        self._library: Any = importlib.import_module(module) if module else None
        self._epoch = 0
        self._is_current = True

    def release(self) -> None:
        """Make a wait in a collective fail. A second call in the same cell has no effect."""
        if self._library is not None and not self.are_released:
            # At once: the main thread may report it before the call returns.
            self.are_released = True
            self.are_released = bool(self._library.release())

    def renew(self, cell: msg.SessionCell) -> list[str]:
        """Give up the groups of an earlier epoch, and join again once all ranks take part.

        Not if a rank has left by itself: it would not join, and the others would wait for it. Returns texts
        for the user.
        """
        self.are_released = False
        if cell.epoch == self._epoch and self._is_current:
            return []
        self._epoch, self._is_current = cell.epoch, cell.is_whole
        if self._library is None:
            return []
        try:
            self._library.leave()
            if not cell.is_joined:
                self._library.forget()
            return list(self._library.join()) if cell.is_whole else []
        except BaseException:  # interrupted while it joins, or a peer is missing: all join again
            self.are_released = True
            raise

    def is_joined(self) -> bool:
        """Return whether this rank has joined the default group, and has not left it by itself."""
        return self._library is not None and bool(self._library.is_joined())

    def n_entered(self, waited_s: float) -> int:
        """Return how many collectives this rank has entered, or the library's substitute; 0 if unknown."""
        return 0 if self._library is None else int(self._library.n_entered(waited_s))
