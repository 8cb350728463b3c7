"""Classes that notebooks know from elsewhere, on gangs: change the import, keep the notebook.

A module may import them at its top and still travel to ranks, which lack the notebook's side: what
belongs to that side is imported on use.
"""

from __future__ import annotations

from hydrogen_magic.compat.driver_log import LogCallback, log_to_driver
from hydrogen_magic.compat.horovod_runner import HorovodRunner
from hydrogen_magic.compat.torch_distributor import TorchDistributor
from hydrogen_magic.node.worker.sparkdl import install as install_sparkdl

__all__ = ["HorovodRunner", "LogCallback", "TorchDistributor", "install_sparkdl", "log_to_driver"]
