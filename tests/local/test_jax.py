"""JAX on ranks: training, arrays that are captured and returned, the socket of its coordinator."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import hydrogen_magic as hm
from hydrogen_magic import plugins
from hydrogen_magic.core import processes
from hydrogen_magic.core.job import JobSpec, Plan, Slot
from hydrogen_magic.frameworks.jax.node import coordinator, observe
from hydrogen_magic.node.rendezvous import connection_guard
from tests import jax_ranks
from tests.gangs import PATIENCE_S, ended, failure_of, notices_of

GUARD = """
import sys
from hydrogen_magic.frameworks.jax.node import coordinator
from hydrogen_magic.node.rendezvous import connection_guard
coordinator.forward(int(sys.argv[1]), "ab")
"""
CONNECT = """
import socket, sys
try:
    with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 60) as sock:
        print("closed" if sock.recv(1) == b"" else "answered")
except ConnectionResetError:
    print("closed")
"""


@pytest.mark.jax
def test_two_ranks_learn_what_one_process_learns() -> None:
    """The notebook's arrays arrive as NumPy's, and return as JAX's."""
    found = _found_by("tests.jax_notebook")
    of_sharded, of_key = found.pop("of_sharded"), found.pop("of_key")
    assert found.pop("arrived") == ["ndarray"] * 3
    assert found.pop("n_devices") == 2
    assert found.pop("n_notes") == [1, 0, 0]
    assert found == dict.fromkeys(found, True)
    assert "process_allgather(x, tiled=True)" in of_sharded
    assert "`KEY`" in of_key and "jax.random.key_data" in of_key


@pytest.mark.jax
@pytest.mark.usefixtures("warm_agents")
def test_ranks_that_do_not_join_are_reported() -> None:
    gang = ended(hm.launch(jax_ranks.compute, np=2, rendezvous="jax"))
    assert gang.result == 1
    assert "jax.distributed.initialize(), so each of the 2 ranks works by itself" in notices_of(
        gang
    )
    error = failure_of(hm.launch(jax_ranks.join_without_first, np=2, rendezvous="jax"))
    never = "rank 0 never entered the jax.distributed.initialize its peers were waiting in"
    assert str(error) == f"{never} (rank 0 had already finished)"
    error = failure_of(hm.launch(jax_ranks.join, 60.0, np=2))
    assert "finds no coordinator" in str(error) and "launch the gang `--with jax`" in str(error)


@pytest.mark.exhaustive
@pytest.mark.jax
def test_a_model_of_flax_is_trained_with_optax_and_continued_by_orbax(tmp_path: Path) -> None:
    missing = [
        name for name in ("flax", "optax", "orbax") if importlib.util.find_spec(name) is None
    ]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    found = _found_by("tests.flax_notebook", str(tmp_path))
    assert found.pop("arrived") == ["ndarray"]
    assert (found.pop("n_devices"), found.pop("n_steps")) == (2, 30)
    assert found.pop("type") == "Scaled"
    assert found == dict.fromkeys(found, True)


def _found_by(notebook: str, *arguments: str) -> dict[str, Any]:
    """Run a notebook as a process of its own; return what it prints."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environ.pop(processes.OWNER, None)
    done = subprocess.run(
        [sys.executable, "-m", notebook, *arguments],
        capture_output=True,
        text=True,
        env=environ,
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def guarded() -> Iterator[int]:
    """The port of a process that forwards connections."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        fd = listening.fileno()
        guard = subprocess.Popen([sys.executable, "-c", GUARD, str(fd)], pass_fds=[fd])
        try:
            yield listening.getsockname()[1]
        finally:
            guard.kill()
            guard.wait()


def test_the_coordinators_socket_is_reached_by_its_own_user_alone() -> None:
    assert_forwards(_refuses_another_user)


def assert_forwards(check: Callable[[int], None] = lambda port: None) -> None:
    """A rank may connect before rank 0 serves."""
    with guarded() as port, socket.create_connection(("127.0.0.1", port), PATIENCE_S) as early:
        path = coordinator.socket_path("ab", port)
        with coordinator.private_directory(f"unix:{path}"):
            assert Path(path).parent.stat().st_mode & 0o777 == 0o700
            _answers(path, early)
            check(port)
        assert not Path(path).parent.exists()


