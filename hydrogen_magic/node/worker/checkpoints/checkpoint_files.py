"""A checkpoint on disk: one file that a single rename replaces, so there is always a complete one.

    <folder>/checkpoint                  the last one: in the format of torch.save, or of pickle
    <folder>/.checkpoint-1f3a….part      the one being written
    <folder>/checkpoint-1f3a….shards/    parts of a sharded one, named in ``checkpoint``

A save removes unfinished files of other processes. If such a process is still alive (a rank that was cut
off and does not know that it was replaced), it fails instead of overwriting the newer state.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from hydrogen_magic.core import disk_space
from hydrogen_magic.serialization.object_paths import describe, path_to
from hydrogen_magic.serialization.pickling_errors import NullFile

NAME = "checkpoint"
_POINTER = b"hydrogen_magic: parts in "
_ZIP = b"PK\x03\x04"
"""First bytes of files written by torch.save."""
_PART = re.compile(r"\.checkpoint-[0-9a-f]{16}\.part")
_PARTS = re.compile(r"checkpoint-[0-9a-f]{16}\.shards")
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES)
"""Errors of file systems that cannot sync a directory: some FUSE and network file systems."""


# ── saving ───────────────────────────────────────────────────────────────────────────────────────


def save(state: Any, folder: Path) -> None:
    """Write ``state`` as the checkpoint in ``folder``. Raises errors as ``hm.checkpoint`` does."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_others(folder, keep=parts(folder))
        _replace(folder, lambda file: _write_state(state, file))
        _remove_others(folder, keep=None)
    except OSError as error:
        raise cannot_write(folder, error) from error


