"""Colours of spans in the picture: those of the live view (``colors.ts``), unless names share a colour."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

KINDS = (
    r"\bdata|loader|fetch|prefetch|input|\bh2d\b|next\(",
    r"forward|\bfwd\b|predict|inference",
    r"backward|\bbwd\b",
    r"^(?!negotiate\b).*(all_?(reduce|gather|to_?all)|reduce_?scatter|broadcast|barrier"
    r"|nccl|gloo|mpi[_ ]|collective|\bhvd\.)",
    r"optimi[sz]er|\bzero_grad|\.step\b",
    r"checkpoint|ckpt|\bsav(e|ing)\b",
    r"^negotiate\b|^waiting for rank",
)
"""Names that are common in training; each has a fixed colour."""

FILLS = (
    "#f89000",
    "#3080a0",
    "#403090",
    "#d060f8",
    "#80d0f8",
    "#702010",
    "#c04000",
    "#9010f8",
    "#908060",
    "#f8c080",
    "#503040",
    "#c0d0c0",
)
"""Colours of the kinds, then of other names."""


def fills(names: Iterable[str]) -> Mapping[str, str]:
    """Return name -> colour: that of its kind, or of its hash, or the next one with the fewest names."""
    n_own, uses, found = len(FILLS) - len(KINDS), Counter[int](), dict[str, str]()
    for name in names:
        place = _kind(name)
        if place is None:
            first = _hash(name)
            own = min(range(first, first + n_own), key=lambda each: uses[each % n_own]) % n_own
            uses[own] += 1
            place = len(KINDS) + own
        found[name] = FILLS[place]
    return found


def _hash(text: str) -> int:
    """Return the FNV-1a hash of the UTF-16 units, as ``colors.ts`` does."""
    data, found = text.encode("utf-16-le", "surrogatepass"), 2166136261
    for unit in memoryview(data).cast("H"):
        found = (found ^ unit) * 16777619 % 2**32
    return found


def _kind(name: str) -> int | None:
    found = (kind for kind, pattern in enumerate(KINDS) if re.search(pattern, name, re.IGNORECASE))
    return next(found, None)
