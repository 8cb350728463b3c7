"""A handle to Parquet data that the notebook has written or named, for ``hm.shard`` on ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydrogen_magic.core.units import counted, first_of, size_text

FOLDER = "HYDROGEN_MAGIC_DATASETS"
"""Variable of a rank: the folder in which its host has data that the notebook has written to its machine."""


@dataclass(frozen=True, eq=False)
class DatasetHandle:
    """A handle to Parquet data, returned by :func:`hydrogen_magic.dataset`.

    As a context manager it deletes the data at its end, as :meth:`delete` does, unless
    :func:`hydrogen_magic.dataset` has returned the same data more than once.
    """

    path: str | tuple[str, ...]
    """Folder, file, glob or URL of the Parquet data; all of them if a list was passed."""
    n_rows: int
    """Number of rows."""
    n_bytes: int
    """Size of the files."""
    columns: tuple[tuple[str, str], ...]
    """Name and Arrow type of each column."""
    is_private: bool = False
    """The notebook has written it to its own machine, not to a folder or URL that all hosts can read."""
    _remove: Callable[[], None] | None = field(default=None, repr=False)
    """Deletes what the notebook has written; None on ranks, and for data that was there before."""
    _n_given: list[int] = field(default_factory=lambda: [1], repr=False)
    """Number of calls that have returned this handle and of which no ``with`` block has ended."""

    @property
    def name(self) -> str:
        """What tells it from other datasets of the notebook's machine; empty for data that all hosts read.

        Hosts that share no disk with the notebook receive the data with the first cell that uses it.
        """
        return Path(self.path).parent.name if isinstance(self.path, str) and self.is_private else ""

    @property
    def is_temporary(self) -> bool:
        """Whether the data is deleted with this process, which has written it."""
        return self._remove is not None

    @property
    def place(self) -> str:
        """The path in messages."""
        return self.path if isinstance(self.path, str) else first_of(self.path, 1)

    def delete(self) -> None:
        """Delete the data, if :func:`hydrogen_magic.dataset` has written it, and in the notebook only.

        Ranks that still read it fail. Those of an ``--outlive`` gang do not: the data stays until its end.
        A second call has no effect.
        """
        if self._remove is not None:
            self._remove()

    def shared(self) -> DatasetHandle:
        """Return this handle for one more use in the notebook."""
        self._n_given[0] += 1
        return self

    def __enter__(self) -> DatasetHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self._n_given[0] -= 1
        if self._n_given[0] < 1:
            self.delete()

    def __repr__(self) -> str:
        shape = f"{counted(self.n_rows, 'row')}, {counted(len(self.columns), 'column')}"
        return f"<hm.dataset: {shape}, {size_text(self.n_bytes)} in {self.place}>"

    def __reduce__(self) -> Any:
        return DatasetHandle, (self.path, self.n_rows, self.n_bytes, self.columns, self.is_private)
