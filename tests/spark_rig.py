"""Spark clusters for tests: masters, workers and Connect servers on loopback, started as people do.

Executors run a Python of their own (:func:`bare_python`) that has torch, pyarrow, pyzmq and pandas, and
neither this package nor anything of a notebook: what a cell needs there has to travel.

Every process of a cluster carries :data:`tests.leaks.LENT` in its environment, with a value of the
cluster's own. By it the cluster is ended whole, also what its workers started, and its sockets are told
from those that a gang left open.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydrogen_magic.core import processes
from tests import leaks, spark_classes

CORES = 16
"""Of each worker, for several applications at once: to Spark they are a number."""
GPUS = 8
"""That each worker says it has. There is none; only sessions that ask for them get to see them."""
HOST = "127.0.0.1"
ANSWER = "answer: "
"""Precedes what a process tells the test that has started it, as JSON."""
_START_S = 180.0
"""A JVM starts in two to four seconds on two cores, in many more when they are busy."""
_END_S = 60.0
_POLL_S, _MAX_POLL_S = 0.05, 0.5
"""Pause between two looks: some read all processes, or a log."""
_NOT_THERE = re.compile(
    r"(_?hydrogen_magic|__editable__|__pycache__|ipykernel|ipython|ipywidgets|anywidget"
    r"|traitlets|jupyter|notebook|nb|cloudpickle).*",
    re.IGNORECASE,
)
"""What executors do not have; everything else of this environment is lent to them (Horovod, too, which
needs psutil)."""
_OF_CONNECT = ("SPARK_CONNECT_MODE_ENABLED", "SPARK_REMOTE", "SPARK_LOCAL_REMOTE")
"""What a Connect session of this process has left, and a classic one stumbles over."""
_JVM_OPTIONS = f"{spark_classes.JVM_OPTIONS} -Xss512k"
_DISCOVERY = """#!/bin/sh
echo '{"name": "gpu", "addresses": [%s]}'
"""
DAEMON = "daemon_with_pandas"
"""Module in the executors' Python that forks Spark's Python workers there, as ``pyspark.daemon`` does."""
_DAEMON_SOURCE = """\
import gc
import sys

# Spark's archives have no compiled modules, and every task reads their directories again: a tenth of a
# second. The same packages are installed.
sys.path[:] = [entry for entry in sys.path if not entry.endswith((".zip", ".jar"))]

# Most of a worker's processor time would be these imports, and tests use hundreds of workers.
import argparse
import asyncio.sslproto
import difflib
import email.message
import importlib.metadata
import multiprocessing.spawn

import pandas
import pyarrow.compute
import pyspark.worker
import zmq.asyncio
import zmq.auth.asyncio
from pyspark import daemon

if __name__ == "__main__":
    gc.freeze()
    daemon.manager()
"""
_SITE_SOURCE = """\
import sys

# The daemon of Python data sources, by which the relay runs, is always Spark's own, and there is one for
# each session of Connect: it would compile all that it imports.
if sys.orig_argv[1:3] == ["-m", "pyspark.daemon"]:
    sys.path[:] = [entry for entry in sys.path if not entry.endswith((".zip", ".jar"))]
"""
_LOGGING = """\
rootLogger.level = warn
rootLogger.appenderRef.file.ref = file
appender.file.type = File
appender.file.name = file
appender.file.fileName = %s
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %%d{HH:mm:ss.SSS} %%p %%c{1}: %%m%%n%%ex
logger.connect.name = org.apache.spark.sql.connect.service
logger.connect.level = info
logger.deploy.name = org.apache.spark.deploy
logger.deploy.level = info
"""


# ── a Python for executors ───────────────────────────────────────────────────────────────────────


def bare_python(folder: Path) -> Path:
    """Return an interpreter that has this environment's libraries, without those of a notebook.

    A virtual environment whose one folder of links stands for what an administrator has installed.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    libraries = folder / "libraries"
    libraries.mkdir()
    # Also of an environment below this one, as that of tests/tensorflow_environment.py has.
    folders = [Path(path) for path in sys.path if Path(path).name == "site-packages"]
    installed = {entry.name: entry for folder in reversed(folders) for entry in folder.iterdir()}
    for name, entry in installed.items():
        if not _NOT_THERE.fullmatch(name) and entry.suffix != ".pth":
            (libraries / name).symlink_to(entry)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / version / "site-packages" / "libraries.pth").write_text(f"{libraries}\n")
    (libraries / "sitecustomize.py").write_text(_SITE_SOURCE)
    add_daemon(libraries)
    return folder / "bin" / "python"


