"""Installs the wheel into this Python, and tests it there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hydrogen_magic.frameworks.horovod import installation
from hydrogen_magic.frameworks.horovod.build import fetching
from hydrogen_magic.frameworks.horovod.build.errors import BuildError

_N_LINES = 8
"""How much of another program's output goes into a message."""


def install(wheel: Path, key: str, *, is_forced: bool, say: Callable[[str], None]) -> None:
    """Install the wheel of build ``key``, unless it is already installed."""
    found = installation.horovod()
    if found and found.build == key and installation.fault() is None and not is_forced:
        return
    missing = fetching.missing_needs()
    if missing:
        fetching.pip(["install", *missing], None, "install what Horovod imports")
    options = ["--no-deps", "--no-index", "--force-reinstall"]
    fetching.pip(["install", *options, str(wheel)], None, "install the wheel")
    say(f"· installed {wheel.name} in {sys.prefix}")


_TRY = """
import torch, horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.arange(4.0), op=hvd.Sum)
assert hvd.size() == 1 and total.tolist() == [0.0, 1.0, 2.0, 3.0], (hvd.size(), total)
hvd.shutdown()
"""
_TRY_TIMEOUT_S = 120.0


def try_out() -> None:
    """Load Horovod and reduce a tensor in a separate process; BuildError has the error."""
    fault = installation.fault()
    if fault is not None:
        raise BuildError(fault)
    environment = {name: v for name, v in os.environ.items() if not name.startswith("HOROVOD_")}
    environment |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRY],
            cwd=sys.prefix,  # there is no folder named horovod or torch that would be imported instead
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TRY_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"Horovod did not reduce one tensor in {_TRY_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()[-_N_LINES:]
        raise BuildError(
            "\n".join([f"Horovod does not work (exit code {done.returncode}):", *lines])
        )
