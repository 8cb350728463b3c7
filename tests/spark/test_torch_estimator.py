"""``hydrogen_magic.spark.TorchEstimator`` with classic sessions and Spark Connect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import estimator_ranks

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

CLASSIC = pytest.param("classic", marks=pytest.mark.xdist_group("spark"))
CONNECT = pytest.param("connect", marks=pytest.mark.xdist_group("connect"))
INPUTS = ["a", "b", "c", "d"]


@pytest.fixture(params=[CLASSIC, CONNECT])
def spark(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """This process's session, classic or Connect."""
    session = request.getfixturevalue(request.param)
    if request.param == "connect":  # as pyspark's own builder does: Spark ML chooses by it
        monkeypatch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
    return session


on_classic = pytest.mark.parametrize("spark", [CLASSIC], indirect=True)


def iris(spark: Any) -> Any:
    """Return the rows, a fifth of them for validation."""
    from sklearn.datasets import load_iris

    data, target = load_iris(return_X_y=True)
    rows = [
        (*map(float, x), float(y), n % 5 == 0)
        for n, (x, y) in enumerate(zip(data, target, strict=True))
    ]
    types = ", ".join(f"{name} double" for name in [*INPUTS, "label"])
    return spark.createDataFrame(rows, f"{types}, held_out boolean").coalesce(1)


def estimator(**params: Any) -> Any:
    from hydrogen_magic.spark import TorchEstimator

    given = {
        "model": estimator_ranks.classifier(), "train": estimator_ranks.train, "gpu": False,
        "predict": estimator_ranks.classify, "batchSize": 16, "options": {"quiet": True},
    }  # fmt: skip
    return TorchEstimator(**{**given, **params})


def accuracy(frame: Any) -> float:
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator

    return float(MulticlassClassificationEvaluator(metricName="accuracy").evaluate(frame))


def datasets(home: Path) -> list[Path]:
    return list((home / "datasets").glob("*"))


def test_a_pipeline_learns_and_is_saved(spark: Any, tmp_path: Path, hydrogen_home: Path) -> None:
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.feature import VectorAssembler

    frame = iris(spark)
    assembler = VectorAssembler(inputCols=INPUTS, outputCol="features")
    pipeline = Pipeline(stages=[assembler, estimator(epochs=15, validation="held_out")])
    fitted = pipeline.fit(frame)
    assert datasets(hydrogen_home) == []
    model = fitted.stages[1]
    assert len(model.history) == 2 * 15 and model.history["accuracy"].iloc[-1] > 0.9
    scored = fitted.transform(frame)
    assert (
        scored.schema["features"].dataType == assembler.transform(frame).schema["features"].dataType
    )
    assert dict(scored.dtypes)["prediction"] == "double" and accuracy(scored) > 0.9
    for _ in range(2):
        fitted.write().overwrite().save(str(tmp_path / "fitted"))
    again = PipelineModel.load(str(tmp_path / "fitted"))
    assert again.transform(frame).collect() == scored.collect()
    assert again.stages[1].history.equals(model.history)
