"""The launch of a gang that outlives its kernel."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from dataclasses import replace
from typing import IO

from hydrogen_magic import plugins
from hydrogen_magic.capture import Captured
from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import processes, run_log
from hydrogen_magic.core.job import JobSpec, Plan
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.owner.connection import OwnerConnection
from hydrogen_magic.driver.placements.surroundings import (
    Surroundings,
    import_path,
    shadowed_modules,
)
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.node.agent import command_line
from hydrogen_magic.serialization import payload
from hydrogen_magic.transport import framing

_START_S = 120.0
"""How long an owner may take to start: an interpreter and imports, on a machine under load."""
LIMIT_S = 86400.0
"""The timeout by default, a day: an unattended gang has to end at some time."""
_MARKS = (processes.OWNER, processes.AGENT, processes.COOKIE)


def launch_outliving(captured: Captured, spec: JobSpec, *, title: str, planned: Plan) -> Gang:
    """Launch a gang whose owner is a new process; return it, attached and controlled from here.

    It is stopped after :data:`LIMIT_S` if ``spec`` has no timeout. ``planned``: the result of
    :func:`launcher.plan`. Raises PlacementError.
    """
    _check_record()
    spec = _with_gpus(spec, planned)
    if spec.timeout_s is None:
        spec = replace(spec, timeout_s=LIMIT_S)
    around = Surroundings.now()
    request = msg.OwnGang(
        spec=spec,
        title=title,
        source=captured.source,
        cells=dict(captured.cells),
        params=dict(captured.params),
        preload=tuple(captured.preload),
        required_modules=tuple(captured.required_modules),
        datasets=dict(captured.datasets),
        data_places=captured.data_places,
        warnings=(*captured.warnings, *captured.hints),
        env={name: value for name, value in around.env.items() if name not in _MARKS},
        cwd=around.directory,
        sys_path=around.sys_path,
        shadowed=tuple(shadowed_modules(around.sys_path)),
        placement_setup=plugins.placement(spec.placement).owner_setup(),
    )
    return _started(request, captured).follow()


def _with_gpus(spec: JobSpec, planned: Plan) -> JobSpec:
    """Return ``spec`` with the GPUs of the plan: the owner does not know the kernel's other gangs."""
    gpus = planned.gpus_of(planned.slots[0])
    if not gpus or not plugins.placement(spec.placement).on_this_machine:
        return spec
    return replace(spec, env=(*spec.env, ("CUDA_VISIBLE_DEVICES", ",".join(gpus))))


def _check_record() -> None:
    try:
        run_log.runs_dir()
    except OSError as error:
        raise PlacementError(
            f"--outlive needs a directory for the record of the gang: {error}; set HYDROGEN_MAGIC_HOME to a "
            "writable directory"
        ) from None


def _started(request: msg.OwnGang, captured: Captured) -> OwnerConnection:
    """Start an owner; return the connection to it once the gang is launched."""
    ours, theirs = framing.pair()
    ours.settimeout(_START_S)
    with tempfile.TemporaryFile() as stderr, theirs:
        starting = _start_process(theirs, stderr)
        theirs.close()
        try:
            _send(ours, request, captured)
            return OwnerConnection(ours, "control")
        except (OSError, ValueError) as error:
            ours.close()
            stderr.seek(0)
            output = stderr.read().decode(errors="replace").strip()
            why = output.splitlines()[-1] if output else str(error)
            raise PlacementError(f"the owner process of the gang did not start: {why}") from error
        finally:
            starting.kill()  # it has exited, unless its start took too long
            starting.wait()


def _send(sock: socket.socket, request: msg.OwnGang, captured: Captured) -> None:
    closure = payload.to_memfd(captured.payload, "closure")
    try:
        framing.send(sock, request, [closure])
    finally:
        os.close(closure)


def _start_process(theirs: socket.socket, stderr: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start it in a session of its own; it forks, and the process that we know exits."""
    environ = {name: value for name, value in os.environ.items() if name not in _MARKS}
    return subprocess.Popen(
        command_line.command(
            "hydrogen_magic.driver.owner.process",
            import_path(),
            str(theirs.fileno()),
        ),
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env=command_line.environment(environ),
        cwd="/",
    )
