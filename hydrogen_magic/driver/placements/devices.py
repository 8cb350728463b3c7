"""The GPUs of this machine, and their assignment to ranks.

Asks the driver instead of CUDA: the kernel does not initialize a GPU by this.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from hydrogen_magic.core.job import JobSpec, Plan, Slot
from hydrogen_magic.core.units import counted
from hydrogen_magic.errors import PlacementError

_TOOL = "nvidia-smi"
_TIMEOUT_S = 20.0
"""A driver that was not in use may take seconds to wake up."""
_DEVICE_FOLDER = Path("/dev")
"""NVIDIA's driver creates ``nvidia0``, ``nvidia1``, ... there; a container has those of its GPUs."""
_HIDDEN = ("", "-1")
"""Values of ``CUDA_VISIBLE_DEVICES`` that hide every GPU."""


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that ranks may use, by CUDA's names and in CUDA's order.

    ``CUDA_VISIBLE_DEVICES`` of the notebook limits and orders them as it does for CUDA itself.
    Raises PlacementError if it is not set and the GPUs of this machine cannot be listed.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted in _HIDDEN:
        return ()
    names = None if wanted is None else tuple(part.strip() for part in wanted.split(","))
    try:
        installed = _installed_gpus(environ.get("PATH", os.defpath))
    except PlacementError:
        if names is None:
            raise
        return names  # CUDA reports those that do not exist
    if names is None:
        return tuple(index for index, _ in installed)
    visible = []
    for name in names:
        # CUDA stops at the first name it does not know (CUDA programming guide, environment variables).
        is_slice = bool(installed) and name.startswith("MIG-")  # the driver's list has whole GPUs
        if not is_slice and _uuid(name, installed) is None:
            break
        visible.append(name)
    return tuple(visible)


def uuids(gpus: Iterable[str]) -> tuple[str, ...]:
    """Return the UUIDs of GPUs, for which other processes may have other names; unknown names as they are."""
    names = tuple(gpus)
    try:
        installed = _installed_gpus(os.environ.get("PATH", os.defpath)) if names else ()
    except PlacementError:
        installed = ()
    return tuple(_uuid(name, installed) or name for name in names)


def _uuid(name: str, installed: Iterable[tuple[str, str]]) -> str | None:
    """Return the UUID of the GPU with this index, UUID or beginning of a UUID; None if there is none."""
    for index, uuid in installed:
        if name in (index, uuid) or (name.startswith("GPU-") and uuid.startswith(name)):
            return uuid
    return None


_known_gpus: dict[str, tuple[tuple[str, str], ...]] = {}
"""Index and UUID of each GPU by the search path of the tool; failures are not cached."""


def _installed_gpus(path: str) -> tuple[tuple[str, str], ...]:
    if path not in _known_gpus:
        rows = [line.split(",") for line in query_driver("index,uuid", path) if "," in line]
        if not rows:
            return ()
        _known_gpus[path] = tuple((row[0].strip(), row[1].strip()) for row in rows)
    return _known_gpus[path]


def query_driver(fields: str, path: str | None = None) -> list[str]:
    """Return one line for each GPU of this machine.

    ``fields``: as in ``nvidia-smi --query-gpu``. ``path``: where to find the tool; default: ``PATH``.
    Raises PlacementError if this machine has GPUs and the driver's tool does not list them.
    """
    command = shutil.which(_TOOL, path=path)
    try:
        if command is None:
            raise FileNotFoundError("it is not on the PATH")
        query = [command, f"--query-gpu={fields}", "--format=csv,noheader"]
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        return answer.stdout.strip().splitlines()
    except subprocess.CalledProcessError as error:
        why = error.stderr or error.stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    if not any(_DEVICE_FOLDER.glob("nvidia[0-9]*")):
        return []
    raise PlacementError(
        f"{_TOOL} does not list the GPUs of this machine ({why.strip():.200}); set "
        "CUDA_VISIBLE_DEVICES to those to use, for example to 0,1"
    )


def assign(
    spec: JobSpec, environ: Mapping[str, str]
) -> tuple[tuple[str | None, ...], tuple[str, ...]]:
    """Return every rank's GPU (or None for all) and notes for the user.

    ``environ``: see :func:`visible_gpus`. Ranks share GPUs, in turn, if ``--env CUDA_VISIBLE_DEVICES``
    names fewer. Raises PlacementError if ``--gpu`` requests more than there are.
    """
    none: tuple[str | None, ...] = (None,) * spec.np
    if spec.gpu is False:
        return none, ()
    try:
        gpus = visible_gpus(environ)
    except PlacementError as error:
        if spec.gpu:
            raise PlacementError(f"`--gpu`: {error}") from None
        return none, (f"all ranks use the CPU: {error}",)
    if spec.gpu is None and not gpus:
        return none, ()
    if len(gpus) >= spec.np:
        return gpus[: spec.np], ()
    if spec.gpu is None and "CUDA_VISIBLE_DEVICES" in dict(spec.env):
        return tuple(gpus[rank % len(gpus)] for rank in range(spec.np)), ()
    found = f"this machine has {len(gpus)}" if gpus else "this machine has none that CUDA can use"
    if spec.gpu is None:
        return none, (f"{counted(spec.np, 'rank')}, but {found} GPU(s): all ranks use the CPU",)
    fewer = f"use `--np {len(gpus)}` or drop `--gpu`" if gpus else "drop `--gpu`"
    raise PlacementError(
        f"`--np {spec.np} --gpu` needs {counted(spec.np, 'GPU')}, {found}: {fewer}"
    )


def environment(plan: Plan, slot: Slot) -> dict[str, str]:
    """Return ``CUDA_VISIBLE_DEVICES`` for a slot: the gang's GPUs on its host in local_rank order."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(plan.gpus_of(slot))}


def device_name(plan: Plan, slot: Slot) -> str:
    """Return the value of ``hm.device()`` on the slot's rank."""
    return "cpu" if slot.gpu is None else f"cuda:{plan.gpus_of(slot).index(slot.gpu)}"
