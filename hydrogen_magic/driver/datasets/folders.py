"""Folders of ``hm.dataset``, each of which is deleted with the process that has written it.

    $HYDROGEN_MAGIC_HOME/datasets/<id>/owner    locked by those who need the data; names its folder
                                       data/    the Parquet files, unless the user chose another folder

The process has a shared lock, and so has the owner of a gang that outlives it. Deleting needs the exclusive
lock, which only the last of them can get. The system releases a lock when its process ends, however it ends:
the next process that writes a dataset or starts a gang deletes what an ended one has left.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
import shutil
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hydrogen_magic.core import run_log
from hydrogen_magic.node import data_files
from hydrogen_magic.node.data_files import AnyPath

_OWNER = "owner"
_PREFIX = "hydrogen_magic-"
"""Of the data's folder in a folder of the user: nothing else is deleted there."""


@dataclass(frozen=True)
class DatasetFolder:
    """A folder for the data of one dataset."""

    record: Path
    data: str
    """Path or URL."""

    @property
    def is_private(self) -> bool:
        """Whether the data is in the state directory, not where the user chose."""
        return not data_files.is_url(self.data) and Path(self.data).is_relative_to(self.record)

    @property
    def parent(self) -> str:
        """Path or URL of the folder that has those of several datasets."""
        return str(self.record.parent) if self.is_private else self.data.rpartition("/")[0]

    @property
    def is_there(self) -> bool:
        """Whether it was not deleted."""
        return self in _owned

    def delete(self) -> None:
        """Delete the data and the record, or leave them to the gangs that use them and outlive this process.

        A second call has no effect, unless the first one failed. Raises what the data's file system raises.
        """
        descriptor = _owned.get(self)
        if descriptor is not None:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.remove()
            del _owned[self]
            os.close(descriptor)

    def remove(self) -> None:
        """Delete a folder that is no longer used: this process has the exclusive lock."""
        if self.is_private or _PREFIX in self.data.rpartition("/")[2]:
            data_files.delete_folder(self.data)
        shutil.rmtree(self.record, ignore_errors=True)


_owned: dict[DatasetFolder, int] = {}
"""Folders of this process -> descriptor that holds the lock."""


def new(parent: AnyPath | None) -> DatasetFolder:
    """Return a new folder, in ``parent`` or else in this user's state directory; it is not created.

    Raises OSError if the state directory is not writable, and what :func:`data_files.check_driver` raises.
    """
    prune()
    name = secrets.token_hex(8)
    if parent is not None:
        # A folder that cannot be reached could not be deleted, either.
        data_files.check_driver(parent)
    with _locked_records() as records:
        record = records / name
        data = str(record / "data")
        if parent is not None:
            data = f"{data_files.full_path(parent).rstrip('/')}/{_PREFIX}{name}"
        record.mkdir(mode=0o700)
        (record / _OWNER).write_text(data)
        folder = DatasetFolder(record, data)
        _owned[folder] = _locked(record / _OWNER, fcntl.LOCK_SH)
    return folder


@contextmanager
def kept(places: Collection[str]) -> Iterator[None]:
    """Keep the data at these paths and URLs even if the process ends that has written it.

    Deletes it at the end, if that process has ended.
    """
    with ExitStack() as locks:
        locks.callback(prune, waits=True)
        with suppress(OSError):
            for record in run_log.state_dir("datasets").iterdir():
                with suppress(OSError):  # it is no record
                    if (record / _OWNER).read_text() in places:
                        locks.callback(os.close, _locked(record / _OWNER, fcntl.LOCK_SH))
        yield


def prune(*, waits: bool = False) -> None:
    """Have a thread delete what processes that have ended have left.

    What cannot be deleted now, in a store that does not answer or whose driver is not installed, stays for a
    later process. ``waits``: return when the thread has ended.
    """
    own = {folder.record for folder in _owned}
    with suppress(OSError):
        if records := set(run_log.state_dir("datasets").iterdir()) - own:
            name = "hydrogen_magic datasets"
            thread = threading.Thread(target=_prune, args=(records,), name=name, daemon=True)
            thread.start()
            if waits:
                thread.join()


def _prune(records: Iterable[Path]) -> None:
    for record in records:
        with suppress(Exception):  # it is used, or is no record
            with _locked_records():  # not while the process makes it
                descriptor = _locked(record / _OWNER, fcntl.LOCK_EX)
            try:
                DatasetFolder(record, (record / _OWNER).read_text()).remove()
            finally:
                os.close(descriptor)


# ── locks ────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _locked_records() -> Iterator[Path]:
    """Give the directory of records, in which no other process changes anything meanwhile."""
    records = run_log.state_dir("datasets")
    descriptor = os.open(records, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield records
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile has it, too
        os.close(descriptor)


def _locked(owner: Path, kind: int) -> int:
    """Return a descriptor of the file, which is locked as long as this is open.

    Raises BlockingIOError if another process holds a lock that excludes this ``kind`` of lock.
    """
    descriptor = os.open(owner, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _forget() -> None:
    """Leave the folders to the parent, which a forked child shares the locks with."""
    for descriptor in _owned.values():
        os.close(descriptor)
    _owned.clear()


@atexit.register
def delete_all() -> None:
    """Delete the data of this process."""
    for folder in list(_owned):
        with suppress(Exception):  # it stays for a later process
            folder.delete()


os.register_at_fork(after_in_child=_forget)
