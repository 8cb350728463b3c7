"""The options of one ``%%infer``, the same in the kernel and on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydrogen_magic.errors import InferError
from hydrogen_magic.node.prediction.column_names import listed

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
    replace: tuple[str, ...] = ()
    """Columns of the frame that ``predict`` changes: the predicted ones take their places."""
    of_function: bool = False
    """Whether the frame holds the arguments of a function: each column of ``schema`` is a predicted one."""

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

        Raises InferError if one of ``columns`` or ``replace`` does not exist.
        """
        known = set(names)
        for option, asked in (("--columns", self.columns or ()), ("--replace", self.replace)):
            missing = [name for name in asked if name not in known]
            if missing:
                raise InferError(
                    f"{option} {','.join(asked)}: the frame has no column {missing[0]!r};"
                    f" it has {listed(names)}"
                )
        replaced = self._declared() if self.of_function else self.replace
        return [name for name in self._asked(names) if name not in replaced]

    def _declared(self) -> Sequence[str]:
        from hydrogen_magic.node.prediction.ddl import parse_schema

        declared: list[str] = parse_schema(self.schema).names if self.schema else []
        return declared

    def _asked(self, names: Sequence[str]) -> Sequence[str]:
        return () if self.only else names if self.columns is None else self.columns

    def order(self, names: Sequence[str], predicted: Sequence[str]) -> list[str]:
        """Return the columns of the result: a replaced one is where the frame has it, new ones follow.

        ``names``: the frame's columns. Columns that ``predict`` did not return are left out.
        """
        missing = set(self.replace).difference(predicted)
        own = [name for name in self._asked(names) if name not in missing]
        known = set(own)
        return [*own, *(name for name in predicted if name not in known)]

    def check_names(self, predicted: Sequence[str], names: Sequence[str]) -> None:
        """Raise InferError if a predicted column has the name of another column of the result.

        ``names``: the frame's columns.
        """
        taken = set(self.kept(names))
        for name in predicted:
            if name in taken:
                remedy = f"replace the frame's with --replace {name}"
                if self.of_function:
                    remedy = "do not change that one"
                raise InferError(
                    f"predict returned a column {name!r} that differs from the frame's: {remedy}, or return"
                    f" the new one under another name, such as {name}_predicted"
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

    def check_replaced(self, predicted: Sequence[str]) -> None:
        """Raise InferError if ``predict`` does not return a column of ``replace``."""
        missing = [name for name in self.replace if name not in predicted]
        if missing:
            raise InferError(
                f"--replace {','.join(self.replace)}: predict returned no column {missing[0]!r}, but"
                f" {listed(predicted)}"
            )

    def result_schema(self, predicted: Any) -> Any:
        """Return the ``pyarrow.Schema`` of the added columns: ``predicted``, and the error messages."""
        if not self.collects:
            return predicted
        import pyarrow as pa

        return predicted.append(pa.field(ERROR_COLUMN, pa.string()))
