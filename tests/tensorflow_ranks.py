"""What tests run on ranks with TensorFlow. Imported only in functions: it starts threads."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

_OPTIONAL = ("jax", "matplotlib", "scipy", "sklearn")


@functools.cache
def tensorflow() -> Any:
    """Import TensorFlow without libraries that it only uses where they are installed: half of its time."""
    hidden = [name for name in _OPTIONAL if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: an ImportError
    import tensorflow

    for name in hidden:
        del sys.modules[name]
    return tensorflow


@functools.cache
def strategy() -> Any:
    """Return this rank's strategy, which it makes once."""
    tf = tensorflow()
    return tf.distribute.MultiWorkerMirroredStrategy()


def join(timeout_s: float) -> int:
    """Join the other ranks; return this one's number."""
    return int(strategy().cluster_resolver.task_id)


def numbers(rank: int) -> list[int]:
    """Return the numbers that all ranks pass, in rank order."""
    found: list[int] = strategy().gather(_of_each_rank([rank]), axis=0).numpy().tolist()
    return found


def all_reduce() -> None:
    """Wait for all ranks in one collective."""
    strategy().reduce("SUM", _of_each_rank(1.0), axis=None)


def _of_each_rank(value: Any) -> Any:
    tf = tensorflow()
    return strategy().experimental_distribute_values_from_function(lambda _: tf.constant(value))


def gpus_of_rank() -> tuple[str, list[str], int]:
    """Where this rank is, the GPUs that are visible there, and which of them is its own."""
    visible = [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    return os.environ["GROUP_RANK"], visible, int(os.environ["LOCAL_RANK"])


def replicas(**options: Any) -> Any:
    """The strategy around this function, as plain code of TensorFlow sees it."""
    tf = tensorflow()
    strategy = tf.distribute.get_strategy()
    return type(strategy).__name__, strategy.num_replicas_in_sync, options


def readme(epochs: int) -> Any:
    """The example of the original's README, with small data; return losses, GPUs and ranks."""
    import numpy as np

    tf = tensorflow()
    images = np.random.default_rng(0).random((64, 8, 8, 1)).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((images, np.arange(64) % 10))
    dataset = dataset.cache().shuffle(64).batch(16).repeat()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(2, 3, activation="relu", input_shape=(8, 8, 1)),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        loss=tf.keras.losses.sparse_categorical_crossentropy,
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.001),
        metrics=["accuracy"],
    )
    fitted = model.fit(x=dataset.with_options(options), epochs=epochs, steps_per_epoch=5, verbose=2)
    gpus = tf.config.experimental.list_physical_devices("GPU")
    return fitted.history["loss"], gpus, tf.distribute.get_strategy().num_replicas_in_sync


def custom() -> int:
    """The number of ranks in a strategy that the function itself makes."""
    tf = tensorflow()
    strategy = tf.distribute.experimental.MultiWorkerMirroredStrategy()
    with strategy.scope():
        return int(strategy.num_replicas_in_sync)
