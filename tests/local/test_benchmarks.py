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


NOTEBOOKS = {
    "a/same.ipynb": [
        "import numpy as np, time, threading\nx = np.arange(3)\nclass Box: size = 2",
        "x += Box.size\nbox = Box()\nprint(x)\nx.sum();",
        "y = np.random.rand(3); y",
        "started = time.time()",
        "x[5]",
        "lock = threading.Lock()",
        "lock.acquire()",
        "%%writefile beside.py\nRATE = 3",
        "import beside\nopen('new.txt', 'w').close()\nbeside.RATE",
        "",
    ],
    "b/differ.ipynb": [
        "import os\nsize = os.environ.get('WORLD_SIZE', '1')",
        "size * 2",
        "if 'RANK' in os.environ: raise ValueError",
    ],
}


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_notebooks_of_others(tmp_path: Path) -> None:
    """Cells that mean something else on ranks are found, and no others."""
    for name, sources in NOTEBOOKS.items():
        cells = [{"cell_type": "code", "source": source} for source in sources]
        path = tmp_path / "notebooks" / name
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": "#"}, *cells]}))
    done = subprocess.run(
        [sys.executable, "benchmarks/public_notebooks.py", str(tmp_path / "notebooks"),
         "--save", str(tmp_path)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=240,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    table = json.loads((tmp_path / "public_notebooks.json").read_text())
    found = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
    counts = {name: {k: v for k, v in row.items() if k and v} for name, row in found.items()}
    same = {"cells": 10, "same": 5, "vary": 1, "raise": 1, "refused": 1, "other": 2}
    assert counts["a/same.ipynb"] == same, done.stdout
    assert counts["b/differ.ipynb"] == {"cells": 3, "same": 1, "differ": 1, "failed": 1}
    assert "`size`: '2', plainly '1'" in done.stdout.replace('"', "").replace("\\'", "'").replace(
        "''", "'"
    )
    assert not [*(tmp_path / "notebooks").rglob("new.txt")], "they ran in copies of their folders"
