"""A notebook on each kind of cluster: the digits cell as it is, and what is left when its kernel ends.

Each kernel has a session of its own, beside that of the process that runs the tests.
"""

from __future__ import annotations

import os
import signal
import textwrap
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest

from hydrogen_magic.core.processes import AGENT, OWNER
from tests import jupyter, leaks, spark_rig
from tests.gangs import PATIENCE_S
from tests.jupyter import Cell, Kernel
from tests.spark_kernels import CLASSIC, CONNECT, notebook

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(600),
]

DIGITS = Path(__file__).parents[2] / "example_notebooks" / "01_first_gang.ipynb"
LOCAL_CLUSTER = "local-cluster[2,2,1024]"
START_S = 240.0
"""A session starts two or three JVMs, and its first gang the executors' Python."""
ONE_EXECUTOR = {"spark.cores.max": "2"}
NO_WAY = """
from hydrogen_magic.driver.placements import local_agents
from hydrogen_magic.driver.placements.remote.agents import RemoteAgentPool
local_agents.close()  # those that are warm have found their way
direct = RemoteAgentPool.listen
RemoteAgentPool.listen = lambda pool, addresses, ports: ["tcp://127.0.0.1:9"]
"""
A_WAY = """
local_agents.close()
RemoteAgentPool.listen = direct
"""
FAMILY = textwrap.dedent(
    """
    %%distributed --np 2 --on spark
    import subprocess, time
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("training", flush=True)
    while True:
        time.sleep(0.01)
    """
).lstrip()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jupyter, "PATIENCE_S", START_S)


def owner(kernel: Kernel) -> str:
    """Return the mark of all that this kernel's gangs start."""
    return kernel.value(
        "from hydrogen_magic.core import run_log; print(end=''); run_log.owner_of_this_process()"
    ).strip("'")


def training(kernel: Kernel) -> Cell:
    cell = kernel.start(FAMILY)
    kernel.until(cell, lambda: cell.stream().count("training") == 2)
    return cell


# ── the digits ───────────────────────────────────────────────────────────────────────────────────


def digits() -> list[str]:
    """Return the first notebook's code cells, up to the one that checks the model's accuracy."""
    cells = [c.source for c in nbformat.read(DIGITS, as_version=4).cells if c.cell_type == "code"]
    last = next(n for n, source in enumerate(cells) if "accuracy >" in source)
    return cells[: last + 1]


def learn_digits(kernel: Kernel) -> None:
    """Run the cells, the gang's on Spark; check what is seen meanwhile and afterwards."""
    for source in digits():
        if source.startswith("%%distributed "):
            train(kernel, source.replace("%%distributed ", "%%distributed --on spark --cpu ", 1))
        else:
            done = kernel.run(source)
            assert not done.error, done.error
    training = "list(hm.gangs().values())[-1].metrics"
    assert kernel.value(f"sorted(map(int, {training}['rank'].unique()))") == "[0, 1]"
    assert kernel.value(f"int({training}['loss'].count())") == str(2 * 8 * 23)


def train(kernel: Kernel, source: str) -> None:
    cell = kernel.start(source)
    kernel.until(cell, lambda: "running" in cell.block or cell.ended)
    assert not cell.error, cell.error
    assert not cell.ended, "shown live, not only at the end"
    kernel.finish(cell)
    assert not cell.error, cell.error
    assert "[0] trained on 2 ranks, on cpu" in cell.stream()
    assert "2 ranks · succeeded" in cell.block
    assert cell.value is not None and 0 < float(cell.value) < 1


@pytest.mark.exhaustive
def test_a_missing_module_and_two_sessions_on_a_cluster(
    spark_site: spark_rig.Site, standalone: spark_rig.Standalone, tmp_path: Path
) -> None:
    """Digits and GPUs on a standalone cluster are in the example notebook."""
    cell = CLASSIC.format(standalone.url)
    with notebook(spark_site, tmp_path, cell, **ONE_EXECUTOR) as kernel:
        refuses_what_executors_lack(kernel)
        displays_and_asks(kernel)
        stops_its_session_while_an_agent_is_stopped(kernel, str(spark_site.python))
        assert not kernel.run(cell).error
        everything_ends_with(kernel)


