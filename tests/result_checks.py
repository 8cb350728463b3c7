"""Checks of results that hold on every placement."""

from __future__ import annotations

import gc
import re
from typing import Any

import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell

import hydrogen_magic as hm
from hydrogen_magic.core import events as ev
from hydrogen_magic.core.units import size_text
from hydrogen_magic.errors import ResultError
from hydrogen_magic.serialization.tolerant_unpickling import MissingObject


def run_cell(shell: InteractiveShell, cell: str) -> Any:
    done = shell.run_cell(cell)
    done.raise_error()
    return done.result


def check_every_name(shell: InteractiveShell, options: str, library: str = "torch") -> None:
    """``library``: of the array among the results, ``torch`` or ``numpy``."""
    run_cell(
        shell,
        f"import threading, {library} as arrays\n"
        "kept, gone, alias_of = [0], 1, [0]\nalias = alias_of",
    )
    with pytest.raises(ResultError) as caught:
        run_cell(
            shell,
            f"%%distributed --np 2 --quiet --out locked,kept,gone,branch,alias_of {options}\n"
            "import os\nlocked = {'weights': arrays.ones(3), 'lock': threading.Lock()}\n"
            "kept = [1]\nalias.append(2)\ndel gone\n"
            "if os.environ['RANK'] == '1': branch = 3\n"
            "(n for n in kept)",
        )
    lines = str(caught.value).splitlines()
    assert shell.user_ns["kept"] == [1] and shell.user_ns["alias_of"] == [0, 2]
    assert shell.user_ns["gone"] == 1, "it keeps its value"
    for name, remedy in (
        ("`gone` (--out) is not defined", "or leave it out of --out"),
        ("`branch` (--out) is not defined", "or leave it out of --out"),
        ("`locked['lock']`", "or leave it out with __getstate__"),
        ("last expression", "or end the cell with `None`"),
    ):
        (line,) = [line for line in lines if name in line]
        assert line.endswith(remedy), line
    assert lines[-1] == "`kept`, `alias_of` arrived and are assigned"
    (gang_id,) = [line.split("'")[1] for line in lines if "load_results" in line]
    rest = hm.load_results(gang_id)["locked"]
    assert rest["weights"].tolist() == [1, 1, 1] and isinstance(rest["lock"], MissingObject)


def details_of(gang: hm.Gang) -> list[str]:
    """Return what the view said about the phases of ranks."""
    return [event.detail for event in gang.events() if isinstance(event, ev.RankPhase)]


def check_that_captured_arrays_are_freed(shell: InteractiveShell, options: str) -> None:
    """Twenty cells, each with an array of its own.

    The first ones leave buffers for the way to Spark, of up to five arrays.
    """
    size = 8 << 20
    run_cell(shell, "import numpy as np")

    def run_with_another(value: int) -> None:
        run_cell(shell, f"data = np.full({size}, {value}, np.uint8)")
        cell = f"%%distributed --np 1 --quiet {options}\nlen(data), int(data[-1])"
        assert run_cell(shell, cell) == (size, value)
        run_cell(shell, "del data")

    run_with_another(0)
    before = psutil.Process().memory_info().rss
    for value in range(1, 21):
        run_with_another(value)
    grown = psutil.Process().memory_info().rss - before
    assert grown < 8 * size, grown


def check_the_view_counts_bytes(shell: InteractiveShell, options: str, size: int) -> None:
    cell = f"%%distributed --np 1 --quiet --out big {options}\nimport numpy as np"
    run_cell(shell, f"{cell}\nbig = np.zeros({size}, np.uint8)")
    assert shell.user_ns.pop("big").nbytes == size
    gang = list(hm.gangs().values())[-1]
    counted = [each for each in details_of(gang) if each.startswith("sending")]
    line = rf"sending [\d.]+ [kMG]?B of {re.escape(size_text(size))}(: `big`)?"
    assert counted and all(re.fullmatch(line, each) for each in counted), counted
    del gang
    run_cell(shell, f"%%distributed --np 1 --quiet {options}\npass")
    gc.collect()
