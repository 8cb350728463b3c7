"""The forkserver: a small single-threaded process that imports the ranks' modules and forks them.

A fork takes milliseconds, whereas a new interpreter with torch takes more than a second. The
forkserver never runs user code and never uses a GPU, so its forks may. It serves its agent over one
socket:

- ``PreloadModules``: import these modules now; answers with the files of those that are loaded
- ``ForkWorkers``: fork so many workers, five descriptors each, with these observers; answers with their pids

It also ends an agent that stays stopped (SIGSTOP) when no other process can: beside a kernel once that
has ended, on another machine always.

Workers are forked through an intermediate process that exits at once. This makes them children of
the agent (a subreaper): the agent reaps them, and the forkserver can be replaced at any time.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from typing import NoReturn

from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import processes
from hydrogen_magic.node.worker.main import run_worker
from hydrogen_magic.node.worker.process_setup import WorkerPipes
from hydrogen_magic.transport import framing

FDS_PER_WORKER = len(WorkerPipes._fields)

_ALWAYS = (
    "cloudpickle",
    "hydrogen_magic.serialization.payload",
    "hydrogen_magic.node.worker.namespace",
    "hydrogen_magic.node.worker.reporting.reporter",
    "hydrogen_magic.node.worker.api",
    "hydrogen_magic.node.worker.commands",
    "hydrogen_magic.node.worker.session.group_recovery",
    "hydrogen_magic.node.worker.session.held_names",
    "hydrogen_magic.node.worker.reporting.profiler",
    "hydrogen_magic.node.worker.results.results",
    "hydrogen_magic.node.worker.main_thread",
    "hydrogen_magic.node.worker.spawn",
    "asyncio",
    "multiprocessing.reduction",
)
"""What every rank imports."""


_LOOK_MS = 1000
_STOPPED_LOOKS = 3
"""How often in a row the agent is found stopped before it is ended."""
_STOPPED_LOOKS_IF_REMOTE = 15
"""A task that is attached ends it sooner, and reports it."""
_END_S = 5.0

_started = time.time()
_safe_path = tuple(sys.path)
"""Python's own directories come first in it."""


def serve(sock: socket.socket, kernel: int, sys_path: Sequence[str], first: Sequence[str]) -> None:
    """Import ``first`` and say so, then answer the agent's requests until it closes the connection.

    ``kernel``: its pidfd, -1 on another machine. ``sys_path``: the notebook's module path.
    """
    agent_pid = os.getppid()
    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
    for name in _ALWAYS:
        importlib.import_module(name)
    from hydrogen_magic.node.worker import observe

    sys.path[:] = sys_path
    if first:
        framing.send(sock, _preload(first))
    reader = framing.FrameReader(sock)
    while True:
        _wait_for_request(sock, kernel, agent_pid)
        received = framing.receive(reader)
        if received is None:
            return
        message, fds = received
        request = msg.decode(message, msg.ForkserverRequest)
        if isinstance(request, msg.PreloadModules):
            framing.send(sock, _preload(request.modules))
        elif isinstance(request, msg.ForkWorkers):
            observe.import_ahead(request.observers)
            pids = _fork_workers(sock, kernel, fds, agent_pid, request.observers)
            framing.send(sock, msg.WorkersForked(pids))
            framing.close_all(fds)


def _wait_for_request(sock: socket.socket, kernel: int, agent_pid: int) -> None:
    """Wait until the agent asks for something, or has ended. One that stays stopped is ended."""
    is_remote = kernel < 0
    waiting = select.poll()
    waiting.register(sock, select.POLLIN)
    if not is_remote:
        waiting.register(kernel, select.POLLIN)
    found = dict(waiting.poll(_LOOK_MS if is_remote else None))
    n_stopped = 0
    # An agent that is not stopped ends after its kernel by itself.
    while sock.fileno() not in found:
        if kernel in found:
            waiting.unregister(kernel)
        n_stopped = n_stopped + 1 if _is_stopped(agent_pid) else 0
        if n_stopped >= (_STOPPED_LOOKS_IF_REMOTE if is_remote else _STOPPED_LOOKS):
            asyncio.run(_end(agent_pid))
        found = dict(waiting.poll(_LOOK_MS))


