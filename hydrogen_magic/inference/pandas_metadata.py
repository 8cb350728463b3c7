"""What pandas wrote into the schema of Arrow data: attributes, the index, the dtypes of columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

_INVALID = (ValueError, TypeError, KeyError, AttributeError)
"""Errors of invalid metadata, which the conversion of the rows reports, if batches are those of pandas."""


def attrs(schema: pa.Schema) -> Any:
    """Return the ``attrs`` of batches that are pandas DataFrames, None if there are none."""
    try:
        return (schema.pandas_metadata or {}).get("attributes")
    except _INVALID:
        return None


def of_rows(schema: pa.Schema, n_rows: int | None) -> pa.Schema:
    """Return the schema of so many rows: without a RangeIndex of another length, which pandas ignores, too.

    ``n_rows``: None if it is not known.
    """
    try:
        found = schema.pandas_metadata or {}
        stored = found.get("index_columns", [])
        index = [level for level in stored if isinstance(level, str) or _length(level) == n_rows]
    except _INVALID:
        return schema
    if index == stored:
        return schema
    text = json.dumps({**found, "index_columns": index})
    return schema.with_metadata({**schema.metadata, b"pandas": text})


def _length(level: Mapping[str, Any]) -> int:
    return len(range(level["start"], level["stop"], level["step"]))


def of_kept(schema: pa.Schema, kept: list[str]) -> dict[bytes, bytes] | None:
    """Return the metadata of ``schema`` for a result that keeps these columns.

    The entry of pandas is left out unless all are kept: it tells the dtypes of columns, which predicted ones
    may replace, and which are the index.
    """
    metadata: dict[bytes, bytes] | None = schema.metadata
    if metadata is None or kept == schema.names:
        return metadata
    return {key: value for key, value in metadata.items() if key != b"pandas"}
