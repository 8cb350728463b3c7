"""Data files at a path, a URL or a glob: found on disks and in object stores, and opened by PyArrow.

| path | read by |
|---|---|
| ``/data``, ``file:///data``, ``/Volumes/…``; ``dbfs:/data`` is ``/dbfs/data`` | the operating system |
| ``s3://``, ``s3a://``, ``gs://``, ``abfss://``, ``hdfs://`` | PyArrow, or fsspec if configured for it |
| other URLs | fsspec and its driver package |

Credentials are those of the user's environment and configuration files.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from hydrogen_magic.node.prediction.column_names import listed

AnyPath = str | os.PathLike[str]

_HIDDEN = (".", "_", "lost+found")
"""Readers of Parquet ignore files whose names begin so: ``_SUCCESS``, ``.part-0.crc``."""
_TABLE_LOGS = {"_delta_log": "Delta", ".hoodie": "Hudi"}
"""Folder -> tables in whose folder it is. Beside their rows these have files with older versions of them."""
_MAGIC = frozenset("*[")
"""Characters of a glob in a URL, in which a question mark begins the options."""
_NOT_QUOTED = "/:@?&=%+,"
"""Characters of a URL that have a meaning, or are escaped already."""
_SAME = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}
_PACKAGES = {"abfs": "adlfs", "abfss": "adlfs", "gs": "gcsfs", "s3": "s3fs"}
"""Packages by which fsspec reads a scheme. It does not know those of Azure before they are installed."""
_BY_ARROW = ("abfs", "abfss", "gs", "hdfs", "s3", "viewfs")
_WRITE_ALIKE = "write the files alike, or read each kind on its own, for example with a glob"
INT96_UNIT = "us"
"""Of timestamps of INT96, as Spark writes them: in PyArrow's own ns, those outside 1677 to 2262 overflow."""


@dataclass(frozen=True)
class DataFiles:
    """Files of one file system."""

    filesystem: Any
    """``pyarrow.fs.FileSystem``, None for this machine's own."""
    root: Path
    """The folder that contains all files."""
    files: tuple[Path, ...]
    """Sorted by path; those of a list in its order."""
    patterns: tuple[tuple[str, ...], ...] = ()
    """Parts of each glob, or of each folder and ``**``; empty for a single file."""

    @property
    def is_single(self) -> bool:
        """Whether the path of one file was given."""
        return not self.patterns

    @property
    def pattern_text(self) -> str:
        """The first glob, as its user has written it."""
        return re.sub(r"\[([*?[])\]", r"\1", str(Path(*self.patterns[0])))

    def contains(self, path: Path) -> bool:
        """Return whether the next reader of the data would read ``path``, of this machine, as well."""
        if self.filesystem is not None:
            return False
        both = path.parts, path.resolve().parts
        return any(_is_at_or_below(each, found) for each in both for found in self.patterns)


def find(paths: AnyPath | Sequence[AnyPath]) -> DataFiles:
    """Return the files at a path, a URL or a glob, or at all of a list.

    Raises:
        FileNotFoundError: There are none; names the nearest existing folder.
        ImportError: The driver of the URL's scheme is not installed.
        OSError: The store does not answer, or refuses access.
        ValueError: A list is empty or names several stores, or a folder is a table of Delta or Hudi.
    """
    if isinstance(paths, (str, os.PathLike)):
        return _find(os.fspath(paths))
    found = [_find(os.fspath(path)) for path in paths]
    if not found:
        raise ValueError("the list of paths is empty")
    if any(each.filesystem != found[0].filesystem for each in found):
        raise ValueError("the list of paths names several file systems: read each one on its own")
    files = tuple(dict.fromkeys(file for each in found for file in each.files))
    root = Path(os.path.commonpath([each.root for each in found]))
    patterns = (each.patterns or (each.files[0].parts,) for each in found)
    return DataFiles(found[0].filesystem, root, files, tuple(p for some in patterns for p in some))


def is_url(path: AnyPath) -> bool:
    """Return whether the path is of another file system than this machine's own."""
    return "://" in str(local_path(path))


def local_path(path: AnyPath) -> str:
    """Return the path on this machine if the URL of one was given, and other paths unchanged."""
    text = os.fspath(path)
    if text.startswith("dbfs:/"):
        return f"/dbfs/{text.removeprefix('dbfs:').lstrip('/')}"
    return unquote(urlsplit(text).path) if text.startswith("file:/") else text


def absolute(path: AnyPath) -> Path:
    return Path(os.path.abspath(os.path.expanduser(local_path(path))))


def full_path(path: AnyPath) -> str:
    """Return a URL of another file system unchanged, and any other path as an absolute one."""
    return os.fspath(path) if is_url(path) else str(absolute(path))


def open_folder(path: AnyPath) -> tuple[Any, str]:
    """Return the file system of a folder, None for this machine's own, and the folder's path in it.

    Creates the folder. Raises ImportError and OSError as :func:`find` does.
    """
    if not is_url(path):
        folder = absolute(path)
        folder.mkdir(parents=True, exist_ok=True)
        return None, str(folder)
    filesystem, place = _opened(os.fspath(path))
    filesystem.create_dir(place)
    return filesystem, place


