"""A notebook with JAX, as a program: ``python -m tests.jax_notebook`` prints what it found as JSON.

A process of its own: JAX keeps its threads for ever.
"""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import hydrogen_magic as hm
from hydrogen_magic.capture import capture_call
from hydrogen_magic.errors import CaptureError
from hydrogen_magic.serialization.library_objects.jax_arrays import restore_jax_array
from hydrogen_magic.serialization.pickler import Pickler
from hydrogen_magic.serialization.pickling_errors import RefusedError
from hydrogen_magic.serialization.result_stream import Packer
from tests import jax_ranks

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_threefry_partitionable", False)
jax.config.update("jax_random_seed_offset", 7)
DRAWN = np.asarray(jax.random.uniform(jax.random.PRNGKey(0), (3,)))
N_STEPS = 5
X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = X @ np.array([1.0, -2.0, 0.5], np.float32)
PARAMS = {"w": jnp.zeros(3), "b": jnp.zeros(()), "half": jnp.ones(2000, jnp.bfloat16)}
KEY = jax.random.key(0)
Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Line:
    slope: Any
    name: str = dataclasses.field(default="", metadata={"static": True})


class Wide(jax_ranks.Node):
    width: Any


@jax.tree_util.register_pytree_node_class
class Pair:
    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right

    def tree_flatten(self) -> Any:
        return (self.left, self.right), None

    @classmethod
    def tree_unflatten(cls, _: None, parts: Any) -> Pair:
        return cls(*parts)


@jax.tree_util.register_pytree_with_keys_class
class Named(Pair):
    def tree_flatten_with_keys(self) -> Any:
        left, right = map(jax.tree_util.GetAttrKey, ("left", "right"))
        return ((left, self.left), (right, self.right)), None


class Scale:
    def __init__(self, factor: Any) -> None:
        self.factor = factor


jax.tree_util.register_pytree_node(
    Scale, lambda x: ((x.factor,), None), lambda _, parts: Scale(*parts)
)
LINE = Line(jnp.ones(2), "first")
NODES = [LINE, Wide(jnp.ones(2)), Named(1, 2), Pair(1, {"of": 2}), Scale(3)]


@jax.jit
def halved(x: Any) -> Any:
    """Half of x."""
    return x / 2


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return x


clipped.defvjp(lambda x: (x, None), lambda _, gradient: (jnp.clip(gradient, -1, 1),))


def loss_of(params: Any, x: Any, y: Any, axis: str | None = None) -> Any:
    loss = jnp.mean((x @ params["w"] + params["b"] - y) ** 2)
    return loss if axis is None else jax.lax.pmean(loss, axis)


def step(params: Any, x: Any, y: Any, axis: str | None = None) -> Any:
    loss, grads = jax.value_and_grad(loss_of)(params, x, y, axis)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def train(step: Any, params: Any, x: Any, y: Any) -> Any:
    losses = []
    for _ in range(N_STEPS):
        params, loss = step(params, x, y)
        losses.append(loss)
    return params, losses


def train_on_ranks() -> Any:
    """Train data-parallel; every rank has half of the rows."""
    arrived = [type(leaf).__name__ for leaf in jax.tree.leaves(PARAMS)]
    is_fixed = not any(leaf.flags.writeable for leaf in PARAMS.values())
    jax.distributed.initialize()
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    mine = slice(jax.process_index(), None, jax.process_count())
    sharded = partial(jax.make_array_from_process_local_data, NamedSharding(mesh, P("data")))
    x, y = sharded(X[mine]), sharded(Y[mine])
    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": (P(), P())}
    parallel = jax.jit(jax.shard_map(partial(step, axis="data"), mesh=mesh, **specs))
    trained = train(parallel, PARAMS, x, y)
    assert isinstance(x, Array), "the class is that of the library"
    assert (halved.__name__, halved.__doc__, halved.__wrapped__(3)) == ("halved", "Half of x.", 1.5)
    assert halved(3.0) == 1.5 and halved.lower(3.0).compile()(3.0) == 1.5
    assert jax.grad(lambda x: 5 * clipped(x))(2.0) == 1
    assert np.array_equal(DRAWN, jax.random.uniform(jax.random.PRNGKey(0), (3,)))
    nodes = jax.jit(lambda nodes: jax.tree.map(lambda x: 2 * x, nodes))(NODES)
    twice, wide, named, pair, scale = nodes
    assert isinstance(twice, Line) and (twice.slope.tolist(), twice.name) == ([2, 2], "first")
    assert isinstance(named, Named) and (named.left, named.right) == (2, 4)
    assert isinstance(pair, Pair) and (wide.width.tolist(), scale.factor) == ([2, 2], 6)
    keys = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(NODES)]
    assert keys[:4] == ["[0].slope", "[1].width", "[2].left", "[2].right"]
    assert keys[4] == "[3][<flat index 0>]"
    try:
        Packer(Pickler).pack("", {"x": x})
    except RefusedError as error:
        return arrived, is_fixed, jax.device_count(), (*trained, PARAMS), error.remedy
    raise AssertionError("an array that is sharded over the ranks was pickled")


def refusal_of_a_key() -> str:
    try:
        hm.launch(lambda: KEY, np=1, rendezvous="jax")
    except CaptureError as error:
        return str(error)
    raise AssertionError("a key of random numbers was sent")


def notes_on_arrays() -> list[int]:
    """Return how many notes calls get that use the arrays as they arrive, convert them, or use none."""
    calls = (lambda: PARAMS["w"] / 2, lambda: jnp.asarray(PARAMS["w"]) / 2, lambda: X / 2)
    hints = [capture_call(call, (), {}).hints for call in calls]
    return [sum("read-only NumPy arrays on the ranks" in text for text in each) for each in hints]


def stays_numpy(option: str, value: Any) -> bool:
    """Whether an array of float64 comes back as NumPy's with an option of JAX, and as JAX's without it."""
    numbers, before = np.ones(2), getattr(jax.config, option)
    is_jax = isinstance(restore_jax_array(numbers), jax.Array)
    jax.config.update(option, value)
    try:
        return is_jax and restore_jax_array(numbers) is numbers
    finally:
        jax.config.update(option, before)


def main() -> None:
    expected_params, expected = train(jax.jit(step), PARAMS, X, Y)
    result = hm.run(train_on_ranks, np=2, rendezvous="jax", quiet=True)
    arrived, is_fixed, n_devices, (params, losses, unchanged), refusal = result
    found = {
        "arrived": arrived,
        "is_fixed": is_fixed,
        "n_devices": n_devices,
        "is_close": bool(np.allclose(losses, expected, rtol=1e-5)),
        "is_learning": bool(losses[-1] < losses[0]),
        "are_params_close": all(
            np.allclose(a, b, rtol=1e-5) and a.dtype == b.dtype
            for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected_params), strict=True)
        ),
        "are_jax": all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((params, losses))),
        "are_unchanged": all(
            isinstance(leaf, jax.Array) and bool((leaf == PARAMS[name]).all())
            for name, leaf in unchanged.items()
        ),
        "is_kept_from_a_gpu": stays_numpy("jax_platforms", "cuda,cpu"),
        "is_precise": stays_numpy("jax_enable_x64", False),
        "of_sharded": refusal,
        "of_key": refusal_of_a_key(),
        "n_notes": notes_on_arrays(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
