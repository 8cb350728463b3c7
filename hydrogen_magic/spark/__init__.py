"""Spark ML by gangs of ranks: :class:`TorchEstimator` trains a torch model, :class:`TorchModel` predicts."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("pyspark") is None:
    raise ImportError(
        "hydrogen_magic.spark needs pyspark, which is not installed: "
        "pip install 'hydrogen_magic[spark]'"
    )

from hydrogen_magic.spark.estimator import TorchEstimator
from hydrogen_magic.spark.model import TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
