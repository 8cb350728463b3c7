"""What tests run on ranks with TensorFlow. Imported only in functions: it starts threads."""

from __future__ import annotations

import functools
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
