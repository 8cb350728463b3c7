"""Run the benchmarks that fit into 20 minutes, and save their tables for ``docs/benchmarks.md``.

    python benchmarks/save_all.py

A benchmark that takes longer than its share is ended; the tables that it has not reached keep their numbers.
Each benchmark lists what is not installed. ``page``, ``timeline``, ``simulated_cluster`` and the large table
of ``dataset`` take too long: run these with ``--save`` yourself. The exit code is 1 if one failed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hydrogen_magic.core import processes

TOTAL_S = 20 * 60.0
PARTS = {
    "launch.py --rounds 4": 180.0,
    "frameworks.py --rounds 3": 150.0,
    "closure.py --rounds 3": 150.0,
    "step.py --rounds 5": 100.0,
    "spark.py --rounds 2": 270.0,
    "stop.py --rounds 1": 120.0,
    "sessions.py --rounds 2 --what call push pull": 150.0,
    "sessions.py --rounds 1 --what interrupt failure": 300.0,
    "dataset.py --rounds 1 --what small": 90.0,
    "view.py": 80.0,
    "infer.py --rounds 3": 300.0,
}
"""Arguments -> the most seconds; together more than there are, since few take that long."""
_MARK = "HYDROGEN_MAGIC_BENCHMARK_PART"
"""Environment variable of a benchmark and all processes that it has started."""
_END_S = 10.0


def main() -> None:
    root, end_s = Path(__file__).parents[1], time.monotonic() + TOTAL_S
    failed = []
    for part, limit_s in PARTS.items():
        left_s = end_s - time.monotonic()
        print(f"\n── {part}", flush=True)
        if left_s <= 0:
            print("left out: the 20 minutes are over", flush=True)
        elif run(root, part, min(limit_s, left_s)):
            failed.append(part)
    subprocess.run([sys.executable, "-m", "docs.generated"], cwd=root, check=True)
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


def run(root: Path, part: str, limit_s: float) -> int:
    """Run one benchmark, end its processes and delete its files; return its exit code, 0 at the limit."""
    name, *arguments = part.split()
    mark = secrets.token_hex(8)
    command = [sys.executable, str(root / "benchmarks" / name), *arguments, "--save"]
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        own = {_MARK: mark, "TMPDIR": folder, "SPARK_LOCAL_DIRS": folder}
        try:
            code = subprocess.run(command, env={**os.environ, **own}, timeout=limit_s).returncode
            print(f"exit code {code} after {time.monotonic() - began_s:.0f} s", flush=True)
        except subprocess.TimeoutExpired:
            code = 0
            print(f"ended after {limit_s:.0f} s: tables not above keep their numbers", flush=True)
        finally:
            asyncio.run(processes.end_marked(_MARK, mark, _END_S))
    return code


if __name__ == "__main__":
    main()
