"""Paths by which a rank finds the objects that the notebook has numbered."""

from __future__ import annotations

import copy
from typing import Any

from hydrogen_magic.serialization.object_paths import objects_at, paths_to


class Part:
    """Found by its type."""

    def __init__(self, name: str) -> None:
        self.name = name


def test_each_object_has_a_path_of_its_own() -> None:
    """Long keys differ at their end alone. Items of sets have another order in another process."""
    layer = "encoder.layers.0.attention.output.LayerNorm"
    root: dict[Any, Any] = {f"{layer}.{name}": Part(name) for name in ("weight", "bias", "scale")}
    root |= {"parts": [Part("first"), (Part("second"),)], "unordered": {Part("in a set")}}
    there = copy.deepcopy(root)
    found = dict(paths_to(root, lambda obj: type(obj) is Part))
    same = dict(objects_at(there, found))
    names = [found[path].name for path in found]
    assert sorted(names) == ["bias", "first", "scale", "second", "weight"]
    assert names == [same[path].name for path in found]
