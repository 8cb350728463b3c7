"""GPUs that this machine does not have, for tests of their assignment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def report(count: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a driver's tool in ``folder`` that is found first and reports so many GPUs."""
    lines = "\n".join(f"echo '{n}, GPU-{n}0000000-aaaa'" for n in range(count))
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{lines}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
