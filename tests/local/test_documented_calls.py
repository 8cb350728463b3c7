"""Lines of Databricks' documentation: those that change or need no cluster, with what to write."""

from __future__ import annotations

import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from hydrogen_magic.driver.datasets import folders
from tests.documented import Case, cases, covers

pytest.importorskip("pyarrow")
pytestmark = pytest.mark.usefixtures("warm_agents")

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs code as cells of one notebook; returns its names."""
    main = types.ModuleType("__main__")
    vars(main).update(FOLDER=str(tmp_path), df=frame())
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.chdir(tmp_path)

    def run(code: str, **names: Any) -> dict[str, Any]:
        vars(main).update(names)
        exec(IMPORTS + textwrap.dedent(code), vars(main))
        return vars(main)

    yield run
    folders._delete_all()


IMPORTS = "import os, torch, hydrogen_magic as hm\nBATCH_SIZE = 16\n"


def frame(n_rows: int = 64) -> pd.DataFrame:
    numbers = np.arange(n_rows)
    features = list(np.ones((n_rows, 3), np.float32))
    return pd.DataFrame({"x": numbers, "features": features, "label_index": numbers % 2})


# ── data ─────────────────────────────────────────────────────────────────────────────────────────

DATA = cases(
    """
`from petastorm.spark import SparkDatasetConverter, make_spark_converter`
`converter = make_spark_converter(df)`
`len(converter)`
`converter.delete()`
    rows = hm.dataset(df)
    assert rows.n_rows == 64
    rows.delete()
    assert not os.path.exists(rows.path)

`spark.conf.set(SparkDatasetConverter.PARENT_CACHE_DIR_URL_CONF, "file:///dbfs/…")`
`petastorm.spark.converter.parentCacheDirUrl` in the cluster's configuration
`dbutils.fs.mkdirs(work_dir)`
    work_dir = FOLDER + "/petastorm"
    os.makedirs(work_dir)
    rows = hm.dataset(df, path=work_dir)
    assert rows.path.startswith(work_dir)

`parquet_row_group_size_bytes=32000000`, `compression_codec="snappy"`
    import pyarrow.parquet as pq
    rows = hm.dataset(df)
    (file,) = [os.path.join(rows.path, name) for name in os.listdir(rows.path)]
    assert pq.ParquetFile(file).num_row_groups == 1

`with converter.make_torch_dataloader(batch_size=BATCH_SIZE) as loader`
`batch['features'].to(device), batch['label_index'].to(device)`
`num_epochs=1`
`workers_count=4`
    device = torch.device("cpu")
    loader = hm.shard(hm.dataset(df), batch_size=BATCH_SIZE, shuffle=True)
    shapes = [batch['features'].to(device).shape for batch in loader]
    assert shapes == [(16, 3)] * 4
    assert all(batch['label_index'].to(device).dtype == torch.int64 for batch in loader)

`make_batch_reader("file:///dbfs/…", num_epochs=100)`
`pq.EXCLUDED_PARQUET_PATHS.update(underscore_files)`
`dbfs:/Volumes/…` of Unity Catalog as `remote`
    os.makedirs("parquet")
    df.to_parquet("parquet/part-0.parquet")
    open("parquet/_SUCCESS", "w").close()
    part = hm.shard(FOLDER + "/parquet", batch_size=16).to_torch()
    assert [batch["features"].shape for batch in part] == [(16, 3)] * 4

`dataframe_to_mds(df, merge_index=True, mds_kwargs={'out': folder, 'columns': …})`
`MDSWriter(out=folder, columns={'x': 'ndarray', 'label': 'int'})`
`'compression': 'zstd'`, `'hashes': ['sha1']` of `mds_kwargs`
`udf_iterable=…`, a preprocessing function
    folder = FOLDER + "/mds"
    rows = hm.dataset(df[["x", "features"]], path=folder)
    assert [name for name, _ in rows.columns] == ["x", "features"]

`loader.state_dict()`, `loader.load_state_dict(state)`
    rows = hm.dataset(df)
    part = hm.shard(rows, batch_size=16, shuffle=True)
    batches = iter(part)
    seen = [int(x) for x in next(batches)["x"]]
    state = part.state_dict()
    batches.close()
    again = hm.shard(rows, batch_size=16, shuffle=True)
    again.load_state_dict(state)
    rest = [int(x) for batch in again for x in batch["x"]]
    assert sorted(seen + rest) == list(range(64))
"""
)


@pytest.mark.parametrize("case", DATA, ids=str)
def test_data(case: Case, run: Run) -> None:
    run(case.code)


# ── data on ranks ────────────────────────────────────────────────────────────────────────────────

DATA_OF_RANKS = cases(
    """