def save_beside(state: Any, folder: Path, name: str) -> None:
    """Write ``state`` to ``folder`` under its own name, independent of other files saved there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(f".{name}-*.part"):
            unfinished.unlink(missing_ok=True)
        _replace(folder, lambda file: _write_state(state, file), name)
    except OSError as error:
        raise cannot_write(folder, error) from error


def _write_state(state: Any, file: BinaryIO) -> None:
    torch = sys.modules.get("torch")
    try:
        if torch is None:
            pickle.dump(state, file, protocol=pickle.HIGHEST_PROTOCOL)
        else:
            # torch's default, protocol 2, inflates bytes and NumPy arrays.
            torch.save(state, file, pickle_protocol=5)
    except OSError:
        raise
    except Exception as error:  # pickling runs the classes' own code
        why = _why_not(state)
        if not why:
            raise
        raise TypeError(why) from error


def _replace(folder: Path, write: Callable[[BinaryIO], object], name: str = NAME) -> None:
    """Have ``write`` fill a new file, and make it the checkpoint once it is safely on disk."""
    part = folder / f".{name}-{secrets.token_hex(8)}.part"
    try:
        _write_part(part, write)
        os.replace(part, folder / name)
    except BaseException:  # an interrupt too: an incomplete file is useless
        part.unlink(missing_ok=True)
        raise
    _sync_directory(folder)


def _write_part(part: Path, write: Callable[[BinaryIO], object]) -> None:
    with open(part, "xb") as file:
        honest = _HonestFile(file)
        try:
            write(cast("BinaryIO", honest))
        except Exception:
            if honest.error is not None:
                raise honest.error from None
            raise
        file.flush()
        os.fsync(file.fileno())


class _HonestFile:
    """A file that remembers the system's error: torch's writer reports it in its own words."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Do nothing: one flush at the end is enough."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _sync_directory(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(fd)


def _remove_others(folder: Path, keep: Path | None) -> None:
    """Remove unfinished files, and the parts of all sharded checkpoints except ``keep``."""
    for found in list(os.scandir(folder)):
        if _PART.fullmatch(found.name):
            Path(found.path).unlink(missing_ok=True)
        elif _PARTS.fullmatch(found.name) and Path(found.path) != keep:
            shutil.rmtree(found.path, ignore_errors=True)


# ── loading ──────────────────────────────────────────────────────────────────────────────────────


def load(folder: Path, map_location: Any, name: str = NAME) -> Any:
    """Return the state in ``folder``, None if there is none.

    Raises ValueError if it cannot be read here.
    """
    path = folder / name
    try:
        with open(path, "rb") as file:
            is_zip = file.read(len(_ZIP)) == _ZIP
            file.seek(0)
            return _read_torch(file, map_location) if is_zip else pickle.load(file)
    except FileNotFoundError:
        return None
    except AttributeError as error:
        if "__main__" not in str(error):
            raise
        raise ValueError(
            f"the checkpoint {path} refers to a class or function that is not available here: {error}; "
            f"define it before hm.checkpoint.load(), or, if the notebook defines it, write its name in "
            "the cell that loads, which sends it to the ranks"
        ) from error
    except (EOFError, OverflowError, UnicodeDecodeError, pickle.UnpicklingError) as error:
        raise ValueError(_damaged(path, error)) from error


def _read_torch(file: BinaryIO, map_location: Any) -> Any:
    import torch

    try:
        return torch.load(file, map_location=map_location, weights_only=False)
    except RuntimeError as error:
        if "PytorchStreamReader" not in str(error):
            raise  # its device does not exist here: torch's message has the remedy
        raise ValueError(_damaged(Path(file.name), error)) from error


def _damaged(path: Path, error: Exception) -> str:
    return (
        f"{path} is not a checkpoint of hm.checkpoint.save(), or it is damaged "
        f"({type(error).__name__}: {error}): delete it to start from scratch"
    )


# ── sharded ──────────────────────────────────────────────────────────────────────────────────────


def parts(folder: Path) -> Path | None:
    """Return the directory with the parts of the checkpoint in ``folder``, None if it has none."""
    try:
        with open(folder / NAME, "rb") as file:
            head = file.read(len(_POINTER) + 64)
    except FileNotFoundError:
        return None
    name = head[len(_POINTER) :].decode(errors="replace")
    is_pointer = head.startswith(_POINTER) and _PARTS.fullmatch(name) is not None
    return folder / name if is_pointer else None


def new_parts(folder: Path) -> Path:
    """Make a directory for the parts of the next checkpoint."""
    made = folder / f"{NAME}-{secrets.token_hex(8)}.shards"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_others(folder, keep=parts(folder))
        made.mkdir()
    except OSError as error:
        raise cannot_write(folder, error) from error
    return made


def commit_parts(made: Path) -> None:
    """Make the parts that all ranks have written to ``made`` the checkpoint."""
    try:
        _sync_directory(made)
        _replace(made.parent, lambda file: file.write(_POINTER + made.name.encode()))
        _remove_others(made.parent, keep=made)
    except OSError as error:
        raise cannot_write(made.parent, error) from error


# ── errors ───────────────────────────────────────────────────────────────────────────────────────


def cannot_write(folder: Path, error: OSError) -> OSError:
    """Return ``error`` with its effect on the checkpoint, and a remedy."""
    before = (
        "the previous checkpoint is intact"
        if (folder / NAME).exists()
        else "there is no previous checkpoint"
    )
    if error.errno in disk_space.FULL:
        room = disk_space.room(folder)
        text = f"the checkpoint does not fit into {folder}{room}; {before}. Free space there, or"
    elif isinstance(error, FileNotFoundError) and folder.exists():
        text = f"another process saves checkpoints in {folder} at the same time; {before}."
        return OSError(error.errno, f"{text} Give each gang a folder of its own")
    else:
        text = f"the checkpoint cannot be written to {folder}: {error}; {before}. Fix this, or"
    return OSError(error.errno, f"{text} save elsewhere, hm.checkpoint.save(state, folder)")


def tensors_in(state: Any) -> Iterator[Any]:
    """Yield the tensors that pickling ``state`` meets, also those inside of objects."""
    tracer = _Tracer()
    with suppress(Exception):  # saving reports it
        tracer.dump(state)
    yield from tracer.tensors


class _Tracer(pickle.Pickler):
    """Discards its output and remembers the tensors, and the last object it visited."""

    def __init__(self) -> None:
        super().__init__(NullFile(), pickle.HIGHEST_PROTOCOL, buffer_callback=lambda buffer: None)
        self.last: Any = None
        self.tensors: list[Any] = []

    def persistent_id(self, obj: Any) -> Any:
        self.last = obj
        if not hasattr(type(obj), "__torch_function__"):
            return None
        self.tensors.append(obj)
        return "tensor"  # its data would only take time, and does not make pickling fail


def _why_not(state: Any) -> str:
    """Return which part of ``state`` cannot be pickled, and why; empty if all of it can."""
    tracer = _Tracer()
    try:
        tracer.dump(state)
    except Exception as error:
        path = path_to("state", state, tracer.last)
        kind = describe(tracer.last)
        what = f"`{path}` ({kind})" if path else f"a {kind} in the state"
        return (
            f"{what} cannot be saved: {error}; leave it out, or save the data that it is built from"
        )
    return ""
