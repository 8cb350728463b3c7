"""Settings of torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from hydrogen_magic.core import processes
from hydrogen_magic.core.rank_gpu import gpu_of_rank
from hydrogen_magic.node.worker.settings.provider import (
    Provider,
    Stays,
    Undo,
    Value,
    attribute,
    functions,
    table,
)


def _default_threads() -> set[int]:
    """Return the numbers of threads that torch may choose by itself on this machine."""
    given = {os.environ.get(name, "") for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    # The mathematical libraries start one thread for each core.
    cores = (os.cpu_count() or 1, processes.usable_cores())
    counts = {count // per for count in cores for per in (1, _threads_per_core())}
    return counts | {int(text) for text in given if text.isdecimal()}


@cache
def _threads_per_core() -> int:
    siblings = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    return len(re.split("[,-]", siblings.read_text())) if siblings.exists() else 1


def _threads(torch: Any) -> int | None:
    count = int(torch.get_num_threads())
    return None if count in _default_threads() else count


def _set_device(torch: Any, kind: str | None) -> None:
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("the rank has no GPU")
        kind = gpu_of_rank()
    torch.set_default_device(kind)


_cudnn = attrgetter("backends.cudnn")
_TORCH = {
    "default dtype": Value(
        lambda torch: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda torch, value: torch.set_default_dtype(getattr(torch, value)),
        "float32",
    ),
    "default device": Value(lambda torch: torch.get_default_device().type, _set_device, "cpu"),
    "grad mode": functions("is_grad_enabled", "set_grad_enabled", True),
    "anomaly detection": functions("is_anomaly_enabled", "autograd.set_detect_anomaly", False),
    "deterministic algorithms": Value(
        lambda torch: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda torch, value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        (False, False),
    ),
    "float32 matmul precision": functions(
        "get_float32_matmul_precision", "set_float32_matmul_precision", "highest"
    ),
    "sharing strategy": functions(
        "multiprocessing.get_sharing_strategy",
        "multiprocessing.set_sharing_strategy",
        "file_descriptor",
    ),
    "number of threads": Value(
        _threads, lambda torch, value: value and torch.set_num_threads(value), None
    ),
    "cudnn.deterministic": attribute(_cudnn, "deterministic", False),
    "cudnn.benchmark": attribute(_cudnn, "benchmark", False),
    "cudnn.enabled": attribute(_cudnn, "enabled", True),
    "print options": Value(
        lambda torch: dict(vars(torch._tensor_str.PRINT_OPTS)),
        lambda torch, value: torch.set_printoptions(**value),
        {"precision": 4, "threshold": 1000, "edgeitems": 3, "linewidth": 80, "sci_mode": None},
    ),
}


def _read_hooks(module: Any) -> Iterator[Stays]:
    kept = (
        name for name in vars(module) if name.startswith("_global_") and name.endswith("_hooks")
    )
    if any(vars(module)[name] for name in kept):  # private
        yield Stays("hooks of all modules of torch (register_module_forward_hook and others)")


def _apply_nothing(module: Any, key: str, value: Any) -> Undo:
    return lambda: None


PROVIDERS = {
    "torch": table("torch", _TORCH),
    "torch.nn.modules.module": Provider(_read_hooks, _apply_nothing),
}
