"""Files that a page may save: metrics as CSV, spans as a Chrome trace, ranks' whole output."""

from __future__ import annotations

import gzip
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hydrogen_magic.core.events import Metrics
from hydrogen_magic.core.units import size_text
from hydrogen_magic.driver import chrome_trace
from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.views import Actions
from hydrogen_magic.views.widget.feed import Message
from hydrogen_magic.views.widget.page_commands import Order

__all__ = ["DownloadFile", "DownloadMaker", "make_file", "parts"]

_PART_BYTES = 1 << 20
"""Of a message: a server hands on others in between."""
_MOST_WAITING = 8
"""Files asked for at a time; each may take seconds."""
_MOST_EMPTY = 16
"""Cells of a table for each one with a value."""
_MOST_BYTES = 64 << 20
"""What is larger stays on the kernel's disk: a page would hold it twice in its memory."""


@dataclass(frozen=True)
class DownloadFile:
    """A file as a browser saves it."""

    name: str
    mime: str
    data: bytes


class DownloadMaker:
    """Makes files one after the other, in a thread while there are any to make.

    Seconds may pass over one of them, in which the view and the kernel's cells go on. ``done`` gets
    the order with the file, or with what to say in its place.
    """

    def __init__(self, done: Callable[[Order, DownloadFile | str], None]) -> None:
        self._done = done
        self._waiting: deque[tuple[Actions, Order]] = deque()
        self._is_busy = False
        self._lock = threading.Lock()

    def make(self, actions: Actions, order: Order) -> None:
        """Make the file that an order asks for. Raises HydrogenError when too many wait already."""
        with self._lock:
            if len(self._waiting) >= _MOST_WAITING:
                raise HydrogenError("too many files are being prepared: try again later")
            self._waiting.append((actions, order))
            is_busy, self._is_busy = self._is_busy, True
        if not is_busy:
            name = "hydrogen_magic.files"
            threading.Thread(target=self._make_all, name=name, daemon=True).start()

    def _make_all(self) -> None:
        while (asked := self._next()) is not None:
            actions, order = asked
            try:
                made: DownloadFile | str = make_file(actions, order)
            except HydrogenError as error:
                made = str(error)
            except Exception as error:  # no memory for a table, or a fault of ours: it is said
                made = f"the file could not be created: {type(error).__name__}: {error}"
            self._done(order, made)

    def _next(self) -> tuple[Actions, Order] | None:
        with self._lock:
            self._is_busy = bool(self._waiting)
            return self._waiting.popleft() if self._waiting else None


def make_file(actions: Actions, order: Order) -> DownloadFile:
    """Return the file that an order asks for.

    Raises HydrogenError when there is none, or when it is too large; then it says where it lies.
    """
    try:
        return _MAKERS[order["do"]](actions, order)
    except OSError as error:
        raise HydrogenError(f"the file could not be created: {error}") from error


def parts(file: DownloadFile, order: Order) -> Iterator[Message]:
    """Yield a file as messages; an empty one is one empty part."""
    n_parts = max(1, -(-len(file.data) // _PART_BYTES))
    for part in range(n_parts):
        content = {
            "kind": "file", "to": order["client"], "id": order["id"], "name": file.name,
            "mime": file.mime, "part": part, "parts": n_parts,
        }  # fmt: skip
        start = part * _PART_BYTES
        yield Message(content, [file.data[start : start + _PART_BYTES]])


def _csv(actions: Actions, order: Order) -> DownloadFile:
    _check_table(actions)
    data = actions.metrics.to_csv(index=False).encode("utf-8", "replace")
    return _bounded(actions, DownloadFile(f"gang-{actions.id}-metrics.csv", "text/csv", data))


def _check_table(actions: Actions) -> None:
    """Refuse a table of nothing: names made at run time fill it with empty cells."""
    logged = [event for event in actions.events() if isinstance(event, Metrics)]
    n_rows = sum(len(event.steps) for event in logged)
    n_columns = len({name for event in logged for name in event.values})
    n_filled = sum(len(event.steps) * len(event.values) for event in logged)
    if n_rows * n_columns > max(_MOST_BYTES, _MOST_EMPTY * n_filled):
        raise HydrogenError(
            f"{n_columns} metrics over {n_rows} steps would make a table that is too large and "
            "mostly empty; the gang's events() have the values"
        )


def _trace(actions: Actions, order: Order) -> DownloadFile:
    with tempfile.TemporaryDirectory(prefix="hydrogen_magic-") as folder:
        plain = chrome_trace.write_chrome_trace(actions.events(), Path(folder) / "trace.json")
        packed = plain.with_suffix(".json.gz")
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=5) as target:
            shutil.copyfileobj(source, target)
        data = packed.read_bytes()
    return _bounded(
        actions, DownloadFile(f"gang-{actions.id}-trace.json.gz", "application/gzip", data)
    )


def _bounded(actions: Actions, file: DownloadFile) -> DownloadFile:
    """Return ``file``; leave it beside the ranks' logs when it is too large for a page."""
    if len(file.data) <= _MOST_BYTES:
        return file
    path = actions.log_path(0).with_name(file.name)
    path.write_bytes(file.data)
    raise HydrogenError(_too_large(len(file.data), str(path)))


def _log(actions: Actions, order: Order) -> DownloadFile:
    rank = order["rank"]
    known = [each.rank for each in actions.snapshot().ranks]
    if rank is not None and rank not in known:
        raise HydrogenError(f"gang {actions.id} has no rank {rank}: it has {len(known)} ranks")
    chosen = known if rank is None else [rank]
    paths = [actions.log_path(each) for each in chosen]
    n_bytes = sum(path.stat().st_size for path in paths if path.exists())
    if n_bytes > _MOST_BYTES:
        where = paths[0] if rank is not None else f"{paths[0].parent}/rank-*.log"
        raise HydrogenError(_too_large(n_bytes, str(where)))
    whose = "" if rank is None else f"-rank-{rank}"
    data = b"".join(
        _read(each, path, rank is None) for each, path in zip(chosen, paths, strict=True)
    )
    return DownloadFile(f"gang-{actions.id}{whose}.log", "text/plain", data)


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


_MAKERS: Mapping[str, Callable[[Actions, Order], DownloadFile]] = {
    "csv": _csv,
    "trace": _trace,
    "log": _log,
}
