"""What tests of gangs in gangs run on ranks, also on those that have only the ranks' part of the package."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

import hydrogen_magic as hm
from hydrogen_magic.compat import (
    DeepspeedTorchDistributor,
    HorovodRunner,
    MirroredStrategyRunner,
    TorchDistributor,
)

REFUSAL = "a rank cannot start a gang (this is rank 0); start it from the notebook"


def refusals() -> list[str]:
    """Try to start a gang in every way; return what is raised."""
    from hydrogen_magic.node.worker.interactive import ipython_shell

    line = ipython_shell.RankShell({})
    ways: list[Any] = [
        lambda: hm.run(print),
        lambda: hm.launch(print, np=1, on="inline"),
        lambda: HorovodRunner(np=-1).run(print),
        lambda: HorovodRunner(np=1).run(print),
        lambda: TorchDistributor(use_gpu=False).run(print),
        lambda: TorchDistributor(local_mode=False, use_gpu=False).run(print),
        lambda: DeepspeedTorchDistributor(useGpu=False).run(print),
        lambda: MirroredStrategyRunner(num_slots=1, local_mode=True, use_gpu=False).run(print),
        lambda: line.run_cell_magic("distributed", "", "1"),
        lambda: line.run_cell_magic("infer", "df", "1"),
        lambda: line.run_line_magic("distributed", "train.py"),
    ]
    raised = []
    for way in ways:
        with pytest.raises(hm.errors.PlacementError) as caught:
            way()
        raised.append(str(caught.value))
    return raised


def refusals_to_a_child() -> list[str]:
    """Return what ranks and a process that they start are told."""
    code = "import hydrogen_magic as hm; hm.run(print)"
    child = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    return [*refusals(), child.stderr.splitlines()[-1].partition(": ")[2]]
