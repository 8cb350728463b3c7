"""Results come home from a cluster as they do from this machine.

What ranks pack, and refuse to pack, is tested in ``tests/local/test_results.py``.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from tests import result_checks
from tests.gangs import PATIENCE_S

pytestmark = pytest.mark.usefixtures("spark", "warm_agents")


def test_every_name_comes_home_or_is_reported(notebook_shell: InteractiveShell) -> None:
    """With NumPy's arrays; ``tests/local/test_results.py`` has torch's, whose import takes seconds."""
    result_checks.check_every_name(notebook_shell, "--on spark --cpu", library="numpy")


@pytest.mark.exhaustive
def test_the_view_counts_the_bytes_of_a_large_result(notebook_shell: InteractiveShell) -> None:
    """From the rank to its agent, and from there to the notebook."""
    result_checks.check_the_view_counts_bytes(notebook_shell, "--on spark --cpu", 512 << 20)


@pytest.mark.exhaustive
def test_the_kernel_frees_what_it_has_captured(notebook_shell: InteractiveShell) -> None:
    result_checks.check_that_captured_arrays_are_freed(notebook_shell, "--on spark --cpu")


def test_a_sweep_fills_the_slots(notebook_shell: InteractiveShell, tmp_path: Path) -> None:
    """Two gangs of two ranks wait for each other, which four slots allow; then the third runs."""
    code = textwrap.dedent(
        f"""
        %%distributed --on spark --np 2 --cpu --quiet --sweep number=1,2,3
        import pathlib, time, hydrogen_magic as hm
        here, deadline = pathlib.Path({str(tmp_path)!r}), time.monotonic() + {PATIENCE_S}
        (here / f"{{number}}-{{hm.rank()}}").touch()
        while len(list(here.iterdir())) < 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        number * 10
        """
    )
    done = notebook_shell.run_cell(code.lstrip())
    done.raise_error()
    assert [row["result"] for row in done.result.results] == [10, 20, 30]
