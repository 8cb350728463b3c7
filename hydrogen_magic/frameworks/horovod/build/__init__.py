"""Builds Horovod, from the source release to a cached wheel and a tested installation.

Each step has its own module:

    machine ── plan ── cache ── there ────────────────────────────────────┐
                         └──── not there ── fetching ── changes ── compiling ── installing
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from hydrogen_magic.frameworks import subprocess_log
from hydrogen_magic.frameworks.horovod import installation
from hydrogen_magic.frameworks.horovod.build import (
    fetching,
    installing,
    source_patches,
    toolchain,
    wheel_cache,
)
from hydrogen_magic.frameworks.horovod.build.errors import BuildError
from hydrogen_magic.frameworks.horovod.build.plan import BuildPlan, plan

Say = Callable[[str], None]

_BUILD = "from setuptools.build_meta import __legacy__ as backend; backend.build_wheel({!r})"
"""The code that pip would run; Horovod has only a setup.py."""


@dataclass(frozen=True)
class BuildOutcome:
    """The result of a build."""

    wheel: Path
    operations: tuple[str, ...]
    was_compiled: bool
    """False: it came from the cache."""
    took_s: float


def build(*, is_forced: bool, is_installed: bool, say: Say) -> BuildOutcome:
    """Build Horovod if needed, install it if requested, and test it; BuildError gives the reason of a
    failure.
    """
    started = time.monotonic()
    wanted = plan(toolchain.detect(), os.environ)
    if wanted.machine.hint:
        say(f"· {wanted.machine.hint}")
    found = None if is_forced else wheel_cache.find(wanted.key)
    wheel = found or _compile(wanted, say)
    if is_installed:
        installing.install(wheel, wanted.key, is_forced=is_forced, say=say)
        installing.try_out()
    return BuildOutcome(wheel, wanted.operations, found is None, time.monotonic() - started)


# ── the wheel ────────────────────────────────────────────────────────────────────────────────────


def _compile(wanted: BuildPlan, say: Say) -> Path:
    toolchain.check_compiler(wanted.machine)
    log = wheel_cache.directory() / f"{wanted.key}.log"
    with wheel_cache.written():
        log.write_text(f"{wanted}\n\n")
    n_jobs = toolchain.jobs()
    say(
        f"· building Horovod {source_patches.VERSION} for torch {wanted.machine.torch.version} "
        f"with {', '.join(wanted.operations)}: {n_jobs} parallel compilers, log in {log}"
    )
    with wheel_cache.workplace() as place:
        tools = fetching.tools(place / "tools", log)
        source = fetching.source(tools, place, log)
        source_patches.apply(wanted.changes, source)
        wheels = place / "wheels"
        wheels.mkdir()
        environment = _environment(wanted, tools, place, n_jobs)
        with closing(subprocess_log.CompilerProgress(sys.stderr)) as progress:
            code = subprocess_log.run(
                [sys.executable, "-u", "-c", _BUILD.format(str(wheels))],
                cwd=source,
                environment=environment,
                log=log,
                on_line=progress.feed,
            )
        built = next(wheels.glob("*.whl"), None)
        if code != 0 or built is None:
            raise BuildError(_explain_failure(wanted, log))
        return wheel_cache.keep(built, wanted.key)


def _environment(wanted: BuildPlan, tools: Path, place: Path, n_jobs: int) -> dict[str, str]:
    """Return the environment of the build, without variables of an outer make."""
    outer = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "PYTHONPATH"}
    found = {name: value for name, value in os.environ.items() if name not in outer}
    cuda = wanted.machine.cuda
    path = [str(cuda.home / "bin")] if cuda else []
    version = re.sub(r"[^a-z0-9]+", ".", wanted.machine.torch.version.lower())
    found |= wanted.choices
    found |= {
        "CXX": wanted.machine.compiler,
        "HOROVOD_CMAKE": fetching.cmake() or str(tools / "bin" / "cmake"),
        "HOROVOD_LOCAL_VERSION": f"torch{version}",  # shown by `pip list`
        "HYDROGEN_MAGIC_BUILD": wanted.key,
        "MAKEFLAGS": f"-j{n_jobs}",
        "PATH": os.pathsep.join([*path, os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": fetching.search_path(tools),
        "TMPDIR": str(place),  # files of a compiler that was ended are removed with it
    }
    if cuda and cuda.nccl_library.name != "libnccl.so" and "HOROVOD_NCCL_LIB" not in os.environ:
        found["HOROVOD_NCCL_LIB"] = str(_linkable(cuda.nccl_library, wanted.key))
    return found


def _linkable(nccl: Path, key: str) -> Path:
    """Return a directory where a linker finds pip's NCCL, which has no ``libnccl.so``.

    Not beside the objects: the library stores this path, and any user could create a directory there.
    """
    folder = wheel_cache.directory() / f"{key}.nccl"
    folder.mkdir(exist_ok=True)
    (folder / "libnccl.so").unlink(missing_ok=True)
    (folder / "libnccl.so").symlink_to(nccl)
    return folder


def _explain_failure(wanted: BuildPlan, log: Path) -> str:
    text = log.read_text(errors="replace").rpartition("\n$ ")[2]  # of the last command
    lines = ["Horovod did not build:", *(f"  {line}" for line in subprocess_log.relevant(text))]
    if "Killed" in text:
        lines.append(
            "The machine ran out of memory. Run fewer compilers in parallel with MAKEFLAGS=-j1."
        )
    if "mpi" in wanted.operations:
        lines.append(f"To build without MPI: HOROVOD_WITHOUT_MPI=1 {installation.BUILD}")
    return "\n".join([*lines, f"Full log: {log}"])
