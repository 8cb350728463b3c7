"""Gangs on Spark Connect that outlive their kernel (``--outlive``), and sessions for which it is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver.owner import start
from hydrogen_magic.driver.owner.connection import attach
from hydrogen_magic.driver.placements.spark import owner_session, private_calls
from hydrogen_magic.driver.placements.spark import spark_session as sessions
from hydrogen_magic.driver.placements.spark.placement import SparkPlacement
from hydrogen_magic.driver.placements.surroundings import Surroundings
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.transport import framing
from tests import jupyter, leaks, spark_rig
from tests.gangs import PATIENCE_S, ended, free_ports, wait_until, wait_until_gone
from tests.jupyter import Kernel
from tests.outliving import TRAINING, losses, owner_of
from tests.spark.test_spark_notebooks import is_interrupted
from tests.spark_kernels import CONNECT, notebook

pytestmark = [
    pytest.mark.spark,
    pytest.mark.xdist_group("connect"),
    pytest.mark.timeout(600),
]

FAILING_ONCE = """
import pathlib, time
import hydrogen_magic as hm
began = hm.checkpoint.load() or 0
for step in range(began, 6):
    hm.checkpoint.save(step + 1)
    if step == 3 and began == 0:
        while not pathlib.Path({go!r}).exists():
            time.sleep(0.02)
        assert hm.rank() > 0, "fails once"
began
"""
"""Fails in its first attempt as soon as there is a file ``go``."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first gang on a server starts its Python."""
    monkeypatch.setattr(jupyter, "PATIENCE_S", 240.0)


@pytest.fixture
def kernel(
    spark_site: spark_rig.Site, connect_server: spark_rig.ConnectServer, tmp_path: Path
) -> Iterator[Kernel]:
    with notebook(spark_site, tmp_path, CONNECT.format(connect_server.url)) as kernel:
        yield kernel


def launched(kernel: Kernel, cell: str, go: Path, line: str = "--np 2") -> str:
    """Launch the cell from the notebook; return the gang's id."""
    done = kernel.run(f"%%distributed --on spark --outlive {line}\n{cell.format(go=str(go))}")
    assert not done.error, done.error
    return kernel.value("_.id").strip("'")


def goes_on(gang_id: str) -> bool:
    at = len(losses(gang_id))
    wait_until(lambda: len(losses(gang_id)) > at)
    return True


def test_it_outlives_its_session_and_its_kernel(
    kernel: Kernel, connect_server: spark_rig.ConnectServer, tmp_path: Path
) -> None:
    """First another gang is interrupted in this kernel: to start one takes long."""
    assert not kernel.run("import hydrogen_magic as hm").error
    is_interrupted(kernel)
    before = {*connect_server.sessions(), kernel.value("spark.session_id").strip("'")}
    gang_id = launched(kernel, TRAINING, tmp_path / "go", "--np 2 --out model")
    owner = owner_of(gang_id)
    (its_session,) = connect_server.sessions() - before
    kernel.run("spark.stop()")
    assert goes_on(gang_id)
    os.kill(kernel.pid, signal.SIGKILL)
    assert goes_on(gang_id)
    gang = attach(gang_id)
    (tmp_path / "go").touch()
    assert ended(gang).results == [41, 42]
    assert gang.out["model"].weights[0] > 0
    wait_until_gone([owner])
    # The owner does not wait for a slow release.
    wait_until(lambda: its_session not in connect_server.sessions())
    late = rf"error during: interrupt\..*SessionId: {its_session}"
    cancelled = rf"Stage cancelled: .*_Session_{its_session}_"
    found = re.search(f"{late}|{cancelled}", connect_server.log())
    assert not found, "the job ended by itself, before its session"
    results = ["results-0", "results-1"]
    assert sorted(os.listdir(gang.folder)) == ["events.jsonl", "rank-0.log", "rank-1.log", *results]


@pytest.mark.exhaustive
def test_it_is_retried_while_no_kernel_is_attached(kernel: Kernel, tmp_path: Path) -> None:
    gang_id = launched(kernel, FAILING_ONCE, tmp_path / "go", "--np 2 --retries 1")
    owner = owner_of(gang_id)
    os.kill(kernel.pid, signal.SIGKILL)
    kernel.revive()
    (tmp_path / "go").touch()
    wait_until_gone([owner])
    assert f"gang {gang_id} has ended: 2 ranks finished" in kernel.load()
    again = attach(gang_id)
    assert (again.result, again.snapshot().attempt, again.state) == (4, 1, "SUCCEEDED")


@pytest.mark.exhaustive
@pytest.mark.parametrize("restarts", [True, False])
def test_the_end_of_the_server_is_in_the_record(
    restarts: bool, spark_site: spark_rig.Site, tmp_path: Path
) -> None:
    # One that no other process gets while no server runs.
    (free,) = free_ports(1)
    port = {"spark.connect.grpc.binding.port": str(free)}
    server = spark_rig.ConnectServer(spark_site, "local[2]", **port)
    with (
        closing(server),
        notebook(spark_site, tmp_path, CONNECT.format(server.url)) as kernel,
    ):
        gang_id = launched(kernel, TRAINING, tmp_path / "go")
        owner = owner_of(gang_id)
        assert goes_on(gang_id)
        os.kill(kernel.pid, signal.SIGKILL)
        server.close()
        with (
            closing(spark_rig.ConnectServer(spark_site, "local[2]", **port))
            if restarts
            else nullcontext()
        ):
            wait_until_gone([owner])
    gang = attach(gang_id)
    assert gang.state == "FAILED"
    # Depends on which of both ends first.
    lost = "the Python process of its Spark task|its Spark executor"
    assert re.search(f"TaskLost: ({lost}) ended", gang.snapshot().reason)


