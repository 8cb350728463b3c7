"""Params of the estimator and of its model, and the values that they accept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasLabelCol, HasPredictionCol, HasSeed

from hydrogen_magic.core.library_types import is_a
from hydrogen_magic.errors import OptionTypeError, OptionValueError
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.serialization.object_paths import describe

_LAUNCH_OPTIONS = (
    *("env", "retries", "timeout", "start_timeout", "grace", "wait", "pack", "ports"),
    *("max_closure", "run_name", "track", "quiet"),
)
"""Options of :func:`hydrogen_magic.run` for one gang that have no Param of their own."""


def _param(name: str, doc: str, wanted: str, convert: Callable[[Any], Any]) -> Any:
    """Return a Param; ``convert`` raises TypeError or ValueError for a value that is not ``wanted``."""

    def converted(value: Any) -> Any:
        try:
            return convert(value)
        except (TypeError, ValueError) as error:
            is_type = isinstance(error, TypeError)
            found = describe(value) if is_type else repr(value)
            kind = OptionTypeError if is_type else OptionValueError
            raise kind(f"{name} should be {wanted}, got {found}") from None

    return Param(Params._dummy(), name, doc, converted)


def _checked(value: Any, *, is_valid: bool) -> Any:
    if not is_valid:
        raise ValueError
    return value


def _count(value: Any) -> Any:
    found = TypeConverters.toInt(value)
    return _checked(found, is_valid=found >= 1)


def _names(value: Any) -> Any:
    found = [value] if isinstance(value, str) else TypeConverters.toListString(value)
    return _checked(found, is_valid=bool(found) and len(set(found)) == len(found))


def _validation(value: Any) -> Any:
    if isinstance(value, str):
        return _checked(value, is_valid=bool(value))
    found = TypeConverters.toFloat(value)
    return _checked(found, is_valid=0 < found < 1)


def _module(value: Any) -> Any:
    if not is_a(value, "torch.nn", "Module"):
        raise TypeError
    return value


def _function(value: Any) -> Any:
    if not callable(value) or isinstance(value, type):
        raise TypeError
    return value


def _options(value: Any) -> Any:
    if not isinstance(value, dict):
        raise TypeError
    return _checked(value, is_valid=set(_LAUNCH_OPTIONS).issuperset(value))


class PredictionParams(HasPredictionCol):  # type: ignore[misc]  # pyspark's classes are Any here
    """Params that the estimator hands on to its model."""

    featuresCols = _param(
        "featuresCols",
        "columns of the features: numbers, vectors or arrays of numbers",
        "a list of different names of columns",
        _names,
    )
    predict = _param(
        "predict",
        "function (model, features) that returns a value for each row, or a dict of columns; by default "
        "the model is called with the features",
        "a function (model, features)",
        _function,
    )
    predictBatchSize = _param(
        "predictBatchSize", "maximum number of rows per prediction", "1 or more rows", _count
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(
            featuresCols=["features"],
            predict=None,
            predictBatchSize=InferOptions.batch_size,
            predictionCol="prediction",
        )

    def setPredictionCol(self, value: str) -> Any:
        """Set :attr:`predictionCol`."""
        return self._set(predictionCol=value)


class TrainingParams(PredictionParams, HasLabelCol, HasSeed):  # type: ignore[misc]
    """Params of the estimator."""

    model = _param("model", "torch model to train", "an instance of torch.nn.Module", _module)
    train = _param(
        "train",
        "function (model, data, …) that trains the model on each rank",
        "a function (model, data, …)",
        _function,
    )
    np = _param("np", "number of ranks", "1 or more ranks", _count)
    on = _param("on", "placement of the ranks", "the name of a placement", TypeConverters.toString)
    rendezvous = _param(
        "rendezvous",
        "how ranks find each other",
        "the name of a rendezvous",
        TypeConverters.toString,
    )
    gpu = _param(
        "gpu",
        "True: a GPU for each rank; False: none; None: GPUs if every rank can have one",
        "True, False or None",
        TypeConverters.toBoolean,
    )
    validation = _param(
        "validation",
        "fraction of the rows for validation, or name of a column that is true for them",
        "a fraction between 0 and 1, or the name of a column",
        _validation,
    )
    epochs = _param("epochs", "number of epochs, for train", "1 or more epochs", _count)
    batchSize = _param("batchSize", "rows per batch of a rank", "1 or more rows", _count)
    shuffle = _param(
        "shuffle",
        "whether each epoch has another random order",
        "True or False",
        TypeConverters.toBoolean,
    )
    dataPath = _param(
        "dataPath",
        "folder or URL for the rows that Spark, this machine and all ranks share",
        "a folder or URL",
        TypeConverters.toString,
    )
    options = _param(
        "options",
        "further options of hydrogen_magic.run",
        f"a dict of options of hydrogen_magic.run ({', '.join(_LAUNCH_OPTIONS)})",
        _options,
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(
            labelCol="label",
            np=2,
            on="local",
            rendezvous="torch",
            gpu=None,
            validation=None,
            epochs=1,
            batchSize=32,
            shuffle=True,
            seed=0,
            dataPath=None,
            options={},
        )
