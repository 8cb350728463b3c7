"""``hm.dataset(frame)``: writes a frame once as Parquet, and returns a handle that travels with a cell.

Spark DataFrame ── Spark's tasks ────────────────────────► path=, or this machine with a local master
                └─ a partition at a time by the session ─► this machine
pandas, Polars, Arrow, … ── row group by row group ──────► path=, or this machine
Parquet data ── nothing is written
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from hydrogen_magic.driver.datasets import folders, handles, writing
from hydrogen_magic.errors import InferError
from hydrogen_magic.inference import sources
from hydrogen_magic.node import data_files
from hydrogen_magic.node.data_files import AnyPath
from hydrogen_magic.node.dataset_handle import DatasetHandle
from hydrogen_magic.node.worker import nesting
from hydrogen_magic.views.row_progress import RowProgress

_CHUNK_ROWS = 256
"""Rows of the first chunk of a frame; later ones have some megabytes."""


def dataset(frame: Any, path: AnyPath | None = None, *, reuse: bool = True) -> DatasetHandle:
    """Return a handle to a frame's rows, which every rank of a cell reads by :func:`hydrogen_magic.shard`.

    The handle has the size of a few names. The rows are written once as Parquet, and deleted when the
    process of the notebook ends, or by ``handle.delete()``; ``with hm.dataset(frame) as rows:`` does that at
    its end. Data that an ``--outlive`` gang uses stays until the end of the gang. What a killed process has
    left is deleted by the next one that calls this function or loads the extension. A write that fails or is
    interrupted leaves nothing.

    Args:
        frame: One of

            * a Spark DataFrame, of a classic session or of Spark Connect. With ``path``, and with a local
              master, Spark's own tasks write. Otherwise the rows come to this machine by the session, a
              partition at a time. Vectors of Spark ML become arrays.
            * a pandas DataFrame, without its index; a Polars DataFrame or LazyFrame; a PyArrow Table; a
              Hugging Face Dataset; or another object with ``__arrow_c_stream__``.
            * the path, URL or glob of Parquet data, or a list of these: nothing is written, and the handle
              deletes nothing.
        path: A folder or URL that all ranks can read, in which a folder for the data is created. For a
            Spark DataFrame, Spark's executors and the process of the notebook have to see it as well. By
            default the data is on the notebook's machine, in the state directory; before a gang starts,
            it is sent to those of its hosts that do not see this directory and lack it.
        reuse: Return the earlier handle for a Spark DataFrame that has the same plan, columns and ``path``
            as one that was written before. Spark compares plans, not data: False writes again after
            files or tables that it reads have changed. Other frames are always written again.

    Raises:
        TypeError: The frame is of another kind, or streaming, or has columns that Parquet does not support.
        ValueError: The frame has no rows, or the data at the path is not Parquet.
        FileNotFoundError: There is no data at the path.
        OSError: The data cannot be written, as to a full disk, or a URL cannot be read.
        ImportError: The package that reads URLs of this scheme is not installed.
        RuntimeError: It is called on a rank.
        HydrogenError: The Spark job failed, or its files are not visible here.

    Example::

        rows = hm.dataset(spark.table("digits"))       # in one cell

        part = hm.shard(rows, batch_size=256, shuffle=True)     # under %%distributed
        for epoch in range(3):
            part.set_epoch(epoch)
            for batch in part:
                loss = model(batch["pixels"])
    """
    if nesting.is_rank():
        raise RuntimeError(
            "hm.dataset() writes a frame of the notebook: call it there, and hm.shard() on its handle here"
        )
    kind = sources.kind_of(frame)
    if kind == "path":
        return _of_files(frame, path)
    if kind == "spark":
        from hydrogen_magic.driver.datasets import spark

        return spark.dataset(frame, path, reuse=reuse)
    source = _source(frame)
    try:
        with RowProgress(source.n_rows) as progress:
            return handles.written(
                folders.new(path),
                lambda to: writing.write(_tables(source), source.schema, to, progress.add),
            )
    finally:
        sources.close(source)


def _of_files(frame: Any, path: AnyPath | None) -> DatasetHandle:
    if path is not None:
        raise TypeError("hm.dataset(path=…) is for frames: this data is Parquet data already")
    is_one = isinstance(frame, (str, os.PathLike))
    full = data_files.full_path
    handle = handles.of_files(full(frame) if is_one else tuple(map(full, frame)))
    if not handle.n_rows:
        raise ValueError(handles.NO_ROWS)
    return handle


# ── frames in memory ─────────────────────────────────────────────────────────────────────────────


def _source(frame: Any) -> sources.FrameSource:
    try:
        return sources.source(frame, caller="hm.dataset()", formats="Parquet")
    except InferError as error:
        raise TypeError(str(error)) from error


def _tables(source: sources.FrameSource) -> Iterator[Any]:
    import pyarrow as pa

    for chunk in source.chunks(_CHUNK_ROWS):
        is_table = isinstance(chunk, pa.Table)
        yield chunk if is_table else pa.Table.from_batches([chunk.to_batch()])
