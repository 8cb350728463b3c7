"""What tests of ``hydrogen_magic.compat.keras`` run on ranks: a plain local module that travels."""

from __future__ import annotations

import os
import pickle
import tempfile
from typing import Any

BATCH, EPOCHS, RATE, MOMENTUM = 8, 3, 0.05, 0.9


def train(x: Any, y: Any, backend: str = "torch", **schedule: Any) -> tuple[Any, Any, Any, Any]:
    """Train on this rank's rows from weights of its own; return those, the result, and the history.

    The text is that of Horovod's example. ``schedule``: arguments of the warmup, none without it.
    """
    os.environ["KERAS_BACKEND"] = backend
    import keras

    import hydrogen_magic.compat.keras as hvd

    hvd.init()
    if backend == "torch":  # of JAX, init() seeds all ranks alike
        keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    begin = model.get_weights()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(RATE, momentum=MOMENTUM))
    model.compile(optimizer, "mse")
    callbacks: list[Any] = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    if schedule:
        callbacks.append(hvd.callbacks.LearningRateWarmupCallback(RATE, **schedule))
    mine = slice(hvd.rank(), None, hvd.size())
    options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    history = model.fit(x[mine], y[mine], callbacks=callbacks, **options)
    if hvd.rank() == 0:  # alone, as in Horovod's example
        with tempfile.TemporaryDirectory() as folder:
            model.save(f"{folder}/model.keras")
            pickle.dumps(model)
    state = [variable.numpy() for variable in optimizer.variables]
    return begin, model.get_weights(), state, history.history


def train_after_joining(x: Any, y: Any, backend: str, **schedule: Any) -> tuple[Any, Any, Any, Any]:
    """Join by JAX itself, as an earlier cell of a session may have done, then train."""
    import jax

    jax.distributed.initialize()
    return train(x, y, backend, **schedule)
