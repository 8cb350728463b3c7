"""Weak references, proxies and collections, with the objects that they refer to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from hydrogen_magic.serialization.library_objects.handlers import Handler
from hydrogen_magic.serialization.pickling_errors import RefusedError

_referents: list[Any] = []
"""Objects that are referred to weakly: in the writer's process, something that is perhaps not sent kept them
alive. On a rank of a session they stay as long as the name that they came with."""


def take_referents() -> list[Any]:
    """Return the objects that were read since the last call and that only this list may keep alive."""
    taken = list(_referents)
    _referents.clear()
    return taken


def restore_weak(make: Callable[..., Any], *args: Any) -> Any:
    """Make what refers weakly to objects in ``args``, which stay alive."""
    _referents.append(args)
    return make(*args)


def restore_dead_reference() -> Any:
    """Make a weak reference to an object that is gone."""
    return weakref.ref(set())


def _reduce_proxy(proxy: Any) -> Any:
    """Reduce a weak proxy to one of the same object, not to a copy of it."""
    try:
        referent = proxy.__reduce_ex__.__self__  # a proxy has no name for it
    except ReferenceError:
        raise RefusedError(
            proxy, "it is a weak proxy of an object that is gone", "delete it"
        ) from None
    return restore_weak, (weakref.proxy, referent)


def _reduce_reference(reference: weakref.ref[Any]) -> Any:
    """Reduce a weak reference to one of the same object, or of one that is gone."""
    if (referent := reference()) is None:
        return restore_dead_reference, ()
    return restore_weak, (weakref.ref, referent, reference.__callback__)


def _reduce_collection(found: Any) -> Any:
    """Reduce a dictionary with weak keys or values, or a weak set, to one of the same objects."""
    items = found if type(found) is weakref.WeakSet else found.items()
    return restore_weak, (type(found), list(items))


OF_CLASSES: dict[type, Handler] = {
    **dict.fromkeys(weakref.ProxyTypes, _reduce_proxy),
    weakref.ref: _reduce_reference,
    weakref.WeakKeyDictionary: _reduce_collection,
    weakref.WeakValueDictionary: _reduce_collection,
    weakref.WeakSet: _reduce_collection,
}
"""What reduces objects of these very classes, not those of subclasses."""
