"""Where the ranks of a session find each other: the same store from cell to cell, until groups break."""

from __future__ import annotations

from hydrogen_magic.driver.placements import Attempt


class SessionAddress:
    """The address of the rendezvous of a session's current epoch."""

    def __init__(self) -> None:
        self._epoch = -1
        self._address = ("", 0)

    def of(self, attempt: Attempt, held: tuple[str, int]) -> tuple[str, int]:
        """Return the address for ``attempt``. ``held``: what rank 0's agent has reserved for a new one."""
        cell = attempt.job.session_cell
        if cell is None:
            return held
        if cell.epoch != self._epoch:
            self._epoch, self._address = cell.epoch, held
        return self._address


def rendezvous_number(attempt: Attempt) -> int:
    """Return a number that no earlier attempt has used at the same address.

    Ranks may leave their process group in one cell of a session and join again in another one.
    """
    cell = attempt.job.session_cell
    return attempt.number if cell is None else cell.number