`cur_shard=hvd.rank(), shard_count=hvd.size()`
`num_epochs=None`, `steps_per_epoch = len(converter) // (BATCH_SIZE * hvd.size())`
`transform_spec=TransformSpec(transform_row, edit_fields=…, selected_fields=…)`
    rows = hm.dataset(df)
    def transform(batch):
        return {"features": 2 * batch["features"], "label_index": batch["label_index"].int()}
    def train():
        part = hm.shard(rows, batch_size=BATCH_SIZE, shuffle=True)
        orders = []
        for epoch in range(2):
            part.set_epoch(epoch)
            batches = [(transform(batch), batch["x"]) for batch in part]
            assert len(batches) == len(part)
            assert all(batch["features"].sum() == 2 * 48 for batch, _ in batches)
            orders.append([int(x) for _, numbers in batches for x in numbers])
        return orders
    results = hm.launch(train, np=2).results
    for first, second in zip(*results):
        assert sorted(first + second) == list(range(64))
    assert results[0][0] != results[0][1]

`StreamingDataset(local=…, remote=…, batch_size=64, shuffle=True)`
`shuffle_seed=9176`
`StreamingDataLoader(dataset, batch_size=64, num_workers=2)`
`clean_stale_shared_memory()`, problems of Python 3.11 with shared memory
    part = hm.shard(hm.dataset(df), batch_size=16, shuffle=True, seed=9176)
    loader = torch.utils.data.DataLoader(part, batch_size=None, num_workers=2)
    assert sorted(int(x) for batch in loader for x in batch["x"]) == list(range(64))

`load_state_dict` with another number of ranks
    rows = hm.dataset(df)
    state = hm.shard(rows, batch_size=16).state_dict()
    def train():
        hm.shard(rows, batch_size=16).load_state_dict(state)
    try:
        hm.run(train, np=2)
    except RuntimeError as error:
        assert "start the epoch again with set_epoch()" in str(error), error
    else:
        raise AssertionError("a state of one rank was loaded by two")
"""
)


@pytest.mark.exhaustive  # tests of hm.shard have smaller ones
@pytest.mark.parametrize("case", DATA_OF_RANKS, ids=str)
def test_data_of_ranks(case: Case, run: Run) -> None:
    run(case.code)


TENSORFLOW = cases(
    """
`with converter.make_tf_dataset(batch_size=BATCH_SIZE) as dataset`
`dataset.map(lambda x: (x.features, x.label_index))`
`make_petastorm_dataset(reader)`
    import keras
    rows = hm.dataset(df)
    part = hm.shard(rows, batch_size=BATCH_SIZE).to_tf()
    dataset = ((batch["features"], batch["label_index"]) for batch in part)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(dataset, steps_per_epoch=len(part))
    assert len(history.history["loss"]) == 1
    for batch in hm.shard(rows.path, batch_size=16).to_tf():
        assert batch["features"].shape == (16, 3)
"""
)


@pytest.mark.exhaustive
@pytest.mark.tensorflow
@pytest.mark.parametrize("case", TENSORFLOW, ids=str)
def test_data_for_tensorflow(case: Case, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    run(case.code)


# ── calls ────────────────────────────────────────────────────────────────────────────────────────

CALLS = cases(
    """
`dist.run(fine_tune_llama2, epochs=1, max_steps=1)`
`from pyspark.ml.deepspeed.deepspeed_distributor import DeepspeedTorchDistributor`
    from hydrogen_magic.compat import DeepspeedTorchDistributor
    def fine_tune(*, epochs=3, max_steps=200):
        return epochs, max_steps, int(os.environ["LOCAL_RANK"])
    dist = DeepspeedTorchDistributor(numGpus=2, useGpu=False, deepspeedConfig={"fp16": {"enabled": True}})
    assert dist.run(fine_tune, epochs=1, max_steps=1) == (1, 1, 0)
"""
)


@pytest.mark.parametrize("case", CALLS, ids=str)
def test_calls(case: Case, run: Run) -> None:
    run(case.code)


# ── HorovodEstimator ─────────────────────────────────────────────────────────────────────────────


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
def test_the_estimator_has_what_replaces_the_options() -> None:
    """Its own tests train with it."""
    estimators = pytest.importorskip("hydrogen_magic.spark")
    options = inspect.signature(estimators.TorchEstimator).parameters
    expected = {"train", "np", "featuresCols", "labelCol", "validation", "epochs", "rendezvous"}
    assert expected <= set(options)
