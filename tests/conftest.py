"""Fixtures of every test: a state directory of its own, and nothing left behind."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hydrogen_magic.horovod import installed
from tests import leaks, spark_rig

leaks.mark_session()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, saying why."""
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


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


def _lacks(module: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"{module} is not installed"


@pytest.fixture(autouse=True)
def hydrogen_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's run records go."""
    home = tmp_path / "hydrogen_home"
    monkeypatch.setenv("HYDROGEN_MAGIC_HOME", str(home))
    return home


@pytest.fixture(scope="module")
def warm_agents() -> Iterator[None]:
    """Keep warm agents from test to test of a module; all of it is judged at the module's end."""
    before = leaks.Snapshot.take()
    yield
    leaks.end_warm_agents()
    _fail_on(leaks.leaks_after(before), "this module")


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


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, hydrogen_home: Path) -> Iterator[None]:
    """Nothing a test started outlives it; with ``warm_agents``, idle agents end with the module."""
    stays_warm = "warm_agents" in request.fixturenames
    before = leaks.Snapshot.take()
    yield
    if stays_warm:
        _fail_on(leaks.settle(leaks.running_gangs, 2.0), "this test")
        return
    leaks.end_warm_agents()
    _fail_on(leaks.leaks_after(before), "this test")


def _fail_on(found: list[str], who: str) -> None:
    if found:
        pytest.fail(f"left behind by {who}:\n  " + "\n  ".join(found), pytrace=False)
