"""Data in an object store: read by ranks, and by the kernel for ``%%infer``."""

from __future__ import annotations

from pathlib import Path

import pytest

import hydrogen_magic as hm
from tests import object_store
from tests.gangs import ended

pq = pytest.importorskip("pyarrow.parquet")


def test_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the credentials of the environment; Spark's name for S3 is one of its names."""
    import pyarrow as pa

    (tmp_path / "rows" / "year=2026").mkdir(parents=True)
    for n in range(2):
        rows = pa.table({"x": range(10 * n, 10 * n + 10)})
        pq.write_table(rows, tmp_path / "rows" / "year=2026" / f"{n}.parquet", row_group_size=4)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-user")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with object_store.serving(tmp_path) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)

        def shares() -> list[list[int]]:
            found = (hm.shard(f"{scheme}://lake/rows") for scheme in ("s3", "s3a"))
            batches = hm.shard("s3a://lake/rows/*/*.parquet", batch_size=4)
            return [*(table["x"].to_pylist() for table in found), [len(table) for table in batches]]

        def columns() -> tuple[int | None, list[str], int]:
            # On a rank, too: the client of a store keeps a connection for its process.
            from hydrogen_magic.inference import sources

            source = sources.source("s3a://lake/rows", tmp_path / "done")
            n_rows = sum(chunk.num_rows for chunk in source.chunks(5))
            return source.n_rows, source.schema.names, n_rows

        for rank, read in enumerate(ended(hm.launch(shares, np=2)).results):
            assert read == [list(range(10 * rank, 10 * rank + 10))] * 2 + [[4, 4, 2]]
        assert ended(hm.launch(columns, np=1)).result == (20, ["x", "year"], 20)
