"""Fixtures of every test, and how tests are spread over pytest-xdist's workers.

Each worker is a session of its own: it marks what it starts, keeps its own state directory, and has its
own Spark cluster, Jupyter server and browser if it runs tests that need them.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import os
import shutil
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
from hypothesis import HealthCheck, settings
from IPython.core.interactiveshell import InteractiveShell
from jupyter_core.utils import ensure_event_loop

from hydrogen_magic.driver import known_gangs
from hydrogen_magic.driver.placements.local_agents import AgentPool
from hydrogen_magic.frameworks.horovod import installation
from hydrogen_magic.frameworks.jax import installation as jax_installation
from hydrogen_magic.frameworks.tensorflow import installation as tensorflow_installation
from tests import leaks, shells, spark_rig

# Modules and tests are there to stay: to look through them again and again took a quarter of the time.
gc.disable()
leaks.mark_session()
# A shell has what it starts in the background ignore SIGINT, which tests send to what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# OpenMP's threads would spin while they wait, on processors that other tests need.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
# jsonschema (of nbformat) does without it. It compiles a grammar of addresses when it is imported: that
# takes over a second in each worker.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

# Examples take longer on a machine that is busy with others.
settings.register_profile(
    "any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any_machine")

TESTS = Path(__file__).parent
SHARED = {
    "classic": "spark",
    "connect_server": "connect",
    "spark": "spark",
    "standalone": "standalone",
    "browser": "browser",
}
"""Fixture -> group of the tests that use it: one worker has it, and runs all of them. The first one counts:
the session has a cluster, and tests that make sessions of their own use another one meanwhile."""
SESSIONS = {"spark": "classic", "connect": "connect"}
"""Group -> fixture of the Spark session that its worker keeps."""
FIRST = ("spark", "browser")
"""Groups that get the processor first: the longest, and the one in which a person's patience is tested."""
NICE = 5
"""Of workers that run others."""
_COLD = {"cold", *SESSIONS.values()}
"""Fixtures of tests that begin without an agent; those of Spark leave agents on its slots."""
_WARM = {"warm_agents", "warm_beside_session"}
"""Fixtures of tests that leave their agents to the next test."""
_BRIEFLY_S = 5.0
"""What a test's gangs started ends within this time beside the warm agent, or is ended with it."""
ORDER = ("spark", "browser", "notebooks", "horovod", "local", "unit")
"""Folders, those first whose groups take longest."""
LONGEST = (
    "local/test_contract.py",
    "local/test_outlive_kills.py",
    "local/test_closures_on_ranks.py",
    "local/test_distribution.py",
    "local/test_deepspeed.py",
    "local/test_random_results.py",
    "local/test_remote_hosts.py",
    "local/test_site_code.py",
    "local/test_widget.py",
)
"""Files that come before others without a cluster or a browser: the last one to begin may run alone for its
whole length. The clusters of several machines, which take gigabytes, so begin one after the other."""


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups by the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, group what runs on one worker, begin with what takes longest."""
    _skip_what_cannot_run(items)
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_group(item)))
        _start_session_first(item)
    places = {path: place for place, path in enumerate(dict.fromkeys(item.path for item in items))}

    def place(item: pytest.Item) -> tuple[bool, bool, int, int, bool]:
        has_own_group = item.get_closest_marker("xdist_group").args[0] not in SHARED.values()
        is_short = _file(item) not in LONGEST
        # In a module the users of a session come first: it must not start after the module's snapshot.
        by_file = ORDER.index(_folder(item)), places[item.path], not _has_session(item)
        return has_own_group, is_short, *by_file

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Prepare this worker; fail where groups have no effect, which would start a cluster in every worker."""
    gc.freeze()  # what was loaded is in no garbage collection
    gc.enable()
    ensure_event_loop()  # jupyter_core's is never closed: before the first look for leaks
    is_grouped = getattr(session.config.option, "loadgroup", False)
    if is_grouped and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("this pytest-xdist does not group tests with this pytest")


