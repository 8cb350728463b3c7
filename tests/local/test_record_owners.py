"""Records of runs whose kernel has died."""

from __future__ import annotations

import os
import subprocess
import sys

from hydrogen_magic.core import run_log
from tests.records import ENDED, METRICS, launched, write


def test_runs_whose_kernel_died_are_unfinished_and_old_ones_pruned() -> None:
    code = "from hydrogen_magic.core import run_log; print(run_log.owner_of_this_process())"
    dead = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    write("dead", launched("dead", 1.0, dead), METRICS)
    write("over", launched("over", 2.0, dead), ENDED)
    write("here", launched("here", 3.0), METRICS)
    away = write("away", launched("away", 4.0, "another machine:1:1"), METRICS)
    assert [found.gang for found in run_log.recent()] == ["away", "here", "over", "dead"]
    assert run_log.unfinished(run_log.is_alive) == ["dead"]
    os.utime(away / "events.jsonl", (0, 0))  # silent for long
    assert run_log.unfinished(run_log.is_alive) == ["away", "dead"]
    run_log.prune(keep=1)
    assert sorted(run_log.recent_ids()) == ["away", "here"]
