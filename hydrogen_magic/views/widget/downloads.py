"""Files that a page may save: metrics as CSV, spans as a Chrome trace, the ranks' complete output."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hydrogen_magic.core.events import Metrics
from hydrogen_magic.core.units import counted, size_text
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.views.widget.page_commands import PageCommand
from hydrogen_magic.views.widget.page_updates import PageMessage

_PART_BYTES = 1 << 20
"""Bytes of a message: a server forwards others in between."""
_MOST_PENDING = 8
"""Maximum number of files in progress or waiting; each may take seconds."""
_MOST_EMPTY = 16
"""Maximum number of cells of a table for each value."""
_MOST_BYTES = 64 << 20
"""Larger files stay on the kernel's disk: a page would hold them twice in its memory."""


@dataclass(frozen=True)
class DownloadFile:
    """A file for the browser to save."""

    name: str
    mime: str
    data: bytes


class DownloadMaker:
    """Creates one file at a time, each in a thread of its own.

    A file may take seconds, while the view and the kernel's cells continue. ``done`` gets the request with
    the file, or with an error message in its place.
    """

    def __init__(self, done: Callable[[PageCommand, DownloadFile | str], None]) -> None:
        self._done = done
        self._pending = threading.BoundedSemaphore(_MOST_PENDING)
        self._lock = threading.Lock()

    def make(self, gang: Gang, request: PageCommand) -> None:
        """Create the requested file. Raises HydrogenError if too many are pending."""
        if not self._pending.acquire(blocking=False):
            raise HydrogenError("too many files are being prepared: try again later")
        name = "hydrogen_magic.files"
        threading.Thread(target=self._make, args=(gang, request), name=name, daemon=True).start()

    def _make(self, gang: Gang, request: PageCommand) -> None:
        try:
            with self._lock:
                made: DownloadFile | str = make_file(gang, request)
        except HydrogenError as error:
            made = str(error)
        except Exception as error:  # out of memory, or an internal error: the page is informed
            made = f"the file could not be created: {type(error).__name__}: {error}"
        self._pending.release()
        self._done(request, made)


def make_file(gang: Gang, request: PageCommand) -> DownloadFile:
    """Return the requested file.

    Raises HydrogenError if there is none, or if it is too large; the message then has its path.
    """
    return _MAKERS[request["do"]](gang, request)


def parts(file: DownloadFile, request: PageCommand) -> Iterator[PageMessage]:
    """Yield a file as messages; an empty one is one empty part."""
    n_parts = max(1, -(-len(file.data) // _PART_BYTES))
    for part in range(n_parts):
        content = {
            "kind": "file",
            "to": request["client"],
            "id": request["id"],
            "name": file.name,
            "mime": file.mime,
            "part": part,
            "parts": n_parts,
        }
        start = part * _PART_BYTES
        yield PageMessage(content, [file.data[start : start + _PART_BYTES]])


def _csv(gang: Gang, request: PageCommand) -> DownloadFile:
    _check_table(gang)
    data = gang.metrics.to_csv(index=False).encode("utf-8", "replace")
    return _bounded(gang, DownloadFile(f"gang-{gang.id}-metrics.csv", "text/csv", data))


def _check_table(gang: Gang) -> None:
    """Refuse a mostly empty table: names created at run time make one."""
    n_rows, n_filled, columns = 0, 0, set[str]()
    for event in gang.events():
        if isinstance(event, Metrics):
            n_rows += len(event.steps)
            n_filled += len(event.steps) * len(event.values)
            columns.update(event.values)
    n_columns = len(columns)
    if n_rows * n_columns > max(_MOST_BYTES, _MOST_EMPTY * n_filled):
        raise HydrogenError(
            f"{n_columns} metrics over {n_rows} steps would make a table that is too large and "
            "mostly empty; the gang's events() have the values"
        )


def _trace(gang: Gang, request: PageCommand) -> DownloadFile:
    with tempfile.TemporaryDirectory(prefix="hydrogen_magic-") as folder:
        data = gang.timeline(Path(folder) / "trace.json.gz").read_bytes()
    return _bounded(gang, DownloadFile(f"gang-{gang.id}-trace.json.gz", "application/gzip", data))


def _bounded(gang: Gang, file: DownloadFile) -> DownloadFile:
    """Return ``file``; if it is too large for a page, save it beside the ranks' logs."""
    if len(file.data) <= _MOST_BYTES:
        return file
    path = gang.log_path(0).with_name(file.name)
    path.write_bytes(file.data)
    raise HydrogenError(_too_large(len(file.data), str(path)))


def _log(gang: Gang, request: PageCommand) -> DownloadFile:
    rank = request["rank"]
    known = [each.rank for each in gang.snapshot().ranks]
    if rank is not None and rank not in known:
        raise HydrogenError(
            f"gang {gang.id} has no rank {rank}: it has {counted(len(known), 'rank')}"
        )
    chosen = known if rank is None else [rank]
    paths = [gang.log_path(each) for each in chosen]
    n_bytes = sum(path.stat().st_size for path in paths if path.exists())
    if n_bytes > _MOST_BYTES:
        where = paths[0] if rank is not None else f"{paths[0].parent}/rank-*.log"
        raise HydrogenError(_too_large(n_bytes, str(where)))
    whose = "" if rank is None else f"-rank-{rank}"
    data = b"".join(
        _read(each, path, rank is None) for each, path in zip(chosen, paths, strict=True)
    )
    return DownloadFile(f"gang-{gang.id}{whose}.log", "text/plain", data)


def _read(rank: int, path: Path, titled: bool) -> bytes:
    title = f"── rank {rank} ──\n".encode() if titled else b""
    data = path.read_bytes() if path.exists() else b""
    is_cut = titled and data and not data.endswith(b"\n")
    return title + data + (b"\n" if is_cut else b"")


def _too_large(n_bytes: int, where: str) -> str:
    return (
        f"{size_text(n_bytes)} is too large for a page; on the kernel's machine the data is in "
        f"{where}"
    )


_MAKERS: Mapping[str, Callable[[Gang, PageCommand], DownloadFile]] = {
    "csv": _csv,
    "trace": _trace,
    "log": _log,
}
