"""The package on other versions of Python: a cell, its result and ``--out``, and a failure."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests import pythons

PROGRAM = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "hydrogen_magic")
shell.run_cell("factor = 3\\ndef scaled(x): return factor * x")
done = shell.run_cell(
    "%%distributed --np 2 --quiet --out mine\\n"
    "import hydrogen_magic as hm\\n"
    "mine = scaled(hm.rank() + 1)\\n"
    "[scaled(n) for n in range(hm.world_size())]"
)
assert done.result == [0, 3], done
assert shell.user_ns["mine"] == 3
failed = shell.run_cell(
    "%%distributed --np 2 --quiet\\n"
    "import time, hydrogen_magic as hm\\n"
    "if hm.rank() == 1: raise ValueError('bad batch 17')\\n"
    "time.sleep(600)"
)
assert "rank 1 failed: ValueError: bad batch 17" in str(failed.error_in_exec)
print("all of it works")
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("version", pythons.OTHERS)
def test_a_cell_runs_on_another_python(version: str) -> None:
    python = pythons.python(version)
    if python is None:
        pytest.skip(f"no Python {version} here: python -m tests.pythons")
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        [str(python), "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=120
    )
    assert "all of it works" in done.stdout, done.stdout + done.stderr
