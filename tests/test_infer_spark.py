"""``%%infer`` over Spark DataFrames: on executors that have nothing of ours, classic and Connect."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hydrogen_magic.capture import Captured, CellText, capture_cell
from hydrogen_magic.errors import InferError
from hydrogen_magic.infer.on_spark import infer_spark
from hydrogen_magic.infer.spark_run import SparkRun
from hydrogen_magic.predict.options import InferOptions
from hydrogen_magic.spec import JobSpec
from tests import spark_rig

pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.timeout(240),
]

NO_GPU = JobSpec(gpu=False)
TWICE = "def predict(batch: dict[str, np.ndarray]):\n    return {'twice': 2 * batch['id']}\n"


@pytest.fixture(scope="module", params=["classic", "connect"])
def spark(request: pytest.FixtureRequest, spark_site: spark_rig.Site) -> Iterator[Any]:
    """One session after the other: what is left of a classic one's objects would not leave Connect
    alone, as their finalizers run in any thread and open connections."""
    if request.param == "classic":
        cluster = request.getfixturevalue("standalone")
        with spark_rig.session(spark_site, cluster.url, **spark_rig.GPU_OPTIONS) as session:
            yield session
    else:
        yield from _connect(spark_site)


def _connect(site: spark_rig.Site) -> Iterator[Any]:
    from pyspark.sql.connect.session import SparkSession

    server = spark_rig.ConnectServer(site, "local[2]")
    try:
        session = SparkSession.builder.remote(server.url).create()
        session.range(1).collect()  # the channel is opened with the first call
        with pytest.raises(Exception, match="no good"):  # and threads for good with the first error
            session.sql("select raise_error('no good')").collect()
        yield session
        session.stop()
    finally:
        server.close()


on_classic = pytest.mark.parametrize("spark", ["classic"], indirect=True)
"""Where Connect would show nothing else."""


def captured(body: str, namespace: Mapping[str, Any] | None = None) -> Captured:
    """Return a cell of a notebook that has imported NumPy."""
    import numpy as np

    cell = CellText(body, "<cell 7>", "Cell In[7]", 2, lambda text: text)
    return capture_cell(cell, {"np": np, **(namespace or {})}, ["import numpy as np"])


def inferred(frame: Any, body: str, *, spec: JobSpec = NO_GPU, **options: Any) -> Any:
    namespace = options.pop("namespace", None)
    return infer_spark(frame, captured(body, namespace), spec, InferOptions(**options))


def plain_report(spark: Any) -> dict[int, dict[str, Any]]:
    """Return what a job of somebody else's finds in the Python workers, by their process ids."""

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

    rows = spark.range(0, 4, 1, 4).mapInArrow(report, "o string").collect()
    found = [json.loads(row.o) for row in rows]
    return {each.pop("pid"): each for each in found}


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────


def test_rows_keep_their_order_and_columns(spark: Any) -> None:
    frame = spark.range(0, 10_000, 1, 5).selectExpr("id", "cast(id as string) as name")
    result = inferred(frame, TWICE, batch_size=300)
    assert result.columns == ["id", "name", "twice"]
    rows = result.collect()
    assert [tuple(row) for row in rows] == [(n, str(n), 2 * n) for n in range(10_000)]


@on_classic
def test_columns_that_are_asked_for(spark: Any) -> None:
    frame = spark.range(3).selectExpr("id", "id + 1 as a", "id + 2 as b")
    assert inferred(frame, TWICE, columns=("b", "a")).columns == ["b", "a", "twice"]
    only = inferred(frame, TWICE, only=True, schema="twice float")
    assert [tuple(row) for row in only.collect()] == [(0.0,), (2.0,), (4.0,)]


@on_classic
def test_types_come_through(spark: Any) -> None:
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
    frame = spark.sql(
        "select id, timestamp'2020-01-01 00:00:00' as moment, parse_json('{}') as free,"
        " cast(null as string) as nothing, interval '3' day as wait, cast(1.5 as decimal(38, 9)) as d"
        " from range(2)"
    )
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


def test_partitions_without_rows(spark: Any) -> None:
    frame = spark.range(0, 1000, 1, 4).where("id >= 990")
    assert [row.twice for row in inferred(frame, TWICE).collect()] == list(range(1980, 2000, 2))


def test_frame_without_rows(spark: Any) -> None:
    nothing = spark.range(0)
    with pytest.raises(InferError, match=r"no rows.*--schema"):
        inferred(nothing, TWICE)
    result = inferred(nothing, TWICE, schema="twice bigint")
    assert (result.columns, result.collect()) == (["id", "twice"], [])


# ── laziness, and one set-up for all ─────────────────────────────────────────────────────────────


def test_nothing_runs_before_an_action_and_the_cell_once_per_worker(
    spark: Any, tmp_path: Path
) -> None:
    (tmp_path / "runs").touch()
    body = f"import os\nwith open({str(tmp_path / 'runs')!r}, 'a') as file:\n"
    body += "    print(os.getpid(), file=file)\n" + TWICE
    frame = spark.range(0, 1000, 1, 8)
    result = inferred(frame, body, schema="twice bigint")
    assert (tmp_path / "runs").read_text() == ""
    for _ in range(3):
        assert result.count() == 1000
        assert result.agg({"twice": "sum"}).collect()[0][0] == 999_000
    again = inferred(frame.where("id < 500"), body, schema="twice bigint")
    assert again.agg({"twice": "sum"}).collect()[0][0] == 249_500
    pids = (tmp_path / "runs").read_text().split()
    assert 1 <= len(pids) == len(set(pids)) <= 4


