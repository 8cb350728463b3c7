"""``%%infer`` over Spark DataFrames: on executors that have nothing of ours, classic and Connect."""

from __future__ import annotations

import datetime as dt
import decimal
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hydrogen_magic.capture import Captured, CellText, capture_cell
from hydrogen_magic.core import events as ev
from hydrogen_magic.core import memory_settings, run_log
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver import known_gangs
from hydrogen_magic.driver.datasets import folders
from hydrogen_magic.driver.placements.remote.agents import RemoteAgentPool
from hydrogen_magic.driver.placements.spark import spark_session as sessions
from hydrogen_magic.errors import GangStoppedError, InferError, OptionTypeError
from hydrogen_magic.inference import fingerprints
from hydrogen_magic.inference.run import InferenceRun
from hydrogen_magic.inference.spark import cached_runs
from hydrogen_magic.inference.spark import gang as spark_gang
from hydrogen_magic.inference.spark.cached_runs import CachedRun
from hydrogen_magic.inference.spark.gang import infer_on_spark
from hydrogen_magic.inference.spark.kept_partitions import KeptPartitions
from hydrogen_magic.inference.spark.prepared import PreparedRun, infer_spark, prepare
from hydrogen_magic.inference.spark.run import SparkRun
from hydrogen_magic.node.prediction.options import InferOptions
from tests import shells, spark_rig
from tests.gangs import PATIENCE_S, wait_until, wait_until_gone
from tests.spark_gangs import busy

pytestmark = [
    pytest.mark.spark,
    pytest.mark.usefixtures("warm_agents"),  # that shells start
    pytest.mark.timeout(300),
]

NO_GPU = JobSpec(gpu=False)
TWICE = "def predict(batch: dict[str, np.ndarray]):\n    return {'twice': 2 * batch['id']}\n"


CLASSIC = pytest.param("classic", marks=pytest.mark.xdist_group("spark"))
CONNECT = pytest.param("connect", marks=pytest.mark.xdist_group("connect"))
CONNECT_TOO = pytest.param(
    "connect", marks=[pytest.mark.xdist_group("connect"), pytest.mark.exhaustive]
)


@pytest.fixture(params=[CLASSIC, CONNECT])
def spark(request: pytest.FixtureRequest) -> Iterator[Any]:
    """This process's session, classic or Connect; files of results are deleted as at the end of a process."""
    yield request.getfixturevalue(request.param)
    folders.delete_all()


on_classic = pytest.mark.parametrize("spark", [CLASSIC], indirect=True)
"""Where Connect would show nothing else."""
mostly_on_classic = pytest.mark.parametrize("spark", [CLASSIC, CONNECT_TOO], indirect=True)
"""Where Connect goes by code that another test of Connect runs as well."""


def captured(
    body: str, namespace: Mapping[str, Any] | None = None, seed: int | None = None
) -> Captured:
    """Return a cell of a notebook that has imported NumPy."""
    import numpy as np

    cell = CellText(body, "<cell 7>", "Cell In[7]", 2, lambda text: text)
    return capture_cell(cell, {"np": np, **(namespace or {})}, ["import numpy as np"], seed=seed)


def inferred(frame: Any, body: str, *, spec: JobSpec = NO_GPU, **options: Any) -> Any:
    cell = captured(body, options.pop("namespace", None), options.pop("seed", None))
    return infer_spark(frame, cell, spec, InferOptions(**options))


def prepared(frame: Any, body: str, **options: Any) -> PreparedRun:
    return prepare(frame, captured(body), NO_GPU, InferOptions(**options))


def plain_report(spark: Any) -> dict[int, dict[str, Any]]:
    """Return what an unrelated job finds in the Python workers, by their process ids."""

    def report(batches: Any) -> Iterator[Any]:
        import json
        import os
        import sys
        import time

        import pyarrow

        for _ in batches:
            pass
        time.sleep(0.3)  # so that no task is done before the last has a worker of its own
        found = {
            "pid": os.getpid(), "env": dict(os.environ), "path": sys.path,
            "main": repr(sys.modules["__main__"]), "finders": list(map(repr, sys.meta_path)),
            "modules": sorted(sys.modules),
        }  # fmt: skip
        yield pyarrow.RecordBatch.from_pydict({"o": [json.dumps(found)]})

    numbers = spark.range(0, 4, 1, 4)
    with sessions.of(numbers).python_workers(memory_settings.ENVIRONMENT):  # the workers of ours
        rows = numbers.mapInArrow(report, "o string").collect()
    found = [json.loads(row.o) for row in rows]
    return {each.pop("pid"): each for each in found}


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────


def test_rows_keep_their_order_and_columns(spark: Any) -> None:
    """The first partitions have no rows; those of the last one come in three batches of Arrow.

    Spark would take names with dots and backticks apart.
    """
    few, many = spark.range(0, 20, 1, 4).where("id >= 15"), spark.range(20, 25_000, 1, 1)
    frame = few.union(many).selectExpr("id as `a.b`", "cast(id as string) as `c``d`")
    body = "def predict(batch): return {'e.f': batch['a.b'] + batch['c`d'].astype(int)}"
    result = inferred(frame, body, batch_size=300)
    assert result.columns == ["a.b", "c`d", "e.f"]
    assert [tuple(row) for row in result.collect()] == [
        (n, str(n), 2 * n) for n in range(15, 25_000)
    ]


@pytest.mark.exhaustive  # options are those of other frames
@on_classic
def test_only_the_selected_columns(spark: Any) -> None:
    frame = spark.range(0, 3, 1, 1).selectExpr("id", "id + 1 as a", "id + 2 as b")
    assert inferred(frame, TWICE, columns=("b", "a")).columns == ["b", "a", "twice"]
    only = inferred(frame, TWICE, only=True, schema="twice float")
    assert [tuple(row) for row in only.collect()] == [(0.0,), (2.0,), (4.0,)]
    changed = "def predict(b):\n    b['a'] *= 10\n    b['new'] = 1.5\n    return b"
    replaced = inferred(frame, changed, replace=("a",))
    assert replaced.columns == ["id", "a", "b", "new"]
    assert [tuple(row) for row in replaced.collect()] == [
        (n, 10 * n + 10, n + 2, 1.5) for n in range(3)
    ]


EVERY_TYPE = (
    "select id, timestamp'2020-01-01 00:00:00' as moment, parse_json('[]') as free, map('k', 1) as m,"
    " cast(null as string) as nothing, interval '3' day as wait, cast(1.5 as decimal(38, 9)) as d,"
    " time'12:34:56' as clock"
    " from range(0, {}, 1, 2)"
)