@pytest.hookimpl(wrapper=True, trylast=True)  # while output is captured, as at the beginning
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """Look for leaks after the last test of a session, when its module's fixtures are closed."""
    yield
    if nextitem is not None and _session_of(nextitem) != _session_of(item):
        _beside_session.end()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have workers yield to those that run the first groups, for which all would wait otherwise."""
    group = item.get_closest_marker("xdist_group")
    is_first = group is not None and group.args[0] in FIRST
    if "PYTEST_XDIST_WORKER" in os.environ and not is_first and os.nice(0) < NICE:
        os.nice(NICE)


def _skip_what_cannot_run(items: list[pytest.Item]) -> None:
    missing = {
        "gpu": None if _has_gpu() else "no CUDA device",
        "spark": _lacks("pyspark") or (None if shutil.which("java") else "no Java runtime"),
        "horovod": installation.fault(),
        "jax": jax_installation.fault(),
        "deepspeed": _lacks("deepspeed"),
        "tensorflow": tensorflow_installation.fault(),
        "browser": None if shutil.which("chromium") else "no chromium",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def _folder(item: pytest.Item) -> str:
    return _file(item).partition("/")[0]


def _file(item: pytest.Item) -> str:
    return _below_tests(item.path)


@functools.cache
def _below_tests(path: Path) -> str:
    return path.relative_to(TESTS).as_posix()


def _group(item: pytest.Item) -> str:
    """Return what the item shares a worker with: the users of a cluster or a browser, else its file."""
    fixtures: list[str] = getattr(item, "fixturenames", [])
    shared = next((group for name, group in SHARED.items() if name in fixtures), None)
    return shared or _file(item)


def _has_session(item: pytest.Item) -> bool:
    return _session_of(item) is not None


def _session_of(item: pytest.Item) -> str | None:
    """Return the fixture of the Spark session that the item uses."""
    group = item.get_closest_marker("xdist_group")
    return SESSIONS.get(group.args[0]) if group is not None and group.args else None


def _start_session_first(item: pytest.Item) -> None:
    """Have a session that outlives the test start before the test's leaks are looked for, and agents stay
    warm as long as the session is used.
    """
    fixture = _session_of(item)
    if fixture is None:
        return
    names: list[str] = getattr(item, "fixturenames", [])
    warm = ["warm_beside_session"] if "warm_agents" in names else []
    others = [name for name in names if name not in (fixture, "warm_agents")]
    # a list of its own: all parametrizations of a function share one
    item.fixturenames = [fixture, *warm, *others]  # type: ignore[attr-defined]


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


def _lacks(module: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"{module} is not installed"


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep this worker's state out of the user's own."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(scope="session", autouse=True)
def get_ready() -> Callable[..., None]:
    """Have no agent started beside that of a session, to which the next test's gang returns: it would import
    torch again, in two seconds of a processor. Return what starts one.
    """
    original = AgentPool.get_ready

    def start_first(pool: AgentPool, *needs: Any) -> None:
        if not pool.all:
            original(pool, *needs)

    AgentPool.get_ready = start_first  # type: ignore[method-assign]
    return original


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yields the directory of each test's run records, which most tests do not create.

    ``tmp_path`` would read the directories of all tests before, thousands of times.
    """
    folder = tmp_path_factory.mktemp("homes")
    return (folder / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def hydrogen_home(homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's run records go."""
    home = next(homes)
    monkeypatch.setenv("HYDROGEN_MAGIC_HOME", str(home))
    return home


@pytest.fixture
def no_gangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget gangs of other tests, which lists have beside the records."""
    monkeypatch.setattr(known_gangs, "_known", WeakValueDictionary())


@pytest.fixture(scope="module")
def warm_agents(request: pytest.FixtureRequest) -> Iterator[None]:
    """Look for leaks after the last test of a module, not after each of its tests.

    Where a Spark session is kept, :func:`warm_beside_session` takes its place.
    """
    with _looking_for_leaks("this module", request):
        yield


class _BesideSession:
    """Agents that stay warm while tests use a Spark session: those on its slots import torch again, for
    seconds of a processor, when they are started again.
    """

    def __init__(self) -> None:
        self._before: leaks.Snapshot | None = None

    def begin(self) -> None:
        if self._before is None:
            self._before = leaks.Snapshot.take()

    def end(self) -> None:
        """Fail on what is left of all tests since it began."""
        before, self._before = self._before, None
        if before is not None:
            leaks.end_warm_agents()
            _fail_on(leaks.leaks_after(before), "the tests of a Spark session")


_beside_session = _BesideSession()


@pytest.fixture
def warm_beside_session() -> None:
    """Look for leaks when no more test uses the Spark session, not after each test."""
    _beside_session.begin()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, hydrogen_home: Path) -> Iterator[None]:
    """Nothing a test started outlives it, but for one idle agent, which the next test takes.

    ``tests/unit`` overrides this: its tests start nothing.
    """
    if not _WARM & {*request.fixturenames}:
        with _looking_for_leaks("this test", request):
            yield
        return
    yield
    found = leaks.settle(leaks.running_gangs, leaks.SETTLE_S)
    if found:
        leaks.end_warm_agents()  # and so the gangs, which no other test is to be blamed for
    _fail_on(found, "this test")


@pytest.fixture
def cold() -> Iterator[None]:
    """The test begins without an agent, and leaves none."""
    leaks.end_warm_agents()
    yield
    leaks.end_warm_agents()


@contextmanager
def _looking_for_leaks(who: str, request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail on leaks. An agent that is idle stays if nothing else does; without it nothing may be left."""
    is_cold = not _COLD.isdisjoint(request.fixturenames)
    if not is_cold:
        leaks.keep_agent_warm()
    before = leaks.Snapshot.take()
    yield
    leaks.end_kept_ranks()  # for which the warm agent would be busy
    if is_cold or leaks.settle(lambda: leaks.leaks(before), _BRIEFLY_S):
        leaks.end_warm_agents()
        _fail_on(leaks.leaks_after(before), who)


def _fail_on(found: list[str], who: str) -> None:
    if found:
        pytest.fail(f"left behind by {who}:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture
def notebook_shell() -> Iterator[InteractiveShell]:
    """A shell of this process with the magics."""
    with shells.loaded_shell() as shell:
        yield shell


# ── Spark ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="session")
def spark_site(tmp_path_factory: pytest.TempPathFactory) -> spark_rig.Site:
    """Settings and a bare Python for Spark clusters."""
    return spark_rig.Site.create(tmp_path_factory.mktemp("spark") / "site")


@pytest.fixture(scope="session")
def standalone(spark_site: spark_rig.Site) -> Iterator[spark_rig.Standalone]:
    """A standalone cluster. Each application on it has two executors of two cores and two GPUs."""
    cluster = spark_rig.Standalone(spark_site)
    yield cluster
    cluster.close()


@pytest.fixture(scope="session")
def classic(spark_site: spark_rig.Site, standalone: spark_rig.Standalone) -> Iterator[Any]:
    """This process's classic session, on the standalone cluster."""
    ui = {"spark.ui.enabled": "true", "spark.ui.port": "0"}
    options = {**ui, **spark_rig.GPU_OPTIONS, **spark_rig.QUICK_REFUSAL}
    with spark_rig.session(spark_site, standalone.url, **options) as session:
        yield session
        _beside_session.end()


@pytest.fixture(scope="session")
def spark(classic: Any) -> Any:
    """See :func:`classic`; modules whose tests run on both kinds of sessions override this."""
    return classic


@pytest.fixture(scope="session")
def connect_server(spark_site: spark_rig.Site) -> Iterator[spark_rig.ConnectServer]:
    """A Spark Connect server of four slots. Its UI has the port where clients look for it."""
    options = {"spark.ui.enabled": "true", **spark_rig.QUICK_REFUSAL}
    server = spark_rig.ConnectServer(spark_site, "local[4]", **options)
    yield server
    server.close()


@pytest.fixture(scope="session")
def connect(connect_server: spark_rig.ConnectServer) -> Iterator[Any]:
    """This process's session through Spark Connect."""
    with spark_rig.connected(connect_server.url) as session:
        yield session
        _beside_session.end()
