"""What tests run on ranks with JAX. Imported only in functions: JAX reads variables of its rank."""

from __future__ import annotations

import dataclasses
import os
import socket
from typing import Any


class Node:
    """Makes its subclasses dataclasses and pytree nodes, as ``flax.struct.PyTreeNode`` does."""

    def __init_subclass__(cls, **options: Any) -> None:
        import jax

        jax.tree_util.register_dataclass(dataclasses.dataclass(cls))


def join(timeout_s: float) -> int:
    """Join the other ranks; return this one's number."""
    import jax

    limit_s = max(1, int(timeout_s))
    jax.distributed.initialize(heartbeat_timeout_seconds=limit_s, shutdown_timeout_seconds=limit_s)
    return int(jax.process_index())


def join_without_first() -> None:
    """All ranks but the first join."""
    if os.environ["RANK"] != "0":
        join(600.0)


def numbers(rank: int) -> list[int]:
    """Return the numbers that all ranks pass, in rank order."""
    import numpy as np
    from jax.experimental import multihost_utils

    found: list[int] = multihost_utils.process_allgather(np.array(rank)).tolist()
    return found


def hosts() -> list[str]:
    """Return the host of every rank, in rank order, as collectives give them."""
    import numpy as np
    from jax.experimental import multihost_utils

    join(60.0)
    name = np.frombuffer(socket.gethostname().encode().ljust(64), np.uint8)
    found = multihost_utils.process_allgather(name)
    return [row.tobytes().decode().strip() for row in found]


def doubles() -> bool:
    """Whether JAX computes with them, as its variable said when it was imported."""
    import jax

    return bool(jax.config.jax_enable_x64)


def all_reduce() -> None:
    """Wait for all ranks in one collective."""
    numbers(0)


def compute() -> int:
    """Compute without joining the other ranks; return how many processes JAX knows."""
    import jax

    jax.numpy.ones(3).sum()
    return int(jax.process_count())
