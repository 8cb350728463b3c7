"""Settings of torch."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from hydrogen_magic.core.rank_gpu import gpu_of_rank
from hydrogen_magic.node.worker.settings.provider import Value, attribute, functions, table


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
    "cudnn.deterministic": attribute(_cudnn, "deterministic", False),
    "cudnn.benchmark": attribute(_cudnn, "benchmark", False),
    "cudnn.enabled": attribute(_cudnn, "enabled", True),
    "print options": Value(
        lambda torch: dict(vars(torch._tensor_str.PRINT_OPTS)),
        lambda torch, value: torch.set_printoptions(**value),
        {"precision": 4, "threshold": 1000, "edgeitems": 3, "linewidth": 80, "sci_mode": None},
    ),
}


PROVIDERS = {"torch": table("torch", _TORCH)}
