"""Shortens long names, keeping different names different."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def short_names(names: Sequence[str], most: int) -> list[str]:
    """Return names cut to ``most`` characters, different ones still different; like ``names.ts``.

    Names of metrics often have common beginnings or ends. The first variant in which all are different is
    used: their ends, their beginnings, both, or the part where they start to differ.
    """
    n_different = len(set(names))
    for cut in _cuts([name for name in names if len(name) > most], most):
        made = [cut(name) if len(name) > most else name for name in names]
        if len(set(made)) == n_different:
            return made
    return [
        f"{place} {name[: most - 3]}…" if len(name) > most else name
        for place, name in enumerate(names, 1)
    ]


def _cuts(long: Sequence[str], most: int) -> list[Callable[[str], str]]:
    half = (most - 1) // 2
    columns = enumerate(zip(*long, strict=False))
    start = next((place for place, letters in columns if len(set(letters)) > 1), 0)
    return [
        lambda name: f"…{name[1 - most :]}",
        lambda name: f"{name[: most - 1]}…",
        lambda name: f"{name[: most - 1 - half]}…{name[-half:]}",
        lambda name: f"…{name[start : start + most - 2]}…",
    ]
