"""``%gang doctor``: checks whether this machine can run gangs, with remedies."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from hydrogen_magic.core import processes
from hydrogen_magic.driver.rendezvous import Diagnosis
from hydrogen_magic.errors import PlacementError

T = TypeVar("T")

_LEAST_SHM_BYTES = 256 << 20
"""DataLoader workers pass batches through /dev/shm; containers often get 64 MB of it."""
_LEAST_DISK_BYTES = 200 << 20
_GANG_TIMEOUT_S = 60.0


def examine() -> Iterator[Diagnosis]:
    """Yield one check after the other; the last starts a gang and takes a few seconds."""
    from hydrogen_magic import plugins
    from hydrogen_magic.core import run_log

    yield python()
    yield _made("system", system)
    for name, requirement in _PACKAGES.items():
        yield _made(name, partial(package, name, requirement))
    yield _made("PyArrow", pyarrow)
    names = _made("plug-ins", lambda: list(plugins.RENDEZVOUS))
    if isinstance(names, Diagnosis):
        yield names
        return
    for name in names or ():
        found = _made(f"--with {name}", partial(library, name))
        if found is not None:
            yield found
    yield _made("GPUs", gpus)
    yield _made("/dev/shm", lambda: memory_files(Path("/dev/shm")))
    remedy = "set HYDROGEN_MAGIC_HOME to a writable directory"
    yield _made("run directory", lambda: run_directory(run_log.runs_dir()), remedy)
    yield _made("2 ranks all_reduce", two_ranks)


def _made(name: str, check: Callable[[], T], remedy: str = "") -> T | Diagnosis:
    """Make a check; an exception in it is its finding."""
    try:
        return check()
    except Exception as error:
        return Diagnosis(name, False, f"{type(error).__name__}: {error}", remedy)


def python() -> Diagnosis:
    """Report the version and path of Python."""
    found = f"{platform.python_version()} at {sys.executable}, {os.cpu_count()} CPUs"
    return Diagnosis("python", True, found)


def system() -> Diagnosis:
    """Check the system calls that agents need to control their ranks."""
    if fault := processes.pidfd_fault():
        remedy = "gangs need Linux 5.3 or newer; here, `--on inline` runs one rank in the kernel"
        return Diagnosis("system", False, f"{platform.platform()}: {fault}", remedy)
    return Diagnosis("system", True, platform.platform())


_PACKAGES = {
    "torch": "pip install torch",
    "ipykernel": "pip install -U ipykernel",
    "pyzmq": "pip install -U 'pyzmq>=26'",
    "cloudpickle": "pip install -U cloudpickle",
}


def package(name: str, remedy: str) -> Diagnosis:
    """Report the version of a package."""
    try:
        return Diagnosis(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Diagnosis(name, False, "not installed", remedy)


def pyarrow() -> Diagnosis:
    """Report the version of PyArrow, which only some cells need."""
    from hydrogen_magic.inference.sources import pyarrow_fault

    found = package("pyarrow", "").found
    needed = "; for `%%infer` and DataFrames: pip install 'hydrogen_magic[infer]'"
    return Diagnosis("PyArrow", True, found + (needed if pyarrow_fault() else ""))


def library(rendezvous: str) -> Diagnosis | None:
    """Say whether the library of a rendezvous is usable here; None where there is nothing to say."""
    from hydrogen_magic import plugins

    return plugins.rendezvous(rendezvous).diagnose()


def gpus() -> Diagnosis:
    """Report the GPUs that the driver lists."""
    from hydrogen_magic.driver.placements import devices

    try:
        found = devices.query_driver("index,name,memory.free")
    except PlacementError as error:
        return Diagnosis("GPUs", False, str(error))
    return Diagnosis("GPUs", True, "; ".join(found) or "none: ranks use the CPU")


def memory_files(path: Path) -> Diagnosis:
    """Report the free shared memory."""
    if not path.is_dir():
        return Diagnosis(str(path), True, "not present: this system shares memory in another way")
    free = shutil.disk_usage(path).free
    remedy = "in a container, start it with --shm-size=2g (or --ipc=host)"
    return Diagnosis(str(path), free >= _LEAST_SHM_BYTES, f"{free / 1e9:.1f} GB free", remedy)


def run_directory(path: Path) -> Diagnosis:
    """Report the directory of records and its free space."""
    free = shutil.disk_usage(path).free
    remedy = "free some space, or set HYDROGEN_MAGIC_HOME to another disk"
    found = f"{path}, {free / 1e9:.1f} GB free"
    return Diagnosis("run directory", free >= _LEAST_DISK_BYTES, found, remedy)


def two_ranks(run: Callable[[], float] | None = None) -> Diagnosis:
    """Start two ranks that add their numbers."""
    from hydrogen_magic.errors import HydrogenError

    started = time.monotonic()
    try:
        total = (run or _run_two_ranks)()
    except HydrogenError as error:
        remedy = (
            "the lines above show which rank failed and why; a firewall on loopback is a common "
            "cause"
        )
        return Diagnosis("2 ranks all_reduce", False, error.report, remedy)
    took = f"{time.monotonic() - started:.1f} s"
    return Diagnosis(
        "2 ranks all_reduce", total == 3.0, f"sum {total:g} in {took}", "please report this"
    )


def _run_two_ranks() -> float:
    from hydrogen_magic.driver import calls, known_gangs

    gang = calls.launch(
        _sum_of_ranks, np=2, gpu=False, timeout=_GANG_TIMEOUT_S, run_name="%gang doctor"
    )
    try:
        total: float = gang.result
    except KeyboardInterrupt:
        gang.stop()
        raise
    # The newest gang should be the user's. One that fails stays, with its logs.
    known_gangs.forget(gang)
    return total


def _sum_of_ranks() -> float:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        number = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(number)
        return float(number)
    finally:
        dist.destroy_process_group()
