"""Downloads for a build: tools that are Python packages, and the source release.

They are not installed into the user's environment; pip downloads them from its configured index.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from hydrogen_magic.frameworks import subprocess_log
from hydrogen_magic.frameworks.horovod.build import source_patches
from hydrogen_magic.frameworks.horovod.build.cuda import output
from hydrogen_magic.frameworks.horovod.build.errors import BuildError

_NEEDS = {
    "cloudpickle": "cloudpickle",
    "psutil": "psutil",
    "pyyaml": "yaml",
    "packaging": "packaging",
}
"""Horovod's dependencies besides torch: distribution -> module. It also lists cffi, but never uses it."""
_LEAST_CMAKE = (3, 13)
_N_LINES = 8
"""How much of pip's output goes into a message."""


def search_path(tools: Path) -> str:
    """Return the PYTHONPATH of a process that should find the tools first."""
    return os.pathsep.join(filter(None, [str(tools), os.environ.get("PYTHONPATH", "")]))


def missing_needs() -> list[str]:
    """Return the distributions that Horovod imports and this Python lacks."""
    return [name for name, module in _NEEDS.items() if importlib.util.find_spec(module) is None]


def tools(target: Path, log: Path) -> Path:
    """Install build requirements that this Python lacks, into a separate directory.

    setuptools 81 and later lack pkg_resources and features that old setup files use.
    """
    needed = missing_needs()
    if _version("setuptools") < (70, 1) or _version("setuptools") >= (81,):
        needed.append("setuptools>=70.1,<81")
    if cmake() is None:
        needed.append("cmake")
    target.mkdir()
    if needed:
        pip(["install", "--target", str(target), *needed], log, "install the build tools")
    return target


def cmake() -> str | None:
    """Return the machine's CMake if it is new enough."""
    found = os.environ.get("HOROVOD_CMAKE") or shutil.which("cmake")
    version = re.search(r"(\d+)\.(\d+)", output([found, "--version"]) if found else "")
    is_new = version is not None and (int(version[1]), int(version[2])) >= _LEAST_CMAKE
    return found if is_new else None


def _version(distribution: str) -> tuple[int, ...]:
    try:
        text = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in re.findall(r"^\d+|(?<=\.)\d+", text)[:2])


def source(tools: Path, place: Path, log: Path) -> Path:
    """Download the source release by pip, unpack it into ``place``, and return its root."""
    with tarfile.open(_release(tools, place, log)) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(place, filter="data")
        else:  # Python before 3.10.12; the file's digest is verified
            archive.extractall(place)
    return place / f"horovod-{source_patches.VERSION}"


def _release(tools: Path, place: Path, log: Path) -> Path:
    """Return the downloaded file; pip verifies its digest before it runs its setup.py for the metadata."""
    asked = place / "horovod.txt"
    asked.write_text(
        f"horovod=={source_patches.VERSION} --hash=sha256:{source_patches.SDIST_SHA256}\n"
    )
    options = ["--no-deps", "--no-binary", "horovod", "--no-build-isolation"]
    command = ["download", *options, "--dest", str(place / "release"), "-r", str(asked)]
    pip(command, log, "download Horovod's source release", tools)
    return next((place / "release").glob("horovod-*.tar.gz"))


def pip(arguments: Sequence[str], log: Path | None, task: str, tools: Path | None = None) -> None:
    """Run pip, or raise BuildError with its output."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    environment = {**os.environ, "PIP_USER": "0"} if "--target" in arguments else dict(os.environ)
    if tools is not None:
        environment["PYTHONPATH"] = search_path(tools)
    said: list[str] = []
    code = subprocess_log.run(
        command,
        cwd=Path.cwd(),
        environment=environment,
        log=log or Path(os.devnull),
        on_line=said.append,
    )
    if code != 0:
        first = next((n for n, line in enumerate(said) if "error" in line.lower()), -_N_LINES)
        lines = "".join(said[first:][:_N_LINES]).rstrip()
        whole = [f"Full log: {log}"] if log else []
        raise BuildError("\n".join([f"pip could not {task}:", lines, *whole]))
