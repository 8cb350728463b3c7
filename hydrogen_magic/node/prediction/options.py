"""The options of one ``%%infer``, the same in the kernel and on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydrogen_magic.errors import InferError
from hydrogen_magic.node.prediction.column_names import listed

__all__ = ["ERROR_COLUMN", "ON_ERROR", "InferOptions"]

ON_ERROR = ("fail", "null", "collect")
"""What to do with rows whose prediction fails."""

ERROR_COLUMN = "error"
"""The column of ``--on-error collect``."""


@dataclass(frozen=True)
class InferOptions:
    """Size of batches, columns of the result, and what to do with failures."""

    batch_size: int = 4096
    """Maximum number of rows per call of ``predict``."""
    columns: tuple[str, ...] | None = None
    """Columns of the frame to keep; None: all."""
    only: bool = False
    """Whether the result has only the predicted columns."""
    schema: str | None = None
    """Types of the predicted columns, as in ``score double, label string``; None: those of the first
    output with rows."""
    on_error: str = "fail"
    """fail: raise; null: predictions are null; collect: as null, with a column of error messages."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise InferError(f"--batch-size should be 1 or more rows, got {self.batch_size}")
        if self.columns is not None and len(set(self.columns)) < len(self.columns):
            raise InferError(f"--columns {','.join(self.columns)} has a column twice")
        if self.on_error not in ON_ERROR:
            raise InferError(
                f"--on-error {self.on_error} is not supported; use {', '.join(ON_ERROR)}"
            )

    @property
    def collects(self) -> bool:
        """Whether the result has a column of error messages."""
        return self.on_error == "collect"

    def kept(self, names: Sequence[str]) -> list[str]:
        """Return which of a frame's columns ``names`` to keep, in the order of ``columns``.

        Raises InferError if one of ``columns`` does not exist.
        """
        asked = self.columns or ()
        missing = [name for name in asked if name not in names]
        if missing:
            raise InferError(
                f"--columns {','.join(asked)}: the frame has no column {missing[0]!r};"
                f" it has {listed(names)}"
            )
        if self.only:
            return []
        return list(names if self.columns is None else self.columns)

    def check_names(self, predicted: Sequence[str], names: Sequence[str]) -> None:
        """Raise InferError if a predicted column has the name of another column of the result.

        ``names``: the frame's columns.
        """
        taken = set(self.kept(names))
        for name in predicted:
            if name in taken:
                raise InferError(
                    f"predict returned a column {name!r}, but the frame has one of that name: rename the"
                    f' predicted one, as in return {{"{name}_predicted": …}}, or drop the frame\'s with'
                    " --columns or --only"
                )
            if self.collects and name == ERROR_COLUMN:
                raise InferError(
                    f"predict returned a column {ERROR_COLUMN!r}, which --on-error collect adds: rename"
                    " it"
                )
        if self.collects and ERROR_COLUMN in taken:
            raise InferError(
                f"the frame has a column {ERROR_COLUMN!r}, which --on-error collect adds: rename it, or"
                " drop it with --columns or --only"
            )

    def result_schema(self, predicted: Any) -> Any:
        """Return the ``pyarrow.Schema`` of the added columns: ``predicted``, and the error messages."""
        if not self.collects:
            return predicted
        import pyarrow as pa

        return predicted.append(pa.field(ERROR_COLUMN, pa.string()))
