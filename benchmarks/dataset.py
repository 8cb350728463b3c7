"""Batches to train on from a table: seconds for one shuffled epoch, everything set up before.

    python benchmarks/dataset.py --rounds 3
    python benchmarks/dataset.py --what small             # no large table
    python benchmarks/dataset.py --only hm.shard          # without the others
    python benchmarks/dataset.py --quick                  # fewer rows, no large table

Two million rows of 16 float32 and a label, batches of 1,024 as tensors, one process, in turn: ``hm.shard``
of a handle of ``hm.dataset``; a torch DataLoader over the pandas frame; Mosaic's StreamingDataset; and the
loader of Spark's TorchDistributor, which does not shuffle. "In memory" is a bound and not a loader: tensors
of the whole table, indexed by a random order. Torch has one thread in all of them. Processor time is given
too: it says more on a machine that does other things. Then a table of 10 GB: rows per second, and the most
memory. The peers that handle one row at a time read a twentieth of it. A DataLoader over pandas is not among
them: it holds the whole table.
Mosaic's package (``mosaicml-streaming``) is used where it is installed. ``make bench`` does not install it:
it would replace torch and NumPy.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from _common import Peer, chosen, chosen_peers, lacks, peer_table, round_robin, timed
from _results import Run, Table, parse_arguments, report

N_FEATURES = 16
BATCH = 1024
PRODUCT = "hm.shard"
IN_MEMORY = "in memory"
LARGE_BYTES = 10_000_000_000
LARGE_FEATURES = 64
LARGE_FILES = 40
LARGE_GROUP_ROWS = 400_000
PEER_FILES = LARGE_FILES // 20
"""Of those that handle one row at a time, and take minutes for all."""
SHUFFLE_ROWS = 10_000
"""Buffer of a peer that shuffles by one."""


def frame(n_rows: int) -> Any:
    import numpy as np
    import pandas as pd

    rows = np.random.default_rng(0).random((n_rows, N_FEATURES), dtype=np.float32)
    return pd.DataFrame({"x": list(rows), "label": np.arange(n_rows)})


def consume(batches: Iterable[Any], n_rows: int) -> None:
    """Use each batch as little as possible; every row has to come."""
    seen = sum(len(batch["label"] if isinstance(batch, dict) else batch[1]) for batch in batches)
    assert seen == n_rows, f"{seen} of {n_rows} rows"


def consume_new(batches: Callable[[], Iterable[Any]], n_rows: int) -> None:
    """:func:`consume` what ``batches`` returns."""
    consume(batches(), n_rows)


# ── peers ────────────────────────────────────────────────────────────────────────────────────────


def of_product(df: Any) -> Callable[[], Iterable[Any]]:
    import hydrogen_magic as hm

    part = hm.shard(hm.dataset(df), batch_size=BATCH, shuffle=True)
    epochs = iter(range(1_000))

    def batches() -> Iterable[Any]:
        part.set_epoch(next(epochs))
        found: Iterable[Any] = part
        return found

    return batches


def of_pandas(df: Any, workers: int) -> Callable[[], Iterable[Any]]:
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):  # type: ignore[misc]
        def __init__(self) -> None:
            self.x, self.label = df["x"].to_numpy(), df["label"].to_numpy()

        def __len__(self) -> int:
            return len(self.label)

        def __getitem__(self, place: int) -> Any:
            return self.x[place], self.label[place]

    loader = DataLoader(Rows(), BATCH, shuffle=True, num_workers=workers)
    return lambda: loader


def of_tensors(df: Any) -> Callable[[], Iterable[Any]]:
    import numpy as np
    import torch

    x, label = torch.tensor(np.stack(df["x"])), torch.tensor(df["label"].to_numpy())
    return lambda: ((x[places], label[places]) for places in torch.randperm(len(x)).split(BATCH))


def of_mosaic(
    parts: Iterable[Any], n_features: int, folder: Path, workers: int
) -> Callable[[], Iterable[Any]]:
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    place = folder / f"mosaic-{n_features}"
    columns = {"x": f"ndarray:float32:{n_features}", "label": "int64"}
    with MDSWriter(out=str(place), columns=columns) as writer:
        for part in parts:
            for x, label in zip(part["x"], part["label"], strict=True):
                writer.write({"x": x, "label": label})
    rows = StreamingDataset(local=str(place), batch_size=BATCH, shuffle=True)
    loader = DataLoader(rows, BATCH, num_workers=workers)
    return lambda: loader


def of_spark(parts: Iterable[Any], folder: Path, workers: int) -> Callable[[], Iterable[Any]]:
    import pyarrow as pa
    from pyspark.ml.torch.data import _SparkPartitionTorchDataset
    from pyspark.sql.types import ArrayType, FloatType, LongType, StructField, StructType
    from torch.utils.data import DataLoader

    file, n_rows = folder / "partition.arrow", 0
    columns = pa.schema({"x": pa.list_(pa.float32()), "label": pa.int64()})
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, columns) as stream:
        for part in parts:
            table = pa.table({"x": part["x"], "label": part["label"]}, schema=columns)
            stream.write_table(table, max_chunksize=10_000)  # as Spark's tasks do
            n_rows += len(table)
    schema = StructType(
        [StructField("x", ArrayType(FloatType())), StructField("label", LongType())]
    )
    rows = _SparkPartitionTorchDataset(str(file), schema, n_rows)
    loader = DataLoader(rows, BATCH, num_workers=workers)
    return lambda: loader


def of_hugging_face(files: list[Path], folder: Path, workers: int) -> Callable[[], Iterable[Any]]:
    from datasets import load_dataset
    from torch.utils.data import DataLoader

    names = [str(file) for file in files]
    cache = str(folder / "hugging-face")
    rows = load_dataset("parquet", data_files=names, split="train", streaming=True, cache_dir=cache)
    mixed = rows.shuffle(seed=0, buffer_size=SHUFFLE_ROWS)
    # The fastest way: tensors of each row take three times as long.
    loader = DataLoader(mixed.with_format("numpy").batch(BATCH), None, num_workers=workers)
    return lambda: loader


def measure(run: Run, n_rows: int) -> None:
    df = frame(n_rows)
    with tempfile.TemporaryDirectory(prefix="hydrogen-bench-") as place:
        folder = Path(place)
        makers: dict[str, tuple[Callable[[], Callable[[], Iterable[Any]]], str]] = {
            PRODUCT: (lambda: of_product(df), ""),
            IN_MEMORY: (lambda: of_tensors(df), ""),
            "DataLoader, pandas": (lambda: of_pandas(df, 0), ""),
            "DataLoader, pandas, 2 workers": (lambda: of_pandas(df, 2), ""),
            "Mosaic, 2 workers": (
                lambda: of_mosaic([df], N_FEATURES, folder, 2),
                lacks("streaming"),
            ),
            "Spark's loader, 1 worker": (lambda: of_spark([df], folder, 1), lacks("pyspark")),
        }
        peers = chosen_peers(
            [Peer(name, lambda: 0.0, why) for name, (_, why) in makers.items()], run.only
        )
        for peer in peers:
            if not peer.missing:
                batches = makers[peer.name][0]()
                peer.measure = partial(timed, partial(consume_new, batches, n_rows))
        used = {peer.name: with_processor_time(peer) for peer in peers}
        round_robin(peers, run.rounds)
    measured = [peer for peer in peers if peer.seconds]
    more = {
        "thousand rows/s": {peer.name: n_rows / peer.median_s / 1e3 for peer in measured},
        "s of processors": {peer.name: statistics.median(used[peer.name]) for peer in measured},
    }
    title = f"{n_rows:,} rows, one epoch"
    report(run, peer_table("dataset", title, peers, PRODUCT, more))


def with_processor_time(peer: Peer) -> list[float]:
    """Have each measurement of a peer add its processor time, that of its worker processes included."""
    seconds, measure = [], peer.measure

    def measured() -> float:
        before = sum(os.times()[:4])
        found = measure()
        seconds.append(sum(os.times()[:4]) - before)
        return found

    peer.measure = measured
    return seconds


# ── a table that is larger than the memory it may take ───────────────────────────────────────────


def write_large(folder: Path, n_rows: int) -> None:
    """Write files as Spark does: row groups of a hundred megabytes."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random, size = np.random.default_rng(0), n_rows // LARGE_FILES
    for number in range(LARGE_FILES):
        values = pa.array(random.random(size * LARGE_FEATURES, dtype=np.float32))
        x = pa.FixedSizeListArray.from_arrays(values, LARGE_FEATURES)
        table = pa.table({"x": x, "label": np.arange(size) + number * size})
        path = folder / f"{number:03}.parquet"
        pq.write_table(table, path, row_group_size=LARGE_GROUP_ROWS, use_dictionary=False)


