"""Attributes that the notebook has set in modules: ``capture.settings`` finds them in its cells."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

from hydrogen_magic.node.worker.settings.provider import Provider, Undo
from hydrogen_magic.serialization.instances import find_on_type

_MISSING = object()


def _apply_attribute(module: Any, key: str, value: Any, *, is_new: bool = False) -> Undo:
    """Set an attribute that the notebook has set; a list or dict that it has changed keeps its identity.

    ``is_new``: the notebook has assigned another one.
    """
    owner, name, before = _find(module, key)
    is_container = type(before) is type(value) and isinstance(value, (list, dict, set, deque))
    if is_container and not is_new:
        copy = before.copy()
        _fill(before, value)
        return partial(_fill, before, copy)
    setattr(owner, name, value)
    return (
        partial(delattr, owner, name)
        if before is _MISSING
        else partial(setattr, owner, name, before)
    )


def _apply_deletion(module: Any, key: str, value: Any) -> Undo:
    """Delete an attribute that the notebook has deleted; the module on a rank may never have had it."""
    owner, name, before = _find(module, key)
    if before is _MISSING:
        return lambda: None
    delattr(owner, name)
    return partial(setattr, owner, name, before)


def _find(module: Any, key: str) -> tuple[Any, str, Any]:
    """Return what has an attribute, the name of the attribute, and its value."""
    *path, name = key.split(".")
    owner = module
    for part in path:
        owner = getattr(owner, part)
    is_stored = hasattr(owner, "__dict__") and not is_property(owner, name)
    return owner, name, vars(owner).get(name, _MISSING) if is_stored else getattr(owner, name)


def is_property(owner: Any, name: str) -> bool:
    """Whether the class of ``owner`` computes an attribute, as those of modules of ``torch.backends`` do."""
    return hasattr(type(find_on_type(type(owner), name)), "__set__")


def _fill(target: Any, content: Any) -> None:
    content = content.copy()
    target.clear()
    target.extend(content) if isinstance(target, (list, deque)) else target.update(content)


PROVIDERS = {
    "attribute": Provider(lambda module: iter(()), _apply_attribute),
    "assignment": Provider(lambda module: iter(()), partial(_apply_attribute, is_new=True)),
    "deletion": Provider(lambda module: iter(()), _apply_deletion),
}
