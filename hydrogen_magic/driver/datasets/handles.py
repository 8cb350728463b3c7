"""Handles to Parquet data, which is deleted if writing it fails."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from hydrogen_magic.core import disk_space
from hydrogen_magic.driver.datasets.folders import DatasetFolder
from hydrogen_magic.node.dataset_handle import DatasetHandle
from hydrogen_magic.node.worker.data import parquet_shard

NO_ROWS = "hm.dataset() got a frame without rows: there is nothing to train on"


def written(folder: DatasetFolder, write: Callable[[str], None]) -> DatasetHandle:
    """Return the handle of what ``write`` writes to a new folder; delete the folder if it fails.

    Raises ValueError for data without rows, and OSError with what is free if the disk is full.
    """
    try:
        write(folder.data)
        handle = of_files(folder.data, folder.delete, is_private=folder.is_private)
        if not handle.n_rows:
            raise ValueError(NO_ROWS)
        return handle
    except BaseException as error:  # an interrupt too
        with suppress(Exception):  # of a store that does not answer: a later process deletes it
            folder.delete()
        if isinstance(error, OSError) and error.errno in disk_space.FULL:
            raise OSError(error.errno, _does_not_fit(folder.parent)) from error
        raise


def _does_not_fit(parent: str) -> str:
    return (
        f"the data does not fit into {parent}{disk_space.room(parent)}. Free space there, or choose "
        "another folder, hm.dataset(frame, path=folder)"
    )


def of_files(
    place: str | tuple[str, ...],
    remove: Callable[[], None] | None = None,
    *,
    is_private: bool = False,
) -> DatasetHandle:
    """Return the handle of Parquet data at paths or URLs, with the number of rows and the size of files."""
    opened = parquet_shard.open_dataset(place)
    groups = parquet_shard.RowGroups.of(opened, None)
    # Not those of row groups: footers have the sizes before compression.
    n_bytes = sum(file.size or 0 for file in opened.filesystem.get_file_info(opened.files))
    columns = tuple((field.name, str(field.type)) for field in opened.schema)
    return DatasetHandle(place, groups.n_rows, n_bytes, columns, is_private, remove)
