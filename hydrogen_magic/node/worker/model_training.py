"""What each rank of a :class:`hydrogen_magic.spark.TorchEstimator` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from hydrogen_magic.core.library_types import is_a
from hydrogen_magic.errors import InferError
from hydrogen_magic.node.dataset_handle import DatasetHandle
from hydrogen_magic.node.prediction.arrow_types import has_null_type
from hydrogen_magic.node.prediction.column_names import refuse_taken
from hydrogen_magic.node.prediction.ddl import name_of, parse_schema, spark_schema
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.node.prediction.predictor import Predictor
from hydrogen_magic.node.prediction.torch_model import FeatureColumns, ModelPredict
from hydrogen_magic.node.worker import api
from hydrogen_magic.node.worker.data import shard
from hydrogen_magic.node.worker.data.batch_kinds import ColumnError, exact_tensors_of
from hydrogen_magic.node.worker.results.rank_parts import dtensor_class


@dataclass(frozen=True)
class TrainingTask:
    """The arguments of a training."""

    train: Callable[..., Any]
    model: Any
    parameters: Mapping[str, Any]
    """Further arguments of ``train``."""
    rows: DatasetHandle
    validation: DatasetHandle | None
    features: tuple[str, ...]
    label: str
    batch_size: int
    shuffle: bool
    seed: int
    predict: Callable[[Any, Any], Any] | None
    prediction: str = "prediction"
    """Name of the predicted column, if ``predict`` does not name its columns."""
    taken: tuple[str, ...] = ()
    """Columns of the DataFrame."""
    is_case_sensitive: bool = False
    """Whether names that differ in case alone are different columns."""


@dataclass(frozen=True)
class TrainedModel:
    """The result of a training."""

    model: Any
    schema: bytes
    """The predicted columns in types of Spark, as serialized by Arrow; ``""`` is the one without a name."""


class TrainingData:
    """This rank's rows: an iterable of batches ``(features, label)``, on the rank's device.

    All ranks have the same number of batches, ``len()``. Each iteration is an epoch; with ``shuffle``, those
    over the training rows have another random order each.
    """

    validation: TrainingData | None = None
    """The validation rows, in their order; None without any."""

    def __init__(self, stream: Any, columns: FeatureColumns, label: str) -> None:
        self._stream = stream
        self._columns = columns
        self._label = label
        self._epoch = 0
        self.n_rows: int = stream.n_rows
        """Rows of this rank."""

    def __len__(self) -> int:
        return len(self._stream)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        self._stream.set_epoch(self._epoch)
        self._epoch += 1
        return self._batches()

    def set_epoch(self, epoch: int) -> None:
        """Choose the random order of the next iteration, on all ranks alike; by default they are counted."""
        self._epoch = epoch

    def _batches(self) -> Iterator[tuple[Any, Any]]:
        try:
            for arrays in self._stream:
                columns = exact_tensors_of(arrays)
                label = self._columns.label(columns[self._label])
                yield self._columns.of(columns), label.to(api.device())
        except ColumnError as error:
            raise error.of_frame() from None


def train_on_rank(task: TrainingTask) -> TrainedModel | None:
    """Train the model on this rank; return it on rank 0, and on all ranks if it is sharded over them."""
    schema = _predicted_columns(task)
    model = task.model.to(api.device()).train()
    data = _data(task, model)
    trained = _unwrapped(task.train(model, data, **task.parameters), model)
    if _is_sharded(trained):
        return TrainedModel(trained, schema)  # all ranks take part in gathering it
    if api.rank() != 0:
        return None
    if trained is not model:
        with suppress(Exception):  # it is not lost here: what fails does so where it predicts
            schema = _serialized(*_predicted(replace(task, model=trained)))
    return TrainedModel(trained.cpu(), schema)


def _data(task: TrainingTask, model: Any) -> TrainingData:
    columns = FeatureColumns(model, task.features)
    data = TrainingData(_stream(task, task.rows, shuffle=task.shuffle), columns, task.label)
    if task.validation is not None:
        data.validation = TrainingData(_stream(task, task.validation), columns, task.label)
    return data


def _stream(task: TrainingTask, rows: DatasetHandle, *, shuffle: bool = False) -> Any:
    options: Any = {"batch_size": task.batch_size, "shuffle": shuffle, "seed": task.seed}
    try:
        return shard.shard(rows, **options).to_numpy()
    except FileNotFoundError as error:
        called, remedy = "call hm.dataset(frame, path=…)", "set TorchEstimator(dataPath=…)"
        raise FileNotFoundError(str(error).replace(called, remedy)) from None


def _unwrapped(returned: Any, model: Any) -> Any:
    """Return the model that ``train`` has returned, ``model`` if it has returned something else."""
    if is_a(returned, "torch.nn.parallel", "DistributedDataParallel"):
        return returned.module
    return returned if is_a(returned, "torch.nn", "Module") else model


def _is_sharded(model: Any) -> bool:
    kind = dtensor_class()
    return kind is not None and any(isinstance(part, kind) for part in model.parameters())


# ── the predicted columns ────────────────────────────────────────────────────────────────────────


def _predicted_columns(task: TrainingTask) -> bytes:
    """Predict the first rows with the untrained model: what fails does so before the training.

    On all ranks, whose models stay alike: lazy layers get their sizes.
    """
    predict, found = _predicted(task)
    unknown = [field.name for field in found if has_null_type(field.type)]
    if unknown:
        raise InferError(
            f"predict returned no value in column {unknown[0]!r}: its type is not known"
        )
    column = "" if predict.names_columns else task.prediction
    refuse_taken(found.names, task.taken, column, is_case_sensitive=task.is_case_sensitive)
    return _serialized(predict, found)


def _predicted(task: TrainingTask) -> tuple[ModelPredict, Any]:
    """Return ``predict``, and the schema of what it predicts for the first rows."""
    predict = ModelPredict(task.model, task.features, task.prediction, task.predict)
    predictor = Predictor(predict, InferOptions(task.batch_size, of_function=True))
    rows = next(iter(_stream(task, task.rows).to_arrow()))
    return predict, predictor.run(rows.select(list(task.features)), 0).columns.schema


def _serialized(predict: ModelPredict, schema: Any) -> bytes:
    import pyarrow as pa

    if not predict.names_columns:
        schema = pa.schema([schema.field(0).with_name("")])
    of_spark = spark_schema(schema)
    for field in of_spark:
        _check_named(field)
    serialized: bytes = of_spark.serialize().to_pybytes()
    return serialized


def _check_named(field: Any) -> None:
    """Raise InferError for a type without a name in the schema of ``TorchModel``, such as a duration."""
    try:
        parse_schema(f"value {name_of(field.type)}")
    except InferError:
        column = f" in column {field.name!r}" if field.name else ""
        raise InferError(
            f"predict returned values of type {field.type}{column}, which TorchModel does not support: return"
            " numbers, for example"
        ) from None
