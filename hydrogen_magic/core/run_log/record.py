"""Writing the record of a gang while it runs."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.run_log.folders import EVENTS, REMEDY, run_dir
from hydrogen_magic.core.run_log.lines import encoded, is_recorded
from hydrogen_magic.errors import HydrogenError


class Record:
    """The record of one gang, open for writing. Any thread may append."""

    def __init__(self, path: Path, fd: int | None, on_problem: Callable[[str], None]) -> None:
        self.path = path
        """Directory of the run."""
        self._fd = fd
        self.is_temporary = False
        """The run is not recorded: its directory is deleted with this object."""
        self.is_incomplete = False
        """An event could not be written, nor could those after it."""
        self.on_problem = on_problem
        self._lock = threading.Lock()

    @classmethod
    def create(cls, gang_id: str, on_problem: Callable[[str], None] = lambda text: None) -> Record:
        """Start the record of a new gang.

        ``on_problem`` is called once with the reason when events can no longer be recorded: the
        disk is full, or the home is read-only. The agent's logs then go to a temporary directory,
        which is deleted with this object, at the end of the process at the latest.
        Raises HydrogenError for an invalid id, FileExistsError if the run exists already.
        """
        try:
            path = run_dir(gang_id)
            path.mkdir(mode=0o700)
        except FileExistsError:
            raise
        except OSError as error:
            on_problem(f"this run is not recorded: {error}; {REMEDY}")
            folder = _temporary_folder(error)
            record = cls(folder, None, on_problem)
            record.is_temporary = True
            weakref.finalize(record, _delete_temporary, folder, os.getpid())
            return record
        return cls(path, _new_file(path / EVENTS, on_problem), on_problem)

    def append(self, event: ev.Event) -> None:
        """Write ``event``, if it :func:`is_recorded`.

        An error of the disk does not raise: it is reported once, and writing stops.
        """
        if self._fd is None or not is_recorded(event):
            return
        line = encoded(event)
        problem = None
        with self._lock:
            if self._fd is None:
                return
            try:
                # Unbuffered, a few microseconds: the record survives if the kernel is killed.
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError as error:
                problem = f"the rest of this run is not recorded: {error}"
                self.is_incomplete = True
                self._close()
        if problem is not None:
            self.on_problem(problem)  # outside of the lock: it may append an event itself

    def close(self) -> None:
        """Close the record. A second call has no effect."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _temporary_folder(refused: OSError) -> Path:
    """Make a folder for the logs of a run without a record; HydrogenError if there is no place for it."""
    try:
        return Path(tempfile.mkdtemp(prefix="hydrogen_magic-"))
    except OSError as error:
        raise HydrogenError(
            f"there is no place for the output of the ranks ({refused}; {error}): free some space, or set "
            "HYDROGEN_MAGIC_HOME to a directory on another disk"
        ) from error


def _delete_temporary(folder: Path, pid: int) -> None:
    """Delete the logs of a run without a record; forks of this process leave them alone."""
    if os.getpid() == pid:
        shutil.rmtree(folder, ignore_errors=True)


# The first finalizer registers an exit handler: before that of the agents, which therefore end first.
weakref.finalize(Record, int)


def write_through(record_dir: Path) -> None:
    """Have other machines see the record so far, if they see its directory.

    NFS sends what a process has written when the file is closed, synchronized, or half a minute old.
    """
    with suppress(OSError):
        fd = os.open(record_dir / EVENTS, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _new_file(path: Path, on_problem: Callable[[str], None]) -> int | None:
    # The directory is new; still, links planted there by other users are not followed.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        on_problem(f"this run is not recorded: {error}")
        return None