@on_classic
def test_column_types_are_preserved(spark: Any) -> None:
    """Those that Spark has differently, and what it can only pass on."""
    body = (
        "import pyarrow as pa\n"
        "def predict(batch: pa.Table):\n"
        "    n = batch.num_rows\n"
        "    return {'small': np.full(n, 7, np.uint8), 'half': np.ones(n, np.float16),\n"
        "            'word': pa.array(['a'] * n).dictionary_encode(),\n"
        "            'vector': np.zeros((n, 3), np.float32),\n"
        "            'at': pa.array([0] * n, pa.timestamp('ms', 'Europe/Berlin'))}\n"
    )
    frame = spark.sql(EVERY_TYPE.format(2)).coalesce(1)
    result = inferred(frame, body)
    added = {name: kind for name, kind in result.dtypes if name not in frame.columns}
    assert added == {
        "small": "smallint", "half": "float", "word": "string", "vector": "array<float>",
        "at": "timestamp",
    }  # fmt: skip
    rows = result.collect()
    own = [str(row[: len(frame.columns)]) for row in rows]  # VariantVal compares by identity
    assert own == [str(tuple(row)) for row in frame.collect()]
    assert [(row.small, row.half, row.word, row.vector) for row in rows] == [
        (7, 1.0, "a", [0.0] * 3), (7, 1.0, "a", [0.0] * 3),
    ]  # fmt: skip


SUM_OF_A_VECTOR = """
import hydrogen_magic as hm
total = hm.udf(lambda batch: [v.sum() for v in batch["v"]], "total double", columns=["v"])
"""


@mostly_on_classic
def test_vectors_are_arrays(spark: Any) -> None:
    """Those of Spark ML, dense and sparse."""
    import pandas as pd
    from pyspark.ml.linalg import Vectors, VectorUDT
    from pyspark.sql.types import StructType

    rows = pd.DataFrame({"vector": [Vectors.dense([1.0, 2.0]), Vectors.sparse(2, {1: 3.0})]})
    by_arrow = (
        "spark.sql.execution.arrow.pyspark.enabled"  # otherwise by workers of another environment
    )
    before = spark.conf.get(by_arrow)
    spark.conf.set(by_arrow, "true")
    try:
        frame = spark.createDataFrame(rows, StructType().add("vector", VectorUDT())).coalesce(1)
    finally:
        spark.conf.set(by_arrow, before)
    body = "def predict(batch):\n    return {'sum': [v.sum() for v in batch['vector']]}"
    found = inferred(frame, body).collect()
    assert [(list(row[0]), row[1]) for row in found] == [([1.0, 2.0], 3.0), ([0.0, 3.0], 3.0)]
    with shells.loaded_shell() as shell:
        shell.push({"spark": spark})
        shell.run_cell(SUM_OF_A_VECTOR).raise_error()
        total = shell.user_ns["total"]
    assert [row[0] for row in frame.select(total("vector")).collect()] == [3.0, 3.0]


@mostly_on_classic
def test_frame_without_rows(spark: Any) -> None:
    """Its columns are those of a batch without rows, whatever the types of its own columns are."""
    nothing = spark.range(0).selectExpr(
        "id", "named_struct('a', 1) as `s.t`", "array(1.5) as l", "timestamp'2020-01-01' as at"
    )
    body = TWICE.replace("return {", "return {'at': batch['at'], 'l': batch['l'], ")
    result = inferred(nothing, body, only=True)
    assert result.dtypes == [("at", "timestamp_ntz"), ("l", "array<double>"), ("twice", "bigint")]
    assert result.collect() == []
    declared = inferred(nothing, TWICE, schema="twice float")
    assert (declared.columns[-1], declared.collect()) == ("twice", [])


# ── laziness, and one set-up for all ─────────────────────────────────────────────────────────────


