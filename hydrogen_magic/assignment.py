"""Results become variables of the notebook again.

A cell on this machine alone would change the notebook's model in place, and its optimizer would go on
with it. Where the ranks changed the object that the notebook had sent, the notebook's own object gets
the new values. Where the cell assigned another object, the variable is assigned as well.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import suppress
from typing import Any

from hydrogen_magic.blame import find_path
from hydrogen_magic.gang.results import RankResults

__all__ = ["assign"]


def assign(
    results: RankResults, names: Iterable[str], namespace: MutableMapping[str, Any]
) -> list[str]:
    """Assign the variables in ``names`` that arrived; return warnings about stale references."""
    replaced: dict[str, Any] = {}
    for name in names:
        if name in results.arrived():
            old, new = namespace.get(name), results.result(name)
            if not (results.is_same_object(name) and _update(old, new)):
                replaced[name] = old
                namespace[name] = new
    return list(_stale_references(replaced, set(names), namespace))


# ── in place ─────────────────────────────────────────────────────────────────────────────────────


def _update(old: Any, new: Any) -> bool:
    """Give ``old`` the values of ``new``; False, and nothing is changed, where they do not match."""
    if type(old) is not type(new):
        return False
    for module, name, update in (
        ("torch.nn", "Module", _update_module),
        ("torch.optim", "Optimizer", _update_optimizer),
        ("torch.optim.lr_scheduler", "LRScheduler", _update_scheduler),
        ("torch", "Tensor", _update_tensor),
        ("numpy", "ndarray", _update_array),
    ):
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(old, kind):
            return update(old, new)
    return False


def _update_module(old: Any, new: Any) -> bool:
    pairs = dict(_pairs(old, new))
    tensors = [pair for ours, theirs in pairs.values() for pair in _tensors(ours, theirs)]
    if None in pairs or not all(_match(*pair) for pair in tensors):
        return False
    known: dict[int, Any] = {}
    for ours, theirs in tensors:
        known[id(theirs)] = ours
        if ours is not None:
            _copy_tensor(ours, theirs)
    known.update((id(theirs), ours) for ours, theirs in pairs.values())
    for ours, theirs in pairs.values():
        _update_attributes(ours, theirs, known)
    return True


def _pairs(old: Any, new: Any) -> Iterator[tuple[int | None, tuple[Any, Any]]]:
    """Yield every module below ``old`` with its counterpart, by identity; None where one lacks one."""
    todo, seen = [(old, new)], set()
    while todo:
        ours, theirs = todo.pop()
        if id(ours) in seen:
            continue
        seen.add(id(ours))
        same = type(ours) is type(theirs) and (
            ours is None or ours._modules.keys() == theirs._modules.keys()
        )
        if not same:
            yield None, (ours, theirs)
            return
        if ours is not None:
            yield id(ours), (ours, theirs)
            todo += [(ours._modules[key], theirs._modules[key]) for key in ours._modules]


def _tensors(old: Any, new: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parameters and buffers of a module alone, each with its counterpart."""
    for ours, theirs in ((old._parameters, new._parameters), (old._buffers, new._buffers)):
        for key in ours.keys() | theirs.keys():
            yield ours.get(key, _MISSING), theirs.get(key, _MISSING)


_MISSING = object()


def _match(old: Any, new: Any) -> bool:
    if old is None or new is None or old is _MISSING or new is _MISSING:
        return old is new
    return bool(type(old) is type(new) and old.shape == new.shape and old.dtype == new.dtype)


def _copy_tensor(old: Any, new: Any) -> None:
    import torch

    with torch.no_grad():
        old.copy_(new)
    if old.is_leaf:
        old.requires_grad_(new.requires_grad)
        old.grad = None  # gradients do not travel


def _update_attributes(old: Any, new: Any, known: dict[int, Any]) -> None:
    """Copy what a module has beside its tensors and children; ``known``: new objects -> old ones."""
    import torch

    own = vars(torch.nn.Module()).keys() - {"training"}
    for name, value in vars(new).items():
        if name not in own:
            with suppress(Exception):  # then it stays what travelled
                value = copy.deepcopy(value, dict(known))
            vars(old)[name] = value


def _update_optimizer(old: Any, new: Any) -> bool:
    ours, theirs = _parameters_of(old), _parameters_of(new)
    if [len(group) for group in ours] != [len(group) for group in theirs]:
        return False
    pairs = [
        pair for groups in zip(ours, theirs, strict=True) for pair in zip(*groups, strict=True)
    ]
    if not all(_match(*pair) for pair in pairs):
        return False
    for pair in pairs:
        _copy_tensor(*pair)
    old.load_state_dict(new.state_dict())
    return True


def _parameters_of(optimizer: Any) -> list[list[Any]]:
    return [group["params"] for group in optimizer.param_groups]


def _update_scheduler(old: Any, new: Any) -> bool:
    old.load_state_dict(new.state_dict())
    return True


def _update_tensor(old: Any, new: Any) -> bool:
    if not _match(old, new):
        return False
    _copy_tensor(old, new)
    return True


def _update_array(old: Any, new: Any) -> bool:
    is_plain = type(old).__module__ == "numpy" and old.flags.writeable and not old.dtype.hasobject
    if type(old).__name__ != "ndarray" or not is_plain or not _match(old, new):
        return False
    old[...] = new
    return True


# ── stale references ─────────────────────────────────────────────────────────────────────────────


def _stale_references(
    replaced: dict[str, Any], names: set[str], namespace: MutableMapping[str, Any]
) -> Iterator[str]:
    """Yield a warning for every variable that still refers to an object that was replaced."""
    candidates = {
        name: value
        for name, value in namespace.items()
        if name not in names and name[:1] != "_" and _may_refer(value)
    }
    for name, old in replaced.items():
        wanted = _parts_of(old)
        users = [other for other, value in candidates.items() if _refers(value, wanted)]
        if users:
            yield _stale_text(name, users, sorted(names))


def _refers(value: Any, wanted: set[int]) -> bool:
    return bool(wanted) and find_path("", value, lambda obj: id(obj) in wanted) is not None


def _stale_text(name: str, users: list[str], names: list[str]) -> str:
    listed = ", ".join(f"`{user}`" for user in users)
    verb, again = ("refers", "it") if len(users) == 1 else ("refer", "them")
    return (
        f"`{name}` is a new object, and {listed} still {verb} to the old one: bring {again} back too "
        f"(--out {','.join([*names, *users])}), or create {again} again"
    )


def _parts_of(old: Any) -> set[int]:
    """Return the identities of an object that others keep references to, and of its parameters."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(old, (torch.nn.Module, torch.optim.Optimizer)):
        return set()
    groups = _parameters_of(old) if isinstance(old, torch.optim.Optimizer) else [old.parameters()]
    return {id(old), *(id(parameter) for group in groups for parameter in group)}


def _may_refer(value: Any) -> bool:
    """Whether a variable is worth searching: an object of torch's or of the notebook's classes."""
    homes = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    return not isinstance(value, type) and bool(homes & {"__main__", "torch"})
