"""Tables as one Parquet file of small row groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hydrogen_magic.node import data_files

GROUP_BYTES = 8 << 20
"""Size of a row group in memory: small, since a shuffle mixes the rows of several at a time, and since
ranks divide the data by row groups."""


def write(tables: Iterable[Any], schema: Any, folder: str, report: Callable[[int], None]) -> None:
    """Write all rows to a new file in ``folder``; call ``report`` with the number of rows after each group.

    ``folder``: path or URL. Raises OSError, and TypeError for types that Parquet lacks.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from hydrogen_magic.node.prediction.arrow_types import family

    filesystem, place = data_files.open_folder(folder)
    schema = schema.remove_metadata()
    path = f"{place}/rows.parquet"
    # Dictionaries of numbers, which rarely repeat, would take most of the time and a third of the file.
    texts = [
        field.name for field in schema if family(field.type) in ("text", "bytes", "dictionary")
    ]
    try:
        with pq.ParquetWriter(
            path, schema, filesystem=filesystem, compression="lz4", use_dictionary=texts
        ) as writer:
            for table in _groups(tables):
                writer.write_table(table.cast(schema), row_group_size=max(1, table.num_rows))
                report(table.num_rows)
    except pa.ArrowNotImplementedError as error:
        from hydrogen_magic.inference.parquet_result import is_writable

        refused = next((field for field in schema if not is_writable(pa.schema([field]))), None)
        if refused is None:
            raise
        raise TypeError(
            f"hm.dataset(): column {refused.name!r} is {refused.type}, which Parquet does not have: cast it, "
            "or leave it out"
        ) from error


def _groups(tables: Iterable[Any]) -> Iterator[Any]:
    import pyarrow as pa

    from hydrogen_magic.node.prediction.arrow_types import size_bytes

    waiting: list[Any] = []
    n_bytes = 0
    for table in tables:
        waiting.append(table)
        n_bytes += size_bytes(table)
        if n_bytes >= GROUP_BYTES:
            yield pa.concat_tables(waiting)
            waiting, n_bytes = [], 0
    if waiting:
        yield pa.concat_tables(waiting)