@pytest.fixture(params=[True, False], ids=["clone", "new"])
def values(
    request: pytest.FixtureRequest, own: Any, monkeypatch: pytest.MonkeyPatch
) -> dict[str, object]:
    """What an owner gets from a notebook that uses the session, with Spark 4.1 and with 4.0."""
    monkeypatch.setattr(sys.modules["__main__"], "spark", own, raising=False)
    return {**SparkPlacement().owner_setup(), "can_clone": request.param}


@pytest.fixture
def own(connect_server: spark_rig.ConnectServer) -> Iterator[Any]:
    """A session of its own, as a notebook has it."""
    with spark_rig.connected(connect_server.url) as spark:
        yield spark


def test_the_owner_has_a_session_like_the_notebooks(
    values: dict[str, object],
    own: Any,
    connect_server: spark_rig.ConnectServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner_session, "_RELEASE_S", PATIENCE_S)
    own.conf.set("spark.sql.shuffle.partitions", "7")
    with owner_session.owned(values):
        spark = sessions.find().spark
        assert spark.conf.get("spark.sql.shuffle.partitions") == "7"
        spark.conf.set("spark.sql.shuffle.partitions", "8")
        assert spark.session_id in connect_server.sessions()
    assert spark.session_id not in connect_server.sessions()
    assert own.conf.get("spark.sql.shuffle.partitions") == "7"


def test_an_owner_that_is_still_starting_ends_with_its_kernel() -> None:
    """Its server accepts the connection and does not answer: the client would try for ten minutes."""
    around = Surroundings.now()
    ours, theirs = framing.pair()
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.TemporaryFile() as stderr:
        server.settimeout(PATIENCE_S)
        request = msg.OwnGang(
            spec=JobSpec(np=1, placement="spark"),
            title="",
            source="",
            cells={},
            params={},
            preload=(),
            required_modules=(),
            datasets={},
            data_places=(),
            warnings=(),
            env=dict(around.env),
            cwd=around.directory,
            sys_path=around.sys_path,
            shadowed=(),
            placement_setup={
                "endpoint": f"127.0.0.1:{server.getsockname()[1]}",
                "params": {"session_id": str(uuid.uuid4()), "user_id": "ada"},
                "options": {},
                "can_clone": True,
            },
        )
        with theirs:
            starting = start._start_process(theirs, stderr)
        closure = os.memfd_create("closure")  # it is read at the launch
        framing.send(ours, request, [closure])
        os.close(closure)
        assert starting.wait() == 0, "the owner is its child"
        with server.accept()[0]:
            mine = leaks.marked(leaks.SESSION, os.environ[leaks.SESSION])
            owners = [pid for pid in mine if "driver.owner.process" in leaks.command(pid)]
            assert len(owners) == 1
            ours.close()
            wait_until_gone(owners)


def test_the_owner_connects_as_the_notebook_does() -> None:
    from pyspark.sql.connect.session import SparkSession

    spark = SparkSession("sc://localhost:9/;use_ssl=true;token=t;x-tenant=7", userId="me")
    values = private_calls.connection(sessions.Session(spark, True, "application", ""))
    its = owner_session._connected(json.loads(json.dumps(values)))
    try:
        assert (its.client.host, its.client.token) == ("localhost", "t")
        assert its.client._builder.metadata() == [("x-tenant", "7")]
        assert its.client._user_id == "me" and its.session_id == spark.session_id
    finally:
        its.client.close()
        spark.client.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("values", [True], indirect=True)
def test_a_clone_has_the_notebooks_artifacts(
    values: dict[str, object], own: Any, tmp_path: Path
) -> None:
    (tmp_path / "added_by_notebook.py").write_text("value = 41\n")
    own.addArtifacts(str(tmp_path / "added_by_notebook.py"), pyfile=True)

    def imported(batches: Any) -> Iterator[Any]:
        import added_by_notebook  # type: ignore[import-not-found]
        import pyarrow

        assert list(batches)
        yield pyarrow.RecordBatch.from_pydict({"id": [added_by_notebook.value]})

    with owner_session.owned(values):
        frame = sessions.find().spark.range(0, 1, 1, 1).mapInArrow(imported, "id long")
        assert [row.id for row in frame.collect()] == [41]


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("is_connect", "said"),
    [
        (False, "a classic session ends with its kernel.*use a"),
        (True, "the settings of its connection cannot be"),
    ],
)
def test_a_session_that_cannot_be_passed_on_is_refused(is_connect: bool, said: str) -> None:
    spark = SimpleNamespace(client=SimpleNamespace(_builder=object()))
    with pytest.raises(PlacementError, match=said):
        owner_session.setup(sessions.Session(spark, is_connect, "application", ""))


@pytest.mark.exhaustive
def test_a_session_that_ends_with_its_kernel_is_refused(
    spark_site: spark_rig.Site, tmp_path: Path
) -> None:
    said = "the Spark Connect server of this session runs inside the kernel"
    with notebook(spark_site, tmp_path, CONNECT.format("local[1]")) as kernel:
        refused = kernel.run("%%distributed --np 1 --on spark --outlive --dry-run\n1")
        assert said in refused.error, refused.error
        assert kernel.run("%%distributed --np 1 --on spark\n41").value == "41"
