"""The leak fixture itself: each kind of leak is seen, named, and gone once it is put right."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from tests import leaks


def _sleeper(argument: str = "", **environment: str) -> subprocess.Popen[bytes]:
    """Start a process that says it is there and lives until its standard input is closed."""
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.communicate(timeout=10)


@contextmanager
def _a_process(argument: str = "", **environment: str) -> Iterator[str]:
    process = _sleeper(argument, **environment)
    yield f"process {process.pid}"
    _end(process)


@contextmanager
def _an_orphan_in_a_session_of_its_own() -> Iterator[str]:
    """Its parent is gone and it is no descendant of ours: only the environment tells."""
    code = (
        "import subprocess, sys\n"
        "up = 'import sys; print(flush=True); sys.stdin.read()'\n"
        "child = subprocess.Popen([sys.executable, '-c', up], stdin=int(sys.argv[1]),\n"
        "    stdout=subprocess.PIPE, start_new_session=True)\n"
        "child.stdout.readline()  # until then it may not have its environment yet\n"
        "print(child.pid)\n"
    )
    reader, writer = os.pipe()
    made = subprocess.run(
        [sys.executable, "-c", code, str(reader)],
        pass_fds=[reader],
        env={**os.environ, "HYDROGEN_MAGIC_RUN": "g1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    os.close(reader)
    pid = int(made.stdout)
    assert pid not in leaks.tree(os.getpid())
    yield f"process {pid}"
    os.close(writer)


@contextmanager
def _a_thread(**options: object) -> Iterator[str]:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, **options)  # type: ignore[arg-type]
    thread.start()
    yield f"thread {thread.name}"
    done.set()
    thread.join()


DESCRIPTORS: dict[str, Callable[[], Sequence[int]]] = {
    "socket": lambda: [end.detach() for end in socket.socketpair()],
    "pipe": os.pipe,
    "memfd": lambda: [os.memfd_create("parcel")],
    "pidfd": lambda: [os.pidfd_open(os.getpid())],
}


@contextmanager
def _descriptors(kind: str) -> Iterator[str]:
    opened = DESCRIPTORS[kind]()
    yield f"{len(opened)} more open descriptor(s) of kind {kind}"
    for fd in opened:
        os.close(fd)


@contextmanager
def _a_listening_tcp_socket() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"listening: tcp port {server.getsockname()[1]}"


@contextmanager
def _a_listening_unix_socket() -> Iterator[str]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0hydrogen-leak-{os.getpid()}")
        server.listen()
        yield f"listening: unix socket @hydrogen-leak-{os.getpid()}"


@contextmanager
def _shared_memory() -> Iterator[str]:
    block = shared_memory.SharedMemory(create=True, size=4096)
    yield f"/dev/shm/{block.name}"
    block.close()
    block.unlink()


@contextmanager
def _a_run_record_at_home() -> Iterator[str]:
    record = leaks.default_runs_dir() / "g1"
    record.mkdir(parents=True)
    owner = f"{leaks._boot_id()}:{os.getpid()}:1"
    (record / "events.jsonl").write_text(json.dumps({"owner": owner}) + "\n")
    yield "run record g1"
    (record / "events.jsonl").unlink()
    record.rmdir()


@pytest.mark.parametrize(
    "leak",
    [
        pytest.param(partial(_a_process, "hydrogen_magic.node.agent"), id="an agent"),
        pytest.param(partial(_a_process, HYDROGEN_MAGIC_RUN="g1"), id="with the cookie"),
        _an_orphan_in_a_session_of_its_own,
        _a_thread,
        pytest.param(partial(_a_thread, name="hydrogen-view", daemon=True), id="of the package"),
        *(pytest.param(partial(_descriptors, kind), id=kind) for kind in DESCRIPTORS),
        _a_listening_tcp_socket,
        _a_listening_unix_socket,
        _shared_memory,
        _a_run_record_at_home,
    ],
)
def test_each_kind_is_seen_and_named(
    leak: Callable[[], AbstractContextManager[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    before = leaks.Snapshot.take()
    with leak() as expected:

        def missing() -> list[str]:
            """Look again where a thread of a library has a socket open for a moment."""
            found = leaks.leaks(before)
            return [] if any(line.startswith(expected) for line in found) else [expected, *found]

        assert leaks.settle(missing, leaks.SETTLE_S) == []
    assert leaks.leaks_after(before) == []


INNER = {
    "local": """
import os
def test_leaks(): os.pipe()
def test_is_clean(): assert os.environ['HYDROGEN_MAGIC_HOME']
""",
    "unit": """
import contextlib, subprocess, threading
def test_thread():
    with contextlib.suppress(AssertionError):
        threading.Thread(target=print).start()
def test_process(): subprocess.run(["true"])
def test_is_pure(): assert threading.active_count()
""",
}
"""Folder -> a test module in it."""


def test_fixtures_fail_tests_that_leak_and_pure_tests_that_start_something(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take time to import
    here = Path(__file__).parents[1]
    package = pytester.mkpydir("tests")
    shared = ("leaks", "shells", "spark_classes", "spark_rig", "capture_rig")
    changes = {
        "SETTLE_S = 30.0": ("leaks.py", "SETTLE_S = 1.0"),
        '_PRELOADED = ("torch",)': ("leaks.py", "_PRELOADED = ()"),
        "_BRIEFLY_S = 5.0": ("conftest.py", "_BRIEFLY_S = 0.5"),
    }
    for name in ("conftest.py", *(f"{each}.py" for each in shared)):
        text = (here / name).read_text()
        for old, (file, new) in changes.items():
            assert (old in text) == (name == file)
            text = text.replace(old, new)
        (package / name).write_text(text)
    for folder, code in INNER.items():
        (package / folder).mkdir()
        (package / folder / "__init__.py").touch()
        (package / folder / "test_inner.py").write_text(code)
    (package / "unit" / "conftest.py").write_text((here / "unit" / "conftest.py").read_text())
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:xdist", timeout=120)
    result.assert_outcomes(passed=4, failed=1, errors=3)
    result.stdout.fnmatch_lines_random(
        [
            "*left behind by this test:*",
            "*2 more open descriptor(s) of kind pipe*",
            "*subprocess.Popen: tests in tests/unit start no process*",
        ]
    )