def add_daemon(folder: Path) -> None:
    """Write the module :data:`DAEMON`."""
    (folder / f"{DAEMON}.py").write_text(_DAEMON_SOURCE)


def spark_home() -> Path:
    """Return the folder of pyspark's Spark."""
    spec = find_spec("pyspark")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def linked_spark_home(folder: Path) -> Path:
    """Return Spark by links, for ``local-cluster``, which writes below its home."""
    folder.mkdir()
    for entry in spark_home().iterdir():
        if entry.name != "work":
            (folder / entry.name).symlink_to(entry)
    return folder


def _log_into(folder: Path) -> str:
    """Have a JVM log into ``spark.log``; return its option for that."""
    log = folder / "spark.log"
    log.touch()
    properties = folder / "log4j2.properties"
    properties.write_text(_LOGGING % log)
    return f"-Dlog4j2.configurationFile={properties.as_uri()}"


# ── processes ────────────────────────────────────────────────────────────────────────────────────


def until(holds: Callable[[], Any], within_s: float, otherwise: Callable[[], str] = str) -> None:
    """Wait until something holds; AssertionError with what ``otherwise`` says after ``within_s``."""
    deadline, pause_s = time.monotonic() + within_s, _POLL_S
    while not holds():
        assert time.monotonic() < deadline, otherwise() or f"not within {within_s} s"
        time.sleep(pause_s)
        pause_s = min(_MAX_POLL_S, 1.2 * pause_s)


def kill_all(variable: str, value: str) -> None:
    """Kill everything with this in its environment until nothing of it is left."""
    deadline = time.monotonic() + _END_S
    while left := leaks.marked(variable, value):
        assert time.monotonic() < deadline, f"cannot be killed: {left}"
        for pid in left:
            processes.send_signal(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


class Daemon:
    """A JVM of a cluster: master, worker or Connect server."""

    def __init__(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], says: str
    ) -> None:
        """Start it and wait until its log has the pattern ``says``."""
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
            )
        self._says = re.compile(says)

    @property
    def pid(self) -> int:
        return self.process.pid

    def ready(self) -> str:
        """Wait for the start; return what the pattern's group caught."""
        until(lambda: self.process.poll() is not None or self._found(), _START_S, self._tail)
        found = self._found()
        assert found is not None, f"it ended: {self._tail()}"
        return found[1]

    def _found(self) -> re.Match[str] | None:
        return self._says.search(self.log.read_text(errors="replace"))

    def _tail(self) -> str:
        return f"{self.log} ends with\n{self.log.read_text(errors='replace')[-3000:]}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


# ── how clusters and their drivers are set up ────────────────────────────────────────────────────


