"""What tests run on ranks with TensorFlow. Imported only in functions: it starts threads."""

from __future__ import annotations

import functools
import os
from typing import Any


@functools.cache
def strategy() -> Any:
    """Return this rank's strategy, which it makes once."""
    import tensorflow as tf

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
    import tensorflow as tf

    return strategy().experimental_distribute_values_from_function(lambda _: tf.constant(value))


def gpus_of_rank() -> tuple[str, list[str], int]:
    """Where this rank is, the GPUs that are visible there, and which of them is its own."""
    visible = [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    return os.environ["GROUP_RANK"], visible, int(os.environ["LOCAL_RANK"])


def replicas(**options: Any) -> Any:
    """The strategy around this function, as plain code of TensorFlow sees it."""
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    return type(strategy).__name__, strategy.num_replicas_in_sync, options
