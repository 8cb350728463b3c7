"""The Spark ML transformer that :class:`hydrogen_magic.spark.TorchEstimator` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
from pyspark.ml.base import Model
from pyspark.ml.util import MLReadable, MLWritable

from hydrogen_magic.driver.placements.spark import spark_session as sessions
from hydrogen_magic.inference.spark.cell_task import called_once, quoted
from hydrogen_magic.inference.spark.function import check_version, function_of
from hydrogen_magic.inference.spark.prepared import is_case_sensitive
from hydrogen_magic.node.prediction.column_names import refuse_taken
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.node.prediction.torch_model import ModelPredict
from hydrogen_magic.spark import rows
from hydrogen_magic.spark.params import PredictionParams
from hydrogen_magic.spark.persistence import Reader, Writer

if TYPE_CHECKING:
    import torch


class TorchModel(PredictionParams, Model, MLWritable, MLReadable):  # type: ignore[misc]
    """A trained torch model that adds its predictions to a Spark DataFrame.

    :meth:`transform` returns a lazy DataFrame: Spark's tasks predict in batches, as for ``%%infer``,
    and predict only the rows that an action needs. Only ``featuresCols`` are sent to Python.

    The Params ``featuresCols``, ``predictionCol``, ``predict`` and ``predictBatchSize`` are those of the
    estimator. ``save`` writes the model with its class, if the notebook defines that, and ``load`` reads
    it in another process. As with all pickles, load only files that you trust.

    Attributes:
        model: The trained ``nn.Module``, on the CPU.
        history: What the ranks have logged with ``hm.log``: a pandas DataFrame, as ``Gang.metrics``.
    """

    __module__ = "hydrogen_magic.spark"  # where saved metadata finds it

    def __init__(
        self, model: torch.nn.Module, types: dict[str, str], history: pd.DataFrame
    ) -> None:
        super().__init__()
        self.model = model.eval()
        self.history = history
        self._types = types
        """Predicted column -> its type in Spark's DDL; ``""`` is ``predictionCol``."""

    def _transform(self, dataset: Any) -> Any:
        rows.check_is_frame(dataset, "TorchModel.transform")
        session = sessions.of(dataset)
        check_version(session, "TorchModel.transform", "use %%infer with the attribute model there")
        features, column = self.getOrDefault("featuresCols"), self.getPredictionCol()
        types = {name or column: kind for name, kind in self._types.items()}
        refuse_taken(
            list(types),
            dataset.columns,
            column if "" in self._types else "",
            is_case_sensitive=is_case_sensitive(dataset),
        )
        predict = ModelPredict(self.model, features, column, self.getOrDefault("predict"))
        schema = ", ".join(f"{quoted(name)} {kind}" for name, kind in types.items())
        size = self.getOrDefault("predictBatchSize")
        function = function_of(session, predict, InferOptions(batch_size=size, schema=schema))
        value = function(*rows.columns(dataset, features, "featuresCols"))
        parts = {name: value if len(types) == 1 else value.getField(name) for name in types}
        return dataset.withColumns(
            {name: called_once(part, features[0], session) for name, part in parts.items()}
        )

    def write(self) -> Writer:
        """Return a writer of Spark ML: ``model.write().overwrite().save(path)``."""
        history = self.history.to_dict("list")
        return Writer(self, {"model": self.model, "types": self._types, "history": history})

    @classmethod
    def read(cls) -> Reader:
        """Return a reader of Spark ML."""
        return Reader(cls)

    @classmethod
    def _restored(cls, attributes: dict[str, Any]) -> TorchModel:
        history = pd.DataFrame(attributes["history"])
        return cls(attributes["model"], attributes["types"], history)
