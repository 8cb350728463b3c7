"""The GPUs of this machine, and their assignment to ranks.

Asks the driver instead of CUDA: the kernel does not initialize a GPU by this.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping

from hydrogen_magic.core.job import JobSpec, Plan, Slot
from hydrogen_magic.core.units import counted
from hydrogen_magic.errors import PlacementError

_QUERY = ("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
_QUERY_TIMEOUT_S = 20.0
"""A driver that was not in use may take seconds to wake up."""


def visible_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that ranks may use, by CUDA's names and in CUDA's order.

    ``CUDA_VISIBLE_DEVICES`` of the notebook limits and orders them as it does for CUDA itself.
    """
    installed = _installed_gpus(environ.get("PATH", os.defpath))
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return tuple(index for index, _ in installed)
    known = {name for pair in installed for name in pair}
    visible = []
    for name in (part.strip() for part in wanted.split(",")):
        # CUDA stops at the first name it does not know (CUDA programming guide, environment variables).
        is_slice = bool(known) and name.startswith("MIG-")  # the driver's list has whole GPUs
        if not is_slice and not any(
            full == name or (full.startswith(name) and name.startswith("GPU-")) for full in known
        ):
            break
        visible.append(name)
    return tuple(visible)


_known_gpus: dict[str, tuple[tuple[str, str], ...]] = {}
"""The driver's answer by the search path of the tool; failures are not cached."""


def _installed_gpus(path: str) -> tuple[tuple[str, str], ...]:
    if path not in _known_gpus:
        found = _ask_driver(path)
        if not found:
            return ()
        _known_gpus[path] = found
    return _known_gpus[path]


def _ask_driver(path: str) -> tuple[tuple[str, str], ...]:
    command = shutil.which(_QUERY[0], path=path)
    if command is None:
        return ()
    try:
        answer = subprocess.run(
            [command, *_QUERY[1:]], capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if answer.returncode != 0:
        return ()
    rows = (line.split(",") for line in answer.stdout.splitlines() if "," in line)
    return tuple((row[0].strip(), row[1].strip()) for row in rows)


def assign(spec: JobSpec, gpus: tuple[str, ...]) -> tuple[tuple[str | None, ...], tuple[str, ...]]:
    """Return every rank's GPU (or None for all) and notes for the user.

    Ranks share GPUs, in turn, if ``--env CUDA_VISIBLE_DEVICES`` names fewer.
    Raises PlacementError if ``--gpu`` requests more than there are.
    """
    none: tuple[str | None, ...] = (None,) * spec.np
    if spec.gpu is False or (spec.gpu is None and not gpus):
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
