"""The task that holds the place of one rank on its host: finds or starts the host's agent, and waits.

Only the source of this file is sent to the host, so it uses only the standard library. It leaves
its process unchanged: it sets no variable, changes no module path, and imports no module that
stays; the process may serve another user next.
"""

from __future__ import annotations

import array
import base64
import contextlib
import hashlib
import hmac
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import secrets
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

PROBLEM = "hydrogen_magic problem: "
"""Precedes the JSON of a problem in the message of the exception that ends the task."""
_HEADER = struct.Struct("!IB")
"""As in ``framing``: length of the JSON, number of descriptors."""
_REACH_S = 3.0
_GREETING_S = 5.0
"""How long the kernel's first byte may take, possibly through a relay."""
_GREETING = b"\xff"
"""First byte of ZMTP (https://rfc.zeromq.org/spec/23/), which both sides send at once."""
_ATTACH_S = 60.0
_STDERR = "stderr"
"""File in an agent's folder."""
_STDERR_TAIL = 2000
_MAX_FIRST_LINE_BYTES = 1 << 20
_PING_S = 1.0
_AGAIN_S = 0.5
"""The same while the agent does not answer."""
_SILENCE_S = 46.0
"""An agent that does not answer for so long hangs: the kernel gives it up at the same time."""
_UNWANTED_S = 4.0
"""The same for one whose process is stopped (SIGSTOP), or whose task was ended, as after Kill."""
_SUSPECT_S = 2.0
"""The same for one that may hang: from now on the end of its task, or of this process, ends it."""
_CLEANUP_S = 5.0
_MOST_AGENTS = 64
"""Maximum number of gangs of one kernel at the same time on one machine."""
_DISTRIBUTIONS = ("torch", "pyzmq", "numpy")
_PASSED_ON = ("gang", "attempt", "server_key", "ports", "fingerprint", "preload", "idle_s")
"""Instructions that the agent gets as they are."""


class _ProblemError(Exception):
    """Ends the task, and so its attempt; the kernel reads the text after :data:`PROBLEM`."""

    def __init__(self, kind: str, text: str, task: int = -1) -> None:
        found = {"kind": kind, "text": text, "host": os.uname().nodename, "task": task}
        super().__init__(PROBLEM + json.dumps(["TaskProblem", found]) + "\n")


def main(instructions: dict[str, Any], code: str) -> None:
    """Be a task in a process of its own, whose argument is the task's number."""
    gpus = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    try:
        task = {"number": int(sys.argv[1]), "gpus": gpus}
        for _ in hold(instructions, base64.b64decode(code), task):
            pass
    except _ProblemError as problem:
        sys.exit(str(problem))


def hold(
    instructions: dict[str, Any],
    code: bytes,
    task: dict[str, Any],
    address: str = "",
    folder: str = "",
    provider: int = -1,
    *,
    beats: bool = False,
) -> Iterator[None]:
    """Hold the place of a rank until the rank is over; yield now and then while the agent is silent.

    ``instructions``: the kernel's. ``code``: the package as a zip. ``task``: fields of its ``TaskHello``.
    ``address``: this host's, among the hosts. ``folder``: where the agent may have its own.
    ``provider``: descriptor of a connection that the provider of this host closes when it ends the
    task without this process; -1 if there is none. ``beats``: yield every second, because the
    provider ends tasks without a sign of life.
    """
    _check(instructions)
    instructions = {**instructions, "code": code, "address": address, "folder": folder}
    sock, agent = _attached(instructions, _about(instructions, task))
    with sock:
        yield from _wait(sock, agent, task["number"], provider, beats)


# ── requirements ─────────────────────────────────────────────────────────────────────────────────


def _check(instructions: dict[str, Any]) -> None:
    """Report missing requirements of the ranks before anything starts."""
    here, hosts = f"Python {platform.python_version()}, {sys.executable}", instructions["hosts"]
    if list(sys.version_info[:2]) != instructions["python"]:
        wanted = ".".join(map(str, instructions["python"]))
        found = f"the notebook runs Python {wanted}, {hosts} run {here}"
        raise _ProblemError("python", found)
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:  # the second also from sandboxes that forbid it
        text = f"{hosts} need Linux 5.3 or newer: no pidfd_open ({error})"
        raise _ProblemError("system", text) from None
    if instructions["library"]:
        asked: dict[str, Any] = {"__name__": "__main__"}
        exec(instructions["library"], asked)
        if fault := asked["fault"]():
            raise _ProblemError("library", f"`--with {instructions['with']}`: {fault}")
    if missing := [name for name in instructions["needs"] if is_missing(name)]:
        raise _ProblemError("missing", f"{hosts} have no module {', '.join(missing)} ({here})")


