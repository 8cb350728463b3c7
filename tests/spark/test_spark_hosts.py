"""On which hosts of a cluster the tasks of a gang run, and by which address they reach the kernel."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.core.network import PortRange
from hydrogen_magic.driver.placements.local_agents import hub
from hydrogen_magic.driver.placements.spark import hosts, private_calls
from hydrogen_magic.driver.placements.spark import spark_session as sessions
from hydrogen_magic.driver.placements.spark.capacity_check import capacity
from tests import spark_rig
from tests.gangs import free_ports

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def test_sparks_scheduler_gets_the_preferred_host_of_each_task(classic: Any) -> None:
    session = sessions._session(classic)
    wanted = ("one", "two", "two")
    stage = session._stage(_empty, 3, None, wanted)._jdf.queryExecution().toRdd()
    locations = [
        private_calls._context(session).getPreferredLocs(stage, n).head().host() for n in range(3)
    ]
    assert tuple(locations) == wanted
    here, profile = (spark_rig.HOST,) * 2, capacity(session, JobSpec(np=2, gpu=True)).profile
    assert profile is not None
    assert session.run_tasks(_one_row(), 2, profile, "located", hosts=here) == [b"0", b"1"]


def test_ranks_run_where_spark_refuses_locations(
    classic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(session: object) -> Any:
        raise RuntimeError("forbidden")

    monkeypatch.setattr(private_calls, "_context", refuse)
    session = sessions._session(classic)
    assert session.run_tasks(_one_row(), 2, None, "anywhere", hosts=("a", "b")) == [b"0", b"1"]


def _empty(batches: Any) -> Iterator[Any]:
    yield from batches


def _one_row() -> Any:
    def task(batches: Any) -> Iterator[Any]:
        import pyarrow
        from pyspark import TaskContext

        for _ in batches:
            pass
        context = TaskContext.get()
        assert context is not None
        yield pyarrow.RecordBatch.from_pydict({"o": [str(context.partitionId()).encode()]})

    return task


@pytest.mark.parametrize(
    ("bind", "behind"),
    [("127.0.0.1", ["127.0.0.1"]), ("0.0.0.0", ["10.0.0.5"]), ("[::1]", ["[::1]"])],
)
def test_executors_get_the_address_that_spark_advertises(
    bind: str, behind: list[str], warm_agents: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel listens at the address that Spark binds, on a port that may be published."""
    monkeypatch.setattr(hosts, "own_addresses", lambda: ("10.0.0.5",))
    conf = {"spark.driver.host": "driver.example", "spark.driver.bindAddress": bind}
    session = sessions.Session(SimpleNamespace(conf=conf), False, "app", "spark://there:7077")
    (port,) = free_ports(1)
    made = on_loop(lambda: hosts.endpoints(session, PortRange(port, port)))
    assert made == [f"tcp://{host}:{port}" for host in ("driver.example", *behind)]
    with socket.create_connection(("::1" if ":" in bind else "127.0.0.1", port)):
        pass


def on_loop(call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns on the hub's loop."""

    async def called() -> Any:
        return call()

    return asyncio.run_coroutine_threadsafe(called(), hub().loop).result()


@pytest.mark.exhaustive  # a driver of its own
def test_a_driver_behind_published_ports(
    spark_site: spark_rig.Site, standalone: spark_rig.Standalone
) -> None:
    """As in a bridged container: executors know another address, whose ports are passed on."""
    ports = free_ports(5)
    addresses = {
        "spark.driver.host": "127.0.0.9",
        "spark.driver.bindAddress": spark_rig.HOST,
        "spark.driver.port": str(ports[0]),
        "spark.driver.blockManager.port": str(ports[1]),
        "spark.cores.max": "2",  # one executor
    }
    out = subprocess.run(
        [sys.executable, "-c", _PUBLISHED, standalone.url, *map(str, ports)],
        capture_output=True, text=True,
        env={**spark_site.driver(**addresses), "PYTHONPATH": os.getcwd()}, timeout=240,
    )  # fmt: skip
    assert out.stdout.splitlines()[-1:] == ["through the published port"], out.stderr


_PUBLISHED = """
import asyncio, sys, threading

passed_on = set()

async def pump(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()

async def publish(port):
    async def connected(reader, writer):
        passed_on.add(port)
        there, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, back), pump(there, writer), return_exceptions=True)
    await asyncio.start_server(connected, "127.0.0.9", port)

master, *ports = sys.argv[1:]
ports = [int(port) for port in ports]
loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, daemon=True).start()
for port in ports:
    asyncio.run_coroutine_threadsafe(publish(port), loop).result()

from pyspark.sql import SparkSession
import hydrogen_magic as hm
from tests import ranks, spark_rig

spark = SparkSession.builder.master(master).getOrCreate()
spark_rig.wait_for_executors(spark, 1)
wanted = f"{ports[2]}-{ports[-1]}"
assert hm.run(ranks.gather, np=2, on="spark", gpu=False, ports=wanted) == [0, 1]
assert passed_on == set(ports[:3]), (passed_on, ports)  # of Spark, and of the kernel
print("through the published port")
"""


@pytest.mark.exhaustive  # a driver of its own
def test_a_driver_with_an_address_of_ipv6(tmp_path: Path) -> None:
    site = spark_rig.Site.create(tmp_path / "site", "[::1]")
    java = f"{spark_rig._JVM_OPTIONS} -Djava.net.preferIPv6Addresses=true"
    environment = site.driver(**{"spark.driver.extraJavaOptions": java})
    out = subprocess.run(
        [sys.executable, "-c", _BY_IPV6], capture_output=True, text=True, timeout=240,
        env={**environment, "SPARK_PREFER_IPV6": "true", "PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert out.stdout.splitlines()[-1:] == ["('::1', [0, 1])"], out.stderr


_BY_IPV6 = """
from pyspark.sql import SparkSession
import hydrogen_magic as hm
from tests import spark_ranks

spark = SparkSession.builder.master("local[2]").getOrCreate()
print(hm.run(spark_ranks.meeting_place, np=2, on="spark", quiet=True))
"""