@mostly_on_classic
def test_an_action_predicts_the_rows_that_it_needs_once(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And runs the cell once per worker."""
    runs, log = tmp_path / "runs", tmp_path / "rows"
    runs.touch()
    log.touch()
    body = (
        "import os\n"
        f"with open({str(runs)!r}, 'a') as file:\n"
        "    print(os.getpid(), file=file)\n"
        "def predict(batch):\n"
        f"    with open({str(log)!r}, 'a') as file:\n"
        "        print(len(batch), file=file)\n"
        "    return {'twice': 2 * batch['id'], 'text': batch['id'].astype(str)}\n"
    )

    def n_rows() -> int:
        return sum(map(int, log.read_text().split()))

    frame = inferred(spark.range(0, 1000, 1, 2), body, schema="twice bigint, text string")
    assert (frame.count(), len(frame.select("id").collect())) == (1000, 1000)
    frame.select("id").explain()
    assert "Python" not in capsys.readouterr().out
    assert (runs.read_text(), n_rows()) == ("", 0), "no prediction was needed"
    assert [row.twice for row in frame.where("id < 3").orderBy("id").collect()] == [0, 2, 4]
    assert n_rows() <= 6, "sorting may read the three rows twice"
    before = n_rows()
    used = frame.where("twice < 10 AND text <> '1' AND id < 900")
    assert {tuple(row) for row in used.selectExpr("twice + id", "twice || text").collect()} == {
        (3 * n, f"{2 * n}{n}") for n in (0, 2, 3, 4)
    }
    assert n_rows() == before + 900, "once for all that uses its predictions"
    used.explain()
    plan = capsys.readouterr().out
    assert plan.count("ArrowEvalPython") == 1
    assert plan.index("twice") < plan.index("ArrowEvalPython") < plan.rindex("< 900")

    pids = runs.read_text().split()
    assert 1 <= len(pids) == len(set(pids)) <= 4, "once per worker"
    again = inferred(spark.range(0, 8, 1, 8), body, schema="twice bigint, text string")
    assert [row.twice for row in again.collect()] == list(range(0, 16, 2))
    later = runs.read_text().split()[len(pids) :]
    assert 1 <= len(later) == len(set(later)) <= 4, (
        "once more: what the cell reads may have changed"
    )

    before = n_rows()
    assert len(frame.limit(5).collect()) == 5
    assert n_rows() == before + 5


@on_classic
def test_a_run_neither_sees_nor_leaves_anything_in_the_workers(spark: Any, tmp_path: Path) -> None:
    """Files that the cell has read, the generators of --seed, settings of libraries, and accumulators.

    A broadcast variable is its value.
    """
    factor, counted = tmp_path / "factor", spark.sparkContext.accumulator(0)
    names = {"counted": counted, "one": spark.sparkContext.broadcast([1])}
    frame = spark.range(0, 40, 1, 4)
    body = f"""
import decimal, os, random
factor = int(open({str(factor)!r}).read())
found = [decimal.getcontext().prec, os.getcwd()]
decimal.getcontext().prec = 5
os.chdir("/")
def predict(batch):
    counted.add(len(batch))
    drawn = [random.random() for _ in batch["id"]]
    times = batch["id"] * factor * one.value[0]
    return {{"times": times, "drawn": drawn, "found": [str(found)] * len(batch)}}
"""
    drawn: list[list[float]] = []
    for number in (1, 10, 100):
        factor.write_text(str(number))
        seed = 7 if number < 100 else None
        rows = inferred(frame, body, namespace=names, seed=seed).collect()
        assert [row.times for row in rows] == [number * n for n in range(40)]
        assert all(row.found.startswith("[28, ") and "'/'" not in row.found for row in rows)
        drawn.append([row.drawn for row in rows])
    assert drawn[0] == drawn[1] and len(set(drawn[0])) == 40, "each partition has its own seed"
    assert not set(drawn[2]) & set(drawn[0])
    assert counted.value == 3 * 40, "without the rows that were tried first"


@pytest.mark.exhaustive
@on_classic
def test_actions_on_a_few_rows_log_no_broken_pipe(
    spark: Any, standalone: spark_rig.Standalone, capfd: pytest.CaptureFixture[str]
) -> None:
    """Spark would end a Python worker that still has rows to write, and the worker log that."""
    frame = inferred(spark.range(0, 1_000_000, 1, 4), TWICE, schema="twice bigint")
    logs = list(standalone.folder.glob(f"*-work/{spark.sparkContext.applicationId}/*/stderr"))
    before = {log: log.stat().st_size for log in logs}
    frame.show(5)
    assert [row.twice for row in frame.limit(5).collect()] == [0, 2, 4, 6, 8]
    assert len(frame.take(5)) == 5 and len(frame.limit(5).toPandas()) == 5
    # Workers that serve another job have written what they had to say.
    assert frame.where("id < 100").agg({"twice": "sum"}).collect()[0][0] == 9900
    said = [log.read_text()[size:] for log, size in before.items()]
    assert any("Finished task" in text for text in said), "the logs of this session"
    for text in (*said, *capfd.readouterr()):
        assert "BrokenPipe" not in text and "Traceback" not in text


@pytest.mark.exhaustive
@mostly_on_classic
def test_the_next_job_of_a_python_worker_finds_it_unchanged(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "local_helper.py").write_text("FACTOR = 3\n")
    body = (
        "import os, sys, local_helper\n"
        "os.environ['LEFT_BY_THE_CELL'] = '1'; os.environ.pop('PYTHONHASHSEED', None)\n"
        "sys.path.append('/left/by/the/cell')\n"
        "class Model:\n"
        "    def __call__(self, x): return local_helper.FACTOR * x\n"
        "model = Model()\n"
        "def predict(batch: dict[str, np.ndarray]):\n"
        "    import pickle, hydrogen_magic as hm\n"
        "    assert os.environ['LEFT_BY_THE_CELL'] == '1' and os.environ['ASKED'] == 'yes'\n"
        "    assert '/left/by/the/cell' in sys.path and (hm.rank(), hm.world_size()) == (0, 1)\n"
        "    assert type(pickle.loads(pickle.dumps(model))) is Model\n"
        "    return {'thrice': model(batch['id'])}\n"
    )
    before = plain_report(spark)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        import local_helper

        spec = JobSpec(gpu=False, env=(("ASKED", "yes"),))
        result = inferred(
            spark.range(0, 100, 1, 4), body, spec=spec, schema="thrice bigint",
            namespace={"local_helper": local_helper},
        )  # fmt: skip
    for _ in range(2):  # the second time what the first has put away comes back
        assert result.agg({"thrice": "sum"}).collect()[0][0] == 3 * 4950
    after = plain_report(spark)
    same = before.keys() & after.keys()
    assert same, "no worker served both jobs"
    for pid in same:
        new = set(after[pid].pop("modules")) - set(before[pid].pop("modules"))
        ours = {name for name in new if name.startswith(("hydrogen", "cloudpickle", "local_"))}
        assert ours == set()
        assert after[pid] == before[pid]


@on_classic
def test_a_cell_has_the_notebooks_settings_and_its_worker_those_of_ranks(spark: Any) -> None:
    """For the allocator, which a process reads when it begins."""
    body = (
        "import decimal, os\n"
        "def predict(batch):\n"
        "    with open('/proc/self/environ') as file:\n"
        "        began_with = file.read()\n"
        "    assert 'PYTHONHASHSEED' in began_with\n"
        "    return {'digits': [decimal.getcontext().prec] * len(batch),\n"
        "            'began': ['GLIBC_TUNABLES=glibc.malloc' in began_with] * len(batch),\n"
        "            'has': ['GLIBC_TUNABLES' in os.environ] * len(batch)}\n"
    )
    frame, schema = spark.range(0, 4, 1, 1), "digits long, began boolean, has boolean"
    context = decimal.getcontext()
    before, context.prec = context.prec, 7
    try:
        result = inferred(frame, body, schema=schema)
    finally:
        context.prec = before
    assert {tuple(row)[1:] for row in result.collect()} == {(7, True, False)}
    other = inferred(frame, body + "# another cell", schema=schema)
    assert {row.digits for row in other.collect()} == {28}
    assert "GLIBC_TUNABLES" not in spark.sparkContext.environment


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────


FAILS_AT_700 = (
    "def check(values):\n"
    "    if (values == 700).any():\n"
    "        raise ValueError('seven hundred')\n"
    "def predict(batch: dict[str, np.ndarray]):\n"
    "    check(batch['id'])\n"
    "    return {'same': batch['id']}\n"
)


@mostly_on_classic
def test_what_fails_in_the_first_batch_is_raised_at_once(spark: Any) -> None:
    with pytest.raises(InferError, match="seven hundred") as caught:
        inferred(spark.range(700, 1000, 1, 2), FAILS_AT_700)
    said = str(caught.value)
    assert said.startswith("partition 0: ")
    assert "Cell In[7], line 4, in check" in said
    assert len(said) < 1500
    exits = "import sys\nsys.exit(3)\n"
    with pytest.raises(InferError, match="the cell failed: SystemExit") as caught:
        inferred(spark.range(0, 10, 1, 1), exits + TWICE)
    assert "Cell In[7], line 3" in str(caught.value)


LATE = (
    "def check(values):\n"
    "    if 700 in values:\n"
    "        raise ValueError('seven hundred')\n"
    "def predict(batch):\n"
    "    check(set(batch['id']))\n"
    "    y = [2 * value for value in batch['id']]\n"
    "    if batch['id'].iloc[0] == 500:\n"
    "        y[1:3] = [None, 0.5]\n"
    "    return {'y': y}\n"
)
"""Integers first, later a missing value and a fraction, then an error."""


@mostly_on_classic
def test_a_late_value_that_does_not_fit_is_named(spark: Any) -> None:
    """A lazy frame has the types of its first batch; other rows are kept if errors are."""
    frame = spark.range(0, 1000, 1, 2)
    with pytest.raises(
        Exception, match=r"partition 1: row 2: predict returned 0.5 .*y double"
    ) as caught:
        inferred(frame, LATE, batch_size=100).collect()
    said = str(caught.value)
    assert said.index("partition 1: ") < 200  # after two lines of Spark's
    assert "worker.py" not in said

    result = inferred(frame, LATE, batch_size=100, on_error="collect")
    assert result.dtypes == [("id", "bigint"), ("y", "bigint"), ("error", "string")]
    rows = result.orderBy("id").collect()
    missing = {501, 502, 700}
    assert [row.y for row in rows] == [None if n in missing else 2 * n for n in range(1000)]
    errors = {row.id: row.error for row in rows if row.error is not None}
    assert errors.keys() == {502, 700} and errors[700] == "ValueError: seven hundred"
    assert "0.5 in column 'y', which is bigint" in errors[502]


@pytest.mark.parametrize(
    ("query", "options", "said"),
    [
        ("select 1 as a, 2 as a", {}, r"more than one column 'a'"),
        ("select 1 as a, 2 as A", {}, r"more than one column 'a'"),
        ("select id, interval '1-2' year to month as age from range(1)", {}, r"column 'age' has type inter"),
        ("select id, array() as v from range(1)", {}, r"column 'v' has type array<void>"),
        ("select id, named_struct('a', 1, 'a', 2) as s from range(1)", {}, r"column 's' has type struct"),
        ("select id, 1 as twice from range(1)", {}, r"'twice'.*--replace twice"),
        ("select id, 1 as TWICE from range(1)", {}, r"'TWICE'"),
        ("select id from range(1)", {"columns": ("no",)}, r"no column 'no'"),
        ("select id.* from (select struct() as id)", {}, "the frame has no columns"),
        ("select id from range(1)", {"schema": "twice money"}, r"money"),
    ],
)  # fmt: skip
def test_unsupported_input_is_refused_before_anything_runs(
    spark: Any, query: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InferError, match=said):
        inferred(spark.sql(query), TWICE, **{"schema": "twice bigint", **options})


@on_classic
def test_a_first_batch_of_nulls_has_no_type(spark: Any) -> None:
    body = "def predict(batch: dict[str, np.ndarray]):\n    return {'x': [%s] * len(batch['id'])}\n"
    for value, said in (("None", "has no value"), ("{'a': 1, 'b': None}", "is struct.*null parts")):
        with pytest.raises(InferError, match=f"column 'x' {said}.*--schema"):
            inferred(spark.range(0, 10, 1, 1), body % value)


# ── functions ────────────────────────────────────────────────────────────────────────────────────


IN_A_NOTEBOOK = """
import hydrogen_magic as hm
OFFSET = 7
def shifted(values):
    return values + OFFSET
def predict(batch):
    if list(batch.columns) != ["id", "a.b"]:
        raise ValueError(f"columns {list(batch.columns)}")
    return shifted(batch["id"] + batch["a.b"])
score = hm.udf(predict, "score double")
both = hm.udf(lambda b: {"x": b["id"], "y": b["id"].astype(str)}, "x bigint, y string")
double = hm.udf(lambda b: b["id"] * 2, "id bigint")
named = hm.udf(predict, "p double", columns=["id", "a.b"])
"""


@mostly_on_classic
def test_a_predict_is_a_function_of_dataframes_and_of_sql(spark: Any) -> None:
    with shells.loaded_shell() as shell:
        # One partition: each cell is loaded once, and a failure ends one worker.
        frame = spark.range(0, 4, 1, 1).selectExpr("id", "10 * id as `a.b`")
        frame.createOrReplaceTempView("rows_of_udf")
        shell.push({"spark": spark, "df": frame})
        shell.run_cell(IN_A_NOTEBOOK).raise_error()
        score, both, double, named = map(shell.user_ns.get, ("score", "both", "double", "named"))
        tens = frame["id"] * 10
        found = frame.select(
            score("id", "`a.b`").alias("by_name"),
            score(frame["id"], tens.alias("a.b")).alias("by_alias"),
            named("id", tens.alias("id")).alias("of_one_name"),
            double("id").alias("id"),
            both.asNondeterministic()("id").alias("struct"),
        ).collect()
        assert [tuple(row)[:3] for row in found] == [(x,) * 3 for x in (7.0, 18.0, 29.0, 40.0)]
        assert [row.id for row in found] == [0, 2, 4, 6]
        assert [tuple(row.struct) for row in found] == [(n, str(n)) for n in range(4)]
        with pytest.raises(Exception, match=r"columns \['id'\]") as caught:
            frame.select(score("id")).collect()
        assert "in predict" in str(caught.value)

        spark.udf.register("score", score)
        spark.udf.register("named", named)
        by_sql = spark.sql("SELECT score(struct(id, `a.b`)), named(id, `a.b`) FROM rows_of_udf")
        assert [tuple(row) for row in by_sql.collect()] == [(row.by_name,) * 2 for row in found]
        with pytest.raises(Exception, match=r"write struct\(a, b\) instead of a, b"):
            spark.sql("SELECT score(id, `a.b`) FROM rows_of_udf").collect()


@pytest.mark.exhaustive
@on_classic
def test_a_stream_takes_a_function(spark: Any, tmp_path: Path) -> None:
    import hydrogen_magic as hm

    spark.range(0, 4, 1, 1).write.parquet(str(tmp_path / "rows"))
    stream = spark.readStream.schema("id long").parquet(str(tmp_path / "rows"))
    with pytest.raises(InferError, match=r"streaming DataFrame: .* hm\.udf\(predict, schema\)"):
        inferred(stream, TWICE, schema="twice bigint")
    with pytest.raises(TypeError, match="write the stream to a table"):
        hm.dataset(stream)
    with shells.loaded_shell() as shell:
        shell.push({"spark": spark})
        shell.run_cell(OF_ONE_SESSION).raise_error()
        scored = stream.select(shell.user_ns["same"]("id").alias("same"))
    writer = scored.writeStream.format("memory").queryName("predicted_stream")
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(PATIENCE_S)
    assert sorted(spark.table("predicted_stream").collect()) == [(n,) for n in range(4)]


OF_ONE_SESSION = """
import hydrogen_magic as hm
same = hm.udf(lambda batch: batch["id"], "same bigint")
"""


@pytest.mark.parametrize("spark", [CONNECT], indirect=True)
def test_a_function_is_for_one_session(spark: Any) -> None:
    """A classic one is refused in test_after_a_restart_of_spark."""
    with shells.loaded_shell() as shell:
        shell.push({"spark": spark})
        shell.run_cell(OF_ONE_SESSION).raise_error()
        same = shell.user_ns["same"]
    other = type(spark).builder.remote(sessions.of(spark.range(1)).where).create()
    try:
        with pytest.raises(
            Exception, match=r"belongs to another Spark session: call hm\.udf again"
        ):
            other.range(0, 3, 1, 1).select(same("id")).collect()
    finally:
        other.stop()
    here = spark.range(0, 3, 1, 1)
    assert len(here.select(same("id")).collect()) == 3
    with pytest.raises(OptionTypeError, match=r"one or more columns, as in score\("):
        same()


# ── GPUs, and runs of our own ────────────────────────────────────────────────────────────────────


@on_classic
def test_every_task_has_a_gpu_of_its_own(spark: Any, tmp_path: Path) -> None:
    body = (
        "import os, time\n"
        "def predict(batch: dict[str, np.ndarray]):\n"
        f"    open(os.path.join({str(tmp_path)!r}, str(os.getpid())), 'w').close()\n"
        f"    while len(os.listdir({str(tmp_path)!r})) < 4:\n"
        "        time.sleep(0.02)  # four tasks at once\n"
        "    here = os.environ['HYDROGEN_MAGIC_DEVICE'], os.environ['LOCAL_RANK']\n"
        "    return {'where': [' '.join(here)] * len(batch['id'])}\n"
    )
    result = inferred(spark.range(0, 4, 1, 4), body, spec=JobSpec(), schema="where string")
    found = {row["where"] for row in result.collect()}
    numbers = [where.split()[1] for where in found]
    assert found == {f"cuda:{number} {number}" for number in numbers} and len(found) == 4
    assert set(map(int, numbers)) <= set(range(spark_rig.GPUS)), "as Spark's worker reports them"


@pytest.mark.exhaustive  # stop and resume are tested above
@on_classic
def test_a_resumed_run_predicts_only_the_partitions_that_are_missing(
    spark: Any, tmp_path: Path
) -> None:
    log, go = tmp_path / "log", tmp_path / "go"
    log.touch()
    body = (
        "import os, time\n"
        "def predict(batch: dict[str, np.ndarray]):\n"
        f"    while batch['id'][0] >= 500 and not os.path.exists({str(go)!r}):\n"
        "        time.sleep(0.05)\n"
        f"    with open({str(log)!r}, 'a') as file:\n"
        "        file.write(f\"{batch['id'][0]}\\n\")\n"
        "    return {'twice': 2 * batch['id']}\n"
    )
    frame = spark.range(0, 1000, 1, 4)
    first = SparkRun(prepared(frame, body, schema="twice bigint"))
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(first.result)
        spark_rig.until(lambda: sum(done for done, _ in first.stages().values()) >= 2, PATIENCE_S)
        first.stop()
        with pytest.raises(GangStoppedError):
            stopped.result(PATIENCE_S)
    go.touch()
    prints = {"the cell": "a", "the frame's columns": "c"}
    application = first._session.application
    cached_runs.keep(CachedRun("g1", prints, first.unfinished, application))
    with pytest.raises(InferError, match="run g1 has finished rows, but the cell changed"):
        cached_runs.find({**prints, "the cell": "b"}, application)
    begun = cached_runs.find(prints, application)
    assert begun is not None
    result = SparkRun(prepared(frame, body, schema="twice bigint"), begun=begun.frame).result()
    assert [row["twice"] for row in result.orderBy("id").collect()] == list(range(0, 2000, 2))
    rows = sorted(map(int, log.read_text().split()))
    assert [row for row in rows if row < 500] == [0, 250], "these partitions were cached"
    cached_runs.forget(prints)
    assert cached_runs.find(prints, application) is None


@mostly_on_classic
def test_a_run_that_is_stopped_before_it_begins_runs_nothing(spark: Any, tmp_path: Path) -> None:
    run = SparkRun(prepared(spark.range(4), f"open({str(tmp_path / 'ran')!r}, 'w')\n" + TWICE))
    run.stop()
    with pytest.raises(GangStoppedError):
        run.result()
    assert not (tmp_path / "ran").exists()


# ── runs in the user's hands ─────────────────────────────────────────────────────────────────────


N_ROWS = 20_000
SLEEPS = (
    "import time\n"
    "def predict(batch: dict[str, np.ndarray]):\n"
    "    time.sleep(0.15)\n"
    "    return {'twice': 2 * batch['id']}\n"
)
HANGS = (
    "import time\n"
    "def predict(batch: dict[str, np.ndarray]):\n"
    "    time.sleep(120)\n"
    "    return {'twice': 2 * batch['id']}\n"
)
HOLDS_ON = HANGS.replace(
    "    time.sleep(120)\n",
    "    try:\n        time.sleep(120)\n    except KeyboardInterrupt:\n        time.sleep(120)\n",
)
HANGS_IN_THE_CELL = "import time\ntime.sleep(120)\n" + TWICE


def launched(
    spark: Any, body: str, n_rows: int = N_ROWS, n_tasks: int = 2, **options: Any
) -> InferenceRun:
    """Start a run. Each task has a Python worker, which takes a third of a second to load the cell."""
    frame = spark.range(0, n_rows, 1, n_tasks)
    given = InferOptions(**{"batch_size": 1000, "schema": "twice bigint", **options})
    return infer_on_spark(frame, captured(body), NO_GPU, given, title="%%infer df")


@on_classic  # the Connect server of the tests has no UI, by which jobs are known
def test_a_run_says_which_job_holds_all_slots(spark: Any, tmp_path: Path) -> None:
    with busy(spark, 4, tmp_path) as let_go:
        run = launched(spark, TWICE)
        holder = r"2 executors; job \d+ \(.*\) holds 4 slots"
        wait_until(lambda: re.fullmatch(holder, run.gang.snapshot().waits_for))
        assert run.gang.snapshot().queued == (0, 1)
        let_go()
        assert run.result.count() == N_ROWS


@on_classic
def test_a_run_whose_job_has_not_failed_has_no_task_that_may_still_run(spark: Any) -> None:
    run = launched(spark, "def predict(batch): return {'ID': batch['id']}", schema=None)
    assert run.gang.wait(PATIENCE_S)
    assert "more than one column 'id'" in run.gang.snapshot().reason
    assert run.gang.snapshot().notices == ()


@on_classic
def test_a_python_worker_that_dies_is_named(spark: Any) -> None:
    run = launched(
        spark,
        "import os, time\ndef predict(batch):\n    time.sleep(1)\n    os.kill(os.getpid(), 9)",
    )
    assert run.gang.wait(PATIENCE_S)
    ended = run.gang.snapshot()
    named = r"the Python worker of task \d on host \S+ \(executor \d+\) exited unexpectedly .*"
    assert re.fullmatch(named, ended.reason)
    assert [rank.failure.error.type for rank in ended.ranks if rank.failure] == ["WorkerLost"]


def rows_done(run: InferenceRun) -> list[ev.RowsDone]:
    return [event for event in run.gang.events() if isinstance(event, ev.RowsDone)]


def pids_at(run: InferenceRun, phase: str, least: int = 2) -> set[int]:
    """Return the Python workers that are in a phase, once they are so many."""

    def found() -> set[int]:
        return {rank.pid for rank in run.gang.ranks if rank.phase == phase and rank.pid}

    spark_rig.until(lambda: len(found()) >= least, PATIENCE_S)
    return found()


@mostly_on_classic
def test_a_run_is_a_gang_whose_rows_are_counted_live(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_gang, "_LAST_REPORT_S", 10.0)
    run = launched(spark, SLEEPS, schema=None)
    assert run.gang.wait(PATIENCE_S)
    assert run.result.agg({"twice": "sum"}).collect()[0][0] == N_ROWS * (N_ROWS - 1)
    run.result.unpersist()
    told = rows_done(run)
    done = [each.done for each in told]
    assert done == sorted(done) and done[-1] == told[-1].total == N_ROWS
    assert len({n for n in done if 0 < n < N_ROWS}) >= 2, "progress is seen while it runs"
    assert 1 <= max(each.in_flight for each in told) <= 2
    assert [rank.phase for rank in run.gang.ranks] == ["done"] * len(run.gang.ranks)
    assert sum(rank.bar.n for rank in run.gang.ranks if rank.bar) == N_ROWS
    assert run.gang.results == [None] * len(run.gang.ranks)


@mostly_on_classic
def test_stop_ends_a_predict_in_the_middle(spark: Any) -> None:
    run = launched(spark, HANGS)
    pids = pids_at(run, "running")
    assert any("time.sleep" in text or "predict" in text for text in run.gang.stacks().values())
    run.gang.stop()
    wait_until_gone(pids)
    assert run.gang.wait(PATIENCE_S)
    assert run.gang.state == "STOPPED"
    with pytest.raises(GangStoppedError):
        _ = run.result
    again = launched(spark, TWICE, 100)
    assert again.gang.wait(PATIENCE_S) and again.result.count() == 100
    again.result.unpersist()


@mostly_on_classic
def test_stop_does_not_wait_for_spark_to_end_the_workers(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark cancels nothing at first, so that we end the workers alone, which takes it seconds."""
    run = launched(spark, HOLDS_ON)
    pids = pids_at(run, "running")
    with monkeypatch.context() as patch:
        patch.setattr(sessions.Session, "cancel", lambda self, tag: None)
        run.gang.stop()
        wait_until_gone(pids)
    run.gang.stop(kill=True)
    assert run.gang.wait(PATIENCE_S)
    assert run.gang.state == "STOPPED"


@mostly_on_classic
def test_stop_ends_a_cell_that_is_still_loading(spark: Any) -> None:
    run = launched(spark, HANGS_IN_THE_CELL, schema=None)
    pids = pids_at(run, "loading", 1)
    run.gang.stop()
    assert run.gang.wait(PATIENCE_S)
    wait_until_gone(pids)
    assert run.gang.state == "STOPPED"


# ── finished partitions ──────────────────────────────────────────────────────────────────────────


def waiting_cell(folder: Path) -> str:
    """Return a cell whose second half of the rows waits for ``go``; it leaves a line for every batch."""
    (folder / "log").touch()
    return (
        "import os, time\n"
        "def predict(batch: dict[str, np.ndarray]):\n"
        f"    while batch['id'][0] >= 500 and not os.path.exists({str(folder / 'go')!r}):\n"
        f"        assert not os.path.exists({str(folder / 'fail')!r}), 'no more'\n"
        "        time.sleep(0.05)\n"
        f"    with open({str(folder / 'log')!r}, 'a') as file:\n"
        "        file.write(f\"{batch['id'][0]}\\n\")\n"
        "    return {'twice': 2 * batch['id']}\n"
    )


def wait_for_parts(n: int) -> None:
    runs = run_log.runs_dir()
    spark_rig.until(lambda: len(list(runs.glob("*/kept/*/*.part"))) == n, PATIENCE_S)


def check_resumed(result: Any, folder: Path) -> None:
    assert [tuple(row) for row in result.collect()] == [(n, 2 * n) for n in range(1000)]
    result.unpersist()
    rows = map(int, (folder / "log").read_text().split())
    assert [row for row in rows if row < 500] == [0], "this partition was finished"
    assert not list(run_log.runs_dir().glob("*/kept"))


@mostly_on_classic
def test_stop_returns_finished_partitions_and_resume_predicts_the_others(
    spark: Any, tmp_path: Path
) -> None:
    body, line = waiting_cell(tmp_path), "df --schema 'twice bigint' --quiet"
    with shells.loaded_shell() as shell:
        shell.run_cell("import numpy as np")
        shell.push({"df": spark.range(0, 1000, 1, 2)})
        run = shell.run_cell_magic("infer", f"{line} --detach", body)
        wait_for_parts(1)
        shell.run_line_magic("gang", f"stop {run.gang.id}")
        part = run.result
        assert run.gang.state == "STOPPED"
        (text,) = [each.text for each in run.gang.snapshot().notices if "--resume" in each.text]
        assert text.startswith("500 rows in 1 partition are finished and kept")
        (tmp_path / "go").touch()
        with pytest.raises(InferError, match="the cell changed since"):
            shell.run_cell_magic("infer", f"{line} --resume", f"{body}    # …\nfactor = 3\n")
        shell.push({"df": spark.range(1, 1001, 1, 2)})
        with pytest.raises(InferError, match=r"rows of partition \d have changed"):
            shell.run_cell_magic("infer", f"{line} --resume", body)
        shell.push({"df": spark.range(0, 1000, 1, 2)})
        check_resumed(shell.run_cell_magic("infer", f"{line} --resume", body), tmp_path)
    assert [tuple(row) for row in part.collect()] == [(n, 2 * n) for n in range(500)]


@on_classic
def test_a_run_that_fails_keeps_its_finished_partitions(spark: Any, tmp_path: Path) -> None:
    cell = captured(waiting_cell(tmp_path))
    frame, options = spark.range(0, 1000, 1, 2), InferOptions(schema="twice bigint")
    run = infer_on_spark(frame, cell, NO_GPU, options, title="%%infer df")
    wait_for_parts(1)
    (tmp_path / "fail").touch()
    assert run.gang.wait(PATIENCE_S)
    with pytest.raises(InferError, match="no more"):
        _ = run.result
    (text,) = [each.text for each in run.gang.snapshot().notices if "--resume" in each.text]
    assert text.startswith("500 rows in 1 partition are finished and kept")
    (tmp_path / "go").touch()
    run = infer_on_spark(frame, cell, NO_GPU, options, title="%%infer df", resume=True)
    check_resumed(run.result, tmp_path)
    rows = run.gang.snapshot().rows
    assert rows is not None and (rows.done, rows.resumed) == (1000, 500)


@on_classic
def test_resume_is_refused_in_another_time_zone(spark: Any) -> None:
    """``predict`` gets times in the zone of the session."""
    frame = spark.sql("select named_struct('at', timestamp'2024-07-01 22:30:00Z') as s")
    options, zone = InferOptions(schema="hour int"), "spark.sql.session.timeZone"
    zones = ["UTC", "UTC", "Asia/Tokyo"]
    before = spark.conf.get(zone)
    try:
        prints = []
        for name in zones:
            spark.conf.set(zone, name)
            prints.append(cached_runs.fingerprint(frame, captured(TWICE), NO_GPU, options))
    finally:
        spark.conf.set(zone, before)
    assert prints[0] == prints[1] != prints[2]
    with pytest.raises(InferError, match=r"but spark\.sql\.session\.timeZone changed since"):
        fingerprints.matching(prints[2], [("g1", None, prints[0])])


IN_ANOTHER_KERNEL = """
import sys
from pathlib import Path
from pyspark.sql import SparkSession
from tests.spark.test_infer_spark import launched, waiting_cell
builder = SparkSession.builder
url, body = sys.argv[1], waiting_cell(Path(sys.argv[2]))
spark = builder.remote(url).create() if "sc:" in url else builder.master(url).getOrCreate()
launched(spark, body, 1000).gang.wait()
"""


@pytest.mark.exhaustive
def test_a_killed_kernel_leaves_its_finished_partitions(
    spark: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    site: spark_rig.Site = request.getfixturevalue("spark_site")
    is_connect = "connect" in type(spark).__module__
    url = request.getfixturevalue("connect_server").url if is_connect else "local[4]"
    command = [sys.executable, "-c", IN_ANOTHER_KERNEL, url, str(tmp_path)]
    with subprocess.Popen(command, env=site.driver()) as kernel:
        wait_for_parts(1)
        kernel.kill()
    (tmp_path / "go").touch()
    frame = spark.range(0, 1000, 1, 2)
    options = InferOptions(batch_size=1000, schema="twice bigint")
    cell = captured(waiting_cell(tmp_path))
    run = infer_on_spark(frame, cell, NO_GPU, options, title="%%infer df", resume=True)
    assert run.gang.wait(PATIENCE_S)
    check_resumed(run.result, tmp_path)


@mostly_on_classic
def test_without_a_shared_disk_partitions_are_in_sparks_cache(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is reported once for a Spark application."""
    monkeypatch.setattr(spark_gang, "_without_shared_disk", set())
    told = KeptPartitions.instructions
    nowhere = {"folder": "/not/on/this/machine"}
    monkeypatch.setattr(KeptPartitions, "instructions", lambda kept: {**told(kept), **nowhere})
    log = tmp_path / "log"
    body = TWICE.replace(
        "    return", f"    with open({str(log)!r}, 'a') as file: file.write('x')\n    return"
    )
    texts = []
    for n_runs in (1, 2):
        run = launched(spark, body, 1000, n_tasks=1)
        assert run.gang.wait(PATIENCE_S)
        assert log.read_text() == "x" * n_runs, "predicted by the run, not when its result is used"
        assert [row.twice for row in run.result.collect()] == list(range(0, 2000, 2))
        run.result.unpersist()
        texts += [notice.text for notice in run.gang.snapshot().notices]
    assert log.read_text() == "xx", "collect() reads the cache"
    (text,) = texts
    assert "executors cannot write" in text and "HYDROGEN_MAGIC_HOME" in text


ALL_KINDS = (
    "import decimal\n"
    "import pyarrow as pa\n"
    "def predict(batch: dict[str, np.ndarray]):\n"
    "    n, late = len(batch['id']), batch['id'][0] >= 4\n"
    "    whole = pa.array([2**63 + 5 if late else 1] * n, pa.uint64() if late else pa.int64())\n"
    "    return {'whole': whole, 'clock': pa.array([3600 * 10**9] * n, pa.time64('ns')),\n"
    "            'wait': pa.array([1500] * n, pa.duration('ns')),\n"
    "            'at': pa.array([10**13 if late else 0] * n, pa.timestamp('s')),\n"
    "            'sum': [decimal.Decimal(10**45 if late else 1)] * n}\n"
)
"""Values that Spark cannot hold, some of them only in later rows."""


@on_classic
def test_no_type_ends_a_run_that_collects_errors(spark: Any) -> None:
    run = launched(spark, ALL_KINDS, 8, schema=None, on_error="collect")
    assert run.gang.wait(PATIENCE_S)
    texts = {"whole": "string", "clock": "string", "at": "string", "sum": "string"}
    wait, error = {"wait": "interval day to second"}, {"error": "string"}
    assert dict(run.result.dtypes[1:]) == {**texts, **wait, **error}
    rows = [row.asDict() for row in run.result.orderBy("id").collect()]
    run.result.unpersist()
    same = {"clock": "01:00:00", "wait": dt.timedelta(microseconds=1), "error": None}
    first = {"whole": "1", "at": "1970-01-01 00:00:00", "sum": "1", **same}
    last = {
        "whole": f"{2**63 + 5}",
        "at": "<value out of range: 10000000000000>",
        "sum": f"{10**45}",
    }
    assert (rows[0], rows[-1]) == ({"id": 0, **first}, {"id": 7, **last, **same})

    lazy = inferred(spark.range(0, 8, 1, 2), ALL_KINDS, on_error="collect")
    kinds = {"whole": "bigint", "clock": "string", "at": "timestamp_ntz", "sum": "decimal(38,0)"}
    assert dict(lazy.dtypes[1:]) == {**kinds, **wait, **error}
    *_, row = lazy.orderBy("id").collect()
    assert (row.whole, row["at"], row["sum"], row.clock) == (None, None, None, "01:00:00")
    assert all(f"predict returned {last[name]} in column {name!r}" in row.error for name in last)


@mostly_on_classic
def test_the_result_of_a_run_has_the_frames_columns_and_late_values(spark: Any) -> None:
    frame = spark.sql(EVERY_TYPE.format(600))
    options = InferOptions(replace=("id",), batch_size=100)
    body = LATE.replace("{'y': y}", "{'id': batch['id'] + 0.5, 'nothing yet': None, 'y': y}")
    run = infer_on_spark(frame, captured(body), NO_GPU, options, title="%%infer df")
    assert run.gang.wait(PATIENCE_S)
    changed = frame.selectExpr(
        "id + 0.5d as id", "* except (id)", "cast(null as string) as `nothing yet`",
        "case id when 501 then null when 502 then 0.5d else 2d * id end as y",
    )  # fmt: skip
    assert run.result.dtypes == changed.dtypes
    # Spark Connect refuses to collect a TIME column.
    found, expected = (
        each.withColumn("clock", each["clock"].cast("string")).collect()
        for each in (run.result, changed)
    )
    assert sorted(map(str, found)) == sorted(map(str, expected))
    run.result.unpersist()
    (notice,) = run.gang.snapshot().notices
    rounded = (
        "column 'y' is double, which rounds integers above 2**53, since predict returned int64"
    )
    assert notice.text.startswith(rounded)


@on_classic
def test_a_stop_while_the_result_is_read_releases_it(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_files = SparkRun._from_files

    def stopped(run: SparkRun, kept: KeptPartitions) -> Any:
        run.stop()
        return from_files(run, kept)

    monkeypatch.setattr(SparkRun, "_from_files", stopped)
    n_cached = spark.sparkContext._jsc.getPersistentRDDs().size()
    run = launched(spark, TWICE, 100, n_tasks=1)
    assert run.gang.wait(PATIENCE_S)
    with pytest.raises(GangStoppedError):
        run.result  # noqa: B018
    assert spark.sparkContext._jsc.getPersistentRDDs().size() == n_cached


# ── other endings ────────────────────────────────────────────────────────────────────────────────


@mostly_on_classic
def test_a_failing_batch_fails_the_gang(spark: Any) -> None:
    run = launched(spark, FAILS_AT_700, 4000, batch_size=100, schema="same bigint")
    assert run.gang.wait(PATIENCE_S)
    with pytest.raises(InferError, match=r"partition 0: .*rows 700 to 799") as caught:
        _ = run.result
    assert "Cell In[7], line 4, in check" in str(caught.value)
    state = run.gang.snapshot()
    assert state.state == "FAILED"
    assert "seven hundred" in state.reason and "\n" not in state.reason
    assert [rank.failure.error.type for rank in state.ranks if rank.failure] == ["InferError"]


@mostly_on_classic
def test_tasks_that_cannot_reach_the_kernel_go_on(
    spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        RemoteAgentPool, "listen", lambda self, addresses, ports: ["tcp://127.0.0.1:9"]
    )
    run = launched(spark, SLEEPS)
    assert run.gang.wait(PATIENCE_S)
    assert run.result.count() == N_ROWS
    run.result.unpersist()
    told = rows_done(run)
    assert (told[-1].done, told[-1].total) == (N_ROWS, N_ROWS), "by Spark's own count"
    assert {each.done for each in told[:-1]} <= {0}
    if "connect" not in type(spark).__module__:  # whose server tells of what takes seconds
        before_the_count = [each for each in told if (each.tasks_done or 0) < 2]
        assert {each.tasks for each in before_the_count} - {None} == {2}


@mostly_on_classic
def test_rows_without_a_prediction_are_reported(spark: Any) -> None:
    options = {"batch_size": 100, "schema": "same bigint", "on_error": "null"}
    run = launched(spark, FAILS_AT_700, 4000, **options)
    assert run.gang.wait(PATIENCE_S)
    assert [row.id for row in run.result.where("same is null").collect()] == [700]
    run.result.unpersist()
    assert rows_done(run)[-1].failed == 1
    (failed,) = (notice.text for notice in run.gang.snapshot().notices)
    assert failed.startswith("1 row got no prediction: partition 0: predict failed on row 700: ")
    assert "seven hundred" in failed


@mostly_on_classic
def test_the_magic_shows_a_run_and_keeps_out_lazy(spark: Any) -> None:
    with shells.loaded_shell() as shell:
        shell.run_cell("import numpy as np")
        shell.push({"df": spark.range(0, 10, 1, 2)})
        known = set(known_gangs.gangs())
        line = "df --schema 'twice bigint'"
        assert shell.run_cell_magic("infer", f"{line} --out scored", TWICE) is None
        assert shell.user_ns["scored"].count() == 10
        assert set(known_gangs.gangs()) <= known, "a lazy result starts no gang"
        kept = shell.run_cell_magic("infer", line, TWICE)
        assert kept.columns == ["id", "twice"]
        kept.unpersist()
        (gang,) = (gang for name, gang in known_gangs.gangs().items() if name not in known)
        assert (gang.state, gang.snapshot().placement) == ("SUCCEEDED", "spark")
