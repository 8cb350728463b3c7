"""Gangs on the Spark session of this process, their agents, and jobs that compete with them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydrogen_magic as hm
from hydrogen_magic.core.processes import AGENT, OWNER
from hydrogen_magic.core.run_log import owner_of_this_process
from hydrogen_magic.driver.gang import Gang
from tests import leaks, spark_rig
from tests.gangs import PATIENCE_S


def launch(function: Callable[..., Any], *arguments: Any, **options: Any) -> Gang:
    """Launch a gang on this process's session; the session's GPUs are for tests that ask for them."""
    return hm.launch(function, *arguments, on="spark", **{"gpu": False, **options})


def agent_pids() -> list[int]:
    """Return what agents of this process started on the cluster, and the agents."""
    return [
        pid
        for pid in leaks.marked(OWNER, owner_of_this_process())
        if f"{AGENT}=".encode() in leaks.environment(pid)
    ]


def report_gpus() -> Callable[[Any], Any]:
    """Return a task that yields its GPUs; made here, so that it travels by value."""

    def task(batches: Any) -> Iterator[Any]:
        import pyarrow
        from pyspark import BarrierTaskContext

        for _ in batches:
            pass
        context = BarrierTaskContext.get()
        assert context is not None
        gpus = [address for r in context.resources().values() for address in r.addresses]
        yield pyarrow.RecordBatch.from_pydict({"o": [" ".join(gpus).encode()]})

    return task


@contextmanager
def busy(spark: Any, n_slots: int, folder: Path) -> Iterator[Callable[[], None]]:
    """Have a plain job hold slots until it is told to let go, at the latest at the end."""
    done = folder / "done"

    def hold(batches: Any) -> Iterator[Any]:
        yield from batches
        # Processes of two machines may have the same number.
        space = os.stat("/proc/self/ns/pid").st_ino
        (folder / f"holding-{os.getpid()}-{space}").touch()
        while not done.exists():
            time.sleep(0.02)

    job = spark.range(0, n_slots, 1, n_slots).mapInArrow(hold, "id long")
    thread = threading.Thread(target=job.collect, daemon=True)
    thread.start()
    spark_rig.until(lambda: len(list(folder.glob("holding-*"))) == n_slots, PATIENCE_S)
    try:
        yield done.touch
    finally:
        done.touch()
        thread.join(PATIENCE_S)