def _answers(path: str, client: socket.socket) -> None:
    with socket.socket(socket.AF_UNIX) as serving:
        serving.bind(path)
        serving.listen()
        serving.settimeout(PATIENCE_S)
        with serving.accept()[0] as accepted:
            accepted.sendall(b"hello")
            assert client.recv(9) == b"hello"


def _refuses_another_user(port: int) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("becoming another user needs root")
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
    prefix = ["setpriv", "--reuid=65534", "--clear-groups", python, "-c", CONNECT, str(port)]
    done = subprocess.run(prefix, capture_output=True, text=True, cwd="/", timeout=2 * PATIENCE_S)
    assert done.stdout.strip() == "closed", done.stderr


def test_another_users_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not connected to, although its directory has the right name."""

    async def stop(seconds: float) -> None:
        raise TimeoutError

    monkeypatch.setattr(asyncio, "sleep", stop)
    path = str(tmp_path / "coordinator")
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(path)
        theirs.listen()
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        with pytest.raises(TimeoutError):
            asyncio.run(connection_guard._connect_when_bound(path))


def test_a_directory_of_a_rank_that_was_killed_is_removed_by_the_next_gang() -> None:
    paths = [Path(coordinator.socket_path(secrets.token_hex(8), 1)) for _ in range(3)]
    killed, binding, serving = sockets = [socket.socket(socket.AF_UNIX) for _ in paths]
    try:
        for path, sock in zip(paths, sockets, strict=True):
            path.parent.mkdir()
            sock.bind(str(path))
            if sock is not binding:
                os.utime(path.parent, (0, 0))
        serving.listen(0)
        with socket.socket(socket.AF_UNIX) as waiting:  # its process does not accept any more
            waiting.connect(str(paths[2]))
            killed.close()
            assert_forwards()
        assert [path.parent.exists() for path in paths] == [False, True, True]
    finally:
        for path, sock in zip(paths, sockets, strict=True):
            sock.close()
            shutil.rmtree(path.parent, ignore_errors=True)


def test_arguments_of_initialize_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gang's socket is served for the gang's address alone, which scripts often pass."""
    socket_folder = tmp_path / "private"
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:4567")
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", f"unix:{socket_folder}/coordinator")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    calls = []

    def initialize(*args: Any, **kwargs: Any) -> None:
        bind_address = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
        calls.append((args, kwargs, bind_address is not None, socket_folder.exists()))

    joining = observe.with_place(initialize)
    for args in (), ("127.0.0.1:4567", 2, 0), ("127.0.0.1:4568", 2, 0):
        joining(*args)
    joins = (None, 2, 0), {"initialization_timeout": observe._JOIN_S}, True, True
    assert calls == [joins, joins, (("127.0.0.1:4568", 2, 0), {}, False, False)]
    assert "JAX_COORDINATOR_BIND_ADDRESS" in os.environ


def test_each_rank_uses_its_own_gpu_and_the_network_of_its_hosts() -> None:
    hosts = (("10.0.0.1", "GPU-a", 0, 0), ("10.0.0.1", "GPU-b", 1, 0), ("10.0.0.2", "3", 0, 1))
    slots = tuple(
        Slot(rank, local, node, 3, 2 - node, 2, address, gpu, address, "eth0")
        for rank, (address, gpu, local, node) in enumerate(hosts)
    )
    spec = JobSpec(np=3, rendezvous="jax")
    where = {"spec": spec, "gang": "a1b2", "attempt": 0}
    info = plugins.rendezvous("jax").prepare(Plan(slots), "10.0.0.1", 4567, **where)
    of = {name: [rank.get(name) for rank in info.environments] for name in info.environments[0]}
    for name in ("JAX_LOCAL_DEVICE_IDS", "JAX_CUDA_VISIBLE_DEVICES"):
        assert of[name] == ["0", "1", "0"], "indices into CUDA_VISIBLE_DEVICES of the host"
    assert of["JAX_COORDINATOR_ADDRESS"] == ["10.0.0.1:4567"] * 3
    assert of["GLOO_SOCKET_IFNAME"] == of["NCCL_SOCKET_IFNAME"] == ["eth0"] * 3
    assert info.service is not None
    assert info.service.options["hosts"] == ["10.0.0.1", "10.0.0.2"]
    token = info.service.options["token"]
    assert (
        of["JAX_COORDINATOR_BIND_ADDRESS"] == [f"unix:{coordinator.socket_path(token, 4567)}"] * 3
    )
