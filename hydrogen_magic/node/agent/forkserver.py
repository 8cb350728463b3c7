"""The forkserver: a small single-threaded process that imports the ranks' modules and forks them.

A fork takes milliseconds, whereas a new interpreter with torch takes more than a second. The
forkserver never runs user code and never uses a GPU, so its forks may. It serves its agent over one
socket:

- ``preload``: import these modules now; answers with the loaded ones (if forking is still safe)
- ``fork``: fork this many workers, with five descriptors each; answers with their pids

Workers are forked through an intermediate process that exits at once. This makes them children of
the agent (a subreaper): the agent reaps them, and the forkserver can be replaced at any time.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import NoReturn

from hydrogen_magic.core import processes
from hydrogen_magic.node.worker.main import run_worker
from hydrogen_magic.node.worker.process_setup import WorkerPipes
from hydrogen_magic.transport import framing

__all__ = ["FDS_PER_WORKER", "main", "serve"]

FDS_PER_WORKER = 5

_ALWAYS = ("cloudpickle", "hydrogen_magic.serialization.payload", "hydrogen_magic.node.worker.namespace",
           "hydrogen_magic.node.worker.reporter", "hydrogen_magic.node.worker.api",
           "hydrogen_magic.node.worker.main_thread", "hydrogen_magic.node.worker.observe",
           "hydrogen_magic.node.worker.spawn", "asyncio", "multiprocessing.reduction")  # fmt: skip
"""Modules that every rank imports."""


_safe_path = tuple(sys.path)
"""Python's own directories come first in it."""


def serve(sock: socket.socket, sys_path: Sequence[str], first: Sequence[str]) -> None:
    """Import ``first`` and report it, then answer the agent's requests until it closes the
    connection.

    ``sys_path``: the notebook's module path.
    """
    agent_pid = os.getppid()
    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
    for name in _ALWAYS:
        importlib.import_module(name)
    sys.path[:] = sys_path
    if first:
        framing.send(sock, _preload(first))
    reader = framing.FrameReader(sock)
    while (received := framing.receive(reader)) is not None:
        request, fds = received
        if request["do"] == "preload":
            framing.send(sock, _preload(request["modules"]))
        else:
            framing.send(sock, {"pids": _fork_workers(sock, fds, agent_pid)})
            for fd in fds:
                os.close(fd)


def _preload(names: Sequence[str]) -> dict[str, list[str]]:
    """Import ``names``; failed imports are left to the ranks, which show the error to the user."""
    for name in names:
        try:
            _import(name)
        except BaseException:  # modules may raise anything on import; ranks will raise it again
            continue
    gc.collect()
    gc.freeze()
    files = [getattr(sys.modules.get(name), "__file__", None) for name in names]
    return {"files": [file for file in files if file], "unsafe": _unsafe_to_fork()}


def _import(name: str) -> None:
    """Import a module; standard-library modules from there, even if a file of the same name shadows them."""
    if name.partition(".")[0] not in sys.stdlib_module_names:
        importlib.import_module(name)
        return
    theirs = sys.path[:]
    sys.path[:] = _safe_path
    try:
        importlib.import_module(name)
    finally:
        sys.path[:] = theirs


def _unsafe_to_fork() -> list[str]:
    """Return the reasons against forking this process further (import side effects)."""
    reasons = [
        f"thread {thread.name}"
        for thread in threading.enumerate()
        if thread is not threading.main_thread()
    ]
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        reasons.append("CUDA is initialised")
    return reasons


def _fork_workers(sock: socket.socket, fds: Sequence[int], agent_pid: int) -> list[int]:
    read_end, write_end = os.pipe()
    intermediate = os.fork()
    if intermediate == 0:
        try:
            os.close(read_end)
            _be_intermediate(sock, fds, agent_pid, write_end)
        finally:
            os._exit(1)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        pids: list[int] = json.loads(pipe.read() or b"[]")
    os.waitpid(intermediate, 0)
    return pids


def _be_intermediate(
    sock: socket.socket, fds: Sequence[int], agent_pid: int, write_end: int
) -> NoReturn:
    pids: list[int] = []
    go_between_pid = os.getpid()
    for start in range(0, len(fds), FDS_PER_WORKER):
        own = WorkerPipes(*fds[start : start + FDS_PER_WORKER])
        pid = os.fork()
        if pid == 0:
            # An inherited descriptor of a sibling would hide that sibling's end of file.
            for fd in {sock.detach(), write_end, *fds} - set(own.all()):
                os.close(fd)
            run_worker(own, agent_pid, go_between_pid)
        pids.append(pid)
    os.write(write_end, json.dumps(pids).encode())
    os._exit(0)


def main(arguments: Sequence[str]) -> None:
    """Serve on a descriptor. Arguments: descriptor, the agent's pid, the notebook's module path,
    first imports.
    """
    fd, agent_pid, sys_path, *first = arguments
    processes.die_with_parent()
    if os.getppid() != int(agent_pid):
        return  # the agent died before the signal was set up
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sock = socket.socket(fileno=int(fd))
    try:
        serve(sock, json.loads(sys_path), first)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the agent closed the connection before the answer was complete
