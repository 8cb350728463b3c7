"""Benchmarks that stand on internals: they run, and measure what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_a_simulated_cluster(tmp_path: Path) -> None:
    """It replaces methods of the kernel's side, and its hosts speak the agents' protocol."""
    done = subprocess.run(
        [sys.executable, "benchmarks/simulated_cluster.py", "--ranks", "16", "--closure", "20",
         "--seconds", "1", "--save", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=240,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = json.loads((tmp_path / "simulated_cluster_closure.json").read_text())
    (row,) = table["rows"]
    found = dict(zip(table["columns"], row, strict=True))
    assert (found["ranks"], found["hosts"]) == (16, 2)
    assert 20 <= found["sent"] < 21, "MB: hosts pass the closure on to each other"
    assert found["events"] > 0
