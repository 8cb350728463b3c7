"""A gang's record: its events on disk during the run, one JSON list per line.

``%gang show`` replays it after a kernel restart, and a new kernel finds gangs in it whose kernel
died. There is one directory per gang, readable only by its owner::

    $HYDROGEN_MAGIC_HOME/runs/<gang>/events.jsonl     written here, by the kernel
                                     rank-<r>.log     written by the agent
                                     <library>-timeline-<n>.json   written by the library
                                     kept/           finished rows of %%infer, or a link to them
                                     owner.sock      where the owner of an outliving gang listens
                                     results-<r>     results of a rank that no kernel has got

A record is optional: failure to write it never disturbs the run.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import stat
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import processes
from hydrogen_magic.core.event_history import EventHistory
from hydrogen_magic.core.units import clipped
from hydrogen_magic.errors import HydrogenError

OWNER_SOCKET = "owner.sock"
"""Where the owner of a gang that outlives its kernel listens, in the directory of its run."""

UNSEEN = "unseen"
"""File of a gang that outlives its kernel, until it has ended and a kernel has seen this."""

RESULTS = "results-"
"""Beginning of the names of files with results that no kernel has got, before the rank."""

CHECKPOINTS = "checkpoints"
"""Folder of a run, for the checkpoints of its gang."""

ARRIVING = ".arriving"
"""End of the name of a file that is not complete; the name begins with a dot."""

_EVENTS = "events.jsonl"
_METRICS = b'["Metrics",'
"""Beginning of the line of a ``Metrics`` event."""
_MOST_METRICS = 1024
"""How many of the last ``Metrics`` events are searched for the last values of a gang without an end."""
_KEEP_RUNS = 50
"""Weeks of work for one person; most records are well below a megabyte."""
_KEEP_DATA_S = 7 * 86400.0
"""Time to notice, after a weekend, that a run left something."""
_KEEP_BYTES = 10 * 10**9
"""Events and output of many ranks that log for days take gigabytes."""

_BEGINS_S = 10.0
"""How long a record may be empty while its run begins."""
_SILENT_S = 60.0
"""Health is recorded about once a second: after this silence, a run seems over whose owner is on another
machine, or which could not record its end."""

_SHORT_REASON = 200
"""Characters of the reason of an end that replaces other events; most reasons are shorter."""

_TAIL_BYTES = 1 << 16
"""Number of bytes read first to find the last line; stacks of many threads can make a longer one."""

_KEPT_SUFFIX = ".kept"
"""Of a folder that a record links to; nothing else is deleted with a record."""

_REMEDY = "set HYDROGEN_MAGIC_HOME to a writable directory"

_GANG_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


# ── folders ──────────────────────────────────────────────────────────────────────────────────────


def runs_dir() -> Path:
    """Return the directory of all records, and create it if needed; see :func:`state_dir`."""
    return state_dir("runs")


def state_dir(name: str) -> Path:
    """Return a directory of this user's state, and create it if needed.

    ``$HYDROGEN_MAGIC_HOME/<name>``, by default ``$XDG_STATE_HOME/hydrogen_magic/<name>``
    (``~/.local/state``). Raises OSError when it cannot be created or belongs to another user.
    """
    try:
        parent = _home().expanduser().absolute()
    except RuntimeError as error:  # no HOME, and no entry for this user
        raise FileNotFoundError(str(error)) from None
    path = parent / name
    if not path.is_dir():
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(f"{parent} is not a directory") from None
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
    return _made_private(path)


def _home() -> Path:
    home = os.environ.get("HYDROGEN_MAGIC_HOME")
    if home:
        return Path(home)
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "hydrogen_magic"


def _made_private(path: Path) -> Path:
    """Let only this user read a directory; raise PermissionError if it is another user's."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{path} is not a directory of this user (chown makes it one)")
    if stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(0o700)
    return path


def run_dir(gang_id: str) -> Path:
    """Return the directory of a run, which may not exist. Raises HydrogenError for an invalid id."""
    if not _GANG_ID.fullmatch(gang_id):
        raise HydrogenError(f"{gang_id!r} is not the id of a run")
    return runs_dir() / gang_id


