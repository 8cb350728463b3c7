"""The folders of records, and the names of the files in them."""

from __future__ import annotations

import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from hydrogen_magic.errors import HydrogenError

OWNER_SOCKET = "owner.sock"
"""Where the owner of a gang that outlives its kernel listens, in the directory of its run."""
UNSEEN = "unseen"
"""File of a gang whose end no kernel has seen, or whose results none has used."""
RESULTS = "results-"
"""Beginning of the names of files with results that no kernel has got, before the rank."""
CHECKPOINTS = "checkpoints"
"""Folder of a run, for the checkpoints of its gang."""
ARRIVING = ".arriving"
"""End of the name of a file that is not complete; the name begins with a dot."""
EVENTS = "events.jsonl"
"""The record itself."""
_KEPT_SUFFIX = ".kept"
"""Of a folder that a record links to; nothing else is deleted with a record."""
REMEDY = "set HYDROGEN_MAGIC_HOME to a writable directory"
GANG_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


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
    if not GANG_ID.fullmatch(gang_id):
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
        return f"the records of gangs cannot be read: {error}; {REMEDY}"
    return ""


def written_at(gang_id: str) -> float:
    """Return when a record was last written to, 0 if it was deleted."""
    try:
        return (run_dir(gang_id) / EVENTS).stat().st_mtime
    except OSError:
        return 0.0


def is_unseen(gang_id: str) -> bool:
    """Return whether no kernel has seen the end of a gang that outlives its own, or used its results."""
    return (run_dir(gang_id) / UNSEEN).exists()


def mark_unseen(folder: Path) -> None:
    """Note in the folder of a run that no kernel has seen its end, or used its results. Raises OSError."""
    (folder / UNSEEN).touch(mode=0o600)


def mark_seen(gang_id: str) -> None:
    """Note that a kernel has seen the end of a gang, or reported or loaded its results."""
    with suppress(OSError):
        (run_dir(gang_id) / UNSEEN).unlink(missing_ok=True)


def drop_incomplete(folder: Path) -> None:
    """Delete checkpoints that have not arrived completely, and ``folder`` if nothing else is in it."""
    with suppress(OSError):
        for path in folder.glob(f".*{ARRIVING}"):
            path.unlink()
        folder.rmdir()


def delete(gang_id: str) -> None:
    """Delete the record of a run, and what it keeps elsewhere, if there is a place for records."""
    with suppress(OSError):
        folder = runs_dir() / gang_id
        delete_kept(gang_id)
        shutil.rmtree(folder, ignore_errors=True)
