"""State that survives a failed attempt: ``hm.checkpoint.save(state)``, ``hm.checkpoint.load()``.

Rank 0 saves, completely or not at all; after a failure every rank of the next attempt (``--retries``) loads
the last checkpoint. :mod:`~hydrogen_magic.node.worker.checkpoints.checkpoint_files` describes the format on
disk.

The folder is the given one; otherwise that of the gang, which its environment names and which is deleted
with the gang; otherwise, in a plain process, a temporary one that is deleted with the process.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydrogen_magic.node.worker import api
from hydrogen_magic.node.worker.checkpoints import checkpoint_files, sharded_checkpoint
from hydrogen_magic.node.worker.results import rank_parts

FOLDER = "HYDROGEN_MAGIC_CHECKPOINTS"
"""Environment variable: the directory of the gang's checkpoints on this rank's host."""
IS_SHARED = "HYDROGEN_MAGIC_CHECKPOINTS_SHARED"
"""Environment variable: ``1`` if all ranks of all attempts see the same directory."""


def save(state: Any, folder: str | os.PathLike[str] | None = None) -> None:
    """Save ``state`` and replace the previous checkpoint.

    Call it on every rank, or on rank 0 alone: rank 0 writes. If it is killed while saving, or finds the disk
    full, the previous checkpoint stays intact. What this rank has logged before is recorded first: the next
    attempt, which skips these steps, does not log it again.

    A state with sharded tensors (``DTensor``, as in FSDP's state dicts) must be a dict and be saved by
    every rank: each writes its own parts with ``torch.distributed.checkpoint``.

    Args:
        state: Any picklable object; with torch loaded it is written by ``torch.save``. For
            models and optimizers, use ``state_dict()``. Classes of the notebook are saved by name.
        folder: A directory that all ranks share, created if needed. The checkpoint stays there after
            the gang's end, so that a new run of the cell continues from it. None: the gang's own.

    Raises:
        TypeError: Something in ``state`` cannot be saved, is a sharded tensor outside of dicts, or is a
            rank's part of an optimizer's state (FSDP1, DeepSpeed's ZeRO); it is named.
        OSError: It cannot be written: the disk is full, the folder is not writable.
        RuntimeError: The state is sharded and not all ranks share the folder, or there is no folder.

    Example::

        state = hm.checkpoint.load() or {"epoch": 0}
        ...
        hm.checkpoint.save({"epoch": epoch + 1, "model": model.state_dict()})
    """
    place = _place(folder) or _temporary_place()
    _process.before_save()
    if sharded_checkpoint.is_sharded(state):
        _check_shared(place)
        sharded_checkpoint.save(state, place.folder)
        return
    if api.rank() == 0:
        rank_parts.refuse_parts(state, checkpoint_files.tensors_in(state))
        checkpoint_files.save(state, place.folder)
        if place.is_carried:
            _process.on_save(checkpoint_files.NAME)
    elif place.is_carried and os.environ.get("GROUP_RANK", "0") != "0":
        _process.saved_elsewhere.add(place.folder)


def load(
    folder: str | os.PathLike[str] | None = None,
    *,
    map_location: Any = "cpu",
    into: dict[str, Any] | None = None,
) -> Any:
    """Return the last saved state, or None if there is none.

    The result is the same on every rank. Load before the first step: after that, rank 0 may save the next
    state.

    Args:
        folder: The folder passed to :func:`save`. The checkpoint is unpickled, which can run any
            code: load only checkpoints that you or one of your gangs has saved.
        map_location: Device of the tensors, as for ``torch.load``: ``hm.device()``, or None for the
            devices they were saved from.
        into: For a sharded state, which every rank loads: a dict like the saved one, taken from the
            current model (the number of ranks may differ). It is filled and returned.

    Raises:
        ValueError: The checkpoint cannot be read here; or it is sharded, and ``into`` is missing; or
            ``folder`` is a file.
        TypeError: ``into`` is not a dict.
        RuntimeError: There is no folder; or the checkpoint is on another host until the next attempt.
    """
    place = _place(folder)
    if place is None:
        return None
    if place.folder in _process.saved_elsewhere:
        raise RuntimeError(
            "hm.checkpoint.load(): the checkpoint of this attempt is on rank 0's host; the other "
            "hosts receive it for the next attempt. To load it earlier, save to a folder that "
            "all hosts share: hm.checkpoint.save(state, folder)"
        )
    if place.folder.is_file():
        parent = str(place.folder.parent)
        raise ValueError(
            f"{place.folder} is a file: pass its folder, hm.checkpoint.load({parent!r})"
        )
    parts = checkpoint_files.parts(place.folder)
    if parts is None:
        return checkpoint_files.load(place.folder, map_location)
    if into is None:
        raise ValueError(
            f"the checkpoint in {place.folder} is sharded: call hm.checkpoint.load(into=…) with a "
            "dict like the saved one, so that every rank loads its own shards"
        )
    return sharded_checkpoint.load(parts, into)


def keep(state: Any, name: str) -> None:
    """Save the state of a library for a restart, beside the user's state. On rank 0 only.

    Raises the same errors as :func:`save`.
    """
    place = _place(None) or _temporary_place()
    _process.before_save()
    checkpoint_files.save_beside(state, place.folder, name)
    if place.is_carried:
        _process.on_save(name)


def kept(name: str) -> Any:
    """Return the last state that an earlier attempt saved under ``name``, None if there is none."""
    place = _place(None)
    return None if place is None else checkpoint_files.load(place.folder, "cpu", name)


# ── a rank and its placement ─────────────────────────────────────────────────────────────────────


class _ProcessCheckpoints:
    """The checkpoints of this process: users call functions of this module, without an object."""

    def __init__(self) -> None:
        self.on_save: Callable[[str], None] = lambda name: None
        """Takes the name of a saved file that other hosts do not see; set on a rank."""
        self.before_save: Callable[[], None] = lambda: None
        """Called on every rank that saves."""
        self.saved_elsewhere: set[Path] = set()
        """Folders for which rank 0 has saved on another host in this attempt."""
        self.temporary: Path | None = None
        """The folder of a plain process, after its first save."""


_process = _ProcessCheckpoints()


def install(
    on_save: Callable[[str], None] = lambda name: None,
    before_save: Callable[[], None] = lambda: None,
) -> None:
    """Call ``before_save()`` before each save, ``on_save(file name)`` if other hosts do not see its file."""
    _process.on_save, _process.before_save = on_save, before_save


# The agent's socket belongs to the rank, not to its children.
os.register_at_fork(after_in_child=install)


def environment(folder: Path, *, is_shared: bool) -> dict[str, str]:
    """Return a rank's environment variables for checkpoints in ``folder`` on its host.

    ``is_shared``: all ranks of all attempts see the same directory.
    """
    return {FOLDER: str(folder), IS_SHARED: str(int(is_shared))}


def folder_of(environment: Mapping[str, str], cwd: str = "") -> Path:
    """Return the folder that a rank's environment names; a user may have written it, as of ``cwd``."""
    return Path(cwd, Path(environment[FOLDER]).expanduser()).absolute()


# ── folders ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Folder:
    """The location of this process's checkpoints."""

    folder: Path
    is_carried: bool
    """Other hosts do not see it: the agent copies saved files to them for the next attempt."""


def _place(folder: str | os.PathLike[str] | None) -> _Folder | None:
    """Return the folder to load from, None in a plain process that has saved nothing."""
    if folder is not None:
        return _Folder(Path(folder).expanduser().absolute(), is_carried=False)
    if os.environ.get(FOLDER):
        return _Folder(folder_of(os.environ), os.environ.get(IS_SHARED) != "1")
    if api.world_size() > 1:
        raise RuntimeError(
            f"hm.checkpoint needs a folder outside of a gang with {api.world_size()} ranks: call "
            f"hm.checkpoint.save(state, folder), or set the environment variable {FOLDER}"
        )
    temporary = _process.temporary
    return None if temporary is None else _Folder(temporary, is_carried=False)


def _temporary_place() -> _Folder:
    folder = Path(tempfile.mkdtemp(prefix="hydrogen_magic-checkpoints-"))
    _process.temporary = folder
    atexit.register(_remove_temporary, folder, os.getpid())
    warnings.warn(
        f"outside of a gang, hm.checkpoint saves to {folder}, which is deleted when this process "
        "exits; hm.checkpoint.save(state, folder) keeps the checkpoint",
        stacklevel=3,
    )
    return _Folder(folder, is_carried=False)


def _remove_temporary(folder: Path, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child has the same exit handlers
        shutil.rmtree(folder, ignore_errors=True)


def _check_shared(place: _Folder) -> None:
    if place.is_carried:
        raise RuntimeError(
            "hm.checkpoint.save() got a sharded state, of which every rank writes its part: pass "
            "a folder that all ranks share, hm.checkpoint.save(state, folder), or set "
            f"{IS_SHARED}=1 if {place.folder} is one"
        )
