"""Paths from a variable to objects that it refers to: they lead to the same ones in another process."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hydrogen_magic.serialization.pickling_errors import children

Path = tuple[str, ...]
_MAX_OBJECTS = 20_000
"""Objects looked at: a fraction of a second."""


def paths_to(root: Any, is_wanted: Callable[[Any], bool]) -> Iterator[tuple[Path, Any]]:
    """Yield the wanted objects that ``root`` refers to, each with its shortest path."""
    todo = deque[tuple[Path, Any]]([((), root)])
    seen: dict[int, Any] = {}
    while todo and len(seen) < _MAX_OBJECTS:
        path, obj = todo.popleft()
        if id(obj) in seen:
            continue
        seen[id(obj)] = obj
        if is_wanted(obj):
            yield path, obj
        todo.extend(((*path, step), child) for step, child in _steps(obj))


def objects_at(root: Any, paths: Iterable[Path]) -> Iterator[tuple[Path, Any]]:
    """Yield the objects to which ``paths`` lead from ``root``; None for a path that leads nowhere."""
    known: dict[Path, dict[str, Any]] = {}
    for path in paths:
        obj = root
        for n, step in enumerate(path):
            if path[:n] not in known:
                known[path[:n]] = dict(_steps(obj))
            obj = known[path[:n]].get(step)
        yield path, obj


def _steps(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield what ``obj`` refers to, each by a step of its own; not the items of sets, without an order."""
    n_alike = Counter[str]()
    for step, child in children("", obj):
        if step.startswith("{"):
            continue
        n_alike[step] += 1  # long keys are cut off
        yield f"{step} {n_alike[step]}", child