def is_missing(name: str) -> bool:
    """Return whether there is no module of this name; does not import it."""
    try:
        return name not in sys.modules and importlib.util.find_spec(name) is None
    except (ImportError, ValueError):
        return True


def _versions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _about(instructions: dict[str, Any], task: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the task's ``TaskHello``."""
    return {
        "gang": instructions["gang"],
        "attempt": instructions["attempt"],
        "machine": _machine(instructions["token"]),
        "shares_disk": _sees_record(instructions["record_dir"], instructions["owner"]),
        "gpus_visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "versions": _versions(),
        "sys_path": _sys_path(),
        **task,
    }


def _sys_path() -> list[str]:
    """Return this process's module path. Entries may be relative to the task's directory."""
    return [os.path.abspath(entry) for entry in sys.path if entry]


def _sees_record(record_dir: str, owner: str) -> bool:
    """Whether this host sees the disk with the kernel's record of this gang, which begins with its owner.

    It may be gigabytes long when the gang is started again.
    """
    with (
        contextlib.suppress(OSError),
        open(os.path.join(record_dir, "events.jsonl"), "rb") as record,
    ):
        return owner.encode() in record.readline(_MAX_FIRST_LINE_BYTES)
    return False


def read(path: str) -> bytes:
    """Return the contents of a file; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


# ── the agent ────────────────────────────────────────────────────────────────────────────────────


def _name(token: str, number: int) -> str:
    """Return the abstract socket of this kernel's agent number ``number`` on this machine.

    Containers of one host count as separate machines: ranks must not use another one's memory or devices.
    """
    return f"\0hydrogen-{_machine(token)}-{number}"


def _machine(token: str) -> str:
    """Return an id of this machine and kernel."""
    spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid", "mnt", "ipc")]
    files = ("/proc/sys/kernel/random/boot_id", "/proc/self/cgroup")
    contents = [read(file).decode(errors="replace") for file in files]
    machine = [token, os.uname().nodename, os.geteuid(), *spaces, *contents]
    return hashlib.sha256(json.dumps(machine).encode()).hexdigest()[:32]


def _attached(
    instructions: dict[str, Any], about: dict[str, Any]
) -> tuple[socket.socket, dict[str, Any]]:
    """Return the connection to an agent that has accepted this task, and what the agent says of itself."""
    deadline = time.monotonic() + _ATTACH_S
    number, ours = 0, ""
    while number < _MOST_AGENTS:
        name = _name(instructions["token"], number)
        sock = _connected(name)
        if sock is None:
            ours = _start(name, instructions, about, ours)
        answer = None if sock is None else _say(sock, about)
        if sock is not None and answer is not None and answer[0] == "TaskAccepted":
            return sock, answer[1]
        if sock is not None:
            sock.close()
        if answer is not None and ours:  # another agent would have the same keys
            text = f"the agent that this task has started does not accept it{_last_words(ours)}"
            raise _ProblemError("agent", text)
        if answer is not None:
            number += 1  # it serves another gang, or does not respond
            deadline = time.monotonic() + _ATTACH_S
        elif time.monotonic() > deadline:
            raise _ProblemError("agent", f"no agent accepted this task within {_ATTACH_S:.0f} s")
        else:
            time.sleep(0.02)  # it is just starting or exiting
    raise _ProblemError("agent", f"{_MOST_AGENTS} gangs of this notebook already run here")


def _connected(name: str) -> socket.socket | None:
    """Connect to the agent of that name; None if there is none, or it is just starting."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(_ATTACH_S)
    try:
        sock.connect(name)
    except (ConnectionRefusedError, ConnectionResetError, BlockingIOError):
        sock.close()
        return None
    peer = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if peer[1] != os.geteuid():
        sock.close()
        raise _ProblemError(
            "agent", f"user {peer[1]} of this machine uses the name of our agent's socket"
        )
    return sock


def _start(name: str, instructions: dict[str, Any], about: dict[str, Any], ours: str) -> str:
    """Start an agent that listens on ``name``, unless another task was faster: the name serves as lock.

    Returns the folder of the agent that this task has started, ``ours`` before this call; empty for none.
    """
    with socket.socket(socket.AF_UNIX) as listening:
        try:
            listening.bind(name)
        except OSError:
            return ours
        if ours:
            text = f"the agent process exited while it started{_last_words(ours)}"
            shutil.rmtree(ours, ignore_errors=True)
            raise _ProblemError("agent", text)
        endpoint, own = reachable(instructions["endpoints"], instructions["hosts"])
        folder = tempfile.mkdtemp(prefix="hydrogen-", dir=instructions["folder"] or None)
        try:
            _start_agent(folder, listening, instructions, about, endpoint, own)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder


def agent_secret(key_seed: str, number: int) -> str:
    """Return the secret key of the agent that task ``number`` may start, as hexadecimal digits.

    All keys follow from one ``key_seed``: a list of them would make every task as large as the gang.
    """
    return hmac.new(bytes.fromhex(key_seed), str(number).encode(), "sha256").hexdigest()


def reachable(endpoints: Sequence[str], hosts: str) -> tuple[str, str]:
    """Return an address of the kernel that can be reached from here, and our own address on that route.

    It is the address itself, since a name may have others that cannot be reached. The kernel speaks first: a
    proxy may accept connections to any address. ``hosts``: what the error calls those like this one.
    """
    tried = []
    for endpoint in endpoints:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        try:
            with socket.create_connection((host.strip("[]"), int(port)), _REACH_S) as sock:
                sock.settimeout(_GREETING_S)
                if sock.recv(1) != _GREETING:
                    raise ConnectionRefusedError("another program answers")
                found = sock.getpeername()[0]
                found = f"[{found}]" if sock.family == socket.AF_INET6 else found
                return f"tcp://{found}:{port}", sock.getsockname()[0]
        except OSError as error:
            tried.append(f"{host}:{port} ({error})")
    text = f"{hosts} cannot reach the notebook at {', '.join(tried)}"
    raise _ProblemError("unreachable", text)


def _start_agent(
    folder: str,
    listening: socket.socket,
    instructions: dict[str, Any],
    about: dict[str, Any],
    endpoint: str,
    own: str,
) -> None:
    package = os.path.join(folder, "code")
    with zipfile.ZipFile(io.BytesIO(instructions["code"])) as packed:
        packed.extractall(package)
    sys_path = [package, *_sys_path()]
    mark, owner = secrets.token_hex(16), instructions["owner"]
    env = {**os.environ, "HYDROGEN_MAGIC_AGENT": mark, "HYDROGEN_MAGIC_OWNER": owner}
    config = {
        **{name: instructions[name] for name in _PASSED_ON},
        "endpoint": endpoint,
        "secret": agent_secret(instructions["key_seed"], about["number"]),
        "bind": _bind_address(instructions["address"], own),
        "env": env,
        "sys_path": sys_path,
        "folder": folder,
        "parent_pid": about.get("parent_pid"),
    }
    ours, theirs = socket.socketpair()
    theirs.setblocking(True)  # a task before may have set a default timeout in this process
    with ours, theirs, open(os.path.join(folder, _STDERR), "wb") as stderr:
        # By a shell that exits at once: an orphan leaves no zombie in this process.
        subprocess.run(
            [
                "/bin/sh",
                "-c",
                '"$@" &',
                "sh",
                sys.executable,
                "-m",
                "hydrogen_magic.node.agent",
                str(theirs.fileno()),
            ],
            env={**env, "PYTHONPATH": os.pathsep.join(sys_path)},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            cwd="/",
            check=True,
        )
        listening.listen(512)
        _send(ours, ["RemoteAgentConfig", config], [listening.fileno()])


def _bind_address(given: str, on_the_way: str) -> str:
    """Return our address among hosts: the given one, if it really is ours.

    Of a name's addresses IPv4 is preferred, as by the kernel.
    """
    for candidate in filter(None, (given.strip("[]"), on_the_way)):
        try:
            found = socket.getaddrinfo(candidate, 0, type=socket.SOCK_STREAM)
            family, *_, where = min(found)
            address = str(where[0])
            with socket.socket(family) as probe:
                probe.bind((address, 0))
        except OSError:
            continue
        return address
    return "127.0.0.1"


# ── messages: the JSON of classes in core/messages.py ───────────────────────────────────────────


def _send(sock: socket.socket, message: Any, fds: list[int]) -> None:
    body = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    data = _HEADER.pack(len(body), len(fds)) + body
    sent = sock.sendmsg([data], rights)
    sock.sendall(data[sent:])


def _receive(sock: socket.socket) -> Any:
    """Return the next message, None if the other end has closed the connection."""
    head = _exactly(sock, _HEADER.size)
    body = None if head is None else _exactly(sock, _HEADER.unpack(head)[0])
    return None if body is None else json.loads(body)


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        try:
            more = sock.recv(count - len(data))
        except ConnectionResetError:
            more = b""
        if not more:
            return None
        data += more
    return data


def _say(sock: socket.socket, about: dict[str, Any]) -> Any:
    """Return the answer, None if the agent is exiting."""
    try:
        _send(sock, ["TaskHello", about], [])
        return _receive(sock)
    except (BrokenPipeError, ConnectionResetError):
        return None
    except TimeoutError:  # a stopped agent never answers
        return ["AgentBusy", {}]


def _wait(
    sock: socket.socket, agent: dict[str, Any], task: int, provider: int, beats: bool
) -> Iterator[None]:
    """Wait until this task's rank is over and its processes have been cleaned up; see :func:`hold`."""
    sock.settimeout(None)
    ready = select.poll()
    ready.register(sock, select.POLLIN)
    if provider >= 0:
        ready.register(provider, select.POLLRDHUP)
    silence_s, is_unwanted = 0.0, False
    with contextlib.ExitStack() as guard:
        while silence_s < _patience_s(agent, is_unwanted):
            wait_s = _AGAIN_S if silence_s else _PING_S
            found = dict(ready.poll(wait_s * 1000))
            if provider in found:
                ready.unregister(provider)
                is_unwanted = True
            elif not found:
                silence_s += wait_s
                with contextlib.suppress(OSError):  # it ends: the answer will be none
                    _send(sock, ["TaskPing", {}], [])
                if silence_s - wait_s < _SUSPECT_S <= silence_s:
                    with contextlib.suppress(OSError):  # there may be no room for a process
                        guard.enter_context(_guarded(sock, agent))
                if (beats or silence_s >= _SUSPECT_S) and not is_unwanted:
                    yield
            else:
                answer = _receive(sock)
                if answer is None:
                    _fail_after_cleanup(agent, task, "exited unexpectedly")
                if answer[0] != "TaskPong":
                    return
                guard.close()
                silence_s = 0.0
        _fail_after_cleanup(agent, task, f"did not respond for {silence_s:.0f} s and was killed")


def _patience_s(agent: dict[str, Any], is_unwanted: bool) -> float:
    return _UNWANTED_S if is_unwanted or _is_stopped(agent["pid"]) else _SILENCE_S


@contextlib.contextmanager
def _guarded(sock: socket.socket, agent: dict[str, Any]) -> Iterator[None]:
    """Have a process that ends the agent if this one is killed, or left by an error, while that is silent."""
    read_end, write_end = os.pipe()
    with open(read_end, "rb"), open(write_end, "wb"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: the child needs none
            pid = os.fork()
        if pid == 0:
            try:
                _guard(read_end, sock, agent)
            finally:
                os._exit(0)
        yield
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _guard(task: int, sock: socket.socket, agent: dict[str, Any]) -> None:
    """Wait for the end of the process at the other end of the pipe ``task``; ask the agent once more."""
    os.setsid()  # the provider may end the task with its group
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in (task, sock.fileno()):  # others would not see that the task has closed theirs
            with contextlib.suppress(OSError):
                os.close(fd)
    os.read(task, 1)
    ready = select.poll()
    ready.register(sock, select.POLLIN)
    with contextlib.suppress(OSError):
        _send(sock, ["TaskPing", {}], [])
    if not ready.poll(_PING_S * 1000) or _receive(sock) is None:
        _clean_up_after(agent)


def _fail_after_cleanup(agent: dict[str, Any], task: int, what: str) -> NoReturn:
    text = f"the agent process {what}{_last_words(agent['folder'])}"  # read before its folder is removed
    _clean_up_after(agent)
    raise _ProblemError("agent_ended", text, task)


def _last_words(folder: str) -> str:
    tail = read(os.path.join(folder, _STDERR))[-_STDERR_TAIL:].decode(errors="replace")
    return f"; its last output:\n{tail.strip()}" if tail.strip() else ""


def _is_stopped(pid: int) -> bool:
    return b") T " in read(f"/proc/{pid}/stat")


def _clean_up_after(agent: dict[str, Any]) -> None:
    """End processes that a killed agent could not end: all with its random mark are its descendants."""
    mark = f"HYDROGEN_MAGIC_AGENT={agent['mark']}".encode()
    deadline = time.monotonic() + _CLEANUP_S
    while time.monotonic() < deadline and (left := _with_mark(mark)):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    shutil.rmtree(agent["folder"], ignore_errors=True)


def _with_mark(mark: bytes) -> list[int]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    found = [pid for pid in pids if mark in read(f"/proc/{pid}/environ").split(b"\0")]
    return [pid for pid in found if b") Z " not in read(f"/proc/{pid}/stat")]
