"""Assigns results to variables of the notebook."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any

from hydrogen_magic.driver.state.gang_results import RankResults
from hydrogen_magic.serialization.identity import Originals
from hydrogen_magic.serialization.pickling_errors import find_path

__all__ = ["assign"]


def assign(
    results: RankResults,
    names: Iterable[str],
    namespace: MutableMapping[str, Any],
    originals: Originals,
) -> list[str]:
    """Assign the variables in ``names`` that arrived; return warnings about stale references.

    Objects of the notebook that the ranks have changed keep their identity.
    """
    results.update(originals)
    replaced: dict[str, Any] = {}
    for name in names:
        if name in results.arrived():
            old, new = namespace.get(name, results), results.result(name)
            if old is not new:  # `results` stands for a name that is not assigned
                replaced[name] = old
                namespace[name] = new
    return list(_stale_references(replaced, set(names), namespace))


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
    current = {part for name in replaced for part in _parts_of(namespace[name])}
    for name, old in replaced.items():
        wanted = _parts_of(old) - current
        users = [other for other, value in candidates.items() if _refers(value, wanted)]
        if users:
            yield _stale_text(name, users, sorted(names))


def _refers(value: Any, wanted: set[int]) -> bool:
    return bool(wanted) and find_path("", value, lambda obj: id(obj) in wanted) is not None


def _stale_text(name: str, users: list[str], names: list[str]) -> str:
    listed = ", ".join(f"`{user}`" for user in users)
    verb, again = ("refers", "it") if len(users) == 1 else ("refer", "them")
    return (
        f"`{name}` is a new object, and {listed} still {verb} to the old one: bring {again} back "
        f"too (--out {','.join([*names, *users])}), or create {again} again"
    )


def _parameters_of(optimizer: Any) -> list[list[Any]]:
    return [group["params"] for group in optimizer.param_groups]


def _parts_of(old: Any) -> set[int]:
    """Return the ids of an object that others keep references to, and of its parameters."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(old, (torch.nn.Module, torch.optim.Optimizer)):
        return set()
    groups = _parameters_of(old) if isinstance(old, torch.optim.Optimizer) else [old.parameters()]
    return {id(old), *(id(parameter) for group in groups for parameter in group)}


def _may_refer(value: Any) -> bool:
    """Whether a variable is worth searching: an object of torch's or of the notebook's classes."""
    homes = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    return not isinstance(value, type) and bool(homes & {"__main__", "torch"})
