"""How instances are reduced without asking them for attributes.

Classes with ``__getattr__`` may answer every attribute, raise other errors than AttributeError, or
recurse before their own attributes are restored; pickle looks for its hooks on the instance. Here
everything is looked up on the type. An attribute dictionary that several objects share, or that is
the object itself (``self.__dict__ = self``), stays one object.
"""

from __future__ import annotations

import copyreg
import pickle
import struct
import sys
import weakref
from typing import Any

from hydrogen_magic.serialization.reducers import restore_immutable, restore_object

_HOOKS = ("__reduce__", "__reduce_ex__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
_HEAP_TYPE = 1 << 9
"""Of ``type.__flags__``: a ``class`` statement makes it, or a C library on import."""
_POINTER_BYTES = struct.calcsize("P")


class _Probe:
    """An object with attributes of its own."""


def _references(obj: Any) -> int:
    """Return the number of references to the attribute dictionary of ``obj``."""
    return sys.getrefcount(object.__getattribute__(obj, "__dict__"))


_UNSHARED = _references(_Probe())
_kinds: weakref.WeakKeyDictionary[type, tuple[bool, bool]] = weakref.WeakKeyDictionary()
"""By class: whether its instances are reduced by default, and whether they may answer any attribute."""


def find_on_type(kind: type, name: str) -> Any:
    """Return an attribute of ``kind`` itself, not of its metaclass; None if there is none."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def reduce_instance(obj: Any, tracks_sharing: bool = True) -> Any:
    """Reduce an instance that default pickling may change; NotImplemented for others.

    ``tracks_sharing``: whether to ask if another object has the same attribute dictionary.
    """
    kind = type(obj)
    if kind not in _kinds:
        _kinds[kind] = _is_default(kind), _answers_more(kind)
    is_default, answers_more = _kinds[kind]
    is_shared = is_default and tracks_sharing and _shares_attributes(obj)
    if not is_default or not (answers_more or is_shared):
        return NotImplemented
    return reduce_by_value(obj, is_shared)


def reduce_by_value(obj: Any, is_shared: bool = False) -> Any:
    """Reduce an instance to its class, attributes and items, whatever its class says."""
    kind = type(obj)
    items = list.__iter__(obj) if issubclass(kind, list) else None
    pairs = iter(dict.items(obj)) if issubclass(kind, dict) else None
    return restore_object, (kind,), _state(obj, is_shared), items, pairs, restore_attributes


def _is_default(kind: type) -> bool:
    """Whether pickle saves the attributes of such instances, and no more."""
    if kind in copyreg.dispatch_table:
        return False
    if any(find_on_type(kind, name) is not find_on_type(object, name) for name in _HOOKS):
        return False
    builtin = [base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE]
    if kind in builtin or not set(builtin) <= {object, dict, list}:
        return False
    return len(builtin) > 1 or not _has_hidden_state(kind)


_IMMUTABLE = (tuple, str, bytes, int, float, complex)


def is_made_by_own_new(kind: type) -> bool:
    """Whether it is a subclass of an immutable type, with a ``__new__`` that may not take the contents.

    Pickle calls it with these: ``T(1, 2)`` becomes ``T((1, 2))``.
    """
    base = next((base for base in _IMMUTABLE if issubclass(kind, base)), None)
    if base is None or not isinstance(find_on_type(kind, "__new__"), staticmethod):
        return False
    hooks = ("__reduce__", "__reduce_ex__", "__getnewargs_ex__")
    own = [name for name in hooks if find_on_type(kind, name) is not find_on_type(object, name)]
    builtin = {base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE}
    gives_contents = find_on_type(kind, "__getnewargs__") is vars(base)["__getnewargs__"]
    return not own and gives_contents and builtin == {object, base}


def reduce_immutable(obj: Any) -> Any:
    """Reduce an instance of such a class to its contents and attributes."""
    base = next(base for base in _IMMUTABLE if isinstance(obj, base))
    reduced: Any = object.__reduce_ex__(obj, pickle.HIGHEST_PROTOCOL)
    _, args, *rest = reduced
    return restore_immutable, (base, *args), *rest


def _has_hidden_state(kind: type) -> bool:
    """Whether instances of a class from C have more than attributes; pickle refuses them by the same rule."""
    n_pointers = bool(kind.__dictoffset__) + bool(kind.__weakrefoffset__)
    n_pointers += len(copyreg._slotnames(kind))  # type: ignore[attr-defined]  # typeshed lacks it
    return kind.__basicsize__ > object.__basicsize__ + n_pointers * _POINTER_BYTES


def _answers_more(kind: type) -> bool:
    own = ("__getattr__", "__getattribute__", "__class__")
    return any(find_on_type(kind, name) is not find_on_type(object, name) for name in own)


def _shares_attributes(obj: Any) -> bool:
    try:
        return _references(obj) > _UNSHARED
    except AttributeError:  # it has slots
        return False


def _state(obj: Any, is_shared: bool) -> tuple[Any, dict[str, Any], bool]:
    """Return attributes, slots, and whether the dictionary of the attributes is shared."""
    kind = type(obj)
    get_state = find_on_type(kind, "__getstate__")
    if get_state is not find_on_type(object, "__getstate__"):
        state = get_state.__get__(obj, kind)()
        attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, {})
        return attributes, slots or {}, False
    slots = {}
    for name in copyreg._slotnames(kind):  # type: ignore[attr-defined]  # typeshed lacks it
        try:
            slots[name] = object.__getattribute__(obj, name)
        except AttributeError:  # not assigned
            continue
    try:
        attributes = object.__getattribute__(obj, "__dict__")
    except AttributeError:
        attributes = None
    return attributes, slots, is_shared


def restore_attributes(obj: Any, state: tuple[Any, dict[str, Any], bool]) -> None:
    """Give an instance its attributes again."""
    attributes, slots, is_shared = state
    if is_shared:
        object.__setattr__(obj, "__dict__", attributes)
    elif attributes:
        object.__getattribute__(obj, "__dict__").update(attributes)
    for name, value in slots.items():
        object.__setattr__(obj, name, value)
