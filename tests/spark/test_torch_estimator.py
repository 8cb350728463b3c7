"""``hydrogen_magic.spark.TorchEstimator`` with classic sessions and Spark Connect."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hydrogen_magic.driver import known_gangs
from hydrogen_magic.errors import GangStoppedError, HydrogenError, RankFailedError
from tests import estimator_ranks, spark_rig
from tests.documented import covers
from tests.gangs import PATIENCE_S, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

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
on_connect = pytest.mark.parametrize("spark", [CONNECT], indirect=True)
"""The page on the estimator does the same on classic (``test_site_code``)."""


def iris(spark: Any) -> Any:
    """Return the rows, a fifth of them for validation."""
    sklearn = find_spec("sklearn")  # to import it would take seconds
    assert sklearn is not None and sklearn.origin is not None
    lines = Path(sklearn.origin).with_name("datasets").joinpath("data/iris.csv").read_text()
    rows = [(*map(float, line.split(",")), n % 5 == 0) for n, line in enumerate(lines.split()[1:])]
    types = ", ".join(f"{name} double" for name in [*INPUTS, "label"])
    return spark.createDataFrame(rows, f"{types}, held_out boolean").coalesce(1)


def estimator(**params: Any) -> Any:
    from hydrogen_magic.spark import TorchEstimator

    given = {
        "model": estimator_ranks.classifier(),
        "train": estimator_ranks.train,
        "gpu": False,
        "predict": estimator_ranks.classify,
        "batchSize": 16,
        "options": {"quiet": True},
    }
    return TorchEstimator(**{**given, **params})


def accuracy(frame: Any) -> float:
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator

    return float(MulticlassClassificationEvaluator(metricName="accuracy").evaluate(frame))


def datasets(home: Path) -> list[Path]:
    return list((home / "datasets").glob("*"))


@covers(
    """
    `HorovodEstimator(modelFn=model_fn)`
    `modelFnParams={"learning_rate": 0.0001}`
    `featureMapping={"features": "features"}`
    `labelCol="rating"`
    `batchSize=128`
    `maxSteps=20000`
    `isValidationCol="isVal"`
    `modelDir="/tmp/horovodDemo"`, `saveCheckpointsSecs=30`
    `hvd.DistributedOptimizer(optimizer)` in `model_fn`
    `transformer = est.fit(df)`, `transformer.transform(df)`
    `KerasEstimator`, `TorchEstimator` of `horovod.spark`
    """
)
@pytest.mark.exhaustive
@on_connect
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
    found = scored.collect()
    assert sum(row.prediction == row.label for row in found) > 0.9 * len(found)
    fitted.save(str(tmp_path / "fitted"))
    again = PipelineModel.load(str(tmp_path / "fitted"))
    assert again.transform(frame).collect() == found
    assert again.stages[1].history.equals(model.history)


@on_classic
def test_columns_by_name_and_another_model(spark: Any, tmp_path: Path, hydrogen_home: Path) -> None:
    """With predictions by name, a saved model, and the columns that are refused."""
    from hydrogen_magic.spark import TorchModel

    frame = spark.range(0, 5, 1, 1).selectExpr(
        "id", "int(id % 3) as category", "array(double(id), 0.5d) as numbers", "1d as label",
        "'text' as name",
    )  # fmt: skip
    names = ["category", "numbers"]
    given = {
        "model": estimator_ranks.Two(),
        "train": estimator_ranks.replace,
        "np": 1,
        "seed": 2**63 - 1,
    }
    fitted = estimator(**given, featuresCols=names, predict=estimator_ranks.both).fit(frame)
    title = list(known_gangs.gangs().values())[-1].snapshot().title
    assert title == "TorchEstimator.fit(replace)"
    fitted.save(str(tmp_path / "fitted"))
    others = spark.range(5)
    # One partition: a worker imports torch in two seconds.
    joined = frame.join(others, frame["id"] == others["id"]).coalesce(1)
    scored = TorchModel.load(str(tmp_path / "fitted")).transform(joined)
    assert scored.columns.count("id") == 2
    assert scored.dtypes[len(joined.columns) :] == [
        ("sum", "float"),
        ("numbers_too", "array<float>"),
    ]
    assert sorted(tuple(row) for row in scored.select("sum", "numbers_too").collect()) == [
        (5.0, [n, 0.5]) for n in range(5)
    ]
    for name in ("sum", "Sum"):  # the same to Spark
        with pytest.raises(ValueError, match=f"already has a column '{name}': drop it"):
            fitted.transform(frame.withColumn(name, frame.label))
    for params, message in (
        (
            {"predictionCol": "ID", "predict": None},
            "already has a column 'id': drop it, or choose another name",
        ),
        (
            {"featuresCols": ["age"]},
            r"featuresCols: the DataFrame has no column 'age'; it has 'id'",
        ),
        (
            {"featuresCols": ["name"]},
            r"featuresCols: column 'name' is string, but should be a numb",
        ),
        ({"labelCol": "name"}, r"labelCol: column 'name' is string"),
        ({"validation": "name"}, r"validation: column 'name' is string"),
        ({"validation": 1e-9}, r"validation=1e-09 leaves no row for validation"),
        ({"np": 6}, r"np=6: only 5 rows for training, and every rank needs one"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            estimator(**{**given, "featuresCols": names, **params}).fit(frame)
    with pytest.raises(
        TypeError, match=r"takes a Spark DataFrame, not a pandas\S*: create one with"
    ):
        estimator(**given, featuresCols=names).fit(frame.toPandas())
    stream = spark.readStream.format("rate").load()
    with pytest.raises(TypeError, match=r"fit\(\) does not support a streaming"):
        estimator(**given, featuresCols=names, validation=0.5).fit(stream)
    assert datasets(hydrogen_home) == []


@on_classic
def test_a_random_column_divides_the_rows(spark: Any, hydrogen_home: Path) -> None:
    """Spark evaluates it for each job, of which the training and the validation rows are one each.

    The model predicts booleans, which stay ones.
    """
    from pyspark.sql.functions import udf

    is_held_out = udf(lambda: random.random() < 0.3, "boolean")
    frame = spark.range(0, 200, 1, 2).selectExpr("id", "double(id) as label").coalesce(1)
    given = {"model": estimator_ranks.one(), "train": estimator_ranks.log_rows, "np": 1}
    options = {"featuresCols": ["id"], "predict": estimator_ranks.is_above_one}
    fitted = estimator(**given, **options, validation="held_out").fit(
        frame.withColumn("held_out", is_held_out())
    )
    assert fitted.history[["both", "either"]].iloc[-1].tolist() == [0, 200]
    found = fitted.transform(frame.limit(4)).orderBy("id").select("prediction").collect()
    assert [row.prediction for row in found] == [False, False, True, True]


@on_classic
def test_an_interrupted_overwrite_is_not_loaded(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New objects beside the old metadata. The last are too large for one task of Spark."""
    from hydrogen_magic.spark import TorchEstimator, persistence

    kind, path = type(spark), str(tmp_path / "saved")
    writer_class = type(spark.range(1).write)
    create, text = kind.createDataFrame, writer_class.text
    sizes: list[int] = []

    def created(session: Any, rows: Any, *args: Any) -> Any:
        sizes.append(sum(len(row[-1]) for row in rows if isinstance(row[-1], bytearray)))
        return create(session, rows, *args)

    def interrupted(writer: Any, path: str) -> None:
        if path.endswith("metadata"):
            raise KeyboardInterrupt
        text(writer, path)

    estimator(epochs=2).save(path)
    monkeypatch.setattr(kind, "createDataFrame", created)
    with monkeypatch.context() as patch:
        patch.setattr(writer_class, "text", interrupted)
        with pytest.raises(KeyboardInterrupt):
            estimator(epochs=3).write().overwrite().save(path)
    with pytest.raises(HydrogenError, match="has parts of two instances, since a save was interru"):
        TorchEstimator.load(path)
    part = max(sizes) // 3 + 1
    monkeypatch.setattr(persistence, "_PART_BYTES", part)
    monkeypatch.setattr(persistence, "_WRITE_BYTES", 2 * part)
    sizes.clear()
    estimator(epochs=4).write().overwrite().save(path)
    assert TorchEstimator.load(path).getOrDefault("epochs") == 4
    assert part < max(sizes) <= 2 * part and sum(sizes) > max(sizes), "of several writes"


