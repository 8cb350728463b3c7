"""The plan of a build: the environment of Horovod's build, and the key of its wheel. Pure."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from hydrogen_magic.frameworks.horovod.build import source_patches
from hydrogen_magic.frameworks.horovod.build.toolchain import Machine

_CHOICES = re.compile(
    r"HOROVOD_(WITH_|WITHOUT_|GPU|CPU_OPERATIONS|CUDA_|NCCL_|NVTX_|BUILD_|ALLOW_MIXED|DEBUG).*"
    r"|(CXX|CUDA|LD)FLAGS"
)
"""Build variables of Horovod and CMake: the user's own settings take precedence."""


@dataclass(frozen=True)
class BuildPlan:
    """One build."""

    machine: Machine
    operations: tuple[str, ...]
    """Subset of ``gloo``, ``mpi``, ``nccl``: the enabled operations."""
    choices: Mapping[str, str]
    """Variables that enable them."""
    changes: tuple[source_patches.SourcePatch, ...]
    key: str
    """Identifies the wheel in the cache; different for each different wheel."""


def plan(machine: Machine, environment: Mapping[str, str]) -> BuildPlan:
    """Return the plan for this machine; ``environment`` may override parts of it."""
    own = {name: value for name, value in environment.items() if value and _CHOICES.fullmatch(name)}
    choices = _choices(machine) | own
    operations = tuple(
        name
        for name, is_chosen in {
            "gloo": choices.get("HOROVOD_WITHOUT_GLOO") != "1",
            "mpi": machine.mpi is not None and choices.get("HOROVOD_WITHOUT_MPI") != "1",
            "nccl": choices.get("HOROVOD_GPU_OPERATIONS") == "NCCL",
        }.items()
        if is_chosen
    )
    edits = source_patches.for_standard(machine.standard)
    return BuildPlan(machine, operations, choices, edits, _key(machine, operations, choices, edits))


def _choices(machine: Machine) -> dict[str, str]:
    found = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_MPI" if machine.mpi else "HOROVOD_WITHOUT_MPI": "1",
    }
    if machine.cuda is not None:
        found |= {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_CUDA_HOME": str(machine.cuda.home),
            "HOROVOD_NCCL_INCLUDE": str(machine.cuda.nccl_include),
            "HOROVOD_NCCL_LIB": str(machine.cuda.nccl_library.parent),
            "HOROVOD_NCCL_LINK": "shared",  # torch's own, already loaded: one NCCL per process
        }
    return found


def _key(
    machine: Machine,
    operations: tuple[str, ...],
    choices: Mapping[str, str],
    edits: tuple[source_patches.SourcePatch, ...],
) -> str:
    """Return a readable name with a digest of everything that affects the wheel."""
    facts = asdict(machine) | {
        "horovod": source_patches.VERSION,
        "source": source_patches.digest(edits),
        "choices": dict(choices),
        "python": [sysconfig.get_config_var("EXT_SUFFIX"), sysconfig.get_platform()],
        "libc": platform.libc_ver(),
    }
    del facts["hint"], facts["torch"]["directory"]  # any torch of this version is equivalent
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    python = "cp{}{}".format(*sys.version_info)
    version = machine.torch.version.replace("+", ".")
    return "-".join((source_patches.VERSION, f"torch{version}", python, *operations, digest[:10]))
