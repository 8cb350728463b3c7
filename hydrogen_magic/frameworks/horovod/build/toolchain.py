"""Build requirements of Horovod on this machine; missing ones with the command that installs them."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydrogen_magic.core import processes
from hydrogen_magic.frameworks.horovod import installation
from hydrogen_magic.frameworks.horovod.build.cuda import Cuda, find_cuda, output
from hydrogen_magic.frameworks.horovod.build.errors import MissingError

_ASK_TIMEOUT_S = 30.0
_BYTES_PER_JOB = 2_000_000_000
"""Memory of a compiler for one file that includes all of torch: GCC 12 and torch 2.13, 1.9 GB."""


@dataclass(frozen=True)
class Machine:
    """Everything on this machine that affects a build."""

    torch: installation.Torch
    compiler: str
    """Command in the form of ``$CXX``."""
    compiler_version: str
    """The first line of its version output."""
    standard: int
    """The C++ standard of torch's headers: 14, 17 or 20."""
    mpi: str | None
    """The version of ``mpirun``; None without it, or without ``mpicxx``."""
    cuda: Cuda | None
    """None if Horovod cannot be built with NCCL."""
    hint: str = ""
    """Feature that torch has and this Horovod will lack, with a remedy."""


def detect() -> Machine:
    """Return the requirements; MissingError lists all that are missing. Takes tenths of a second."""
    torch, lacks = installation.torch(), []
    compiler = _compiler()
    if compiler is None:
        lacks.append("compiler")
    if shutil.which("make") is None:
        lacks.append("make")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        lacks.append("headers")
    no_torch = ["torch: pip install torch"] if torch is None else []
    no_pip = [] if importlib.util.find_spec("pip") else ["pip: python -m ensurepip"]
    if torch is None or compiler is None or lacks or no_pip:
        raise MissingError(_explain(lacks, [*no_torch, *no_pip]))
    cuda, hint = find_cuda(torch, os.environ)
    return Machine(
        torch=torch,
        compiler=compiler,
        compiler_version=output([*shlex.split(compiler), "--version"]).partition("\n")[0]
        or compiler,
        standard=wanted_standard(torch.directory),
        mpi=_mpi(),
        cuda=cuda,
        hint=hint,
    )


# ── missing requirements ─────────────────────────────────────────────────────────────────────────


_NAMES = {"compiler": "a C++ compiler", "make": "make", "headers": "Python's headers (Python.h)"}
_PACKAGES = {
    "conda install -c conda-forge": {
        "compiler": "cxx-compiler",
        "make": "make",
        "headers": "python",
    },
    "apt-get install": {"compiler": "g++", "make": "make", "headers": "python{python}-dev"},
    "dnf install": {"compiler": "gcc-c++", "make": "make", "headers": "python{python}-devel"},
}
"""Command -> names of the packages."""


def _explain(lacks: Sequence[str], others: Sequence[str]) -> str:
    lines = [f"  {_NAMES[what]}" for what in lacks] + [f"  {line}" for line in others]
    if lacks:
        lines.append(f"Install with: {_command(lacks)}")
    return "\n".join(["To build Horovod, this machine lacks", *lines])


def _command(lacks: Sequence[str]) -> str:
    is_conda = (Path(sys.prefix) / "conda-meta").is_dir()
    for command, packages in _PACKAGES.items():
        tool = command.split()[0]
        if shutil.which(tool) is None or (tool == "conda" and not is_conda):
            continue
        names = " ".join(packages[what] for what in lacks)
        sudo = "" if is_conda or os.geteuid() == 0 else "sudo "
        version = "{}.{}".format(*sys.version_info)
        return f"{sudo}{command} {names.format(python=version)}"
    return "the system's package manager"


# ── the compiler ─────────────────────────────────────────────────────────────────────────────────


def _compiler() -> str | None:
    """Return ``$CXX``, or CMake's default."""
    asked = os.environ.get("CXX")
    if asked:
        return asked if shutil.which(shlex.split(asked)[0]) else None
    return next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


def check_compiler(here: Machine) -> None:
    """Compile one line; MissingError if the compiler is too old for this torch, or broken."""
    options = [f"-std=c++{here.standard}", "-x", "c++", "-fsyntax-only", "-"]
    said = subprocess.run(
        [*shlex.split(here.compiler), *options],
        input="#include <vector>\nint main() { return 0; }\n",
        capture_output=True,
        text=True,
        timeout=_ASK_TIMEOUT_S,
        check=False,
    )
    if said.returncode == 0:
        return
    first = next((line for line in said.stderr.splitlines() if "error" in line), "")
    raise MissingError(
        f"torch {here.torch.version} needs C++{here.standard}, which `{here.compiler}` "
        f"({here.compiler_version}) cannot compile here: {first.strip()}\nIt takes g++ 10 or "
        "clang++ 12, or newer. Select another compiler with CXX=…, or\ninstall one with: "
        f"{_command(['compiler'])}"
    )


_STANDARD = re.compile(r"""["']-std=(?:c|gnu)\+\+(\d\d)["']""")


def wanted_standard(torch: Path) -> int:
    """Return the C++ standard that torch uses for extensions of its users: 14, 17, 20 …"""
    try:
        text = (torch / "utils" / "cpp_extension.py").read_text()
    except OSError:
        return 17
    return max((int(found) for found in _STANDARD.findall(text)), default=17)


# ── other tools ──────────────────────────────────────────────────────────────────────────────────


def _mpi() -> str | None:
    if not (shutil.which("mpicxx") and shutil.which("mpirun")):
        return None
    return output(["mpirun", "--version"]).partition("\n")[0] or None


def jobs(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many compilers may run in parallel: a core and 2 GB of free memory for each."""
    found = re.search(r"(?:^|\s)-?j\s*(\d+)", environment.get("MAKEFLAGS", ""))
    if found and "MAKELEVEL" not in environment:  # under a make, the flags come from that make
        return max(1, int(found[1]))
    return max(1, min(processes.usable_cores(), _free_bytes() // _BYTES_PER_JOB))


def _free_bytes() -> int:
    """Return the available memory without swapping, within a container's limit."""
    import psutil

    free: int = psutil.virtual_memory().available
    try:
        bound, used = (
            int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current")
        )
    except (OSError, ValueError):  # no such limit: ``max``
        return free
    return min(free, max(0, bound - used))
