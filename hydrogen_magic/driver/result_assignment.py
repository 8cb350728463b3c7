"""Assigns results to variables of the notebook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from hydrogen_magic.driver.state.gang_results import RankResults
from hydrogen_magic.serialization.bindings import take_writers
from hydrogen_magic.serialization.identity import Originals
from hydrogen_magic.serialization.stale_references import parts_of, stale_references


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
    before = {name: namespace[name] for name in names if name in namespace}
    parts = {name: parts_of(old) for name, old in before.items()}
    take_writers()  # of earlier results
    results.objects(originals, loading)
    arrived = {name: results.result(name) for name in names if name in results.arrived()}
    namespace.update(arrived)
    stale = stale_references(
        {name: held for name, held in parts.items() if name in arrived}, set(names), namespace
    )
    return [
        _stale_text(name, arrived[name] is before[name], users, sorted(names))
        for name, users in stale.items()
    ]


def _stale_text(name: str, is_same: bool, users: list[str], names: list[str]) -> str:
    listed = ", ".join(f"`{user}`" for user in users)
    verb, again = ("refers", "it") if len(users) == 1 else ("refer", "them")
    what = "has new parameters or modules" if is_same else "is a new object"
    return (
        f"`{name}` {what}, and {listed} still {verb} to the old {'ones' if is_same else 'one'}: bring "
        f"{again} back too (--out {','.join([*names, *users])}), or create {again} again"
    )
