"""What pandas wrote into the schema of Arrow data, for a result without some of its columns."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

_KEY = b"pandas"


def of_kept(schema: pa.Schema, kept: list[str]) -> dict[bytes, bytes] | None:
    """Return the metadata of ``schema`` for a result that keeps these columns.

    Entries of pandas tell the dtypes of columns, which predicted ones may replace, and which are the index.
    """
    metadata: dict[bytes, bytes] | None = schema.metadata
    if metadata is None or _KEY not in metadata or kept == schema.names:
        return metadata
    try:
        entries = json.loads(metadata[_KEY])
        lists = {name: _kept(entries[name], kept) for name in ("columns", "index_columns")}
    except (ValueError, KeyError, TypeError):  # of another writer
        return {key: value for key, value in metadata.items() if key != _KEY}
    return {**metadata, _KEY: json.dumps({**entries, **lists}).encode()}


def _kept(entries: list[Any], kept: list[str]) -> list[Any]:
    """Return the entries that do not name another column."""
    return [entry for entry in entries if _column_of(entry) in (None, *kept)]


def _column_of(entry: Any) -> str | None:
    """Return the column that an entry names, None for the numbers of a RangeIndex."""
    if isinstance(entry, str):
        return entry
    if "kind" in entry:
        return None
    return str(entry.get("field_name") or entry["name"])