def test_the_next_job_of_a_worker_finds_nothing_of_ours(spark: Any, tmp_path: Path) -> None:
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


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────


FAILS_AT_700 = (
    "def check(values):\n"
    "    if (values == 700).any():\n"
    "        raise ValueError('seven hundred')\n"
    "def predict(batch: dict[str, np.ndarray]):\n"
    "    check(batch['id'])\n"
    "    return {'same': batch['id']}\n"
)


def test_a_failing_batch_is_named_in_what_spark_raises(spark: Any) -> None:
    result = inferred(spark.range(0, 1000, 1, 2), FAILS_AT_700, batch_size=100)
    with pytest.raises(Exception, match="seven hundred") as caught:
        result.collect()
    said = str(caught.value)
    assert said.index("partition 1: ") < 200  # after two lines of Spark's
    assert "rows 200 to 299" in said
    assert "Cell In[7], line 4, in check" in said
    assert "worker.py" not in said


def test_a_failing_first_batch_is_told_at_once(spark: Any) -> None:
    with pytest.raises(InferError, match="seven hundred") as caught:
        inferred(spark.range(700, 1000, 1, 2), FAILS_AT_700)
    said = str(caught.value)
    assert said.startswith("partition 0: ")
    assert "Cell In[7], line 4, in check" in said
    assert len(said) < 1500


@on_classic
def test_a_failing_cell_is_told_at_once(spark: Any) -> None:
    with pytest.raises(InferError, match="the cell failed: ZeroDivisionError") as caught:
        inferred(spark.range(10), "1 / 0\n" + TWICE)
    assert "Cell In[7], line 2" in str(caught.value)
    with pytest.raises(InferError, match="SystemExit"):
        inferred(spark.range(10), "import sys\nsys.exit(3)\n" + TWICE)


@on_classic
def test_other_rows_survive_with_on_error(spark: Any) -> None:
    result = inferred(spark.range(0, 1000, 1, 2), FAILS_AT_700, batch_size=100, on_error="collect")
    assert result.columns == ["id", "same", "error"]
    rows = result.collect()
    failed = [row.id for row in rows if row.error is not None]
    assert failed == [700]
    assert all(row.same == (None if row.error else row.id) for row in rows)


@pytest.mark.parametrize(
    ("query", "options", "said"),
    [
        ("select 1 as a, 2 as a", {}, r"more than one column 'a'"),
        ("select 1 as a, 2 as A", {}, r"more than one column 'a'"),
        ("select id, interval '1-2' year to month as age from range(1)", {}, r"column 'age' is inter"),
        ("select id, named_struct('a', 1, 'a', 2) as s from range(1)", {}, r"column 's' is struct"),
        ("select id, 1 as twice from range(1)", {}, r"'twice'.*another name"),
        ("select id, 1 as TWICE from range(1)", {}, r"'TWICE'"),
        ("select id from range(1)", {"columns": ("no",)}, r"no column 'no'"),
        ("select id from range(1)", {"schema": "twice money"}, r"money"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_before_anything_runs(
    spark: Any, query: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InferError, match=said):
        inferred(spark.sql(query), TWICE, **{"schema": "twice bigint", **options})


@on_classic
def test_a_first_batch_of_nulls_has_no_type(spark: Any) -> None:
    body = (
        "def predict(batch: dict[str, np.ndarray]):\n    return {'x': [None] * len(batch['id'])}\n"
    )
    with pytest.raises(InferError, match=r"column 'x'.*--schema"):
        inferred(spark.range(10), body)


# ── GPUs, and runs of our own ────────────────────────────────────────────────────────────────────


@on_classic
def test_every_task_knows_its_gpu(spark: Any) -> None:
    body = (
        "import os, time\n"
        "def predict(batch: dict[str, np.ndarray]):\n"
        "    time.sleep(0.5)\n"
        "    here = os.environ['HYDROGEN_MAGIC_DEVICE'], os.environ['LOCAL_RANK']\n"
        "    return {'where': [' '.join(here)] * len(batch['id'])}\n"
    )
    result = inferred(spark.range(0, 4, 1, 4), body, spec=JobSpec(), schema="where string")
    found = {row["where"] for row in result.collect()}
    assert found == {f"cuda:{number} {number}" for number in range(4)}  # the rig's workers say so


def test_a_run_of_our_own_is_counted_and_kept(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "batches").touch()
    body = (
        "def predict(batch: dict[str, np.ndarray]):\n"
        f"    with open({str(tmp_path / 'batches')!r}, 'a') as file:\n"
        "        file.write('x')\n"
        "    return {'twice': 2 * batch['id']}\n"
    )
    run = SparkRun(inferred(spark.range(0, 1000, 1, 4), body, schema="twice bigint"))
    kept = run.result()
    done, total = run.progress()
    assert done == total
    assert total >= 4 or "connect" in type(spark).__module__, "Connect tells of what takes seconds"
    assert kept.count() == 1000
    assert (tmp_path / "batches").read_text() == "x" * 4
    kept.unpersist()
