"""Random results, the same in every process for the same seed; imported by the ranks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from hydrogen_magic.serialization.tolerant_unpickling import MissingObject

__all__ = ["Point", "build", "build_large", "has_unpicklable", "is_large", "same"]

_DEPTH = 3
_SIZES = (0, 1, 7, 600, 5000, 300_000)
_DTYPES = ("u1", "i8", "f4", "f8", "c16", "?", "M8[s]")


class Point:
    """An object with state and a slot of another object."""

    def __init__(self, x: Any, inner: Any) -> None:
        self.x, self.inner = x, inner


class _Builder:
    def __init__(self, seed: int, has_group: bool, bad: bool) -> None:
        self._random = random.Random(seed)
        self._has_group = has_group
        self._bad = bad
        self._shared: list[Any] = []

    def build(self, depth: int = 0) -> Any:
        made = self._pick(depth)(depth)
        self._shared.append(made)
        return made

    def _pick(self, depth: int) -> Callable[[int], Any]:
        leaves = [self._scalar, self._array, self._tensor, self._view, self._again, self._sharded]
        inner = [self._list, self._dict, self._point, self._module]
        return self._random.choice(leaves if depth >= _DEPTH else leaves + 2 * inner)

    def _scalar(self, depth: int) -> Any:
        values = [
            None,
            True,
            3,
            -(2**80),
            0.5,
            "text",
            "ä\ud800",
            b"bytes",
            1j,
            (1, 2),
            {3},
            range(4),
        ]
        return self._random.choice(values)

    def _array(self, depth: int) -> Any:
        size, kind = self._random.choice(_SIZES), self._random.choice(_DTYPES)
        return (np.arange(size) % 2).astype(kind) if kind == "?" else np.arange(size).astype(kind)

    def _tensor(self, depth: int) -> Any:
        size = self._random.choice(_SIZES)
        kind = self._random.choice([torch.float32, torch.int16, torch.bfloat16, torch.bool])
        tensor = (torch.arange(size) % 2).to(kind)
        is_trained = kind == torch.float32 and self._random.random() < 0.5
        return torch.nn.Parameter(tensor) if is_trained else tensor

    def _view(self, depth: int) -> Any:
        base = torch.arange(6000.0).reshape(60, 100)
        return [base, base[3:7], base.t(), base[::2, 5]]

    def _again(self, depth: int) -> Any:
        return self._random.choice(self._shared) if self._shared else None

    def _sharded(self, depth: int) -> Any:
        full = torch.arange(self._random.choice((2, 12, 4096)) * 2.0).reshape(-1, 2)
        return self._distributed(full)

    def _distributed(self, full: torch.Tensor) -> torch.Tensor:
        dimension = self._random.randrange(2)
        if not self._has_group:
            return full
        from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        return distribute_tensor(full, mesh, [Shard(dimension)])

    def _list(self, depth: int) -> Any:
        made = [self.build(depth + 1) for _ in range(self._random.randrange(4))]
        if self._bad and self._random.random() < 0.5:
            made.append(self._unpicklable())
        return self._random.choice([list, tuple])(made)

    def _dict(self, depth: int) -> Any:
        return {f"key{n}": self.build(depth + 1) for n in range(self._random.randrange(4))}

    def _point(self, depth: int) -> Any:
        return Point(self.build(depth + 1), self._unpicklable() if self._bad else [])

    def _unpicklable(self) -> Any:
        return self._random.choice([threading.Lock, lambda: (n for n in ()), threading.local])()

    def _module(self, depth: int) -> Any:
        torch.manual_seed(self._random.randrange(100))
        linear = torch.nn.Linear(3, 4)
        if self._random.random() < 0.5:
            linear.weight = torch.nn.Parameter(self._distributed(linear.weight.detach()))
        model = torch.nn.Sequential(linear, torch.nn.BatchNorm1d(4))
        if self._random.random() < 0.5:
            return model
        # One tensor at a time: sharded and ordinary ones cannot be in one list.
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return self._random.choice([[model, optimizer], optimizer, model.state_dict()])


def build(seed: int) -> Any:
    """Return object number ``seed``: with sharded tensors on ranks that have a process group."""
    bad = random.Random(-seed).random() < 0.2
    return _Builder(seed, torch.distributed.is_initialized(), bad).build()


def has_unpicklable(obj: Any) -> bool:
    """Whether some part of ``obj`` cannot be pickled."""
    return _any(obj, lambda one: type(one).__name__ in ("lock", "generator", "_local", "LockType"))


_PIECE = 64 << 20


def build_large(n_bytes: int) -> Any:
    """Return an array of random bytes."""
    array = np.empty(n_bytes, np.uint8)
    for start, piece in _pieces(n_bytes):
        array[start : start + len(piece)] = piece
    return array


def is_large(array: Any, n_bytes: int) -> bool:
    """Whether this is the array of :func:`build_large`, of which there is no second copy meanwhile."""
    return (
        array.dtype == np.uint8
        and array.shape == (n_bytes,)
        and all(
            np.array_equal(array[start : start + len(piece)], piece)
            for start, piece in _pieces(n_bytes)
        )
    )


def _pieces(n_bytes: int) -> Iterator[tuple[int, Any]]:
    generator = np.random.default_rng(n_bytes)
    for start in range(0, n_bytes, _PIECE):
        yield start, generator.integers(0, 256, min(_PIECE, n_bytes - start), np.uint8)


def has_lost(obj: Any) -> bool:
    """Whether something stands for a part of ``obj`` that could not be sent."""
    return _any(obj, lambda one: isinstance(one, MissingObject))


def _any(obj: Any, holds: Callable[[Any], bool]) -> bool:
    return holds(obj) or any(_any(one, holds) for one in _parts(obj))


def _parts(obj: Any) -> list[Any]:
    if isinstance(obj, Point):
        return [obj.x, obj.inner]
    if isinstance(obj, dict):
        return list(obj.values())
    return list(obj) if type(obj) in (list, tuple) else []


def same(a: Any, b: Any) -> bool:
    """Whether two objects are equal, with types, dtypes, what they refer to twice, and the memory that their
    tensors share.
    """
    return _Comparison().are_same(a, b)


class _Pairs:
    """Pairs of objects, none of which has two partners."""

    def __init__(self) -> None:
        self._partners: tuple[dict[int, int], dict[int, int]] = ({}, {})

    def match(self, a: int, b: int) -> bool:
        """Whether the objects with these addresses can be partners; they are then."""
        there, back = self._partners
        return there.setdefault(a, b) == b and back.setdefault(b, a) == a

    def are_known(self, a: int, b: int) -> bool:
        return self._partners[0].get(a) == b


_WITHOUT_IDENTITY = (type(None), bool, int, float, complex, str, bytes, range, torch.dtype)
"""Pickle may make several of one, and Python one of several."""


class _Comparison:
    """Compares two objects and all that they refer to."""

    def __init__(self) -> None:
        self._objects = _Pairs()
        self._storages = _Pairs()
        self._kept: list[Any] = []
        """Else another object might get the address of one that is known."""

    def are_same(self, a: Any, b: Any) -> bool:
        if type(a) is not type(b):
            return False
        if isinstance(a, _WITHOUT_IDENTITY) or (isinstance(a, tuple) and not a):
            return bool(a == b)
        if self._objects.are_known(id(a), id(b)):
            return True
        self._kept += (a, b)
        return self._objects.match(id(a), id(b)) and self._are_equal(a, b)

    def _are_equal(self, a: Any, b: Any) -> bool:
        if isinstance(a, torch.nn.Module):
            return self.are_same(_state_of(a), _state_of(b))
        if isinstance(a, torch.optim.Optimizer):
            states = [[one.param_groups, list(one.state.items())] for one in (a, b)]
            return self.are_same(*states)
        if isinstance(a, torch.Tensor):
            return self._are_same_tensors(a, b)
        if isinstance(a, np.ndarray):
            return a.dtype == b.dtype and np.array_equal(a, b)
        if isinstance(a, dict) and list(a) != list(b):
            return False
        if isinstance(a, (dict, list, tuple, Point)):
            parts = zip(_parts(a), _parts(b), strict=False)
            return len(_parts(a)) == len(_parts(b)) and all(self.are_same(x, y) for x, y in parts)
        return bool(a == b)

    def _are_same_tensors(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        if (a.dtype, a.stride(), a.storage_offset()) != (b.dtype, b.stride(), b.storage_offset()):
            return False
        storages = [tensor.untyped_storage()._cdata for tensor in (a, b)]
        return self._storages.match(*storages) and torch.equal(a, b)


def _state_of(module: torch.nn.Module) -> list[Any]:
    tensors = [module.named_parameters(remove_duplicate=False), module.named_buffers()]
    return [dict(named) for named in tensors]
