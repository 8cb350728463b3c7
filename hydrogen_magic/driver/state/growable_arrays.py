"""Growing columns of numbers, and columns that ranks send as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class GrowableArray:
    """An array for appending: doubling its capacity keeps a million appends cheap."""

    def __init__(self, dtype: type) -> None:
        self._room: NDArray[np.generic] = np.empty(16, dtype)
        self._n = 0

    def __len__(self) -> int:
        return self._n

    @property
    def array(self) -> NDArray[np.generic]:
        """The appended values; a view that later appends do not change."""
        return self._room[: self._n]

    def append(self, values: NDArray[np.generic]) -> None:
        until = self._n + len(values)
        if until > len(self._room):
            # New memory, so that earlier views stay valid.
            room = np.empty(max(until, 2 * len(self._room)), self._room.dtype)
            room[: self._n] = self._room[: self._n]
            self._room = room
        self._room[self._n : until] = values
        self._n = until


Column = Sequence[float | None]


def floats(column: Column | Sequence[Column]) -> NDArray[np.float64]:
    """Return a column, or columns of one length, as numbers; NaN for None."""
    return np.array(column, dtype=np.float64)
