"""Data in an object store: read by ranks, and by the kernel for ``%%infer``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hydrogen_magic as hm
from tests import object_store
from tests.gangs import ended

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


IN_A_NOTEBOOK = """
import sys
import pyarrow.parquet as pq
from IPython.core.interactiveshell import InteractiveShell
import hydrogen_magic as hm
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "hydrogen_magic")
rows = hm.dataset("s3a://lake/rows")
def count():
    return sum(len(batch["x"]) for batch in hm.shard(rows, batch_size=4)) + 10
gang = hm.launch(count, np=2)
gang.wait()
print(rows.n_rows, gang.results)
def predicted(source, name):
    target = f"{sys.argv[1]}/{name}.parquet"
    cell = "def predict(batch): return {'twice': 2 * batch['x']}"
    shell.run_cell_magic("infer", f'"{source}" --np 2 --quiet --out "{target}"', cell)
    return pq.read_table(target)
table = predicted("s3a://lake/rows", "all")
print(len(table), sum(table["twice"].to_pylist()) // 2, sorted(table.column_names))
print(len(predicted("s3a://lake/rows/*/1.parquet", "glob")))
"""
"""In a process of its own: the client of a store keeps a connection for its process."""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Twenty rows in two files, and the credentials in the environment."""
    (tmp_path / "rows" / "year=2026").mkdir(parents=True)
    for n in range(2):
        rows = pa.table({"x": range(10 * n, 10 * n + 10)})
        pq.write_table(rows, tmp_path / "rows" / "year=2026" / f"{n}.parquet", row_group_size=4)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-user")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with object_store.serving(tmp_path) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        yield


@pytest.mark.usefixtures("store")
def test_an_object_store(tmp_path: Path) -> None:
    """With the credentials of the environment; Spark's name for S3 is one of its names."""

    def reads() -> tuple[list[list[int]], tuple[int | None, list[str], int]]:
        return shares(), columns()

    def shares() -> list[list[int]]:
        found = (hm.shard(f"{scheme}://lake/rows") for scheme in ("s3", "s3a"))
        batches = hm.shard("s3a://lake/rows/*/*.parquet", batch_size=4)
        return [*(table["x"].to_pylist() for table in found), [len(table) for table in batches]]

    def columns() -> tuple[int | None, list[str], int]:
        # On a rank, too: the client of a store keeps a connection for its process.
        from hydrogen_magic.inference import sources

        source = sources.source("s3a://lake/rows", tmp_path / f"done-{hm.rank()}")
        n_rows = sum(chunk.num_rows for chunk in source.chunks(5))
        return source.n_rows, source.schema.names, n_rows

    for rank, (read, found) in enumerate(ended(hm.launch(reads, np=2)).results):
        assert read == [list(range(10 * rank, 10 * rank + 10))] * 2 + [[4, 4, 2]]
        assert found == (20, ["x", "year"], 20)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("store")
def test_datasets_and_predictions_of_an_object_store(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", IN_A_NOTEBOOK, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    expected = ["20 [20, 20]", "20 190 ['twice', 'x', 'year']", "10"]
    assert found.stdout.splitlines()[-3:] == expected, found.stdout + found.stderr