def measure_large(run: Run) -> None:
    from tests.memory import Memory

    size = LARGE_BYTES // (4 * LARGE_FEATURES + 8) // LARGE_FILES
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory(prefix="hydrogen-bench-") as place:
        folder, table = Path(place), Path(place) / "table"
        table.mkdir()
        write_large(table, size * LARGE_FILES)
        files = sorted(table.iterdir())
        n_bytes, few = sum(file.stat().st_size for file in files), files[:PEER_FILES]
        loaders: dict[str, tuple[Callable[[], Callable[[], Iterable[Any]]], int, str]] = {
            f"{PRODUCT}, in order": (lambda: of_table(table, shuffle=False), LARGE_FILES, ""),
            f"{PRODUCT}, shuffled": (lambda: of_table(table, shuffle=True), LARGE_FILES, ""),
            "Mosaic, 2 workers, shuffled": (
                lambda: of_mosaic(parts_of(few), LARGE_FEATURES, folder, 2),
                PEER_FILES,
                lacks("streaming"),
            ),
            "datasets, 2 workers, shuffled": (
                lambda: of_hugging_face(few, folder, 2),
                PEER_FILES,
                lacks("datasets"),
            ),
            "Spark's loader, 1 worker, in order": (
                lambda: of_spark(parts_of(few), folder, 1),
                PEER_FILES,
                lacks("pyspark"),
            ),
        }
        names = chosen(loaders, run.only)
        left_out = {name: why for name in names if (why := loaders[name][2])}
        for name in names:
            if name not in left_out:
                make, n_files, _ = loaders[name]
                batches, n_rows = make(), size * n_files
                with Memory() as memory:
                    seconds = timed(partial(consume_new, batches, n_rows))
                speed = n_rows / seconds / 1e3, n_bytes / len(files) * n_files / seconds / 1e6
                grown_mb = (memory.peak - memory.before) / 1e6
                rows.append([name, n_rows / 1e6, seconds, *speed, grown_mb])
    headings = ("", "million rows", "seconds", "thousand rows/s", "MB/s")
    columns = {**dict.fromkeys(headings, ""), "most memory": "MB"}
    title = f"a table of {n_bytes / 1e9:.1f} GB, one epoch"
    report(run, Table("dataset_large", title, columns, rows, left_out))


