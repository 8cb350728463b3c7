"""Observers of TensorFlow: the GPU of this rank, and in which of its functions the rank waits for others.

Collectives inside of compiled functions are not observed: they run after the Python code that started them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hydrogen_magic.core.events import CollectiveWait
from hydrogen_magic.frameworks.tensorflow.node import COLLECTIVES, CONFIG, STRATEGY
from hydrogen_magic.node.worker.observe.collectives import tracked_collective
from hydrogen_magic.node.worker.reporting import reporter as _reporter
from hydrogen_magic.node.wrapping import wraps


def attach(module: ModuleType) -> None:
    """Have TensorFlow use this rank's own GPU alone, of those that are visible on its host."""
    if CONFIG not in os.environ:
        return
    config: Any = module.config
    gpus = config.list_physical_devices("GPU")
    if len(gpus) > 1:
        config.set_visible_devices(gpus[int(os.environ["LOCAL_RANK"]) % len(gpus)], "GPU")


def attach_to_strategy(module: ModuleType) -> None:
    """Wrap what waits for other ranks in ``MultiWorkerMirroredStrategy``."""
    extended: Any = module.CollectiveAllReduceExtended
    joining = _reported(extended._initialize_multi_worker)
    extended._initialize_multi_worker = tracked_collective(STRATEGY, joining, is_joining=True)
    strategy: Any = module.CollectiveAllReduceStrategy
    for name in COLLECTIVES:
        setattr(strategy, name, _eager_collective(name, getattr(strategy, name)))


def _reported(joining: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``joining``, which reports at once that this rank waits: TensorFlow holds the GIL meanwhile."""

    @wraps(joining)
    def call(*args: Any, **kwargs: Any) -> Any:
        _report_wait(STRATEGY)
        try:
            return joining(*args, **kwargs)
        finally:
            _report_wait("")

    return call


def _report_wait(name: str) -> None:
    """``name``: empty if the wait is over."""
    reporter = _reporter.current()
    entered = None if reporter is None else reporter.collectives.current
    if reporter is not None and entered is not None:
        start_s = entered.start_ns / 1e9
        reporter.post(
            CollectiveWait(reporter.now_s(), reporter.rank, name, entered.number, start_s)
        )


def _eager_collective(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``original``, noted as a collective unless it is only traced for a ``tf.function``."""
    tracked = tracked_collective(name, original)

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        import tensorflow as tf

        return (tracked if tf.executing_eagerly() else original)(*args, **kwargs)

    return call