@on_classic
def test_null_vectors_are_null_arrays(spark: Any) -> None:
    from pyspark.ml.functions import array_to_vector
    from pyspark.sql.functions import array, col, lit, when

    from hydrogen_magic.spark import rows

    vector = array_to_vector(array(lit(1.0), lit(2.0)))
    frame = spark.range(0, 2, 1, 1).select(when(col("id") == 0, vector).alias("v"))
    arrays = frame.select(*rows.columns(frame, ["v"], "featuresCols")).collect()
    assert [row.v for row in arrays] == [[1.0, 2.0], None]


@on_classic
def test_a_column_for_validation_has_booleans_or_0_and_1(spark: Any, hydrogen_home: Path) -> None:
    from hydrogen_magic.spark import TorchModel

    frame = spark.range(0, 4, 1, 1).selectExpr(
        "id", "double(id) as label", "array(id) as list", "if(id = 0, double('NaN'), 1D) as nan"
    )
    for name, message in (
        ("id", "column 'id' has numbers other than 0 and 1"),
        ("nan", "column 'nan' has numbers other than 0 and 1"),
        ("list", "column 'list' is array<bigint>, but should be a boolean, or 0 and 1"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            estimator(train=estimator_ranks.fail, featuresCols=["id"], validation=name).fit(frame)
    fitted = TorchModel(estimator_ranks.one(), {"": "double"}, None)
    with pytest.raises(TypeError, match=r"TorchModel.transform\(\) takes a Spark DataFrame, not a"):
        fitted.transform(frame.toPandas())
    assert datasets(hydrogen_home) == []


@on_classic
def test_a_thread_that_writes_rows_ends_with_the_other_trainings(
    spark: Any, hydrogen_home: Path
) -> None:
    """CrossValidator calls the trainings in threads, which an interrupt does not reach."""
    from hydrogen_magic.spark.rows import RowSpec, SharedRows

    slow = "double(id) + double(java_method('java.lang.Thread', 'sleep', 1000L) is null)"
    frame = spark.range(0, 1000, 1, 2).selectExpr(f"{slow} as x", "id as label")
    spec = RowSpec(("x",), "label", None, shuffle=False, seed=0, path=None)
    shared, errors = SharedRows(frame, [spec, spec]), []

    def train() -> None:
        try:
            with shared.of(spec):
                pass
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    tracker = spark.sparkContext.statusTracker()
    wait_until(tracker.getActiveJobsIds)
    shared.cancel()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [type(error) for error in errors] == [GangStoppedError] * 2
    wait_until(lambda: not tracker.getActiveJobsIds())  # its state lags behind
    assert datasets(hydrogen_home) == []


@pytest.mark.exhaustive
@on_classic
def test_failures_are_those_of_a_gang(spark: Any, hydrogen_home: Path) -> None:
    """Of the training, and of predictions: before it."""
    frame = iris(spark)
    with pytest.raises(RankFailedError, match="ValueError: on purpose") as caught:
        estimator(train=estimator_ranks.fail, featuresCols=INPUTS).fit(frame)
    assert caught.value.rank == 1
    with pytest.raises(RankFailedError, match="'Sequential' object has no attribute 'infer'"):
        estimator(
            train=estimator_ranks.fail,
            featuresCols=INPUTS,
            np=1,
            predict=lambda model, features: model.infer(features),
        ).fit(frame)
    assert datasets(hydrogen_home) == []


@pytest.mark.exhaustive
@on_connect
def test_cross_validation_finds_the_learning_rate(spark: Any, tmp_path: Path) -> None:
    """Two gangs at a time, whose rows are written once for each fold."""
    from pyspark.ml.evaluation import MulticlassClassificationEvaluator
    from pyspark.ml.tuning import CrossValidator, CrossValidatorModel

    chosen = estimator(featuresCols=INPUTS, validation=0.2, epochs=15)
    grid = [{chosen.lr: 1e-6, chosen.batchSize: 4}, {chosen.lr: 0.5, chosen.batchSize: 8}]
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy")
    validator = CrossValidator(
        estimator=chosen,
        estimatorParamMaps=grid,
        evaluator=evaluator,
        numFolds=2,
        parallelism=2,
        seed=1,
    )
    found = validator.fit(iris(spark))
    assert found.avgMetrics[1] > 0.7 > found.avgMetrics[0]
    found.write().overwrite().save(str(tmp_path / "found"))
    again = CrossValidatorModel.load(str(tmp_path / "found"))
    assert accuracy(again.transform(iris(spark))) > 0.7, "of small batches, whose statistics vary"
    assert again.getEstimator().getOrDefault("batchSize") == 16
    assert again.getEstimatorParamMaps()[0][again.getEstimator().lr] == 1e-6


@pytest.mark.exhaustive
def test_executors_train_on_rows_of_a_shared_folder(spark: Any, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    chosen = estimator(featuresCols=INPUTS, epochs=15, on="spark", dataPath=str(shared))
    assert accuracy(chosen.fit(iris(spark)).transform(iris(spark))) > 0.9
    assert list(shared.iterdir()) == []


SAVES = """
import sys
from pyspark.sql import SparkSession
import torch
from hydrogen_magic.spark import TorchEstimator

class Net(torch.nn.Linear):
    def forward(self, x):
        return doubled(super().forward(x))

def doubled(x):
    return 2 * x

def train(model, data, bias=0.25):
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(bias)

spark = SparkSession.builder.master("local[1]").getOrCreate()
frame = spark.range(4).selectExpr("id as features", "id as label")
estimator = TorchEstimator(model=Net(1, 1), train=train, np=1, gpu=False)
estimator.save(sys.argv[1] + "/estimator")
estimator.fit(frame).save(sys.argv[1] + "/model")
"""


@pytest.mark.exhaustive
@on_classic
def test_another_process_loads_what_one_has_saved(
    spark: Any, spark_site: spark_rig.Site, tmp_path: Path
) -> None:
    """With the classes and functions that only the first one defines."""
    from hydrogen_magic.spark import TorchEstimator, TorchModel

    script = tmp_path / "script.py"
    script.write_text(SAVES)
    environment = {**spark_site.driver(), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    frame = spark.range(0, 4, 1, 1).selectExpr("id as features", "id as label")
    model = TorchModel.load(f"{tmp_path}/model")
    again = TorchEstimator.load(f"{tmp_path}/estimator").setParams(bias=1.0).fit(frame)
    found = [[row.prediction for row in m.transform(frame).collect()] for m in (model, again)]
    assert found == [[0.5, 2.5, 4.5, 6.5], [2.0, 4.0, 6.0, 8.0]]
    with pytest.raises(Exception, match=r"Expected class name \S*TorchModel but found"):
        TorchModel.load(f"{tmp_path}/estimator")
