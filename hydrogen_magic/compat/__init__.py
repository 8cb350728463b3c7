"""Drop-in classes for existing notebooks, based on gangs: only the import changes.

A module may import them at its top level and still be sent to ranks, which lack the notebook's side: those
parts are imported on use.
"""

from __future__ import annotations

from hydrogen_magic.compat.deepspeed_distributor import DeepspeedTorchDistributor
from hydrogen_magic.compat.driver_log import LogCallback, log_to_driver
from hydrogen_magic.compat.horovod_runner import HorovodRunner
from hydrogen_magic.compat.mirrored_strategy_runner import MirroredStrategyRunner
from hydrogen_magic.compat.torch_distributor import TorchDistributor
from hydrogen_magic.node.worker.sparkdl import install as install_sparkdl

__all__ = [
    "DeepspeedTorchDistributor",
    "HorovodRunner",
    "LogCallback",
    "MirroredStrategyRunner",
    "TorchDistributor",
    "install_sparkdl",
    "log_to_driver",
]
