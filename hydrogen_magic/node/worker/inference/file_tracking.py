"""Files that a cell reads during its set-up: after a change of one, its state and predictions are outdated.

Python's audit hooks report the files that Python opens. C++ and Rust code opens files by itself (TorchScript,
Parquet): inotify reports those that the cell names, and those in folders that it names.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import sys
import sysconfig
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.machinery import all_suffixes
from itertools import islice
from typing import Any

MOST = 10_000
"""Maximum number of files recorded: a cell that reads more of them reads data."""
_MOST_WATCHED = 1_000
"""Maximum number of files and folders that inotify watches."""
_MOST_ENTRIES = 10_000
"""Maximum number of files and folders that are looked at for that."""
_LONGEST_PATH = 4_096
_OTHER = ("/proc/", "/sys/", "/dev/")
"""Paths of files without content of their own."""
_CODE = tuple(all_suffixes())
_PACKAGES = ("/site-packages/", "/dist-packages/", f"{sysconfig.get_path('stdlib')}/")
_CLOSED_WRITTEN, _CLOSED_UNWRITTEN, _OPENED = 0x8, 0x10, 0x20
"""Events of inotify."""


def of_data(files: Iterable[str]) -> list[str]:
    """Return the files without those of code and of installed packages."""
    return [
        file
        for file in files
        if not file.endswith(_CODE) and not any(part in file for part in _PACKAGES)
    ]


class _AuditHook:
    """The audit hook of this process: Python cannot remove it, so there is one."""

    def __init__(self) -> None:
        self._is_added = self._is_on = False
        self._files: dict[str, int] = {}
        """File -> its modification time in ns."""
        self.written: set[str] = set()

    @contextmanager
    def tracking(self) -> Iterator[dict[str, int]]:
        if not self._is_added:
            self._is_added = True
            sys.addaudithook(self._on_event)
        self._files, self.written, self._is_on = {}, set(), True
        try:
            yield self._files
        finally:
            self._is_on = False

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(args[0], (str, bytes)) or not isinstance(args[2], int):
            return
        is_read = args[2] & os.O_ACCMODE == os.O_RDONLY
        if is_read and not self._is_on:
            return
        path = os.path.abspath(os.fsdecode(args[0]))
        if not is_read:
            if self._is_on or path in self._files:
                self.written.add(path)
        elif path not in self.written:
            _note(self._files, path)


_hook = _AuditHook()


@contextmanager
def noted(texts: Iterable[str] = ()) -> Iterator[dict[str, int]]:
    """Yield a dictionary that is filled with the regular files opened by this process meanwhile.

    ``texts``: what may name files or folders. The values are modification times in ns. If there are more
    than :data:`MOST` files, the dictionary has one more than that.
    """
    with _watching(texts) as watched, _hook.tracking() as files:
        yield files
        open_to_write = _open_to_write()
        for path in watched.read():
            if path not in _hook.written and os.path.realpath(path) not in open_to_write:
                _note(files, path)


def written() -> set[str]:
    """Return those of the files noted last that Python has opened to write, also after the set-up.

    The run itself changes them: a cache, a log.
    """
    return _hook.written


def _open_to_write() -> set[str]:
    """Return the files that this process has open to write: C code may have opened them."""
    found = set()
    with suppress(OSError):  # there is no /proc
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError), open(f"/proc/self/fdinfo/{fd}") as info:
                flags = int(info.read().partition("flags:")[2].split()[0], 8)
                if flags & os.O_ACCMODE != os.O_RDONLY:
                    found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def _note(files: dict[str, int], path: str) -> None:
    if path in files or len(files) > MOST or path.startswith(_OTHER):
        return
    with suppress(OSError):  # opening it will fail too
        status = os.stat(path)
        if stat.S_ISREG(status.st_mode):
            files[path] = status.st_mtime_ns


# ── inotify ──────────────────────────────────────────────────────────────────────────────────────


class _Watched:
    """Files and folders that inotify watches: nothing where the system has none, or no more of it."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        begin = getattr(self._libc, "inotify_init1", lambda flags: -1)
        self.fd = int(begin(os.O_NONBLOCK | os.O_CLOEXEC))
        self._paths: dict[int, str] = {}

    def add(self, path: str) -> None:
        events = _CLOSED_WRITTEN | _CLOSED_UNWRITTEN | _OPENED
        if self.fd < 0:
            return
        watch = self._libc.inotify_add_watch(self.fd, os.fsencode(path), events)
        if watch >= 0:  # -1 is also the watch of an event that others were lost
            self._paths[watch] = path

    def read(self) -> list[str]:
        """Return what has been opened since, except for what was only written, such as a log."""
        seen: dict[str, int] = {}
        for watch, event, name in self._events():
            if watch in self._paths:
                path = os.path.join(self._paths[watch], name) if name else self._paths[watch]
                seen[path] = seen.get(path, 0) | event
        return [
            path
            for path, events in seen.items()
            if events & _CLOSED_UNWRITTEN or not events & _CLOSED_WRITTEN
        ]

    def _events(self) -> Iterator[tuple[int, int, str]]:
        header = struct.Struct("iIII")
        with suppress(OSError):  # there are no more
            while self.fd >= 0:
                data, at = os.read(self.fd, 1 << 16), 0
                while at < len(data):
                    watch, event, _, length = header.unpack_from(data, at)
                    at += header.size + length
                    yield watch, event, os.fsdecode(data[at - length : at].rstrip(b"\0"))


@contextmanager
def _watching(texts: Iterable[str]) -> Iterator[_Watched]:
    watched = _Watched()
    try:
        with suppress(FileNotFoundError):  # the working directory no longer exists
            for path in islice(_named(texts), _MOST_WATCHED):
                watched.add(path)
        yield watched
    finally:
        if watched.fd >= 0:
            os.close(watched.fd)


def _named(texts: Iterable[str]) -> Iterator[str]:
    """Yield the files that texts name, then the folders and those below.

    Without folders that hold the working directory or temporary files: others read there, such as the
    notebook's server.
    """
    first = islice(texts, _MOST_ENTRIES)
    short = {text for text in first if 0 < len(text) < _LONGEST_PATH and "\0" not in text}
    paths = {os.path.abspath(os.path.expanduser(text)) for text in short}
    yield from filter(os.path.isfile, paths)
    shared = [os.path.join(path, "") for path in (os.getcwd(), tempfile.gettempdir())]
    for path in filter(os.path.isdir, paths):
        is_shared = any(each.startswith(os.path.join(path, "")) for each in shared)
        if not is_shared and not f"{path}/".startswith(_OTHER):
            yield from _folders(path)


def _folders(top: str) -> Iterator[str]:
    """Yield a folder and those below; a data set of a million files is not listed."""
    queue, n_left = deque([top]), _MOST_ENTRIES
    while queue:
        folder = queue.popleft()
        yield folder
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in islice(entries, n_left):
                n_left -= 1
                if entry.is_dir(follow_symlinks=False):
                    queue.append(entry.path)
