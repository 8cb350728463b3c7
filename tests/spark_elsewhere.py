"""A notebook on a network of its own: it reaches Spark Connect's server, and no executor reaches it.

    notebook 10.78.0.2 ── 10.78.0.1 server 10.77.0.1 ── 10.77.0.2 and 10.77.0.3 executors

The server's machine forwards nothing from one network to the other. Run like
:mod:`tests.spark_machines`, in namespaces that end with it; it prints one line of JSON, with what the
notebook saw and what became of its ranks when it was killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tests import leaks, plain_ranks, spark_machines, spark_ranks
from tests import spark_rig as rig
from tests.gangs import alive

SERVER = "10.78.0.1"
"""The server's address as the notebook knows it."""


def main(folder: Path) -> None:
    leaks.mark_session()
    spark_machines.prepare_network()
    executors = [
        spark_machines.Machine("one", "10.77.0.2"),
        spark_machines.Machine("two", "10.77.0.3"),
    ]
    spark_machines.add_network("hm-office", SERVER)
    notebook = spark_machines.Machine("notebook", "10.78.0.2", "hm-office")
    site = rig.Site.create(folder, spark_machines.KERNEL)
    cluster = rig.Standalone(site, [machine.place for machine in executors])
    server = rig.ConnectServer(site, cluster.url, **{"spark.connect.grpc.binding.address": SERVER})
    with closing(cluster), closing(server):
        rig.until(lambda: len(cluster.executors()) == 2, spark_machines.AWAY_S)
        port = server.url.rpartition(":")[2]
        told = visit(notebook, executors, f"sc://{SERVER}:{port}", folder)
    print(f"{spark_machines.ANSWER}{json.dumps({'value': told})}", flush=True)


def visit(
    notebook: spark_machines.Machine,
    executors: Sequence[spark_machines.Machine],
    url: str,
    folder: Path,
) -> dict[str, Any]:
    """Return what the notebook saw, once its ranks have ended after it."""
    process = subprocess.Popen(
        [*notebook.prefix, sys.executable, "-m", "tests.spark_elsewhere", "notebook", url],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "HYDROGEN_MAGIC_HOME": str(folder / "home")},
    )
    assert process.stdout is not None
    lines = (line for line in process.stdout if line.startswith(spark_machines.ANSWER))
    told: dict[str, Any] = json.loads(next(lines).removeprefix(spark_machines.ANSWER))
    family = [pid for machine in executors for pid in machine.gang_pids()]
    for pid in notebook.pids().values():
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    rig.until(lambda: not alive(family), spark_machines.AWAY_S)
    return {**told, "n_processes": len(family)}


# ── on the notebook's machine ────────────────────────────────────────────────────────────────────


def be_notebook(url: str) -> None:
    """Run gangs through Spark Connect; say how that went, and wait for the end in the last one."""
    from pyspark.sql.connect.session import SparkSession

    import hydrogen_magic as hm

    spark = SparkSession.builder.remote(url).create()
    spark.range(1).collect()  # a server's first query takes seconds
    gang = hm.launch(spark_ranks.where, np=4, on="spark")
    everyone = gang.result
    notices = [notice.text for notice in gang.snapshot().notices]
    again = hm.launch(spark_ranks.count, 100_000, np=4, on="spark")
    rig.until(
        lambda: all("step 5" in text for text in again.logs.values()) and again.ranks,
        spark_machines.AWAY_S,
    )
    told = {
        "refused": refusal(),
        "hosts": sorted({rank["host"] for rank in everyone}),
        "notices": notices,
    }
    print(f"{spark_machines.ANSWER}{json.dumps(told)}", flush=True)
    again.wait()


def refusal() -> str:
    """Return the message about a gang that is too large."""
    import hydrogen_magic as hm

    try:
        hm.run(plain_ranks.parent, np=8, on="spark")
    except hm.errors.PlacementError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    if sys.argv[1] == "notebook":
        be_notebook(sys.argv[2])
    else:
        main(Path(sys.argv[1]))
