"""Cache of built wheels: ``<cache>/hydrogen_magic/horovod/<key>/*.whl``.

A wheel is written completely or not at all; one that was damaged later is not used.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from hydrogen_magic.frameworks.horovod.build.errors import BuildError


def directory() -> Path:
    """Return the directory, created if needed: below ``$XDG_CACHE_HOME``, by default ``~/.cache``."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = base.expanduser().absolute() / "hydrogen_magic" / "horovod"
    with written():
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
    return found


@contextmanager
def written() -> Iterator[None]:
    """Let an error name the setting of the directory, which may be read-only."""
    try:
        yield
    except OSError as error:
        raise BuildError(
            f"Horovod cannot be built here: {error}; set XDG_CACHE_HOME to a folder that can be written"
        ) from None


def find(key: str) -> Path | None:
    """Return the wheel of this key, or None if there is no intact one."""
    return next(filter(_is_whole, (directory() / key).glob("*.whl")), None)


def _is_whole(wheel: Path) -> bool:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, EOFError):
        return False


def keep(wheel: Path, key: str) -> Path:
    """Move a wheel into the cache and return its path; it replaces an existing one."""
    target = directory() / key
    incoming = Path(tempfile.mkdtemp(prefix=".incoming-", dir=directory()))
    try:
        shutil.copyfile(wheel, incoming / wheel.name)
        shutil.rmtree(target, ignore_errors=True)
        incoming.rename(target)
    except BaseException:
        shutil.rmtree(incoming, ignore_errors=True)
        raise
    return target / wheel.name


def put(file: Path, target: Path) -> Path:
    """Copy a file to ``target``, completely or not at all."""
    with tempfile.TemporaryDirectory(prefix=".incoming-", dir=target.parent) as incoming:
        return Path(shutil.copy(file, incoming)).replace(target)


@contextmanager
def alone(key: str, on_wait: Callable[[], None]) -> Iterator[None]:
    """Let one process at a time build a key; the system releases the lock if its holder dies.

    Without effect if the directory is read-only: its wheels can be used, but nothing is built.
    """
    with ExitStack() as opened:
        file = None
        with suppress(OSError):
            file = opened.enter_context((directory() / f"{key}.lock").open("a"))
        if file is not None:
            _lock(file, on_wait)
        yield


def _lock(file: IO[str], on_wait: Callable[[], None]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(file, fcntl.LOCK_EX)


@contextmanager
def workplace() -> Iterator[Path]:
    """Yield a directory for source and objects, some 600 MB, and always remove it."""
    with tempfile.TemporaryDirectory(prefix="hydrogen-magic-horovod-") as path:
        yield Path(path)
