"""TensorFlow on machines with ranks: the observers of its functions."""

from __future__ import annotations

CONFIG = "TF_CONFIG"
"""Variable with the addresses of all ranks, and which of them this one is."""
STRATEGY = "MultiWorkerMirroredStrategy"
"""The class in whose constructor ranks wait for all others at the start."""
COLLECTIVES = ("gather", "reduce", "run")
"""Methods of the strategy that wait for all ranks."""
