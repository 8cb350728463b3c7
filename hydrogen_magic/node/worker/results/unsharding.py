"""Gathers sharded tensors in results before they leave the ranks.

A ``DTensor`` holds the shard of one rank. Pickled unchanged, it would come back with its full shape and
only a part of its values. Gathering is a collective operation, so the ranks first compare the tensors they
are about to gather: a rank that lacks a variable must not leave the others waiting.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from hydrogen_magic.core.messages import SessionCell
from hydrogen_magic.node.rendezvous import torch_address
from hydrogen_magic.node.worker import api
from hydrogen_magic.node.worker.reporting import reporter
from hydrogen_magic.node.worker.results.rank_parts import dtensor_class
from hydrogen_magic.serialization.object_paths import walk
from hydrogen_magic.serialization.pickling_errors import NullFile
from hydrogen_magic.serialization.result_stream import label

_COMPARE_S = 600.0
"""How long the other ranks may take to finish the cell, in seconds."""
_POLL_S = 0.02
_CONNECT_S = 10.0
"""How long the gang's store may take to accept a connection."""
_REMEDY = "call `.full_tensor()` on all ranks inside the cell and return its result"
_LEFT = "has destroyed its process group"


class Gathering:
    """Makes the sharded tensors (DTensor) of the results full ones."""

    def __init__(
        self,
        make_pickler: Callable[..., Any],
        report: Callable[[str], None],
        session: SessionCell | None,
    ) -> None:
        """``make_pickler`` makes the pickler that will pickle the results: it finds the tensors
        wherever they are. ``report``: called with a line about the progress. ``session``: as for
        :func:`~hydrogen_magic.node.worker.results.results.deliver`.
        """
        self.tensors: dict[int, Any] = {}
        """``id`` of a DTensor -> the full tensor or parameter; filled by :meth:`gather`."""
        self._make_pickler = make_pickler
        self._report = report
        self._found: dict[str, dict[str, Any]] = {}
        self.is_possible = dtensor_class() is not None
        """There may be such tensors."""
        self._is_whole = session is None or session.is_whole
        cell = 0 if session is None else session.number
        self._peers = _Peers(report, cell) if self.is_possible and self._is_whole else None

    def concerns(self, name: str, obj: Any) -> bool:
        """Whether a result contains sharded tensors. All ranks ask it for all results."""
        if self.is_possible:
            self._found[name] = _find(name, obj, self._make_pickler)
        return bool(self._found.get(name))

    @property
    def is_needed(self) -> bool:
        """Whether the results of this rank contain sharded tensors."""
        return any(self._found.values())

    def gather(self) -> dict[str, str]:
        """Gather the tensors; return the results for which that is impossible, and why.

        All ranks call this method. Waits for the slowest rank of their device meshes.
        """
        found = {name: paths for name, paths in self._found.items() if paths}
        if not self._is_whole:
            return {name: _refusal(name, "this cell does not run on all ranks") for name in found}
        if self._peers is None:
            return {}
        if not self._peers.have_group:
            return {name: _refusal(name, f"this rank {_LEFT}") for name in found}
        refused = {name: why for name in found if (why := _why_not(found[name]))}
        try:
            self._peers.publish(
                {name: [_describe(*one) for one in paths.items()] for name, paths in found.items()}
            )
            refused.update(
                self._peers.refusals(
                    {name: paths for name, paths in found.items() if name not in refused}
                )
            )
        except Exception as error:  # stores raise errors of many types
            return {name: _refusal(name, str(error)) for name in found}
        for name in found:
            if name not in refused:
                self._report(f"gathering {label(name)}")
                why = self._gather(list(found[name].values()))
                refused.update({name: why} if why else {})
        return {name: _refusal(name, why) for name, why in refused.items()}

    def _gather(self, sharded: list[Any]) -> str:
        """Gather these tensors; return why that failed, or nothing."""
        try:
            for tensor in sharded:
                if id(tensor) not in self.tensors:
                    self.tensors[id(tensor)] = _full(tensor)
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
    found: dict[int, Any] = {}

    def note(tensor: Any) -> Any:
        found.setdefault(id(tensor), tensor)
        return int, ()

    pickler = make_pickler(NullFile(), None, lambda buffer: False)
    pickler.handlers[dtensor_class()] = note
    try:
        pickler.dump(obj)
        return _by_path(name or "value", obj, found)
    except KeyboardInterrupt:  # a stop: the cell ends
        raise
    except BaseException:  # this result is reported when it is packed
        return {}
    finally:
        pickler.release()  # it is part of a reference cycle


def _by_path(name: str, obj: Any, found: dict[int, Any]) -> dict[str, Any]:
    paths: dict[int, str] = {}
    # Not through hooks: their numbers differ between ranks, and FSDP's refer to all parameters.
    for path, each in walk(name, obj, lambda path: path.endswith("_hooks")):
        if id(each) in found:
            paths.setdefault(id(each), path)
    labelled: dict[str, Any] = {}
    for place, (key, tensor) in enumerate(found.items()):
        path = paths.get(key, "")
        labelled[path if path and path not in labelled else f"{name}{{{place}}}"] = tensor
    return {path: labelled[path] for path in sorted(labelled)}


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