@pytest.mark.exhaustive
def test_a_driver_that_is_killed(
    spark_site: spark_rig.Site, standalone: spark_rig.Standalone, tmp_path: Path
) -> None:
    cell = CLASSIC.format(standalone.url)
    with notebook(spark_site, tmp_path, cell, **ONE_EXECUTOR) as kernel:
        ends_with_its_driver(kernel, str(spark_site.python))


def refuses_what_executors_lack(kernel: Kernel) -> None:
    """Name a module that is here and not there, with its host, before any rank runs."""
    kernel.run("import nbformat")
    refused = kernel.run("%%distributed --on spark\nprint('it ran')\nnbformat.__name__")
    # what is imported and not used does not matter: the next cells run
    assert "no module nbformat" in refused.error and os.uname().nodename in refused.error
    assert "it ran" not in refused.stream()


@pytest.fixture
def linked_site(spark_site: spark_rig.Site, tmp_path: Path) -> spark_rig.Site:
    """For ``local-cluster``."""
    return replace(spark_site, home=spark_rig.linked_spark_home(tmp_path / "spark"))


@pytest.mark.exhaustive
def test_a_session_that_is_stopped_on_a_local_cluster(
    spark_site: spark_rig.Site, linked_site: spark_rig.Site, tmp_path: Path
) -> None:
    with notebook(linked_site, tmp_path, CLASSIC.format(LOCAL_CLUSTER)) as kernel:
        done = kernel.run("%%distributed --np 2 --on spark\n1")
        assert not done.error, done.error
        mark = owner(kernel)

        def agents() -> list[int]:
            ours = leaks.marked(OWNER, mark)  # those on the notebook's own machine too
            return [pid for pid in ours if leaks.command(pid).startswith(str(spark_site.python))]

        assert agents(), "they are warm"
        assert not kernel.run("spark.stop()").error
        spark_rig.until(lambda: not agents(), PATIENCE_S)
        again = kernel.run("%%distributed --on spark\n1")
        assert "SparkSession.builder" in again.error, "how to make a session"


@pytest.mark.exhaustive
def test_digits_interrupt_relay_and_a_kernel_that_is_killed_on_a_servers_cluster(
    linked_site: spark_rig.Site, tmp_path: Path
) -> None:
    """On a server of its own, whose executors are processes.

    ``test_spark_outlive`` has an interrupt, ``test_spark_relay`` the relay.
    """
    with closing(spark_rig.ConnectServer(linked_site, LOCAL_CLUSTER)) as server:
        on_connect(linked_site, server, tmp_path)


def on_connect(site: spark_rig.Site, server: spark_rig.ConnectServer, folder: Path) -> None:
    with notebook(site, folder, CONNECT.format(server.url)) as kernel:
        learn_digits(kernel)
        is_interrupted(kernel)
        goes_by_a_relay(kernel)
        everything_ends_with(kernel)


def is_interrupted(kernel: Kernel) -> None:
    """Interrupt a cell; the next gang has all slots."""
    cell = training(kernel)
    kernel.interrupt()
    kernel.finish(cell)
    assert "KeyboardInterrupt" in cell.error or "GangStoppedError" in cell.error
    assert kernel.run("%%distributed --np 4 --on spark\nhm.world_size()").value == "4"


def goes_by_a_relay(kernel: Kernel) -> None:
    """Where executors cannot reach the notebook, the gang goes through the server, which is shown."""
    assert not kernel.run(NO_WAY).error
    cell = kernel.run("%%distributed --np 4 --on spark\nprint('hello')\nhm.world_size()")
    assert not cell.error, cell.error
    assert cell.value == "4" and cell.stream().count("hello") == 4
    assert "relay" in cell.block
    assert not kernel.run(A_WAY).error


