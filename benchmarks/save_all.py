"""Run the benchmarks that fit into 20 minutes, and save their tables for ``docs/benchmarks.md``.

    python benchmarks/save_all.py

A benchmark that takes longer than its share is ended; the tables that it has not reached keep their numbers.
Each benchmark lists what is not installed. ``page``, ``timeline``, ``simulated_cluster`` and the whole of
``dataset`` take too long: run these with ``--save`` yourself.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

from hydrogen_magic.core import processes

TOTAL_S = 20 * 60.0
PARTS = {
    "launch.py --rounds 4": 180.0,
    "horovod_launch.py --rounds 5": 60.0,
    "closure.py --rounds 3": 150.0,
    "step.py --rounds 5": 100.0,
    "spark.py --rounds 2": 270.0,
    "stop.py --rounds 1": 120.0,
    "sessions.py --rounds 2 --what call push pull": 150.0,
    "sessions.py --rounds 1 --what interrupt failure": 300.0,
    "dataset.py --quick": 60.0,
    "view.py": 80.0,
    "infer.py --rounds 3": 300.0,
}
"""Arguments -> the most seconds; together more than there are, since few take that long."""
_MARK = "HYDROGEN_MAGIC_BENCHMARK_PART"
"""Environment variable of a benchmark and all processes that it has started."""


def main() -> None:
    root, end_s = Path(__file__).parents[1], time.monotonic() + TOTAL_S
    for part, limit_s in PARTS.items():
        left_s = end_s - time.monotonic()
        print(f"\n── {part}", flush=True)
        if left_s > 0:
            run(root, part, min(limit_s, left_s))
        else:
            print("left out: the 20 minutes are over", flush=True)
    subprocess.run([sys.executable, "-m", "docs.generated"], cwd=root, check=True)


def run(root: Path, part: str, limit_s: float) -> None:
    """Run one benchmark, and end what is left of it."""
    name, *arguments = part.split()
    mark = secrets.token_hex(8)
    command = [sys.executable, str(root / "benchmarks" / name), *arguments, "--save"]
    began_s = time.monotonic()
    try:
        code = subprocess.run(command, env={**os.environ, _MARK: mark}, timeout=limit_s).returncode
        print(f"exit code {code} after {time.monotonic() - began_s:.0f} s", flush=True)
    except subprocess.TimeoutExpired:
        print(
            f"ended after {limit_s:.0f} s: tables that are not above keep their numbers", flush=True
        )
    finally:
        processes.kill_marked(_MARK, {mark})


if __name__ == "__main__":
    main()
