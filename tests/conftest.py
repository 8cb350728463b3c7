"""Fixtures of every test, and how tests are spread over pytest-xdist's workers.

Each worker is a session of its own: it marks what it starts, keeps its own state directory, and has its
own Spark cluster, Jupyter server and browser if it runs tests that need them.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hydrogen_magic.horovod import installed
from tests import leaks, spark_rig

leaks.mark_session()

TESTS = Path(__file__).parent
SHARED = ("spark", "connect", "browser")
"""Markers of tests that share something expensive: one worker runs all of a kind."""
ORDER = ("spark", "browser", "horovod", "local", "unit")
"""Folders, those first whose groups take longest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, group what runs on one worker, begin with what takes longest."""
    _skip_what_cannot_run(items)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
    items.sort(key=lambda item: ORDER.index(_folder(item)))


def _skip_what_cannot_run(items: list[pytest.Item]) -> None:
    missing = {
        "gpu": None if _has_gpu() else "no CUDA device",
        "spark": _lacks("pyspark") or (None if shutil.which("java") else "no Java runtime"),
        "horovod": installed.fault(),
        "browser": None if shutil.which("chromium") else "no chromium",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


def _group(item: pytest.Item) -> str:
    """Return what the item shares a worker with: the users of a cluster or a browser, else its file."""
    fixtures: list[str] = getattr(item, "fixturenames", [])
    shared = next((name for name in SHARED if name in fixtures), None)
    return shared or str(item.path.relative_to(TESTS))


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


def _lacks(module: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"{module} is not installed"


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep this worker's state out of the user's own."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True)
def hydrogen_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's run records go."""
    home = tmp_path / "hydrogen_home"
    monkeypatch.setenv("HYDROGEN_MAGIC_HOME", str(home))
    return home


@pytest.fixture(scope="module")
def warm_agents() -> Iterator[None]:
    """Keep warm agents from test to test of a module; leaks of processes are judged at its end."""
    before = leaks.Snapshot.take()
    yield
    leaks.end_warm_agents()
    _fail_on(leaks.leaks_after(before), "this module")


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, hydrogen_home: Path) -> Iterator[None]:
    """Nothing a test started outlives it; with ``warm_agents``, idle agents end with the module.

    ``tests/unit`` overrides this: its tests start nothing.
    """
    if "warm_agents" in request.fixturenames:
        yield
        _fail_on(leaks.settle(leaks.running_gangs, leaks.SETTLE_S), "this test")
        return
    before = leaks.Snapshot.take()
    yield
    leaks.end_warm_agents()
    _fail_on(leaks.leaks_after(before), "this test")


def _fail_on(found: list[str], who: str) -> None:
    if found:
        pytest.fail(f"left behind by {who}:\n  " + "\n  ".join(found), pytrace=False)


# ── Spark ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="session")
def spark_site(tmp_path_factory: pytest.TempPathFactory) -> spark_rig.Site:
    """Settings and a bare Python for Spark clusters."""
    return spark_rig.Site.create(tmp_path_factory.mktemp("spark") / "site")


@pytest.fixture(scope="session")
def standalone(spark_site: spark_rig.Site) -> Iterator[spark_rig.Standalone]:
    """A standalone cluster, lent to all tests: one application at a time has its four cores."""
    cluster = spark_rig.Standalone(spark_site)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def spark(spark_site: spark_rig.Site, standalone: spark_rig.Standalone) -> Iterator[Any]:
    """This process's session on the standalone cluster, for a module."""
    options = {"spark.ui.enabled": "true", "spark.ui.port": "0"}
    with spark_rig.session(spark_site, standalone.url, **options) as session:
        yield session
