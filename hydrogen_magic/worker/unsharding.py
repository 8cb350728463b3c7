"""Sharded tensors in results become full ones before they leave the ranks.

A ``DTensor`` holds the part of one rank. Pickled as it is, it would come back with its full shape and a
part of its values. Gathering is a collective operation, so the ranks first compare what they are about
to gather: a rank that lacks a variable must not leave the others waiting.
"""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hydrogen_magic.result_stream import label

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
    """Results that cannot be gathered -> why, and what to write instead."""


def unshard(
    results: Mapping[str, Any],
    make_pickler: Callable[..., Any],
    report: Callable[[str], None] = lambda text: None,
) -> Unsharded:
    """Gather every DTensor in ``results``; all ranks of their device meshes call this function.

    Waits for the slowest of them. ``make_pickler`` makes the pickler that will pickle the results: it
    finds the tensors wherever they are. ``report``: called with a line about the progress.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return Unsharded()
    found = {name: _find(obj, make_pickler) for name, obj in results.items()}
    plan = {name: [_describe(tensor) for tensor in tensors] for name, tensors in found.items()}
    peers = _peers(tensor for tensors in found.values() for tensor in tensors)
    names = [name for name, tensors in found.items() if tensors]
    store = _store()
    if store is None:
        why = "its process group has been destroyed"
        return Unsharded({}, {name: _refusal(name, why) for name in names})
    refused = _compare(plan, names, store, peers, report)
    tensors: dict[int, Any] = {}
    for name in names:
        if name not in refused:
            report(f"gathering {label(name)}")
            why = _gather(found[name], tensors)
            if why:
                refused[name] = _refusal(name, why)
    return Unsharded(tensors, refused)


def _gather(sharded: list[Any], tensors: dict[int, Any]) -> str:
    """Add the full tensors to ``tensors``; return why that failed, or nothing."""
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


def _find(obj: Any, make_pickler: Callable[..., Any]) -> list[Any]:
    """Return the DTensors in ``obj``, each once, in the order in which pickle meets them."""
    from torch.distributed.tensor import DTensor

    found: dict[int, Any] = {}

    def note(tensor: Any) -> Any:
        found.setdefault(id(tensor), tensor)
        return int, ()

    pickler = make_pickler(_Nowhere(), None, lambda buffer: False)
    pickler.handlers[DTensor] = note
    try:
        pickler.dump(obj)
    except Exception:  # this result is reported when it is packed
        return []
    return list(found.values())


class _Nowhere(io.RawIOBase):
    """A file that forgets what is written to it."""

    def write(self, data: Any) -> int:
        return len(data)


def _describe(tensor: Any) -> list[Any]:
    mesh = tensor.device_mesh.mesh
    return [list(tensor.shape), str(tensor.dtype), str(tensor.placements), mesh.tolist()]


def _peers(tensors: Any) -> set[int]:
    """Return the global ranks that hold parts of ``tensors``."""
    return {rank for tensor in tensors for rank in tensor.device_mesh.mesh.flatten().tolist()}


# ── agreeing ─────────────────────────────────────────────────────────────────────────────────────


def _store() -> Any:
    """Return the store of the default process group, None when there is no group."""
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def _compare(
    plan: Mapping[str, list[Any]], names: list[str], store: Any, peers: set[int],
    report: Callable[[str], None],
) -> dict[str, str]:  # fmt: skip
    """Return the results that some rank would gather differently, and why."""
    import torch.distributed as dist

    store.set(_key(dist.get_rank()), json.dumps(plan))
    refused: dict[str, str] = {}
    deadline = time.monotonic() + _COMPARE_S
    for peer in sorted(peers - {dist.get_rank()}):
        theirs = _plan_of(peer, store, deadline, report)
        for name in names:
            if theirs is None:
                why = f"rank {peer} did not finish the cell within {_COMPARE_S:.0f} s"
                refused.setdefault(name, _refusal(name, why))
            elif theirs.get(name) != plan[name]:
                held = (
                    "holds a different tensor there" if theirs.get(name) else "has no such tensor"
                )
                refused.setdefault(name, _refusal(name, f"rank {peer} {held}"))
    return refused


def _plan_of(
    peer: int, store: Any, deadline: float, report: Callable[[str], None]
) -> dict[str, list[Any]] | None:
    while not store.check([_key(peer)]):
        if time.monotonic() > deadline:
            return None
        report(f"waiting for rank {peer} to gather sharded tensors")
        time.sleep(_POLL_S)
    plan: dict[str, list[Any]] = json.loads(store.get(_key(peer)))
    return plan


def _key(rank: int) -> str:
    return f"hydrogen_magic/sharded_results/{rank}"


def _full(tensor: Any) -> Any:
    import torch

    full = tensor.detach().full_tensor()
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(full, tensor.requires_grad) if is_parameter else full