def check_driver(path: AnyPath) -> None:
    """Raise ImportError or OSError if this machine cannot access file systems of a URL's scheme."""
    if is_url(path):
        _opened(os.fspath(path))


def delete_folder(path: AnyPath) -> None:
    """Delete a folder and all in it, if it exists."""
    if not is_url(path):
        shutil.rmtree(absolute(path), ignore_errors=True)
        return
    filesystem, place = _opened(os.fspath(path))
    with suppress(FileNotFoundError):
        filesystem.delete_dir(place)


def parquet_format() -> Any:
    """Return PyArrow's format of Parquet data, for a Dataset."""
    import pyarrow.dataset as ds

    return ds.ParquetFileFormat(coerce_int96_timestamp_unit=INT96_UNIT)


def unified(common: Any, schema: Any, path: str) -> Any:
    """Return the schema of the files up to ``path``, of ``common`` and its own: each type as wide as needed.

    ``common``: of the files before; None before the first one. Raises ValueError if they have other columns
    or types without a common one.
    """
    import pyarrow as pa

    if common is None:
        return schema
    different = sorted(set(common.names) ^ set(schema.names))
    if different:
        raise ValueError(
            f"{path} and the files before it differ in {listed(different)}: {_WRITE_ALIKE}"
        )
    try:
        return pa.unify_schemas([common, schema], promote_options="permissive")
    except pa.ArrowException as error:
        raise ValueError(
            f"{path} has a column of another type than the files before it ({error}): {_WRITE_ALIKE}"
        ) from None


def check_types(path: str, own: Any, common: Any, error: Exception) -> None:
    """Raise ValueError for an ``error`` of reading a file with other types than the common ones."""
    kinds = {field.name: field.type for field in own}
    changed = [
        f"{field.name!r} is {kinds[field.name]} in this file and {field.type} in all files"
        for field in common
        if kinds.get(field.name, field.type) != field.type
    ]
    if changed:
        raise ValueError(
            f"{path} cannot be read: column {'; '.join(changed[:3])} ({error}): {_WRITE_ALIKE}"
        ) from None


def with_folders(common: Any, of_dataset: Any) -> Any:
    """Return the schema of all files with the columns of a PyArrow Dataset that its folders' names make."""
    import pyarrow as pa

    in_files = set(common.names)
    from_folders = [field for field in of_dataset if field.name not in in_files]
    return pa.schema([*common, *from_folders], metadata=common.metadata)


def _find(path: str) -> DataFiles:
    return _find_remote(path) if is_url(path) else _find_here(local_path(path))


# ── on this machine ──────────────────────────────────────────────────────────────────────────────


def _find_here(path: str) -> DataFiles:
    place = absolute(path)
    if place.is_file():
        return DataFiles(None, place.parent, (place,))
    if place.is_dir():
        root, matches = place, [place]
        pattern = (*map(glob.escape, place.resolve().parts), "**")
    elif glob.has_magic(path):
        # Brackets in the names of the working directory, and of those above it, are those of names.
        here = () if os.path.isabs(os.path.expanduser(path)) else Path.cwd().parts
        both = zip(here, place.parts, strict=False)
        n_here = sum(1 for _ in takewhile(lambda parts: parts[0] == parts[1], both))
        own = place.parts[n_here:]
        pattern = (*map(glob.escape, place.parts[:n_here]), *own)
        fixed = takewhile(lambda part: not glob.has_magic(part), own)
        root = Path(*place.parts[:n_here], *fixed)
        matches = [Path(match) for match in glob.glob(os.path.join(*pattern), recursive=True)]
    else:
        nearest = next(folder for folder in place.parents if folder.is_dir())
        raise _missing(f"{path} (from {os.getcwd()})", str(nearest))
    inside = (file for match in matches for file in _files_at(match))
    return _visible(None, root, inside, pattern, f"{path} (from {os.getcwd()})")


def _files_at(path: Path, above: frozenset[tuple[int, int]] = frozenset()) -> Iterator[Path]:
    """Yield a file, or those in a folder; links to folders are followed, except to one of those ``above``.

    Raises OSError for a folder that cannot be read: without its rows the data would not be complete.
    """
    if path.is_file():
        yield path
    elif path.is_dir() and (here := _identity(path)) not in above:
        for entry in path.iterdir():
            if entry.name in _TABLE_LOGS or not entry.name.startswith(_HIDDEN):
                yield from _files_at(entry, above | {here})


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino


def _missing(what: str, nearest: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"there is no file or folder {what}; the nearest existing folder is {nearest}"
    )


def _visible(
    filesystem: Any, root: Path, files: Iterator[Path], pattern: tuple[str, ...], what: str
) -> DataFiles:
    found = set(files)
    for file in found:
        _refuse_table(file.relative_to(root), what)
    visible = sorted(file for file in found if not _is_hidden(file.relative_to(root)))
    if not visible:
        raise FileNotFoundError(f"there are no files in {what}")
    return DataFiles(filesystem, root, tuple(visible), (pattern,))


