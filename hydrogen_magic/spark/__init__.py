"""Spark ML by gangs of ranks: :class:`TorchEstimator` trains a torch model, :class:`TorchModel` predicts.

Names are loaded on first use, so that pyspark is needed only then.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydrogen_magic.spark.estimator import TorchEstimator
    from hydrogen_magic.spark.model import TorchModel

__all__ = ["TorchEstimator", "TorchModel"]

_HOMES = {
    "TorchEstimator": "hydrogen_magic.spark.estimator",
    "TorchModel": "hydrogen_magic.spark.model",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("pyspark") is None:
        raise ImportError(
            f"{__name__}.{name} needs pyspark, which is not installed: "
            "pip install 'hydrogen_magic[spark]'"
        )
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
