"""Older ipykernels beside the installed one: a page reaches a busy kernel differently in each.

Each is installed in a folder of its own, which a kernel gets by ``PYTHONPATH``; everything else comes from
the environment the tests run in. ``python -m tests.kernels`` installs the versions that are missing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NEWEST = "newest"
"""The ipykernel of the environment itself."""
OLDER = {"6.31.0": ("nest-asyncio>=1.6",), "7.0.1": ("nest-asyncio>=1.6",)}
"""Version -> what it needs and the newest does not: no subshells at all, and the first with them."""
VERSIONS = (*OLDER, NEWEST)
EACH = (*(pytest.param(version, marks=pytest.mark.exhaustive) for version in OLDER), NEWEST)
"""All versions, as parameters of a test or fixture; `make test` runs it with the newest only."""
QUIET = """__import__("hydrogen_magic.notebook.magics", fromlist="_")._PRELOADED = ("torch",)"""
"""Has the first agent import no ``torch._dynamo`` in advance, which takes two seconds of a processor."""
LOAD = f"%load_ext hydrogen_magic\n{QUIET}"
"""Loads the extension."""
LEAVE_UNREAD = ("7.0.1",)
"""ipykernel 7.0 to 7.3 leave a request unread that comes while they send a reply, until the next one
comes by another connection (https://github.com/ipython/ipykernel/issues/1554)."""


def overlay(version: str) -> Path:
    """Return where an older version is, or will be."""
    return Path(sys.prefix) / "kernels" / version


def is_installed(version: str) -> bool:
    return version == NEWEST or (overlay(version) / "ipykernel").is_dir()


def environment(version: str) -> dict[str, str]:
    """Return the variables that make a kernel process use this version; newest: none.

    The ranks of its gangs inherit them, and import no ipykernel.
    """
    if version == NEWEST:
        return {}
    paths = [str(overlay(version)), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def spec(version: str) -> dict[str, Any]:
    """Return the content of a ``kernel.json``."""
    return {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": f"ipykernel {version}",
        "language": "python",
        "env": environment(version),
        "metadata": {"debugger": False},
    }


def install(version: str) -> None:
    """Put an older version where :func:`overlay` says. Raises CalledProcessError."""
    part = overlay(version).with_name(f"{version}.part")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    target = ["--upgrade", "--no-deps", "--target", str(part)]
    subprocess.run([*command, *target, f"ipykernel=={version}", *OLDER[version]], check=True)
    part.rename(overlay(version))  # whole or not at all


def main() -> None:
    for version in OLDER:
        if not is_installed(version):
            print(f"· installing ipykernel {version} beside the newest", flush=True)
            install(version)


if __name__ == "__main__":
    main()
