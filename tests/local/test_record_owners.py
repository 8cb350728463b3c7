"""Records of runs whose kernel has died."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
from IPython.core.interactiveshell import InteractiveShell

from hydrogen_magic.core import run_log
from hydrogen_magic.driver.owner import connection
from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.notebook import extension
from tests.records import ENDED, METRICS, launched, write


def dead_owner() -> str:
    code = "from hydrogen_magic.core import run_log; print(run_log.owner_of_this_process())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def test_runs_whose_kernel_died_are_unfinished_and_old_ones_pruned() -> None:
    dead = dead_owner()
    write("dead", launched("dead", 1.0, dead), METRICS)
    write("over", launched("over", 2.0, dead), ENDED)
    write("here", launched("here", 3.0), METRICS)
    away = write("away", launched("away", 4.0, "another machine:1:1"), METRICS)
    assert [found.gang for found in run_log.recent()] == ["away", "here", "over", "dead"]
    assert run_log.unfinished() == ["dead"]
    os.utime(away / "events.jsonl", (0, 0))  # silent for long
    assert run_log.unfinished() == ["dead"]
    run_log.prune(keep=1)
    assert sorted(run_log.recent_ids()) == ["here", "over"]


@pytest.mark.parametrize("host", ["another", os.uname().nodename])
def test_a_silent_run_of_another_machine_is_ended_there(host: str) -> None:
    """A gang that waits for slots is silent. A machine of this name was this one, before it restarted."""
    folder = write(
        "away", replace(launched("away", owner="another machine:1:1"), host=host), METRICS
    )
    os.utime(folder / "events.jsonl", (0, 0))
    extension._report_stopped_runs()  # as %load_ext does it
    is_here = host != "another"
    if not is_here:
        with pytest.raises(HydrogenError, match="runs on another: attach to it there"):
            connection.attach("away")
    found = run_log.summary("away")
    assert found is not None and (found.ended is not None) == is_here


def test_a_run_is_reported_before_its_record_is_deleted(
    notebook_shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    write("old", replace(launched("old", owner=dead_owner()), outlives=True), METRICS)
    for number in range(50):
        write(f"new{number}", launched(f"new{number}", 100.0), ENDED)
    extension.load(notebook_shell)
    assert "gang old has ended: its owner process" in capsys.readouterr().out
    assert "old" not in run_log.recent_ids()
