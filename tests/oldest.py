"""The oldest releases of the dependencies that pyproject.toml allows, in an environment of their own.

``python -m tests.oldest ARGUMENTS`` makes what is missing, and runs pytest there; ``make test-oldest`` does.
It takes gigabytes: releases of torch for CPUs alone are only in torch's own index.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import environments

ROOT = Path(__file__).parents[1]
PLACE = Path(sys.prefix) / "oldest"
_PYTHON = str(PLACE / "bin" / "python")
_EXTRAS = "torch,infer"
_TOOLS = (
    "hypothesis>=6.100",
    "jupyterlab>=4",
    "matplotlib>=3.8",
    "pexpect>=4.9",
    "polars>=1",
    "pytest>=8.3,<9.2",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
    "tqdm>=4.66",
)
"""What the tests need; their own oldest releases do not matter."""
TESTS = (
    "tests/local/test_in_jupyter.py",
    "tests/local/test_magics.py",
    "tests/local/test_rendezvous.py",
    "tests/local/test_session.py",
    "tests/unit/test_infer_work.py",
    "tests/unit/test_predictor.py",
)
"""Those with most of what differs from release to release."""


def install() -> None:
    """Make the environment. Raises CalledProcessError."""
    uv, here = [_PYTHON, "-m", "uv", "pip"], ["--quiet", "--python", _PYTHON]
    pins = PLACE / "oldest.txt"
    with environments.made(PLACE) as pip_install:
        subprocess.run([*pip_install, "uv"], check=True)
        package = ["--editable", f"{ROOT}[{_EXTRAS}]"]
        subprocess.run(
            [*uv, "install", *here, "--resolution", "lowest-direct", *package], check=True
        )
        with pins.open("wb") as file:
            freeze = [*uv, "freeze", *here, "--exclude-editable"]
            subprocess.run(freeze, check=True, stdout=file)
        subprocess.run([*uv, "install", *here, "--constraint", str(pins), *_TOOLS], check=True)


def main() -> None:
    if not PLACE.exists():
        print("· the oldest releases of all dependencies", flush=True)
        install()
    options = ["-p", "no:nbval", "-m", "not exhaustive", "--dist", "loadgroup"]
    os.execv(_PYTHON, [_PYTHON, "-m", "pytest", *options, *TESTS, *sys.argv[1:]])


if __name__ == "__main__":
    main()
