"""Other versions of Python, where this machine has an interpreter: the package, without torch, in each.

Each has a virtual environment of its own beside the one that the tests run in. ``python -m tests.pythons``
makes what is missing; ``make test-all`` does.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests import environments

ROOT = Path(__file__).parents[1]
SUPPORTED = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.15")
OTHERS = tuple(v for v in SUPPORTED if v != f"{sys.version_info.major}.{sys.version_info.minor}")


def environment(version: str) -> Path:
    """Return where a version's virtual environment is, or will be."""
    return Path(sys.prefix) / "pythons" / version


def python(version: str) -> Path | None:
    """Return the interpreter of a version's environment, None when there is none."""
    found = environment(version) / "bin" / "python"
    return found if found.exists() else None


def _interpreters(version: str) -> Iterator[str]:
    """Yield what may be an interpreter of this version: pyenv's, which need not be on the path, too."""
    if (found := shutil.which(f"python{version}")) is not None:
        yield found
    yield from map(str, sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")))


def _works(interpreter: str, version: str) -> bool:
    """True unless it is a version manager's shim for a version that is not there, or lacks venv."""
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() == version


def interpreter(version: str) -> str | None:
    """Return an interpreter of this version that can make environments, None when there is none."""
    return next((each for each in _interpreters(version) if _works(each, version)), None)


def install(version: str) -> bool:
    """Make a version's environment; return False when this machine lacks it. Raises CalledProcessError."""
    found = interpreter(version)
    if found is None:
        return False
    with environments.made(environment(version), found) as pip_install:
        subprocess.run([*pip_install, "--editable", str(ROOT)], check=True)
    return True


def main() -> None:
    for version in OTHERS:
        if python(version) is None:
            print(f"· Python {version}: ", end="", flush=True)
            print("installing the package" if install(version) else "not on this machine")


if __name__ == "__main__":
    main()
