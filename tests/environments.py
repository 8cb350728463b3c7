"""Virtual environments beside that of the tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def made(folder: Path, interpreter: str = sys.executable) -> Iterator[list[str]]:
    """Make an environment, and yield its command ``pip install``; whole or not at all.

    Raises CalledProcessError.
    """
    try:
        subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        yield [*pip, "install", "--quiet"]
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