def of_table(table: Path, *, shuffle: bool) -> Callable[[], Iterable[Any]]:
    import hydrogen_magic as hm

    part: Iterable[Any] = hm.shard(hm.dataset(str(table)), batch_size=BATCH, shuffle=shuffle)
    return lambda: part


def parts_of(files: Iterable[Path]) -> Iterator[Any]:
    """Yield the table in pieces of which each fits into memory."""
    import numpy as np
    import pyarrow.parquet as pq

    for file in files:
        for part in pq.ParquetFile(file).iter_batches(100_000):
            x = np.asarray(part["x"].flatten()).reshape(-1, LARGE_FEATURES)
            yield {"x": list(x), "label": part["label"].to_numpy()}


def main() -> None:
    packages = ("torch", "pandas", "pyarrow", "pyspark", "mosaicml-streaming", "datasets")
    tables = ["small", "large"]
    run = parse_arguments(
        __doc__.splitlines()[0],
        rounds=3,
        quick_rounds=1,
        packages=packages,
        more=lambda parser: parser.add_argument(
            "--what", nargs="+", default=tables, choices=tables, help="which tables; default both"
        ),
    )
    print(f"dataset: {run.machine}", flush=True)
    import torch

    torch.set_num_threads(1)  # those that wait for each other would take most of the time
    if "small" in run.what:
        measure(run, 200_000 if run.quick else 2_000_000)
    if "large" in run.what and not run.quick:
        measure_large(run)


if __name__ == "__main__":
    main()
