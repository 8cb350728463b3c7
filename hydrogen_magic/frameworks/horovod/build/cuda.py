"""CUDA and NCCL for Horovod's GPU operations: the same versions that torch uses."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydrogen_magic.frameworks.horovod.installation import Torch

_ASK_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Cuda:
    """CUDA and NCCL for compiling Horovod's GPU operations."""

    home: Path
    """The directory with ``bin/nvcc``."""
    release: str
    """The version according to nvcc: ``12.8``."""
    nccl_include: Path
    nccl_library: Path
    """A file, ``libnccl.so`` or ``libnccl.so.2``."""


def find_cuda(torch: Torch, environment: Mapping[str, str]) -> tuple[Cuda | None, str]:
    """Return CUDA and NCCL, and advice if they are missing although torch could use them."""
    if torch.cuda is None:
        return None, ""
    major = torch.cuda.partition(".")[0]
    toolkit = next(_toolkits(major, torch.cuda, environment), None)
    if toolkit is None:
        short = torch.cuda.replace(".", "-")
        return None, _hint(
            torch,
            f"nvcc of CUDA {major} was found",
            f"`conda install -c nvidia cuda-toolkit={torch.cuda}` or, from NVIDIA's repository, "
            f"`apt-get install cuda-toolkit-{short}`",
        )
    home, release = toolkit
    nccl = next(_nccls(torch, home, environment), None)
    if nccl is None:
        return None, _hint(
            torch, "NCCL with headers was found", f"`pip install nvidia-nccl-cu{major}`"
        )
    return Cuda(home, release, *nccl), ""


def _hint(torch: Torch, lacks: str, get: str) -> str:
    return (
        f"torch is built for CUDA {torch.cuda}, but no {lacks}: this Horovod copies tensors from "
        f"the GPU and reduces them on the CPU. To use NCCL, run {get}, then build again."
    )


def _toolkits(
    major: str, version: str, environment: Mapping[str, str]
) -> Iterator[tuple[Path, str]]:
    """Yield directories with nvcc of CUDA ``major`` and its headers, and their releases."""
    named = [environment.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    nvcc = shutil.which("nvcc")
    beside = [str(Path(nvcc).resolve().parents[1])] if nvcc else []
    usual = [f"/usr/local/cuda-{version}", f"/usr/local/cuda-{major}", "/usr/local/cuda"]
    for home in (Path(name) for name in (*named, *beside, *usual) if name):
        release = _release(home / "bin" / "nvcc")
        if release and release.partition(".")[0] == major and _has_headers(home):
            yield home, release


def _has_headers(home: Path) -> bool:
    inside_conda = home.glob("targets/*/include/cuda_runtime.h")
    return (home / "include" / "cuda_runtime.h").exists() or any(inside_conda)


def _release(nvcc: Path) -> str | None:
    found = re.search(r"release (\d+\.\d+)", output([str(nvcc), "--version"]))
    return found[1] if found else None


def output(command: Sequence[str]) -> str:
    """Return a program's output, empty if it does not run."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _nccls(torch: Torch, home: Path, environment: Mapping[str, str]) -> Iterator[tuple[Path, Path]]:
    """Yield NCCL's header directory and its library: first of all the one that torch loads."""
    asked = environment.get("HOROVOD_NCCL_HOME")
    roots = [Path(asked)] if asked else []
    roots += [torch.directory.parent / "nvidia" / "nccl", home, Path("/usr"), Path("/usr/local")]
    include, library = (environment.get(f"HOROVOD_NCCL_{name}") for name in ("INCLUDE", "LIB"))
    for root in roots:
        header = Path(include or root / "include") / "nccl.h"
        folders = (
            [Path(library)] if library else [*root.glob("lib*"), *root.glob("lib/*-linux-gnu")]
        )
        files = (folder / name for folder in folders for name in ("libnccl.so", "libnccl.so.2"))
        file = next((file for file in files if file.exists()), None)
        if header.exists() and file is not None:
            yield header.parent, file