def _refuse_table(path: Path, what: str) -> None:
    """Raise ValueError for a file of a table's log, which alone knows the files with the table's rows."""
    kind = next((_TABLE_LOGS[part] for part in path.parts[:-1] if part in _TABLE_LOGS), None)
    if kind is not None:
        raise ValueError(
            f"{what} has a {kind} table, with files of deleted and replaced rows beside its own: pass a frame"
            f" of its rows, such as spark.read.format('{kind.lower()}').load(path), to hm.shard() as"
            " hm.dataset(frame); a glob of files, such as *.parquet, takes all of them"
        )


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(_HIDDEN) for part in path.parts)


def _is_at_or_below(parts: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Return whether a glob matches a path or one of its parent folders."""
    if not pattern:
        return True
    if pattern[0] == "**":
        is_here = _is_at_or_below(parts, pattern[1:])
        return is_here or (bool(parts) and _is_at_or_below(parts[1:], pattern))
    is_match = bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0])
    return is_match and _is_at_or_below(parts[1:], pattern[1:])


# ── in stores ────────────────────────────────────────────────────────────────────────────────────


def _find_remote(url: str) -> DataFiles:
    fixed, wanted = _split(url)
    try:
        filesystem, folder = _opened(fixed)
        return _listed(filesystem, Path(folder), wanted, url)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise OSError(f"{url} cannot be read: {error}") from error


def _split(url: str) -> tuple[str, tuple[str, ...]]:
    """Return a URL without the parts from the first one that is a glob, and these parts."""
    scheme, _, rest = url.partition("://")
    path, mark, options = rest.partition("?")
    parts = path.rstrip("/").split("/")
    fixed = list(takewhile(_MAGIC.isdisjoint, parts))
    return f"{scheme}://{'/'.join(fixed)}{mark}{options}", tuple(parts[len(fixed) :])


def _opened(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    from pyarrow import fs

    alias, _, rest = url.partition("://")
    scheme = _SAME.get(alias, alias)  # as PyArrow and fsspec know it
    url = f"{scheme}://{rest}"
    if scheme not in _BY_ARROW or _has_settings(scheme):
        return _opened_by_fsspec(url, scheme)
    try:
        found: tuple[Any, str] = fs.FileSystem.from_uri(quote(url, safe=_NOT_QUOTED))
    except NotImplementedError:  # PyArrow was built without it
        return _opened_by_fsspec(url, scheme)
    return found


def _has_settings(scheme: str) -> bool:
    """Return whether the user has configured fsspec for the scheme."""
    try:
        from fsspec.config import conf
    except ImportError:
        return False
    return bool(conf.get(scheme))


def _opened_by_fsspec(url: str, scheme: str) -> tuple[Any, str]:
    from pyarrow import fs

    try:
        from fsspec.core import url_to_fs

        filesystem, path = url_to_fs(url)
    except (ImportError, ValueError) as error:  # fsspec raises ValueError for an unknown scheme
        package = _PACKAGES.get(scheme, "")
        is_missing = isinstance(error, ImportError) or (package and find_spec(package) is None)
        if not is_missing:
            raise OSError(str(error)) from error
        remedy = f"pip install {package}" if package else error
        raise ImportError(
            f"{url} cannot be read: {scheme}:// needs a package that is not installed here: {remedy}"
        ) from error
    if "://" in path:  # as of fsspec's HTTP
        raise OSError(f"{scheme}:// has no folders: download the data, and pass its path")
    return fs.PyFileSystem(fs.FSSpecHandler(filesystem)), path


def _listed(filesystem: Any, folder: Path, wanted: tuple[str, ...], url: str) -> DataFiles:
    from pyarrow import fs

    kind = filesystem.get_file_info(str(folder)).type
    if kind == fs.FileType.NotFound:
        raise _missing(url, _nearest(filesystem, folder, url))
    if kind == fs.FileType.File:
        return DataFiles(filesystem, folder.parent, (folder,))
    found = filesystem.get_file_info(fs.FileSelector(str(folder), recursive=True))
    files = (Path(info.path) for info in found if info.type == fs.FileType.File)
    pattern = (*folder.parts, *(wanted or ("**",)))
    matching = (file for file in files if _is_at_or_below(file.parts, pattern))
    return _visible(filesystem, folder, matching, pattern, url)


def _nearest(filesystem: Any, folder: Path, url: str) -> str:
    """Return the URL of the nearest folder above that exists, at least of the store."""
    from pyarrow import fs

    scheme = url.partition("://")[0]
    above = [parent for parent in folder.parents if parent.name]
    there = (p for p in above if filesystem.get_file_info(str(p)).type != fs.FileType.NotFound)
    nearest = next(there, None)
    return f"{scheme}://" if nearest is None else f"{scheme}://{str(nearest).lstrip('/')}"
