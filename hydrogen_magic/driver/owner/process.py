"""The owner: a process that launches a gang, serves kernels that attach, and exits at the gang's end."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from hydrogen_magic import plugins
from hydrogen_magic.capture import Captured
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import processes, run_log
from hydrogen_magic.driver import launcher, tracking
from hydrogen_magic.driver.datasets import folders
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.owner import local_socket
from hydrogen_magic.driver.owner.server import OwnerServer
from hydrogen_magic.driver.placements import local_agents
from hydrogen_magic.driver.state.stored_results import attempts
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.serialization import payload
from hydrogen_magic.transport import framing

_STDERR = "owner.log"
"""File of the run log with this process's stderr; deleted if it is empty."""


def main(arguments: Sequence[str]) -> None:
    """Own the gang that the kernel asks for by an inherited socket."""
    processes.reset_signals()
    if os.fork() > 0:
        os._exit(0)  # so that this process is not the kernel's child, which others may end with it
    sock = socket.socket(fileno=int(arguments[0]))
    reader = framing.FrameReader(sock)
    received = framing.receive(reader)
    if received is None:
        return  # the kernel has already exited
    request, (closure,) = msg.decode(received[0], msg.OwnGang), received[1]
    with ExitStack() as data, ExitStack() as placement:
        try:
            with local_socket.interrupted_at_hang_up(sock):  # Spark's client tries for ten minutes
                _become_like_kernel(request)
                data.enter_context(folders.kept(request.data_places))
                runs_on = plugins.placement(request.spec.placement)
                placement.enter_context(runs_on.in_owner(request.placement_setup))
            gang, listener = _launched(request, closure)
        except KeyboardInterrupt:
            return  # that took too long: the kernel has ended, or reported that the gang did not start
        except Exception as error:  # the kernel raises it
            framing.send(sock, msg.LaunchRefused(type(error).__name__, str(error)))
            return
        server = OwnerServer(gang, listener)
        server.serve(sock, reader)
        _own(gang, server, placement)
        _write_timeline(gang, request.spec.timeline)
        _complete_record(gang, is_seen=server.is_attended)
        server.hang_up()  # the gang does not wait for its tracker
        gang.wait_for_tracker(tracking.LATE_S)
        _leave_nothing(gang.folder)


def _launched(request: msg.OwnGang, closure: int) -> tuple[Gang, socket.socket]:
    captured = Captured(
        payload=payload.from_memfd(closure),
        inventory=(),
        preload=request.preload,
        cells=request.cells,
        warnings=request.warnings,
        required_modules=request.required_modules,
        datasets=request.datasets,
        params=request.params,
        source=request.source,
    )
    os.close(closure)
    gang = launcher.launch_captured(captured, request.spec, title=request.title)
    try:
        if run_log.summary(gang.id) is None:  # no kernel could attach to it, nor get its results
            why = "; ".join(note.text for note in gang.snapshot().notices)
            raise PlacementError(
                f"--outlive needs a record of the gang, which cannot be made: {why}"
            )
        listener = local_socket.listen(gang.folder)
        run_log.mark_unseen(gang.folder)
    except (OSError, PlacementError):
        gang.stop(kill=True)
        gang.wait()
        raise
    _redirect_stderr(gang.folder / _STDERR)
    return gang, listener


def _become_like_kernel(request: msg.OwnGang) -> None:
    """Take over the environment, working directory and module path, on which a launch depends."""
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    for name in request.shadowed:
        importlib.import_module(name)
    sys.path[:] = request.sys_path


def _redirect_stderr(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    os.dup2(fd, 2)
    os.close(fd)


def _own(gang: Gang, server: OwnerServer, placement: ExitStack) -> None:
    """Return when the gang has ended, every connection has its last events, and nothing is left."""
    signal.signal(signal.SIGTERM, lambda signum, frame: gang.stop_for("owner"))
    server.start()
    gang.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is left is to write the record
    server.close()
    placement.close()
    local_agents.close()


def _write_timeline(gang: Gang, path: str | None) -> None:
    """Write the trace for ``--timeline FILE``, for which no kernel may be there."""
    if path:
        try:
            gang.timeline(path)
        except OSError as error:
            print(f"the timeline could not be written: {error}", file=sys.stderr)


def _complete_record(gang: Gang, *, is_seen: bool) -> None:
    """Record what is missing, the end above all: without it the gang seems to have lost its owner."""
    for _ in attempts(gang.folder):
        try:
            if is_seen:
                run_log.mark_seen(gang.id)
            run_log.complete(gang.id, gang.events())
            return
        except FileNotFoundError:  # the folder was deleted
            return
        except OSError:  # the disk is still full
            continue
    with suppress(OSError):
        run_log.complete(gang.id, gang.events(), only_now=True)


def _leave_nothing(folder: Path) -> None:
    (folder / run_log.OWNER_SOCKET).unlink(missing_ok=True)
    with suppress(FileNotFoundError):  # the folder was deleted
        if os.path.getsize(folder / _STDERR) == 0:
            (folder / _STDERR).unlink()


if __name__ == "__main__":
    main(sys.argv[1:])
