"""Assigns results to variables of the notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hydrogen_magic.driver.state.gang_results import RankResults
from hydrogen_magic.serialization.identity import Originals
from hydrogen_magic.serialization.stale_references import stale_references


def assign(
    results: RankResults,
    names: Iterable[str],
    namespace: MutableMapping[str, Any],
    originals: Originals,
    loading: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[str]:
    """Assign the variables in ``names`` that arrived; return warnings about stale references.

    Objects of the notebook that the ranks have changed keep their identity. ``loading``: the context in
    which the classes' own code runs; an interrupt there assigns nothing.
    """
    results.update(originals, loading)
    replaced: dict[str, Any] = {}
    for name in names:
        if name in results.arrived():
            old, new = namespace.get(name, results), results.result(name)
            if old is not new:  # `results` stands for a name that is not assigned
                replaced[name] = old
                namespace[name] = new
    stale = stale_references(replaced, set(names), namespace)
    return [_stale_text(name, users, sorted(names)) for name, users in stale.items()]


def _stale_text(name: str, users: list[str], names: list[str]) -> str:
    listed = ", ".join(f"`{user}`" for user in users)
    verb, again = ("refers", "it") if len(users) == 1 else ("refer", "them")
    return (
        f"`{name}` is a new object, and {listed} still {verb} to the old one: bring {again} back "
        f"too (--out {','.join([*names, *users])}), or create {again} again"
    )
