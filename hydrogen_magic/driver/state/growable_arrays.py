"""Growing columns of numbers, and conversion of numbers that ranks send."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hydrogen_magic.core.units import as_float


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
    """Return a column, or columns of one length, as numbers.

    NaN for None, infinity for an integer too large for a float.
    """
    try:
        return np.array(column, dtype=np.float64)
    except OverflowError:
        convert = np.vectorize(lambda n: np.nan if n is None else as_float(n), otypes=[np.float64])
        return convert(np.array(column, dtype=object))


def integers(column: Sequence[int], least: int, most: int) -> NDArray[np.int64]:
    """Return a column as integers between ``least`` and ``most``, which must fit into 64 bits."""
    try:
        return np.clip(np.array(column, dtype=np.int64), least, most)
    except OverflowError:
        return np.array([min(most, max(least, value)) for value in column], dtype=np.int64)
