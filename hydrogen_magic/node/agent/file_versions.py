"""Versions of files that a process depends on, by their modification times."""

from __future__ import annotations

import os
from collections.abc import Mapping


def modified_ns(file: str) -> int:
    """Return the modification time of ``file``, 0 if there is no such file."""
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0


def are_changed(files: Mapping[str, int]) -> bool:
    """Return whether one of ``files`` has another modification time than the one in the mapping."""
    return any(modified_ns(file) != time_ns for file, time_ns in files.items())