def kept_dir(gang_id: str) -> Path:
    """Return the directory, or the link, of the finished rows that a run of ``%%infer`` keeps."""
    return run_dir(gang_id) / "kept"


def delete_kept(gang_id: str) -> None:
    """Delete the finished rows that a run keeps, if any."""
    kept = kept_dir(gang_id)
    if not kept.is_symlink():
        shutil.rmtree(kept, ignore_errors=True)
        return
    linked = kept.readlink()
    if linked.suffix == _KEPT_SUFFIX:
        shutil.rmtree(linked, ignore_errors=True)
    kept.unlink(missing_ok=True)


# ── writing ──────────────────────────────────────────────────────────────────────────────────────


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
            on_problem(f"this run is not recorded: {error}; {_REMEDY}")
            folder = _temporary_folder(error)
            record = cls(folder, None, on_problem)
            record.is_temporary = True
            weakref.finalize(record, _delete_temporary, folder, os.getpid())
            return record
        return cls(path, _new_file(path / _EVENTS, on_problem), on_problem)

    def append(self, event: ev.Event) -> None:
        """Write ``event``, if it :func:`is_recorded`.

        An error of the disk does not raise: it is reported once, and writing stops.
        """
        if self._fd is None or not is_recorded(event):
            return
        line = _line(event)
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
        fd = os.open(record_dir / _EVENTS, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def is_recorded(event: ev.Event) -> bool:
    """Return whether records have such events: all but displays, which the notebook keeps."""
    return not isinstance(event, ev.Display)


_as_json = json.JSONEncoder(separators=(",", ":")).encode


def _line(event: ev.Event) -> bytes:
    return _as_json(ev.encode(event)).encode() + b"\n"


def _new_file(path: Path, on_problem: Callable[[str], None]) -> int | None:
    # The directory is new; still, links planted there by other users are not followed.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        on_problem(f"this run is not recorded: {error}")
        return None


# ── reading ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Summary:
    """The first and the last event of a run, for lists of runs."""

    gang: str
    launched: ev.GangLaunched
    last: ev.Event

    @property
    def ended(self) -> ev.GangEnded | None:
        """Its last event; None while it runs, or if no process was left to record it."""
        return self.last if isinstance(self.last, ev.GangEnded) else None

    @property
    def last_wall_time(self) -> float:
        """Unix time of the last event."""
        return self.launched.wall_time + self.last.at_s


def read(gang_id: str) -> Sequence[ev.Event]:
    """Return the events of a run, which may still be running.

    An incomplete last line (its kernel was killed) is left out. Raises HydrogenError if there is no
    such run, or its record is damaged.
    """
    events = EventHistory()
    for event, _ in read_on(gang_id, 0):
        events.append(event)
    return events[:]


def read_on(gang_id: str, start: int) -> Iterator[tuple[ev.Event, int]]:
    """Yield each event from the byte ``start`` of the record on, and the byte where to read on.

    See :func:`read`.
    """
    with _open(gang_id) as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return  # its writer may add the rest at any moment
            start += len(line)
            yield _decode(line, gang_id), start


@contextmanager
def _open(gang_id: str) -> Iterator[BinaryIO]:
    """Open a record for reading; errors that this meets are HydrogenErrors."""
    try:
        with open(run_dir(gang_id) / _EVENTS, "rb") as file:
            yield file
    except FileNotFoundError:
        raise HydrogenError(f"there is no record of a run {gang_id!r}{_where()}") from None
    except OSError as error:
        raise HydrogenError(f"the record of run {gang_id!r} cannot be read: {error}") from error
    except ev.MessageError as error:
        raise HydrogenError(str(error)) from error


def _where() -> str:
    try:
        return f" in {runs_dir()}"
    except OSError:
        return ""


def _decode(line: bytes, gang_id: str) -> ev.Event:
    try:
        return ev.decode(json.loads(line))
    except ValueError as error:  # MessageError is one
        raise ev.MessageError(
            f"the record of run {gang_id!r} is damaged, or of a newer version: {error}"
        ) from error


def recent_ids() -> list[str]:
    """Return the ids of all recorded runs, readable or not, in no particular order."""
    try:
        return [e.name for e in os.scandir(runs_dir()) if e.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def why_inaccessible() -> str:
    """Return why no record can be read, nor created; empty if their directory can be used."""
    try:
        os.scandir(runs_dir()).close()
    except OSError as error:
        return f"the records of gangs cannot be read: {error}; {_REMEDY}"
    return ""


def recent(*, with_kept: bool = False) -> list[Summary]:
    """Return the recorded runs, newest first, without those whose record cannot be read.

    ``with_kept``: only those that keep finished rows.
    """
    names = [name for name in recent_ids() if _GANG_ID.fullmatch(name)]
    found = [summary(name) for name in names if not with_kept or kept_dir(name).is_dir()]
    readable = [each for each in found if each is not None]
    return sorted(readable, key=lambda each: each.launched.wall_time, reverse=True)


def summary(gang_id: str) -> Summary | None:
    """Return the first and the last event of a run; None without a record that can be read."""
    try:
        return _summary(gang_id)
    except HydrogenError:
        return None


def why_unreadable(gang_id: str) -> str:
    """Return why the record of a run cannot be read; empty if it can be, or there is none yet."""
    try:
        file = (run_dir(gang_id) / _EVENTS).stat()
    except (OSError, HydrogenError):
        return ""
    try:
        _summary(gang_id)
    except HydrogenError as error:
        begins = not file.st_size and time.time() - file.st_mtime < _BEGINS_S
        return "" if begins else str(error)
    return ""


def unreadable() -> list[str]:
    """Return the ids of runs whose record cannot be read, which :func:`recent` leaves out."""
    return sorted(name for name in recent_ids() if why_unreadable(name))


def _summary(gang_id: str) -> Summary:
    """Return the first and the last event of a run without reading the others. Raises HydrogenError."""
    with _open(gang_id) as file:
        first, last = file.readline(), _last_line(file.fileno())
        if not first:
            raise HydrogenError(
                f"the record of run {gang_id!r} is empty: its disk was full, or the run has only just begun"
            )
        launched, newest = _decode(first, gang_id), _decode(last or first, gang_id)
    if not isinstance(launched, ev.GangLaunched):
        raise HydrogenError(f"the record of run {gang_id!r} is damaged: its beginning is missing")
    return Summary(gang_id, launched, newest)


def _last_line(fd: int) -> bytes:
    """Return the last complete line, empty if there is none."""
    size = os.fstat(fd).st_size
    length = _TAIL_BYTES
    while True:
        start = max(0, size - length)
        tail = os.pread(fd, size - start, start)
        lines = tail[: tail.rfind(b"\n") + 1].split(b"\n")[:-1]
        # The first line may be cut off at its beginning, unless it is the first one of the file.
        if len(lines) > 1 or start == 0:
            return lines[-1] if lines else b""
        length *= 4


def going_on() -> list[ev.GangLaunched]:
    """Return the gangs of this machine that go on, by the records of the last minute.

    The health of ranks is recorded once a second. A record that is silent for longer has lost its end.
    """
    since = time.time() - _SILENT_S
    names = [name for name in recent_ids() if _GANG_ID.fullmatch(name) and written_at(name) > since]
    found = [each for each in map(summary, names) if each is not None and each.ended is None]
    return [each.launched for each in found if is_alive(each.launched.owner)]


def unfinished() -> list[str]:
    """Return the unreported runs that ended because their kernel did, newest first.

    Not those of other machines: a gang that waits for slots there is silent, too, and goes on.
    """
    return [
        found.gang
        for found in recent()
        if _is_abandoned(found) and not is_elsewhere(found.launched)
    ]


def end_abandoned(gang_id: str) -> None:
    """Record that the user has been informed of a run that ended because its owner did."""
    found = summary(gang_id)
    write_end(run_dir(gang_id), "its kernel ended" if found is None else why_over(found.launched))
    mark_seen(gang_id)


def why_over(launched: ev.GangLaunched) -> str:
    """Return why a gang ended whose owner no longer runs."""
    boots = (owner.partition("/")[0] for owner in (launched.owner, _machine()))
    if launched.host == os.uname().nodename and len(set(boots)) > 1:
        return "its machine was restarted"
    return "its owner process ended unexpectedly" if launched.outlives else "its kernel ended"


def complete(gang_id: str, events: Sequence[ev.Event], *, only_now: bool = False) -> None:
    """Append what the record lacks of ``events``, all those of a run: its disk was full for a while.

    Raises OSError if it still is. With ``only_now``, the end replaces recorded events then: without an end,
    the run seems to have lost its kernel.
    """
    with open(run_dir(gang_id) / _EVENTS, "r+b", buffering=0) as file:
        data = file.readall()
        end = data.rfind(b"\n") + 1
        file.truncate(end)
        file.seek(end)
        n_recorded = data.count(b"\n", 0, end)
        missing = b"".join(map(_line, islice(filter(is_recorded, events), n_recorded, None)))
        try:
            while missing:  # a disk that gets full takes a part, and refuses the rest
                missing = missing[file.write(missing) :]
        except OSError:
            if only_now and isinstance(events[-1], ev.GangEnded):
                _write_over(file, events[-1])
            raise


def _write_over(file: FileIO, end: ev.GangEnded) -> None:
    """Replace the last lines of a record by ``end``, which needs no space; the first line stays.

    An end that is longer than the other lines is shortened. Nothing is written if that is not enough.
    """
    file.seek(0)
    data = file.readall()
    short = replace(end, reason=clipped(end.reason, _SHORT_REASON), metrics={})
    for line in map(_line, (end, short)):
        start = data.rfind(b"\n", 0, max(0, len(data) - len(line))) + 1
        if start:
            file.truncate(start + len(line))  # first: a part of a line is ignored
            file.seek(start)
            file.write(line)
            return


def write_end(run_dir: Path, reason: str) -> None:
    """Finish the record of a gang whose owner has exited: ``STOPPED``, for ``reason``.

    Does nothing if the record is damaged or cannot be written: the record is optional, and the
    agent that writes it has processes to end.
    """
    with suppress(OSError):
        (run_dir / OWNER_SOCKET).unlink(missing_ok=True)
    drop_incomplete(run_dir / CHECKPOINTS)
    try:
        fd = os.open(run_dir / _EVENTS, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)
        # Unbuffered: a full disk must raise here, not when the file is closed.
        with os.fdopen(fd, "r+b", buffering=0) as file:
            data = file.readall()
            complete = data.rfind(b"\n") + 1
            lines = data[:complete].splitlines()
            last = complete and _decode(lines[-1], run_dir.name)
            if reason == ev.KERNEL_ENDED and complete and _outlives(lines[0], run_dir.name):
                reason = ev.OWNER_ENDED
            metrics = getattr(last, "metrics", None) or _last_metrics(lines, run_dir.name)
            end = ev.GangEnded(getattr(last, "at_s", 0.0), "STOPPED", reason, metrics=metrics)
            file.truncate(complete)  # removes a line that a killed kernel did not complete
            file.write(_line(end))
    except (OSError, ev.MessageError):
        return


def drop_incomplete(folder: Path) -> None:
    """Delete checkpoints that have not arrived completely, and ``folder`` if nothing else is in it."""
    with suppress(OSError):
        for path in folder.glob(f".*{ARRIVING}"):
            path.unlink()
        folder.rmdir()


def mark_seen(gang_id: str) -> None:
    """Note that a kernel has seen the end of a gang that outlived its own."""
    with suppress(OSError):
        (run_dir(gang_id) / UNSEEN).unlink(missing_ok=True)


def _last_metrics(lines: Sequence[bytes], gang_id: str) -> dict[str, float]:
    """Return the last values that ranks have logged in the last ``_MOST_METRICS`` events."""
    found: dict[int, dict[str, float]] = {}
    logged = (line for line in reversed(lines) if line.startswith(_METRICS))
    for line in islice(logged, _MOST_METRICS):
        with suppress(ev.MessageError):
            event = _decode(line, gang_id)
            assert isinstance(event, ev.Metrics)
            values = found.setdefault(event.rank, {})
            for name, column in event.values.items():
                given = [value for value in column if value is not None]
                if given:
                    values.setdefault(name, given[-1])
    return ev.of_first_ranks(found[rank] for rank in sorted(found))


def _outlives(first: bytes, gang_id: str) -> bool:
    launched = _decode(first, gang_id)
    return isinstance(launched, ev.GangLaunched) and launched.outlives


def _is_abandoned(found: Summary) -> bool:
    unseen = (ev.KERNEL_ENDED, ev.OWNER_ENDED)
    is_seen = found.ended is not None and found.ended.reason not in unseen
    return not is_seen and is_owner_gone(found.gang, found.launched.owner)


def is_over(found: Summary) -> bool:
    """Return whether a run has ended, or its kernel has."""
    return found.ended is not None or _is_abandoned(found)


def is_certainly_over(found: Summary) -> bool:
    """Return whether a run has ended, or has been silent for a week: what it has kept is free for others.

    A gang of another machine that waits for slots is silent for hours, and goes on.
    """
    is_here = not is_elsewhere(found.launched)
    silent_s = time.time() - written_at(found.gang)
    return is_over(found) and (found.ended is not None or is_here or silent_s > _KEEP_DATA_S)


def prune(
    keep: int = _KEEP_RUNS, keep_bytes: int = _KEEP_BYTES, keep_data_s: float = _KEEP_DATA_S
) -> None:
    """Delete finished runs except those that ended last, ``keep`` gangs and as many cells of sessions.

    Others with data that are in no notebook (results, finished rows, checkpoints of a gang that did not
    succeed) stay for ``keep_data_s``. When the files of those with data, or of all others, have more than
    ``keep_bytes``, the oldest of them are deleted, too, but for the newest run, and for those among the last
    ``keep`` with data. Runs that no kernel has seen since their end stay. A gang that outlived its kernel may
    have run for days, while dozens of short ones began and ended. Records that cannot be read are deleted
    after ``keep_data_s``.
    """
    # Before they are read: a run that begins meanwhile is not among those that cannot be.
    names = set(filter(_GANG_ID.fullmatch, recent_ids()))
    readable = recent()
    _delete_unreadable(names - {found.gang for found in readable}, keep_data_s)
    over = [found for found in readable if is_certainly_over(found)]
    over.sort(key=lambda found: found.last_wall_time, reverse=True)
    n_kept_bytes: Counter[bool] = Counter()
    """Of runs with data and of those without: large data leave no place for small records."""
    places: Counter[bool] = Counter()
    for found in over:
        files = _files(found.gang)
        n_bytes = sum(files.values())
        is_of_session = bool(found.launched.session)
        places[is_of_session] += 1
        has_data = _has_data(found.gang, files)
        is_too_much = n_kept_bytes[has_data] + n_bytes > keep_bytes
        if places[is_of_session] > keep:
            is_fresh = time.time() - found.last_wall_time < keep_data_s
            is_kept = has_data and is_fresh and not is_too_much
        else:
            is_kept = has_data or not is_too_much or found is over[0]
        if is_kept or (found.ended is not None and is_unseen(found.gang)):
            n_kept_bytes[has_data] += n_bytes
        else:
            delete(found.gang)


def _delete_unreadable(gang_ids: Iterable[str], older_s: float) -> None:
    """Delete old records that this version cannot read: of another version, or of a full disk."""
    for gang_id in gang_ids:
        with suppress(OSError):
            paths = [run_dir(gang_id), *run_dir(gang_id).iterdir()]
            is_old = time.time() - max(path.lstat().st_mtime for path in paths) > older_s
            if is_old:
                delete(gang_id)


def _has_data(gang_id: str, files: Collection[str]) -> bool:
    """Return whether a record has results, finished rows, or checkpoints, which are deleted if not needed."""
    has_results = any(name.startswith(RESULTS) for name in files)
    return has_results or CHECKPOINTS in files or kept_dir(gang_id).is_dir()


def _files(gang_id: str) -> dict[str, int]:
    """Return the number of bytes of each file of a run, of its checkpoints, and of its finished rows."""
    folder, kept = run_dir(gang_id), kept_dir(gang_id)
    try:
        entries = list(os.scandir(folder))
        found = {each.name: each.stat(follow_symlinks=False).st_size for each in entries}
    except OSError:  # another kernel deletes it
        return {}
    for name in {CHECKPOINTS, kept.name} & found.keys():
        # Finished rows may be beside their data, where a link leads: on a file server that does not answer.
        with suppress(OSError):
            files = (folder / name).resolve().rglob("*")
            found[name] = sum(path.lstat().st_size for path in files)
    return found


def delete(gang_id: str) -> None:
    """Delete the record of a run, and what it keeps elsewhere, if there is a place for records."""
    with suppress(OSError):
        folder = runs_dir() / gang_id
        delete_kept(gang_id)
        shutil.rmtree(folder, ignore_errors=True)


def is_unseen(gang_id: str) -> bool:
    """Return whether the gang outlives its kernel, and no kernel has seen its end, if it has ended."""
    return (run_dir(gang_id) / UNSEEN).exists()


# ── owners ───────────────────────────────────────────────────────────────────────────────────────


def owner_of_this_process() -> str:
    """Return ``machine:pid:start time``, which is unique to this process.

    ``machine`` is the boot id and the pid namespace: pids are only valid within their namespace.
    """
    return _owner(os.getpid())


@functools.cache
def _owner(pid: int) -> str:
    return f"{_machine()}:{pid}:{_start_time(pid)}"


def is_alive(owner: str) -> bool:
    """True if ``owner`` (as made by :func:`owner_of_this_process`) runs on this machine."""
    machine, _, process = owner.rpartition(":")[0].rpartition(":")
    if machine != _machine() or not process.isdigit():
        return False
    return _start_time(int(process)) == owner.rpartition(":")[2]


def is_owner_gone(gang_id: str, owner: str) -> bool:
    """Return whether ``owner``, of this run, no longer runs; on another machine, whether it seems so."""
    if is_alive(owner):
        return False
    if _machine_of(owner) == _machine():
        return True
    # A home directory shared between machines: only the file's age tells of that kernel.
    return time.time() - written_at(gang_id) > _SILENT_S


def is_elsewhere(launched: ev.GangLaunched) -> bool:
    """Return whether the owner is, or was, on a machine of another name, whose processes are out of sight."""
    return _machine_of(launched.owner) != _machine() and launched.host != os.uname().nodename


def written_at(gang_id: str) -> float:
    """Return when a record was last written to, 0 if it was deleted."""
    try:
        return (run_dir(gang_id) / _EVENTS).stat().st_mtime
    except OSError:
        return 0.0


def is_stopped(owner: str) -> bool:
    """Whether ``owner`` runs on this machine and is stopped (SIGSTOP)."""
    found = next(processes.processes([pid_of(owner)]), None) if is_alive(owner) else None
    return found is not None and found.state == "T"


def pid_of(owner: str) -> int:
    """Return the pid of ``owner`` on its machine."""
    return int(owner.rsplit(":", 2)[1])


def _machine_of(owner: str) -> str:
    return owner.rpartition(":")[0].rpartition(":")[0]


def _machine() -> str:
    return f"{_boot_id()}/{os.stat('/proc/self/ns/pid').st_ino}"


def _boot_id() -> str:
    """Return the id of this boot of the machine; some sandboxes hide ``/proc/sys``."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        lines = Path("/proc/stat").read_text().splitlines()
        booted_at = next((line.split()[1] for line in lines if line.startswith("btime ")), "")
        return f"{os.uname().nodename}@{booted_at}"


def _start_time(pid: int) -> str:
    """Return the start time of the process, in ticks since the boot; empty if it has exited."""
    found = next(processes.processes([pid]), None)
    return "" if found is None or found.has_exited else str(found.start_ticks)
