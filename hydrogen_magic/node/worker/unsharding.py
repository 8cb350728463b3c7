"""Gathers sharded tensors in results before they leave the ranks.

A ``DTensor`` holds the shard of one rank. Pickled unchanged, it would come back with its full shape and
only a part of its values. Gathering is a collective operation, so the ranks first compare the tensors they
are about to gather: a rank that lacks a variable must not leave the others waiting.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hydrogen_magic.serialization.pickling_errors import walk
from hydrogen_magic.serialization.result_stream import label

__all__ = ["Unsharded", "unshard"]

_COMPARE_S = 600.0
"""How long the other ranks may take to finish the cell, in seconds."""
_POLL_S = 0.02
_REMEDY = "call `.full_tensor()` on all ranks inside the cell and return its result"


@dataclass(frozen=True)
class Unsharded:
    """The sharded tensors of the results."""

    tensors: Mapping[int, Any] = field(default_factory=dict)
    """``id`` of a DTensor -> the full tensor or parameter."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Results that cannot be gathered -> the reason, and an alternative."""


def unshard(
    results: Mapping[str, Any],
    make_pickler: Callable[..., Any],
    report: Callable[[str], None] = lambda text: None,
) -> Unsharded:
    """Gather every DTensor in ``results``; all ranks of their device meshes call this function.

    Waits for the slowest of them. ``make_pickler`` makes the pickler for the results, which finds all
    tensors in them. ``report``: called with a line about the progress.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return Unsharded()
    found = {name: _find(name, obj, make_pickler) for name, obj in results.items()}
    plan = {name: [_describe(*one) for one in paths.items()] for name, paths in found.items()}
    names = [name for name, paths in found.items() if paths]
    store = _store()
    if store is None:
        why = "its process group has been destroyed"
        return Unsharded({}, {name: _refusal(name, why) for name in names})
    refused = {name: _refusal(name, why) for name in names if (why := _why_not(found[name]))}
    try:
        store.set(_key(_rank()), json.dumps(plan))
        differing = _Comparison(store, report).refusals(plan, found, set(names) - refused.keys())
    except Exception as error:  # stores raise errors of many types
        return Unsharded({}, {name: _refusal(name, str(error)) for name in names})
    refused.update((name, _refusal(name, why)) for name, why in differing.items())
    tensors: dict[int, Any] = {}
    for name in names:
        if name not in refused:
            report(f"gathering {label(name)}")
            why = _gather(list(found[name].values()), tensors)
            if why:
                refused[name] = _refusal(name, why)
    return Unsharded(tensors, refused)


def _gather(sharded: list[Any], tensors: dict[int, Any]) -> str:
    """Add the full tensors to ``tensors``; return why that failed, or an empty text."""
    try:
        for tensor in sharded:
            if id(tensor) not in tensors:
                tensors[id(tensor)] = _full(tensor)
    except Exception as error:  # backends raise errors of many types
        return f"{type(error).__name__}: {error}"
    return ""


def _refusal(name: str, why: str) -> str:
    return (
        f"{label(name)} contains sharded tensors (DTensor) and cannot be gathered: {why}; {_REMEDY}"
    )


# ── finding ──────────────────────────────────────────────────────────────────────────────────────


def _find(name: str, obj: Any, make_pickler: Callable[..., Any]) -> dict[str, Any]:
    """Return the DTensors in ``obj`` by the expression of their path, sorted by it.

    The order of pickling may differ between ranks: that of a set depends on addresses.
    """
    from torch.distributed.tensor import DTensor

    found: dict[int, Any] = {}

    def note(tensor: Any) -> Any:
        found.setdefault(id(tensor), tensor)
        return int, ()

    pickler = make_pickler(_NullFile(), None, lambda buffer: False)
    pickler.handlers[DTensor] = note
    try:
        pickler.dump(obj)
        return _by_path(name or "value", obj, found)
    except BaseException:  # this result is reported when it is packed
        return {}


def _by_path(name: str, obj: Any, found: dict[int, Any]) -> dict[str, Any]:
    paths: dict[int, str] = {}
    for path, each in walk(name, obj):
        if id(each) in found:
            paths.setdefault(id(each), path)
    labelled: dict[str, Any] = {}
    for place, (key, tensor) in enumerate(found.items()):
        path = paths.get(key, "")
        labelled[path if path and path not in labelled else f"{name}{{{place}}}"] = tensor
    return {path: labelled[path] for path in sorted(labelled)}


class _NullFile(io.RawIOBase):
    """A file that discards its data."""

    def write(self, data: Any) -> int:
        return len(data)


def _describe(path: str, tensor: Any) -> list[Any]:
    mesh = tensor.device_mesh.mesh
    return [path, list(tensor.shape), str(tensor.dtype), str(tensor.placements), mesh.tolist()]


def _why_not(found: Mapping[str, Any]) -> str:
    """Return why these tensors cannot be gathered here, or an empty text."""
    if any(tensor.device_mesh.get_coordinate() is None for tensor in found.values()):
        return "this rank is not part of their device mesh"
    if any("{" in path for path in found):
        return "they are in a set, or in an object that cannot be inspected"
    return ""


def _peers(found: Mapping[str, Any]) -> set[int]:
    """Return the other global ranks that hold parts of these tensors."""
    meshes = (tensor.device_mesh.mesh.flatten().tolist() for tensor in found.values())
    return {peer for mesh in meshes for peer in mesh} - {_rank()}


# ── agreeing ─────────────────────────────────────────────────────────────────────────────────────


def _rank() -> int:
    import torch.distributed as dist

    return int(dist.get_rank())


def _store() -> Any:
    """Return the store of the default process group, None when there is no group."""
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


class _Comparison:
    """The tensors that the other ranks are about to gather."""

    def __init__(self, store: Any, report: Callable[[str], None]) -> None:
        self._store = store
        self._report = report
        self._deadline = time.monotonic() + _COMPARE_S
        self._plans: dict[int, dict[str, list[Any]] | None] = {}

    def refusals(
        self, plan: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]], names: set[str]
    ) -> dict[str, str]:
        """Return the results that a rank of their mesh would gather differently, and why."""
        refused: dict[str, str] = {}
        for name in sorted(names):
            for peer in sorted(_peers(found[name])):
                theirs = self._plan_of(peer)
                if theirs is None:
                    refused[name] = f"rank {peer} did not finish the cell in {_COMPARE_S:.0f} s"
                elif theirs.get(name) != plan[name]:
                    held = (
                        "holds different tensors there"
                        if theirs.get(name)
                        else "has no such tensor"
                    )
                    refused[name] = f"rank {peer} {held}"
        return refused

    def _plan_of(self, peer: int) -> dict[str, list[Any]] | None:
        if peer not in self._plans:
            self._plans[peer] = self._wait_for(peer)
        return self._plans[peer]

    def _wait_for(self, peer: int) -> dict[str, list[Any]] | None:
        while not self._store.check([_key(peer)]):
            if time.monotonic() > self._deadline:
                return None
            self._report(f"waiting for rank {peer} to gather sharded tensors")
            time.sleep(_POLL_S)
        plan: dict[str, list[Any]] = json.loads(self._store.get(_key(peer)))
        return plan


def _key(rank: int) -> str:
    return f"hydrogen_magic/sharded_results/{rank}"


def _full(tensor: Any) -> Any:
    import torch

    full = tensor.detach().full_tensor()
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(full, tensor.requires_grad) if is_parameter else full
