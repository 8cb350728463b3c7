"""Features and labels of a Spark DataFrame: as data for ranks, and as arguments of a function."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from hydrogen_magic.driver.datasets.dataset import dataset
from hydrogen_magic.driver.datasets.handles import NO_ROWS
from hydrogen_magic.driver.datasets.spark import while_wanted
from hydrogen_magic.driver.placements.spark import spark_session as sessions
from hydrogen_magic.errors import GangStoppedError, OptionTypeError, OptionValueError
from hydrogen_magic.inference import sources
from hydrogen_magic.inference.spark.cell_task import quoted
from hydrogen_magic.inference.spark.prepared import as_array
from hydrogen_magic.node.dataset_handle import DatasetHandle
from hydrogen_magic.node.prediction.column_names import listed
from hydrogen_magic.serialization.object_paths import describe
from hydrogen_magic.spark.trainings import NOT_TRAINED

_IS_VALIDATION = "hydrogen_magic is validation"
"""A column that is in no data."""


@dataclass(frozen=True)
class RowSpec:
    """The rows of one training."""

    features: tuple[str, ...]
    label: str
    validation: float | str | None
    shuffle: bool
    seed: int
    path: str | None


@dataclass(frozen=True)
class TrainingRows:
    """Written rows."""

    training: DatasetHandle
    validation: DatasetHandle | None = None

    def delete(self) -> None:
        """Delete them. If that fails, a warning says so: the model that was trained matters more."""
        for rows in filter(None, (self.training, self.validation)):
            try:
                rows.delete()
            except Exception as error:  # of any file system
                text = f"the rows in {rows.place} could not be deleted: {type(error).__name__}: {error}"
                warnings.warn(text, stacklevel=2)


class SharedRows:
    """The rows of a DataFrame for several trainings: the first one writes them, the last one deletes them."""

    def __init__(self, frame: Any, specs: Sequence[RowSpec]) -> None:
        """``specs``: one for each training."""
        self.frame = frame
        self._left = Counter(specs)
        """Trainings that have not ended."""
        self._begun: Counter[RowSpec] = Counter()
        """Those of them that have begun."""
        self._written: dict[RowSpec, TrainingRows] = {}
        self._is_cancelled = False
        self._writing = threading.Lock()
        self._lock = threading.Lock()
        """Of the attributes; never held for long."""
        weakref.finalize(self, _delete, self._written)  # if some of them never begin

    @contextmanager
    def of(self, spec: RowSpec) -> Iterator[TrainingRows]:
        """Return the rows for one training, which lasts as long as the context.

        Raises GangStoppedError after :meth:`cancel`, also while the rows are written.
        """
        with self._lock:
            self._begun[spec] += 1
        try:
            with self._writing:
                rows = self._rows(spec)
            self._refuse_cancelled()
            yield rows
        finally:
            with self._lock:
                self._begun[spec] -= 1
                self._left[spec] -= 1
                self._delete_unused()

    def cancel(self) -> None:
        """Let no training begin: end a write, and delete rows as soon as no training uses them."""
        with self._lock:
            self._is_cancelled = True
            self._delete_unused()

    def _rows(self, spec: RowSpec) -> TrainingRows:
        self._refuse_cancelled()
        if spec not in self._written:
            try:
                with while_wanted(self._refuse_cancelled):
                    rows = _write(self.frame, spec)
            except BaseException:
                self.cancel()  # before another thread, which waits, tries the same
                raise
            with self._lock:
                self._written[spec] = rows
        return self._written[spec]

    def _refuse_cancelled(self) -> None:
        if self._is_cancelled:
            raise GangStoppedError(NOT_TRAINED)

    def _delete_unused(self) -> None:
        users = self._begun if self._is_cancelled else self._left
        for spec in [each for each in self._written if not users[each]]:
            self._written.pop(spec).delete()


def _delete(written: dict[RowSpec, TrainingRows]) -> None:
    for rows in written.values():
        rows.delete()


def check_is_frame(frame: Any, method: str) -> None:
    """Raise TypeError for an argument of ``method`` that is no DataFrame of Spark."""
    if sources.kind_of(frame) != "spark":
        raise OptionTypeError(
            f"{method}() takes a Spark DataFrame, not a {describe(frame)}: create one with "
            "spark.createDataFrame(…)"
        )


# ── columns ──────────────────────────────────────────────────────────────────────────────────────


def columns(frame: Any, names: Sequence[str], param: str) -> list[Any]:
    """Return columns of numbers and of arrays of numbers, with these names.

    Raises ValueError if one is missing, TypeError if it has other values; both name ``param``.
    """
    session = sessions.of(frame)
    return [_column(frame, name, param, session).alias(name) for name in names]


def _column(frame: Any, name: str, param: str, session: sessions.Session) -> Any:
    if name not in frame.columns:
        raise OptionValueError(
            f"{param}: the DataFrame has no column {name!r}; it has {listed(frame.columns)}"
        )
    column, kind = frame[quoted(name)], frame.schema[name].dataType
    if type(kind).__name__ == "VectorUDT":
        return as_array(column, session)
    if not _is_numeric(kind):
        raise OptionTypeError(
            f"{param}: column {name!r} is {kind.simpleString()}, but should be a number, a vector or an "
            "array of numbers; StringIndexer makes numbers of text"
        )
    return column


def _is_numeric(kind: Any) -> bool:
    from pyspark.sql.types import ArrayType, BooleanType, NumericType

    while isinstance(kind, ArrayType):
        kind = kind.elementType
    return isinstance(kind, (NumericType, BooleanType))


# ── writing ──────────────────────────────────────────────────────────────────────────────────────


def _write(frame: Any, spec: RowSpec) -> TrainingRows:
    check_is_frame(frame, "TorchEstimator.fit")
    if frame.isStreaming:
        raise OptionTypeError("TorchEstimator.fit() does not support a streaming DataFrame")
    chosen = columns(frame, spec.features, "featuresCols")
    if spec.label not in spec.features:
        chosen += columns(frame, [spec.label], "labelCol")
    if spec.validation is None:
        with _named(spec, "training"):
            return TrainingRows(_training(frame.select(*chosen), spec))
    marked = frame.select(*chosen, _is_validation(frame, spec).alias(_IS_VALIDATION))
    # Rows must not change sides between the two jobs: a column of the user may be random, too.
    marked.persist()
    try:
        if isinstance(spec.validation, str):
            _check_marks(marked, spec.validation)
        return _divided(marked, spec)
    finally:
        marked.unpersist()


def _is_validation(frame: Any, spec: RowSpec) -> Any:
    """Return a column of booleans; it is null for a number that is neither 0 nor 1."""
    from pyspark.sql.types import BooleanType, NumericType

    functions = sessions.of(frame).sql_module("functions")
    if not isinstance(spec.validation, str):
        return functions.rand(spec.seed) < spec.validation
    (column,) = columns(frame, [spec.validation], "validation")
    kind = frame.schema[spec.validation].dataType
    if not isinstance(kind, (BooleanType, NumericType)):
        raise OptionTypeError(
            f"validation: column {spec.validation!r} is {kind.simpleString()}, but should be a boolean, or 0 "
            "and 1"
        )
    is_mark = functions.coalesce(column, functions.lit(0).cast(kind)).isin(0, 1)
    value = functions.coalesce(column.cast("boolean"), functions.lit(False))
    return value if isinstance(kind, BooleanType) else functions.when(is_mark, value)


def _check_marks(marked: Any, name: str) -> None:
    if marked.where(marked[quoted(_IS_VALIDATION)].isNull()).limit(1).count():
        raise OptionValueError(
            f"validation: column {name!r} has numbers other than 0 and 1: use a column that is true, or 1, "
            f"for the validation rows, such as frame[{name!r}] == 4"
        )


def _divided(marked: Any, spec: RowSpec) -> TrainingRows:
    is_validation = marked[quoted(_IS_VALIDATION)]
    sides = marked.where(~is_validation), marked.where(is_validation)
    training, validation = (side.drop(_IS_VALIDATION) for side in sides)
    with _named(spec, "validation"):
        held_out = dataset(validation, spec.path, reuse=False)
    with ExitStack() as undo, _named(spec, "training"):
        undo.callback(held_out.delete)
        rows = TrainingRows(_training(training, spec), held_out)
        undo.pop_all()
    return rows


@contextmanager
def _named(spec: RowSpec, use: str) -> Iterator[None]:
    """Let the error of a frame without rows name the Param."""
    try:
        yield
    except ValueError as error:
        if str(error) != NO_ROWS:
            raise
        if spec.validation is None:
            raise OptionValueError("the DataFrame has no row to train with") from None
        raise OptionValueError(f"validation={spec.validation!r} leaves no row for {use}") from None


def _training(rows: Any, spec: RowSpec) -> DatasetHandle:
    """Write the rows to train with, mixed: ranks get consecutive ones, which may be sorted by the label."""
    if spec.shuffle:
        rows = rows.repartition(sessions.of(rows).sql_module("functions").rand(~spec.seed))
    return dataset(rows, spec.path, reuse=False)
