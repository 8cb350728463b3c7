"""A notebook with Flax, Optax and Orbax: ``python -m tests.flax_notebook FOLDER`` prints what it found.

A process of its own: JAX keeps its threads for ever.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import hydrogen_magic as hm

N_STEPS = 10
X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = np.sin(X.sum(1, keepdims=True))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.Dense(1)(nn.tanh(nn.Dense(16)(x)))


class Scaled(TrainState):
    scale: Any


def step(state: Scaled, x: Any, y: Any, axis: str | None = None) -> Any:
    def loss_of(params: Any) -> Any:
        loss = jnp.mean((state.scale * state.apply_fn(params, x) - y) ** 2)
        return loss if axis is None else jax.lax.pmean(loss, axis)

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


def train(step: Any, state: Scaled, x: Any, y: Any) -> Any:
    losses = []
    for _ in range(N_STEPS):
        state, loss = step(state, x, y)
        losses.append(loss)
    return state, losses


NET = Net()
STATE, _ = train(
    jax.jit(step),
    Scaled.create(
        apply_fn=NET.apply,
        params=NET.init(jax.random.key(0), X),
        tx=optax.adamw(1e-2),
        scale=jnp.full((), 1.25),
    ),
    X,
    Y,
)
"""Adam's moments are not zero any more."""


def train_on_ranks(folder: str) -> Any:
    """Go on with the notebook's state, data-parallel; every rank has half of the rows.

    A rank fails after the first half; the next attempt continues from Orbax's checkpoint.
    """
    arrived = sorted({type(leaf).__name__ for leaf in jax.tree.leaves(STATE)})
    jax.distributed.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    mine = slice(jax.process_index(), None, jax.process_count())
    sharded = partial(jax.make_array_from_process_local_data, NamedSharding(mesh, P("data")))
    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": (P(), P())}
    parallel = jax.jit(jax.shard_map(partial(step, axis="data"), mesh=mesh, **specs))
    state, x, y = (
        jax.device_put(STATE, NamedSharding(mesh, P())),
        sharded(X[mine]),
        sharded(Y[mine]),
    )
    with ocp.CheckpointManager(folder) as manager:
        was_saved = manager.latest_step() is not None
        if not was_saved:
            manager.save(0, args=ocp.args.StandardSave(train(parallel, state, x, y)[0]))
            manager.wait_until_finished()
            if jax.process_index() == 1:
                raise ConnectionError("the machine is lost")
        state = manager.restore(0, args=ocp.args.StandardRestore(state))
    return arrived, jax.device_count(), was_saved, train(parallel, state, x, y), names_in(STATE)


def names_in(state: Scaled) -> Any:
    """Return the names of the parts of a state, in paths as Orbax writes them, and of Flax itself."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
    return paths, sorted(flax.serialization.to_state_dict(state))


def main() -> None:
    halfway, _ = train(jax.jit(step), STATE, X, Y)
    expected, expected_losses = train(jax.jit(step), halfway, X, Y)
    result = hm.run(train_on_ranks, sys.argv[1], np=2, rendezvous="jax", retries=1, quiet=True)
    arrived, n_devices, was_saved, (state, losses), names = result
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True)
    found = {
        "arrived": arrived,
        "n_devices": n_devices,
        "was_saved": was_saved,
        "type": type(state).__name__,
        "are_names_kept": names == names_in(STATE),
        "is_close": bool(np.allclose(losses, expected_losses, rtol=1e-4)),
        "is_learning": bool(losses[-1] < losses[0]),
        "are_leaves_close": all(np.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in pairs),
        "goes_on": bool(jax.jit(step)(state, X, Y)[1] < losses[-1]),
        "n_steps": int(state.step),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
