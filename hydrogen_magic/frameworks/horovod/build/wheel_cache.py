"""Cache of built wheels: ``<cache>/hydrogen_magic/horovod/<key>/*.whl``.

A wheel is written completely or not at all.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    """Turn an OSError into an error that names the setting of the directory, which may be read-only."""
    try:
        yield
    except OSError as error:
        raise BuildError(
            f"Horovod cannot be built here: {error}; set XDG_CACHE_HOME to a folder that can be written"
        ) from None


def find(key: str) -> Path | None:
    """Return the wheel of this key, or None if there is none."""
    return next((directory() / key).glob("*.whl"), None)


def keep(wheel: Path, key: str) -> Path:
    """Copy a wheel into the cache and return its path; it replaces an existing one."""
    target = directory() / key
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".incoming-", dir=directory()) as incoming:
        return Path(shutil.copy(wheel, incoming)).replace(target / wheel.name)


@contextmanager
def workplace() -> Iterator[Path]:
    """Yield a directory for source and objects, some 600 MB, and always remove it."""
    with tempfile.TemporaryDirectory(prefix="hydrogen-magic-horovod-") as path:
        yield Path(path)
