"""Keras on JAX: ``keras.distribution.DataParallel`` over the devices of all ranks.

A step is compiled for all ranks together: it has the batches of all ranks, and so its gradients and metrics
are of all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from hydrogen_magic.node.worker import api


class JaxExchange:
    """See :class:`hydrogen_magic.compat.keras.torch_exchange.TorchExchange`."""

    keeps_momentum_fixed = True

    def init(self) -> None:
        import jax
        import keras

        if api.world_size() == 1 or keras.distribution.distribution() is not None:
            return
        if jax.distributed.is_initialized():  # by the user, such as in an earlier cell of a session
            from keras.src.backend.jax.distribution_lib import initialize_rng

            initialize_rng()
        elif "JAX_COORDINATOR_ADDRESS" in os.environ:
            keras.distribution.initialize()
        else:
            raise RuntimeError("Keras uses JAX, but the ranks cannot join by it: use `--with jax`")
        _prepare_saving()
        # Each rank passes its own rows.
        parallel = keras.distribution.DataParallel(auto_shard_dataset=False)
        keras.distribution.set_distribution(parallel)

    def shutdown(self) -> None:
        import jax

        if jax.distributed.is_initialized():
            jax.distributed.shutdown()

    def average_gradients(self, gradients: Sequence[Any]) -> None:
        """They are those of all ranks already, if the ranks have joined. Raises RuntimeError if not."""
        import keras

        if api.world_size() > 1 and keras.distribution.distribution() is None:
            raise RuntimeError(
                "the ranks have not joined, so each would train a model of its own: call init() of "
                "hydrogen_magic.compat.keras before the model is created"
            )

    def average(self, values: Sequence[float]) -> Sequence[float]:
        """They are those of all ranks already."""
        return values

    def broadcast(self, variables: Sequence[Any], root_rank: int) -> None:
        from jax.experimental import multihost_utils

        if api.world_size() == 1:
            return
        own = [variable.value.addressable_data(0) for variable in variables]
        of_root = multihost_utils.broadcast_one_to_all(own, is_source=api.rank() == root_rank)
        for variable, value in zip(variables, of_root, strict=True):
            variable.assign(value)

    def before_change(self, model: Any) -> None:
        model.jax_state_sync()


def _prepare_saving() -> None:
    """Let one rank save or pickle a model alone.

    Keras makes an optimizer and a metric each time, to learn their attributes; under a distribution their
    variables are made by all ranks together. It looks up what it has learned under these names, but stores it
    under others (3.15).
    """
    try:
        from keras.src.backend.common import global_state
        from keras.src.saving.saving_lib import get_attr_skipset
    except ImportError:  # private to Keras
        return
    for kind in ("Metric", "Optimizer"):
        learned = get_attr_skipset(kind)
        global_state.set_global_attribute(f"saving_attr_skiplist_{kind}", learned)
