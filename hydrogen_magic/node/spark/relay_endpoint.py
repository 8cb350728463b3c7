"""The code that Spark runs on the driver's host for each request: it passes requests on to the daemon.

::

    agents ──TCP──▶ relay_daemon ◀──Unix socket── answer() ◀── Spark's planner ◀──Connect── kernel

Spark runs ``schema()`` of a Python DataSource on the driver's host when it analyses a plan, which
needs no slot of an executor. The first request starts the daemon. Only the source of this file is
sent, so it uses only the standard library, and little of it: it is loaded again for each request.
"""

from __future__ import annotations

import base64
import errno
import json
import os
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from typing import Any

REQUEST = struct.Struct("!BQI")
"""Request to the daemon: operation, the request's number, and the number of bytes that follow."""
START, PULL, PUSH, STOP = range(1, 5)
ALIVE = b"+"
"""Start of every reply: a reply without it was cut off, since the daemon exited."""
LONGEST_WAIT_S = 1.0
"""Reply to ``PULL`` without data."""
_REACH_S = 5.0
_START_S = 20.0
"""Time for Python to start on a busy host."""
_BACKLOG = 1024
_ENDED = "the relay's process has exited: it was killed, or the notebook had been silent for 30 s"
_BOOT = """
import json, sys, types
given = json.load(sys.stdin)
for name, text in given["modules"].items():
    sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), vars(sys.modules[name]))
sys.modules[name].run(*given["arguments"])  # the hydrogen_magic relay
"""


def answer(options: Any, modules: dict[str, str]) -> dict[str, str]:
    """Carry out one request of the kernel; return ``{"reply": base64}`` or ``{"error": text}``.

    ``{"unanswered": ""}``: the daemon exists and has not answered in time, since its host was paused or is
    busy; the kernel may repeat the request. ``options``: of the DataSource, all strings. ``modules``: the
    daemon's sources by name, the main one last.
    """
    name = f"\0hydrogen_magic/relay/{options['relay']}"
    action = int(options["do"])
    try:
        if action == START:
            _start(name, options["host"], options["ports"], modules)
        body = base64.b64decode(options.get("body", ""))
        reply = _ask(name, action, int(options["number"]), body)
    except TimeoutError:
        return {"unanswered": ""}
    except (OSError, EOFError, subprocess.SubprocessError) as error:
        return {"error": str(error) or type(error).__name__}
    return {"reply": base64.b64encode(reply).decode()}


def _ask(name: str, action: int, number: int, body: bytes = b"") -> bytes:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(LONGEST_WAIT_S + _REACH_S)
        try:
            sock.connect(name)
        except ConnectionRefusedError:
            raise EOFError(_ENDED) from None
        check_user(sock)
        sock.sendall(REQUEST.pack(action, number, len(body)) + body)
        with sock.makefile("rb") as stream:
            reply = stream.read()
    if not reply.startswith(ALIVE):
        raise EOFError(_ENDED)
    return reply[len(ALIVE) :]


def _start(name: str, host: str, ports: str, modules: dict[str, str]) -> None:
    """Start the daemon, which does not run yet, unless this is a repeated request.

    ``ports``: ``40000-40100``, or ``0-0`` for any port.
    """
    with suppress(EOFError):
        _ask(name, START, 0)
        return
    with _listening(host, ports) as port, socket.socket(socket.AF_UNIX) as requests:
        requests.bind(name)
        requests.listen()
        port.setblocking(False)
        fds = (port.fileno(), requests.fileno())
        _spawn({"modules": modules, "arguments": [*fds, _jvm()]}, fds)


def _listening(host: str, ports: str) -> socket.socket:
    """Listen on the first port that is free."""
    # IPv4 if there is a choice: agents resolve names to it.
    family, *_, (address, *_) = min(socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM))
    first, last = map(int, ports.split("-"))
    for port in range(first, last + 1):
        try:
            return socket.create_server((address, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(f"all ports of {ports} are in use there (`%config Distributed.ports`)")


def _spawn(given: dict[str, Any], fds: tuple[int, ...]) -> None:
    """Run the daemon in a Python that is independent of Spark's, and wait until it has forked."""
    begun = subprocess.Popen(
        [sys.executable, "-I", "-c", _BOOT],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=fds,
        start_new_session=True,  # Spark sends SIGHUP to the group of its Python processes
        cwd="/",
    )
    begun.communicate(json.dumps(given).encode(), timeout=_START_S)
    if begun.returncode != 0:
        raise OSError(
            f"{sys.executable} on the driver's host failed to run it (exit code {begun.returncode})"
        )


def _jvm() -> int:
    """Return the driver's process: the nearest ancestor of this one that is a JVM; 0 if there is none."""
    pid = os.getppid()
    while pid > 1:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            name, _, rest = file.read().partition("(")[2].rpartition(")")
        if name == "java":
            return pid
        pid = int(rest.split()[1])
    return 0


def check_user(sock: Any) -> None:
    """Raise PermissionError if another user is at the other end of a Unix socket."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    if struct.unpack("3i", credentials)[1] != os.getuid():
        raise PermissionError("the relay's socket belongs to another user")
