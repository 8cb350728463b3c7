"""Colours of spans in the picture: the same as in the live view, see ``colors.ts``."""

from __future__ import annotations

import re
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
    """Return name -> colour; names without a kind get the remaining colours in turn."""
    kinds = {name: _kind(name) for name in names}
    others = [name for name, kind in kinds.items() if kind is None]
    n_left = len(FILLS) - len(KINDS)
    turns = {name: len(KINDS) + turn % n_left for turn, name in enumerate(others)}
    return {name: FILLS[turns[name] if kind is None else kind] for name, kind in kinds.items()}


def _kind(name: str) -> int | None:
    found = (kind for kind, pattern in enumerate(KINDS) if re.search(pattern, name, re.IGNORECASE))
    return next(found, None)