def _is_stopped(pid: int) -> bool:
    return [process.state for process in processes.processes([pid])] == ["T"]


async def _end(agent_pid: int) -> None:
    """End everything that descends from a stopped agent, then the agent and so this process."""
    own = os.getpid()
    seen, _ = await processes.end_descendants(agent_pid, _END_S, lambda: {own})
    processes.unlink_shared_memory(seen, _started)
    processes.send_signal(agent_pid, signal.SIGKILL)


def _preload(names: Sequence[str]) -> msg.ModulesPreloaded:
    """Import ``names``; an import that fails is left to the ranks, where the user sees its error."""
    thresholds = gc.get_threshold()
    # Imports leave little garbage; collections would take an eighth of their time.
    gc.set_threshold(0)
    for name in names:
        try:
            _import(name)
        except BaseException:  # modules may raise anything on import; ranks will raise it again
            continue
    if gc.get_threshold()[0] == 0:  # otherwise a module has chosen its own
        gc.set_threshold(*thresholds)
    gc.collect()
    gc.freeze()
    files = [getattr(sys.modules.get(name), "__file__", None) for name in names]
    return msg.ModulesPreloaded(tuple(file for file in files if file), _is_unsafe_to_fork())


def _import(name: str) -> None:
    """Import a module; standard-library modules from there, even if a file of the same name shadows them."""
    if name.partition(".")[0] not in sys.stdlib_module_names:
        package, _, attribute = name.rpartition(".")
        # `from a import b` of a rank imports a.b only if a has no b of its own.
        if not package or not hasattr(importlib.import_module(package), attribute):
            importlib.import_module(name)
        return
    theirs = sys.path[:]
    sys.path[:] = _safe_path
    try:
        importlib.import_module(name)
    finally:
        sys.path[:] = theirs


def _is_unsafe_to_fork() -> bool:
    """Return whether an import has started a thread, or initialised CUDA."""
    torch = sys.modules.get("torch")
    has_cuda = torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized()
    return has_cuda or threading.active_count() > 1


def _fork_workers(
    sock: socket.socket,
    kernel: int,
    fds: Sequence[int],
    agent_pid: int,
    observers: Sequence[msg.ObserverSpec],
) -> tuple[int, ...]:
    read_end, write_end = os.pipe()
    intermediate = os.fork()
    if intermediate == 0:
        try:
            os.close(read_end)
            if kernel >= 0:
                os.close(kernel)
            _be_intermediate(sock, fds, agent_pid, write_end, observers)
        finally:
            os._exit(1)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        pids = json.loads(pipe.read() or b"[]")
    os.waitpid(intermediate, 0)
    return tuple(pids)


def _be_intermediate(
    sock: socket.socket,
    fds: Sequence[int],
    agent_pid: int,
    write_end: int,
    observers: Sequence[msg.ObserverSpec],
) -> NoReturn:
    pids: list[int] = []
    intermediate_pid = os.getpid()
    for start in range(0, len(fds), FDS_PER_WORKER):
        own = WorkerPipes(*fds[start : start + FDS_PER_WORKER])
        pid = os.fork()
        if pid == 0:
            # An inherited descriptor of a sibling would hide that sibling's end of file.
            framing.close_all({sock.detach(), write_end, *fds} - set(own))
            run_worker(own, agent_pid, intermediate_pid, observers)
        pids.append(pid)
    os.write(write_end, json.dumps(pids).encode())
    os._exit(0)


def main(arguments: Sequence[str]) -> None:
    """Serve on a descriptor.

    ``arguments``: that; the kernel's pidfd; the agent's pid; and as in :func:`serve`.
    """
    fd, kernel, agent_pid, sys_path, *first = arguments
    processes.die_with_parent()
    if os.getppid() != int(agent_pid):
        return  # the agent died before the signal was set up
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(fd))
    try:
        serve(sock, int(kernel), json.loads(sys_path), first)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the agent closed the connection before the answer was complete
