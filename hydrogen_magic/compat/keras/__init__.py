"""Horovod's Keras module for Keras 3 on torch or JAX: ``import hydrogen_magic.compat.keras as hvd``.

Ranks exchange gradients by their gang's rendezvous: ``torch`` or ``horovod`` with torch, ``jax`` with JAX.
Names and behaviour are those of ``horovod.keras`` 0.28.1, which needs TensorFlow and Keras 2.
"""

from __future__ import annotations

from hydrogen_magic.compat.keras import callbacks
from hydrogen_magic.compat.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from hydrogen_magic.compat.keras.collectives import init, shutdown
from hydrogen_magic.compat.keras.optimizer import DistributedOptimizer
from hydrogen_magic.node.worker.api import local_rank, rank
from hydrogen_magic.node.worker.api import world_size as size

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "DistributedOptimizer",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "callbacks",
    "init",
    "local_rank",
    "rank",
    "shutdown",
    "size",
]