# ── agreeing ─────────────────────────────────────────────────────────────────────────────────────


class _Peers:
    """The other ranks at the end of the cell: the tensors that they are about to gather.

    They use the store of their process group. A rank without a process group reports that in the store of
    the gang's rendezvous: its peers would wait for it in vain.
    """

    def __init__(self, report: Callable[[str], None], cell: int) -> None:
        """``cell``: the number of the cell in its session, whose store keeps the keys of earlier ones."""
        self._report = report
        self._cell = cell
        self._store = _store()
        self._plan: dict[str, Any] = {}
        self._plans: dict[int, dict[str, Any] | str] = {}
        self._deadline = time.monotonic() + _COMPARE_S
        if self._store is not None:
            with suppress(Exception):  # stores raise errors of many types
                self._store.set(self._key("arrived", _rank()), "1")
        elif _had_group() and self._gangs_store is not None:
            with suppress(Exception):
                self._gangs_store.set(self._key("left", api.rank()), "1")

    def _key(self, what: str, rank: int) -> str:
        return f"hydrogen_magic/sharded_results/{self._cell}/{what}/{rank}"

    @functools.cached_property
    def _gangs_store(self) -> Any:
        """The store at which the ranks of this gang have met, None if there is none."""
        address, _, port = os.environ.get(torch_address.STORE, "").rpartition(":")
        if api.world_size() == 1 or not port:
            return None
        with suppress(Exception):  # stores raise errors of many types
            from torch.distributed import TCPStore

            timeout = timedelta(seconds=_CONNECT_S)
            return TCPStore(address, int(port), timeout=timeout, wait_for_workers=False)
        return None

    @property
    def have_group(self) -> bool:
        """Whether this rank has a process group."""
        return self._store is not None

    def publish(self, plan: dict[str, Any]) -> None:
        """Report to the others what this rank is about to gather."""
        self._plan = plan
        self._store.set(self._key("plan", _rank()), json.dumps(plan))

    def refusals(self, found: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Return the results that some rank of their mesh would gather differently, and why."""
        refused: dict[str, str] = {}
        for name in sorted(found):
            for peer in sorted(_others(found[name])):
                why = self._why_not(name, peer)
                if why:
                    refused[name] = f"rank {peer} {why}"
        return refused

    def _why_not(self, name: str, peer: int) -> str:
        if peer not in self._plans:
            self._plans[peer] = self._wait_for(peer)
        theirs = self._plans[peer]
        if isinstance(theirs, str):
            return theirs
        if theirs.get(name) == self._plan[name]:
            return ""
        return "holds different tensors there" if theirs.get(name) else "has no such tensor"

    def _wait_for(self, peer: int) -> dict[str, Any] | str:
        """Return the plan of another rank, or why there is none."""
        while not self._store.check([self._key("plan", peer)]):
            if self._has_left(peer):
                return _LEFT
            # Once it has arrived it is packing results, and its agent watches it.
            is_late = time.monotonic() > self._deadline
            if is_late and not self._store.check([self._key("arrived", peer)]):
                return f"did not finish the cell in {_COMPARE_S:.0f} s"
            self._report(f"waiting for rank {peer} to gather sharded tensors")
            time.sleep(_POLL_S)
        plan: dict[str, Any] = json.loads(self._store.get(self._key("plan", peer)))
        return plan

    def _has_left(self, peer: int) -> bool:
        if _has_gangs_ranks() and self._gangs_store is not None:
            with suppress(Exception):
                return bool(self._gangs_store.check([self._key("left", peer)]))
        return False


def _others(found: Mapping[str, Any]) -> set[int]:
    """Return the other global ranks that hold parts of these tensors."""
    meshes = (tensor.device_mesh.mesh.flatten().tolist() for tensor in found.values())
    return {peer for mesh in meshes for peer in mesh} - {_rank()}


def _rank() -> int:
    import torch.distributed as dist

    return int(dist.get_rank())


def _has_gangs_ranks() -> bool:
    """Whether the process group numbers its ranks as the gang does."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) == (api.rank(), api.world_size())


def _store() -> Any:
    """Return the store of the default process group, None when there is no group."""
    import torch.distributed as dist

    return dist.distributed_c10d._get_default_store() if dist.is_initialized() else None


def _had_group() -> bool:
    """Whether this rank may have joined a process group: others connect to no store in vain."""
    current = reporter.current()
    return current is not None and current.collectives.has_entered


def _full(tensor: Any) -> Any:
    import torch

    full = tensor.detach().full_tensor()
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(full, tensor.requires_grad) if is_parameter else full
