"""A Spark ML estimator that trains a torch model by a gang of ranks.

fit(df) ─ rows ─► hm.dataset ─► Parquet ─► ranks: train(model, data, …) ─► rank 0's model ─► TorchModel
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import keyword_only
from pyspark.ml.base import Estimator
from pyspark.ml.param import Param
from pyspark.ml.util import MLReadable, MLWritable

from hydrogen_magic.core.argument_types import not_one_of
from hydrogen_magic.core.lazy_annotations import signature_of
from hydrogen_magic.core.units import counted
from hydrogen_magic.driver import attending, calls, launcher
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.interrupts import interrupts_held
from hydrogen_magic.errors import OptionTypeError, OptionValueError
from hydrogen_magic.inference.spark.prepared import is_case_sensitive
from hydrogen_magic.node.prediction.arrow_types import is_number
from hydrogen_magic.node.prediction.column_names import refuse_taken
from hydrogen_magic.node.prediction.ddl import name_of
from hydrogen_magic.node.worker.model_training import TrainingTask, train_on_rank
from hydrogen_magic.spark.model import TorchModel
from hydrogen_magic.spark.params import TrainingParams
from hydrogen_magic.spark.persistence import Reader, Writer
from hydrogen_magic.spark.rows import RowSpec, SharedRows, TrainingRows
from hydrogen_magic.spark.trainings import Trainings

if TYPE_CHECKING:
    import torch

_OWN_PARAMS = {param.name for param in TrainingParams().params}


class TorchEstimator(TrainingParams, Estimator, MLWritable, MLReadable):  # type: ignore[misc]
    """Trains a torch model on a Spark DataFrame by a gang of ranks, with its live view.

    ``fit(df)`` writes the feature and label columns once as Parquet, calls ``train(model, data, …)`` on every
    rank, deletes the data, and returns a :class:`TorchModel`, which predicts. It works in a ``Pipeline``, in
    ``CrossValidator`` and ``TrainValidationSplit``, with classic sessions and with Spark Connect (Spark 4.1
    or newer).

    ``train`` gets the rank's copy of ``model``, on the rank's device, and ``data``, the
    :class:`~hydrogen_magic.node.worker.model_training.TrainingData` of this rank: an iterable of batches
    ``(features, label)``, whose attribute ``validation`` has those of the validation rows. Each iteration
    over ``data`` is an epoch in another random order. ``train`` synchronizes the ranks as any training code
    does, for example by ``DistributedDataParallel``. If it returns a module, that one replaces ``model``.

    Further parameters of ``train`` become Params of the estimator, so that a ``ParamGridBuilder`` can vary
    them; those named like a Param (``epochs``, ``batchSize``, ``seed``, …) get its value, even if they have
    a default.

    Example::

        def train(model, data, epochs, lr=0.1):
            dist.init_process_group()
            ddp = DistributedDataParallel(model)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
            for epoch in range(epochs):
                for features, label in data:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(ddp(features), label.long())
                    loss.backward()
                    optimizer.step()
                hm.log(epoch, loss=loss)
            dist.destroy_process_group()

        estimator = TorchEstimator(
            model=nn.Linear(4, 3), train=train, np=2, epochs=5, lr=0.5,
            predict=lambda model, features: model(features).argmax(1),
        )
        fitted = estimator.fit(df)
        fitted.transform(df).select("label", "prediction")

    Args:
        model: The ``nn.Module`` to train. It is not changed.
        train: The function to call on each rank.
        np: Number of ranks.
        on: Where ranks run: ``"local"``, ``"spark"``, or a placement of a plug-in.
        rendezvous: How ranks find each other: ``"torch"``, or another one that is installed.
        gpu: True: a GPU for each rank. False: none. None: GPUs if every rank can have one.
        featuresCols: Names of the feature columns: numbers, arrays of numbers, vectors of Spark ML. Numbers
            and vectors are put side by side in one tensor, in this order. If the model's ``forward`` is
            annotated with ``dict[str, torch.Tensor]``, features are a dict of tensors by column; if it takes
            several arguments, too, and the model is called with their values.
        labelCol: Name of the label column. Labels are a tensor of the column's type, doubles of torch's
            default type.
        validation: A fraction of the rows, chosen at random, or the name of a column that is true (or 1) for
            the rows to validate with. Default: none.
        epochs: The argument ``epochs`` of ``train``. Default: its own default, otherwise 1.
        batchSize: Rows of a batch on each rank.
        shuffle: Whether Spark mixes the rows to train with, and each epoch has another random order.
        seed: Of the order of the rows, and of the choice of validation rows.
        predictionCol: Name of the predicted column. One number per row is stored as a double, as in all of
            Spark ML, more as an array.
        predict: A function ``(model, features)`` that returns one value for each row, or a dict of columns.
            Default: the output of the model.
        predictBatchSize: Maximum number of rows per call of ``predict``.
        dataPath: A folder or URL for the rows that Spark's executors, this machine and all ranks share; see
            :func:`hydrogen_magic.dataset`. Default: on this machine, which sends them to hosts with ranks.
        options: Further options of :func:`hydrogen_magic.run`, such as ``{"retries": 2, "quiet": True}``.
        **parameters: Arguments of ``train``.

    ``fit`` raises the errors of :func:`hydrogen_magic.run` and :func:`hydrogen_magic.dataset`.

    Raises:
        TypeError: An argument has the wrong type, or ``train`` has no parameter of this name.
        ValueError: An argument has an invalid value.
    """

    __module__ = "hydrogen_magic.spark"  # where saved metadata finds it

    @keyword_only  # type: ignore[untyped-decorator]
    def __init__(
        self,
        *,
        model: torch.nn.Module | None = None,
        train: Callable[..., Any] | None = None,
        np: int = 2,
        on: str = "local",
        rendezvous: str = "torch",
        gpu: bool | None = None,
        featuresCols: Sequence[str] = ("features",),
        labelCol: str = "label",
        validation: float | str | None = None,
        epochs: int = 1,
        batchSize: int = 32,
        shuffle: bool = True,
        seed: int = 0,
        predictionCol: str = "prediction",
        predict: Callable[[Any, Any], Any] | None = None,
        predictBatchSize: int = 4096,
        dataPath: str | None = None,
        options: dict[str, Any] | None = None,
        **parameters: Any,
    ) -> None:
        super().__init__()
        self.setParams(**self._input_kwargs)

    def setParams(self, **params: Any) -> TorchEstimator:
        """Set Params by name: those of the constructor, for which None is the default, and of ``train``."""
        for name in [each for each in params if params[each] is None and each in _OWN_PARAMS]:
            self.clear(self.getParam(name))
            del params[name]
        if "train" in params:
            self._set(train=params["train"])
            for name in _parameters_of(self.getOrDefault("train")):
                self._declare(name)
        for name in params:
            if not self.hasParam(name):
                self._declare_free(name)
        self._set(**params)
        return self

    # ── parameters of train ──

    def _declare(self, name: str) -> None:
        """Make a parameter of ``train`` a Param, so that it can be set and be part of a grid."""
        if self.hasParam(name):
            return
        if hasattr(self, name):
            raise OptionValueError(
                f"train has a parameter {name!r}, which is an attribute of TorchEstimator: rename it"
            )
        setattr(self, name, Param(self, name, "parameter of train"))
        self._params = None  # pyspark's list of all of them

    def _declare_free(self, name: str) -> None:
        """Declare a name that ``train`` accepts by ``**``. Raises TypeError if it does not."""
        train = self.getOrDefault("train") if self.isDefined("train") else None
        if train is None or not _takes_any(train):
            known = [param.name for param in self.params]
            raise OptionTypeError(
                f"neither TorchEstimator nor train has a parameter {name!r}; {not_one_of(name, known)}"
            )
        self._declare(name)

    def _declared(self) -> list[str]:
        return [param.name for param in self.params if param.name not in _OWN_PARAMS]

    def _arguments(self, train: Callable[..., Any]) -> dict[str, Any]:
        """Return the arguments of ``train`` after the first two, without those that its defaults set.

        Raises ValueError if one has no value.
        """
        declared = _parameters_of(train)
        free = self._declared() if _takes_any(train) else []
        wanted = {**dict.fromkeys(free, False), **declared}
        found = {
            name: self.getOrDefault(name)
            for name, is_needed in wanted.items()
            if self._has_value(name, is_needed)
        }
        missing = [name for name, is_needed in declared.items() if is_needed and name not in found]
        if missing:
            (name, *_) = missing
            # One of a grid's functions may have parameters that are no Params.
            remedy = f"set TorchEstimator({name}=…)" if self.hasParam(name) else "give it a default"
            raise OptionValueError(f"train has a parameter {name!r} without a value: {remedy}")
        if self.isSet("epochs") and "epochs" not in declared:
            raise OptionValueError(
                f"epochs={self.getOrDefault('epochs')} has no effect, since train has no parameter "
                "'epochs': add one, or drop epochs"
            )
        return found

    def _has_value(self, name: str, is_needed: bool) -> bool:
        if not self.hasParam(name):
            return False
        has_default = self.hasDefault(name) and (is_needed or name != "epochs")
        return bool(self.isSet(name) or has_default)

    # ── fit ──

    def _fit(self, dataset: Any) -> TorchModel:
        _, model = next(self.fitMultiple(dataset, [{}]))
        return model

    def fitMultiple(
        self, dataset: Any, paramMaps: Sequence[dict[Any, Any]]
    ) -> Iterator[tuple[int, TorchModel]]:
        """Return an iterator of models, one for each of ``paramMaps``, which share the written rows.

        After a failure, or an interrupt of the cell, the remaining ones are not trained.
        """
        estimators = [self.copy(each) for each in paramMaps]
        arguments = [each._checked_arguments() for each in estimators]  # before the first training
        rows = SharedRows(dataset, [each._rows() for each in estimators])

        def fit(number: int, launched: Callable[[Gang], None]) -> Any:
            return estimators[number]._fit_on(rows, arguments[number], launched)

        return Trainings(fit, len(estimators), rows.cancel)

    def _rows(self) -> RowSpec:
        return RowSpec(
            tuple(self.getOrDefault("featuresCols")),
            self.getLabelCol(),
            self.getOrDefault("validation"),
            self.getOrDefault("shuffle"),
            self.getSeed(),
            self.getOrDefault("dataPath"),
        )

    def _checked_arguments(self) -> dict[str, Any]:
        for name in ("model", "train"):
            if not self.isSet(name):
                raise OptionValueError(
                    f"TorchEstimator has no {name}: set TorchEstimator({name}=…)"
                )
        return self._arguments(self.getOrDefault("train"))

    def _fit_on(
        self, rows: SharedRows, arguments: dict[str, Any], launched: Callable[[Gang], None]
    ) -> TorchModel:
        options = self._options()
        quiet = options.pop("quiet", False)
        # All refusals come before the rows are written.
        launcher.plan(calls.spec_of(**options))
        self._check_prediction(rows.frame)
        with rows.of(self._rows()) as written:
            self._check_size(written)
            task = self._task(written, arguments, rows.frame)
            gang = _run(task, options, quiet, launched)
        trained = gang.result
        types = _types_of(trained.schema)
        model = TorchModel(trained.model.cpu(), types, gang.metrics)._resetUid(self.uid)
        fitted: TorchModel = self._copyValues(model)
        return fitted

    def _options(self) -> dict[str, Any]:
        """Return the options of ``launcher.launch``, and ``quiet``."""
        own = {name: self.getOrDefault(name) for name in ("np", "on", "rendezvous", "gpu")}
        return {**(self.getOrDefault("options") or {}), **own}

    def _check_prediction(self, frame: Any) -> None:
        if self.getOrDefault("predict") is None:  # else it may name its columns
            column = self.getPredictionCol()
            case = is_case_sensitive(frame)
            refuse_taken([column], frame.columns, column, is_case_sensitive=case)

    def _check_size(self, rows: TrainingRows) -> None:
        n_ranks = self.getOrDefault("np")
        for use, handle in (("training", rows.training), ("validation", rows.validation)):
            if handle is not None and handle.n_rows < n_ranks:
                raise OptionValueError(
                    f"np={n_ranks}: only {counted(handle.n_rows, 'row')} for {use}, and "
                    "every rank needs one"
                )

    def _task(self, rows: TrainingRows, arguments: dict[str, Any], frame: Any) -> TrainingTask:
        return TrainingTask(
            train=self.getOrDefault("train"),
            model=self.getOrDefault("model"),
            parameters=arguments,
            rows=rows.training,
            validation=rows.validation,
            features=tuple(self.getOrDefault("featuresCols")),
            label=self.getLabelCol(),
            batch_size=self.getOrDefault("batchSize"),
            shuffle=self.getOrDefault("shuffle"),
            seed=self.getSeed(),
            predict=self.getOrDefault("predict"),
            prediction=self.getPredictionCol(),
            taken=tuple(frame.columns),
            is_case_sensitive=is_case_sensitive(frame),
        )

    # ── saving ──

    def write(self) -> Writer:
        """Return a writer of Spark ML: ``estimator.write().overwrite().save(path)``.

        ``options["env"]``, which may hold secrets, is not written.
        """
        return Writer(self._without_environment(), {"declared": self._declared()})

    def explainParam(self, param: str | Param[Any]) -> str:
        """Return the documentation and the value of a Param, without ``options["env"]``."""
        explained: str = super(TorchEstimator, self._without_environment()).explainParam(param)
        return explained

    def _without_environment(self) -> TorchEstimator:
        if not self.isSet("options"):
            return self
        given = self.getOrDefault("options") or {}  # None: of a grid
        options = {name: value for name, value in given.items() if name != "env"}
        public: TorchEstimator = self.copy({self.options: options})
        return public

    @classmethod
    def read(cls) -> Reader:
        """Return a reader of Spark ML."""
        return Reader(cls)

    @classmethod
    def _restored(cls, attributes: dict[str, Any]) -> TorchEstimator:
        estimator: TorchEstimator = cls()
        for name in attributes["declared"]:
            estimator._declare(name)
        return estimator


def _parameters_of(train: Callable[..., Any]) -> dict[str, bool]:
    """Return the parameters of ``train`` after the model and data, and whether each needs a value."""
    signature = _signature(train)
    taken = signature.bind_partial(None, None).arguments
    return {
        each.name: each.default is each.empty
        for each in signature.parameters.values()
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) and each.name not in taken
    }


def _takes_any(train: Callable[..., Any]) -> bool:
    parameters = _signature(train).parameters.values()
    return any(each.kind is each.VAR_KEYWORD for each in parameters)


def _signature(train: Callable[..., Any]) -> inspect.Signature:
    signature = signature_of(train)
    try:
        signature.bind_partial(None, None)
    except TypeError:
        raise OptionTypeError(
            f"train{signature} cannot be called with a model and data: write def train(model, data, …)"
        ) from None
    return signature


def _run(
    task: TrainingTask, options: dict[str, Any], quiet: bool, launched: Callable[[Gang], None]
) -> Gang:
    """Run the gang and show it; return it after its end."""
    call = functools.partial(train_on_rank, task)
    name = getattr(task.train, "__qualname__", "train")
    vars(call)["__qualname__"] = f"TorchEstimator.fit({name})"  # the gang's title
    with interrupts_held():
        gang = calls.launch(call, **options)
        launched(gang)
        attending.attend(gang, quiet=quiet)
    gang.raise_for_state()
    return gang


def _types_of(serialized: bytes) -> dict[str, str]:
    """Return the types of the predicted columns in Spark's DDL; a number without a name is a double.

    A boolean stays a boolean: Spark cannot convert it to a double.
    """
    schema = pa.ipc.read_schema(pa.py_buffer(serialized))
    return {
        field.name: "double"
        if not field.name and is_number(field.type) and not pa.types.is_boolean(field.type)
        else name_of(field.type)
        for field in schema
    }