def displays_and_asks(kernel: Kernel) -> None:
    """Executors have no IPython."""
    cell = kernel.start(
        "%%distributed --np 2 --on spark --display 1\nimport os, sys\n"
        "display({'text/html': '<b>html</b>', 'text/plain': 'text'}, raw=True)\n"
        "rank = os.environ['RANK']\n"
        "[input('name? ') if rank == '1' else rank, 'IPython' in sys.modules]"
    )
    assert kernel.type("Ada") == "[1] name? "
    kernel.finish(cell)
    assert cell.value == "['0', False]", cell.error
    assert "[0] text" in cell.stream() and "[1] text" not in cell.stream()
    shown = [content["data"] for kind, content in cell.messages if kind == "display_data"]
    assert shown[1:3] == [
        {"text/plain": "rank 1"},
        {"text/html": "<b>html</b>", "text/plain": "text"},
    ]


def stops_its_session_while_an_agent_is_stopped(kernel: Kernel, executors_python: str) -> None:
    """A stopped agent cannot end its ranks when Spark ends the executor.

    ``test_spark_endings`` has executors that are killed while their agent is stopped.
    """
    assert not kernel.run("import hydrogen_magic as hm").error
    mark = owner(kernel)
    started = kernel.run(FAMILY.replace("--np 2", "--np 2 --detach"))
    assert not started.error, started.error
    gang = "list(hm.gangs().values())[-1]"
    logs = f"all('training' in {gang}.logs.get(rank, '') for rank in (0, 1))"
    spark_rig.until(lambda: kernel.value(logs) == "True", START_S)

    (agent,) = [
        pid
        for pid in leaks.marked(OWNER, mark)
        if leaks.command(pid).startswith(executors_python)
        and leaks.command(pid).partition(" -m ")[2].startswith("hydrogen_magic.node.agent ")
    ]
    _, _, rest = leaks.environment(agent).partition(f"{AGENT}=".encode())
    agents_own = rest.partition(b"\0")[0].decode()
    assert len(leaks.marked(AGENT, agents_own)) >= 5, "two ranks with a helper each"
    os.kill(agent, signal.SIGSTOP)
    assert not kernel.run("spark.stop()").error
    spark_rig.until(lambda: not leaks.marked(AGENT, agents_own), PATIENCE_S)
    assert kernel.value(f"{gang}.wait(60), {gang}.state") == "(True, 'FAILED')"
    assert "Spark session was stopped" in kernel.value(f"{gang}.snapshot().reason")


def everything_ends_with(kernel: Kernel) -> None:
    """Kill the kernel while a gang runs; nothing of the gang, nor an agent, may be left."""
    mark = owner(kernel)
    training(kernel)
    assert len(leaks.marked(OWNER, mark)) >= 5, "an agent, two ranks with a helper each"
    os.kill(kernel.pid, signal.SIGKILL)
    spark_rig.until(
        lambda: not leaks.marked(OWNER, mark),
        PATIENCE_S,
        lambda: "\n".join(f"{pid} {leaks.command(pid)}" for pid in leaks.marked(OWNER, mark)),
    )


def ends_with_its_driver(kernel: Kernel, executors_python: str) -> None:
    """Kill the driver's JVM while a gang runs: the cell fails, and nothing is left on executors."""
    mark = owner(kernel)
    cell = training(kernel)
    (driver,) = [p for p in leaks.tree(kernel.pid) if "SparkSubmit" in leaks.command(p)]
    os.kill(driver, signal.SIGKILL)

    def left() -> list[int]:
        ours = leaks.marked(OWNER, mark)  # agents of the notebook's own machine stay
        return [pid for pid in ours if leaks.command(pid).startswith(executors_python)]

    spark_rig.until(lambda: not left(), PATIENCE_S, lambda: str([*map(leaks.command, left())]))
    kernel.finish(cell)
    assert "Spark" in cell.error