@dataclass(frozen=True)
class Site:
    """A folder for everything of one test session's clusters, and the executors' Python in it."""

    folder: Path
    python: Path
    home: Path
    """``SPARK_HOME``."""
    address: str = HOST
    """Of this machine, for the drivers, masters and servers on it."""

    @classmethod
    def create(cls, folder: Path, address: str = HOST) -> Site:
        folder.mkdir(exist_ok=True)
        python = bare_python(folder / "python")
        return cls(folder, python, spark_home(), address)

    def settings(self, name: str, options: Mapping[str, str]) -> Path:
        """Return a fresh folder with ``spark.conf``, the properties of a driver that logs there.

        Not Spark's own folder of settings: its JVMs have that in their class path, and an archive of
        classes is of no use for a class path that begins with files.
        """
        folder = self.folder / f"{name}-{secrets.token_hex(4)}"
        (folder / "local").mkdir(parents=True)
        java = {"spark.driver.extraJavaOptions": f"{_JVM_OPTIONS} {_log_into(folder)}"}
        lines = (f"{key} {value}" for key, value in {**java, **options}.items())
        (folder / "spark.conf").write_text("\n".join(lines))
        return folder

    def environment(self, settings: Path, mark: str) -> dict[str, str]:
        """Return the environment of a cluster's process, and of a driver before it starts its JVM."""
        spark = {
            "SPARK_HOME": str(self.home),
            "SPARK_LOCAL_DIRS": str(settings / "local"),
            "SPARK_LOCAL_IP": self.address,
            "PYSPARK_PYTHON": str(self.python),
            # For the JVM in which Spark's scripts put together the command of the next one.
            "SPARK_LAUNCHER_OPTS": spark_classes.QUICK,
            leaks.LENT: mark,
        }
        ours = ("HYDROGEN_MAGIC_RUN", "HYDROGEN_MAGIC_OWNER", "HYDROGEN_MAGIC_AGENT")
        around = {name: value for name, value in os.environ.items() if name not in ours}
        return {**around, **spark}

    def driver(self, **options: str) -> dict[str, str]:
        """Return the environment of a driver: its sessions are small, quick and quiet."""
        settings = self.settings("driver", {**self.driver_options(), **options})
        submit = f"--properties-file '{settings / 'spark.conf'}' pyspark-shell"
        environment = self.environment(settings, secrets.token_hex(8))
        return {**environment, "PYSPARK_SUBMIT_ARGS": submit}

    def driver_options(self) -> dict[str, str]:
        """Return the properties of a session."""
        return {
            "spark.driver.host": self.address,
            "spark.driver.bindAddress": self.address,
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "2",
            "spark.cores.max": "4",
            "spark.executor.extraJavaOptions": _JVM_OPTIONS,
            "spark.python.daemon.module": DAEMON,
            # Compiling an expression takes longer than to interpret it for a few rows.
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
            "spark.sql.shuffle.partitions": "2",
            # Attempts of a task. By default four: each ends a Python worker, and imports all anew.
            "spark.task.maxFailures": "2",
            "spark.sql.warehouse.dir": str(self.folder / "warehouse"),
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }


@dataclass(frozen=True)
class Place:
    """Where a worker runs."""

    address: str = HOST
    prefix: tuple[str, ...] = ()
    """Command that runs the rest of its arguments there."""
    n_gpus: int = GPUS
    """That the worker says it has."""
    n_cores: int = CORES


GPU_OPTIONS = {"spark.executor.resource.gpu.amount": "2"}
"""What a session adds to get GPUs of those that the workers of :class:`Standalone` report."""
QUICK_REFUSAL = {
    "spark.scheduler.barrier.maxConcurrentTasksCheck.maxFailures": "3",
    "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
}
"""Spark's own check whether a barrier stage fits: by default forty times, every fifteen seconds."""


# ── clusters ─────────────────────────────────────────────────────────────────────────────────────


class Standalone:
    """A master and workers, by default one: it runs both executors of each application."""

    def __init__(self, site: Site, places: Sequence[Place] = (Place(),)) -> None:
        self._site = site
        self.mark = secrets.token_hex(8)
        self.folder = site.settings("cluster", {})
        self._environment = {
            **site.environment(self.folder, self.mark),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_NO_DAEMONIZE": "1",
        }
        self.workers: list[Daemon] = []
        try:
            self.master = self._start(
                "master", "master.Master", r"Starting Spark master at (\S+)", Place(site.address)
            )
            self.url = self.master.ready()
            added = [self.add_worker(place) for place in places]
            for worker in added:
                worker.ready()
        except BaseException:
            self.close()
            raise

    def _report_gpus(self, name: str, n_gpus: int) -> Path:
        """Return the settings of a worker that says it has the next GPUs of this machine."""
        first = GPUS * len(self.workers)
        script = self.folder / f"{name}-gpus.sh"
        script.write_text(_DISCOVERY % ", ".join(f'"{first + index}"' for index in range(n_gpus)))
        script.chmod(0o755)
        properties = self.folder / f"{name}.conf"
        lines = (
            f"spark.worker.resource.gpu.amount {n_gpus}\n"
            f"spark.worker.resource.gpu.discoveryScript {script}\n"
        )
        properties.write_text(lines if n_gpus else "")
        return properties

    def _start(self, name: str, of: str, says: str, place: Place, *arguments: str) -> Daemon:
        folder = self.folder / name
        folder.mkdir()
        java = f"{_JVM_OPTIONS} {_log_into(folder)}"
        settings = {"SPARK_DAEMON_JAVA_OPTS": java, "SPARK_LOCAL_IP": place.address}
        environment = {**self._environment, **settings}
        command = [
            *place.prefix, str(self._site.home / "bin" / "spark-class"),
            f"org.apache.spark.deploy.{of}",
            "--host", place.address, "--port", "0", "--webui-port", "0", *arguments,
        ]  # fmt: skip
        return Daemon(command, folder / "spark.log", environment, says)

    def add_worker(self, place: Place = Place()) -> Daemon:
        """Start a worker, which registers itself; return its JVM."""
        name = f"worker-{len(self.workers)}"
        worker = self._start(
            name, "worker.Worker", r"Successfully registered with master (\S+)", place,
            "--cores", str(place.n_cores), "--memory", "8g",
            "--work-dir", str(self.folder / f"{name}-work"),
            "--properties-file", str(self._report_gpus(name, place.n_gpus)), self.url,
        )  # fmt: skip
        self.workers.append(worker)
        return worker

    def kill_worker(self, worker: Daemon) -> None:
        """Kill a worker and its executors, as when their machine is lost."""
        lost = [p.pid for p in processes.processes() if p.ppid == worker.pid]
        worker.end()
        for pid in lost:
            processes.send_signal(pid, signal.SIGKILL)

    def executors(self) -> list[int]:
        """Return the pids of the executors that run now."""
        lent = leaks.marked(leaks.LENT, self.mark)
        return [pid for pid in lent if "CoarseGrainedExecutorBackend" in leaks.command(pid)]

    def close(self) -> None:
        """End all of it, executors and what they started included."""
        for daemon in [*self.workers, *([self.master] if hasattr(self, "master") else [])]:
            daemon.end()
        kill_all(leaks.LENT, self.mark)
        shutil.rmtree(self.folder, ignore_errors=True)


def python_workers(executor: int) -> list[int]:
    """Return the pids of an executor's Python workers (the children of its daemon)."""
    daemons = [p.pid for p in processes.processes() if p.ppid == executor]
    daemons = [pid for pid in daemons if DAEMON in leaks.command(pid)]
    return [p.pid for p in processes.processes() if p.ppid in daemons and not p.has_exited]


class ConnectServer:
    """A Spark Connect server with a master of its own choice; ``url`` is for ``remote(...)``."""

    def __init__(self, site: Site, master: str, **options: str) -> None:
        settings = {
            **site.driver_options(),
            "spark.connect.grpc.binding.address": site.address,
            "spark.connect.grpc.binding.port": "0",
            **options,
        }
        folder = site.settings("connect", settings)
        self.mark = secrets.token_hex(8)
        command = [
            str(site.home / "bin" / "spark-submit"), "--master", master,
            "--class", "org.apache.spark.sql.connect.service.SparkConnectServer",
            "--name", "Spark Connect server", "--properties-file", str(folder / "spark.conf"),
        ]  # fmt: skip
        environment = site.environment(folder, self.mark)
        log = folder / "spark.log"
        self._daemon = Daemon(command, log, environment, r"Connect server started at: \S+:(\d+)")
        try:
            self.url = f"sc://{site.address}:{self._daemon.ready()}"
        except BaseException:
            self.close()
            raise

    def log(self) -> str:
        return self._daemon.log.read_text(errors="replace")

    def sessions(self) -> set[str]:
        """Return the ids of the sessions that are open."""
        log = self.log()
        closed = re.findall(r"Closing session with .*sessionId: (\S+)", log)
        return {*re.findall(r"sessionId: (\S+) accessed", log)} - {*closed}

    def close(self) -> None:
        self._daemon.end()
        kill_all(leaks.LENT, self.mark)


# ── sessions in other processes ──────────────────────────────────────────────────────────────────


def answer_of(
    module: str,
    *arguments: str,
    env: Mapping[str, str],
    cwd: Path | None = None,
    within_s: float = 240.0,
) -> Any:
    """Run a module of tests as a program with this environment; return what it tells."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.{module}", *arguments],
        timeout=within_s,
        env={**env, "PYTHONPATH": os.getcwd()},
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    assert answers, done.stderr
    return json.loads(answers[0].removeprefix(ANSWER))


def tell(answer: Any) -> None:
    """Tell the test that has started this process."""
    print(f"{ANSWER}{json.dumps(answer)}", flush=True)


# ── sessions in this process ─────────────────────────────────────────────────────────────────────


@contextmanager
def session(site: Site, master: str, *, n_executors: int = 2, **options: str) -> Iterator[Any]:
    """Give a classic session in this very process; its JVM ends with it, so another may follow."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    assert SparkContext._active_spark_context is None, "a process has one classic session at a time"
    for name in _OF_CONNECT:
        os.environ.pop(name, None)
    settings = site.driver(**options)
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        spark = SparkSession.builder.master(master).appName("tests").getOrCreate()
    finally:
        os.environ.clear()
        os.environ.update(before)
    gateway = SparkContext._gateway
    try:
        wait_for_executors(spark, n_executors)
        process_ids(spark, n_executors)  # Spark opens a connection for good with the first job
        yield spark
    finally:
        spark.stop()
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(_END_S)
        SparkContext._gateway = SparkContext._jvm = None
        kill_all(leaks.LENT, settings[leaks.LENT])


@contextmanager
def connected(url: str) -> Iterator[Any]:
    """Give a Connect session in this process, with everything open that stays open."""
    from pyspark.sql.connect.session import SparkSession

    spark = SparkSession.builder.remote(url).create()
    try:
        spark.range(1).collect()  # the channel is opened with the first call
        with suppress(Exception):  # and threads for good with the first error
            spark.sql("select raise_error('as expected')").collect()
        yield spark
    finally:
        spark.stop()


def wait_for_executors(spark: Any, count: int) -> None:
    """Wait until the session has this many executors: one that was lost is replaced in seconds."""
    context = spark.sparkContext._jsc.sc()  # whose status names the driver's block manager too
    until(lambda: context.getExecutorMemoryStatus().size() == count + 1, _START_S)


def process_ids(spark: Any, n_tasks: int) -> list[int]:
    """Return the pids of the Python workers in which the tasks of a plain job ran, all at once.

    On several machines some may be equal.
    """

    def report(batches: Any) -> Iterator[Any]:
        import os

        import pyarrow

        for _ in batches:
            pass
        meet()
        found = {"pid": [os.getpid()], "space": [os.stat("/proc/self/ns/pid").st_ino]}
        yield pyarrow.RecordBatch.from_pydict(found)

    with meeting(n_tasks) as meet:
        tasks = spark.range(0, n_tasks, 1, n_tasks)
        rows = tasks.mapInArrow(report, "pid long, space long").collect()
    return [pid for pid, _ in {(row.pid, row.space) for row in rows}]


@contextmanager
def meeting(n_tasks: int) -> Iterator[Callable[[], None]]:
    """Provide a function by which tasks that share this disk wait until all have a worker of their own."""

    def meet() -> None:
        import os
        import time

        space = os.stat("/proc/self/ns/pid").st_ino
        open(f"{folder}/{os.getpid()}-{space}", "w").close()
        deadline = time.monotonic() + 15  # there may be fewer slots than tasks
        while len(os.listdir(folder)) < n_tasks and time.monotonic() < deadline:
            time.sleep(0.01)

    with tempfile.TemporaryDirectory(prefix="hydrogen-meeting-") as folder:
        yield meet
