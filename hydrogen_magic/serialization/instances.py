"""How instances are reduced without asking them for attributes.

Classes with ``__getattr__`` may answer every attribute, raise other errors than AttributeError, or
recurse before their own attributes are restored; pickle looks for its hooks on the instance. Here
everything is looked up on the type. An attribute dictionary that several objects share, or that is
the object itself (``self.__dict__ = self``), stays one object.
"""

from __future__ import annotations

import copyreg
import enum
import pickle
import struct
import sys
import weakref
from collections.abc import Sequence
from typing import Any

_HOOKS = ("__reduce__", "__reduce_ex__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
_HEAP_TYPE = 1 << 9
"""Of ``type.__flags__``: a ``class`` statement makes it, or a C library on import."""
_POINTER_BYTES = struct.calcsize("P")

ATOMS = (bool, bytes, complex, float, int, str, type(None))
"""Types whose values have neither parts nor an identity that matters."""


class Reduced:
    """Stands for an object in a stream, which is restored as :attr:`how` says."""

    def __init__(self, how: tuple[Any, ...]) -> None:
        self.how = how

    def __reduce__(self) -> tuple[Any, ...]:
        return self.how


def itself(obj: Any) -> Any:
    """Return ``obj``, which stands for an object around it."""
    return obj


def restore_same(obj: Any) -> Any:
    return obj


class _Probe:
    """An object with attributes of its own."""


def _references(obj: Any) -> int:
    """Return the number of references to the attribute dictionary of ``obj``."""
    return sys.getrefcount(object.__getattribute__(obj, "__dict__"))


_UNSHARED = _references(_Probe())
_kinds: weakref.WeakKeyDictionary[type, tuple[bool, bool]] = weakref.WeakKeyDictionary()
"""By class: whether its instances are reduced by default, and whether its code would change them: it may
answer any attribute, or set the items of a list or dict."""


def own_attributes(obj: Any) -> dict[str, Any]:
    """Return the attribute dictionary itself, empty if there is none.

    The object's own access to attributes is not used: a proxy may load something.
    """
    try:
        found: dict[str, Any] = object.__getattribute__(obj, "__dict__")
    except AttributeError:  # it has slots, or is an array
        return {}
    return found


def find_on_type(kind: type, name: str) -> Any:
    """Return an attribute of ``kind`` itself, not of its metaclass; None if there is none."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def is_reduced_as(base: type, kind: type) -> bool:
    """Whether a subclass of ``base`` does not change what pickle saves."""
    return all(
        find_on_type(kind, name) is find_on_type(base, name)
        for name in ("__getstate__", "__reduce__", "__reduce_ex__")
    )


def reduce_instance(obj: Any, tracks_sharing: bool = True) -> Any:
    """Reduce an instance that default pickling may change; NotImplemented for others.

    ``tracks_sharing``: whether to ask if another object has the same attribute dictionary.
    """
    kind = type(obj)
    if kind not in _kinds:
        _kinds[kind] = _is_default(kind), _answers_more(kind) or _sets_items(kind)
    is_default, changes_more = _kinds[kind]
    is_shared = is_default and tracks_sharing and _shares_attributes(obj)
    if not is_default or not (changes_more or is_shared):
        return NotImplemented
    return reduce_by_value(obj, is_shared)


def reduce_by_value(obj: Any, is_shared: bool = False) -> Any:
    """Reduce an instance to its class, attributes and items, whatever its class says."""
    kind, state = type(obj), _state(obj, is_shared)
    if _sets_items(kind):  # pickle would call its methods, before there are attributes
        contents = [*list.__iter__(obj)] if issubclass(kind, list) else dict(dict.items(obj))
        return restore_object, (kind,), (contents, state), None, None, restore_contents
    items = list.__iter__(obj) if issubclass(kind, list) else None
    pairs = iter(dict.items(obj)) if issubclass(kind, dict) else None
    return restore_object, (kind,), state, items, pairs, restore_attributes


def restore_object(cls: type, *args: Any) -> Any:
    """Make an object without its state; its class may differ from that of the writer's object."""
    try:
        return cls.__new__(cls, *args)
    except TypeError:
        if args:
            raise
        # A __new__ with arguments that only the writer had, as that of jax.custom_vjp.
        return next(base for base in (dict, list, object) if issubclass(cls, base)).__new__(cls)


def restore_contents(obj: Any, state: tuple[Any, tuple[Any, dict[str, Any], bool]]) -> None:
    """Give a list or dict its items, and its attributes."""
    contents, attributes = state
    list.extend(obj, contents) if isinstance(obj, list) else dict.update(obj, contents)
    restore_attributes(obj, attributes)


def _sets_items(kind: type) -> bool:
    """Whether the code of the class is called when an item is added to a list or dict."""
    base = next((base for base in (list, dict) if issubclass(kind, base)), None)
    names = ("__setitem__", "append", "extend")
    return base is not None and any(
        find_on_type(kind, name) is not find_on_type(base, name) for name in names
    )


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


def attributes_alone(obj: Any) -> dict[str, Any] | None:
    """Return all that an instance has, if these are attributes that pickle saves and restores by itself.

    None for others. A sentinel, which code compares by ``is``, has none: the dictionary is empty.
    """
    kind = type(obj)
    if kind is object:
        return {}
    if not _is_default(kind) or issubclass(kind, (list, dict)):
        return None
    if find_on_type(kind, "__getstate__") is not find_on_type(object, "__getstate__"):
        return None
    attributes, slots, _ = _state(obj, False)
    return None if slots else attributes or {}


_IMMUTABLE = (tuple, str, bytes, int, float, complex)


def is_made_by_library(kind: type) -> bool:
    """Whether Python's own library makes instances of a class of the notebook, which pickle would call.

    The class may take other arguments: ``T(1, 2)`` becomes ``T((1, 2))``. Pickle also leaves out attributes.
    """
    library = _library_of(kind)
    is_pythons = str(library.__module__).partition(".")[0] in sys.stdlib_module_names
    if not is_pythons or issubclass(kind, enum.Enum) or kind in copyreg.dispatch_table:
        return False
    hooks = (*_HOOKS, "__getstate__")
    if any(find_on_type(kind, name) is not find_on_type(library, name) for name in hooks):
        return False
    own = [name for name in hooks[:2] if find_on_type(kind, name) is not find_on_type(object, name)]
    is_immutable = library in _IMMUTABLE and isinstance(find_on_type(kind, "__new__"), staticmethod)
    return bool(own) or is_immutable


def _library_of(kind: type) -> type:
    return next(base for base in kind.__mro__ if base.__module__ != "__main__")


def reduce_by_library(obj: Any) -> Any:
    """Reduce an instance of such a class: its library makes it, and gets its items."""
    kind, library = type(obj), _library_of(type(obj))
    reduced: Any = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    if type(reduced) is not tuple:
        return NotImplemented
    make, args, state, items, pairs, *_ = (*reduced, None, None, None)
    if make is copyreg.__newobj__:  # type: ignore[attr-defined]  # typeshed lacks it
        args = args[1:]
    elif make is not kind:
        return reduced
    contents = [list(each) if each is not None else () for each in (items, pairs)]
    own = _state(obj, False, [one for one in kind.__mro__ if one.__module__ == "__main__"])
    made = restore_by_library, (make is kind, library, kind, *args)
    return (*made, (state, *contents, own), None, None, restore_state_of_library)


def restore_by_library(is_called: bool, library: Any, cls: type, *args: Any) -> Any:
    """Make an instance of ``cls`` by its base class. ``is_called``: pickle would call the class itself."""
    obj = library.__new__(cls, *args)
    if is_called and library.__init__ is not object.__init__:
        library.__init__(obj, *args)
    return obj


def restore_state_of_library(obj: Any, state: tuple[Any, list[Any], list[Any], Any]) -> None:
    """Give an instance the state that its library has saved, its items, and its attributes."""
    saved, items, pairs, own = state
    library: Any = _library_of(type(obj))
    if saved is not None:
        set_state(obj, saved)
    for item in items:
        library.append(obj, item)
    for key, value in pairs:
        library.__setitem__(obj, key, value)
    restore_attributes(obj, own)


def set_state(obj: Any, state: Any) -> None:
    """Perform pickle's BUILD operation."""
    if find_on_type(type(obj), "__setstate__") is not None:
        obj.__setstate__(state)
        return
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    vars(obj).update(attributes or {})
    for name, value in (slots or {}).items():
        setattr(obj, name, value)


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


def _state(
    obj: Any, is_shared: bool, owners: Sequence[type] | None = None
) -> tuple[Any, dict[str, Any], bool]:
    """Return attributes, slots, and whether the dictionary of the attributes is shared.

    ``owners``: classes of which the slots alone are returned, if not what ``__getstate__`` returns.
    """
    kind = type(obj)
    get_state = find_on_type(kind, "__getstate__")
    if owners is None and get_state is not find_on_type(object, "__getstate__"):
        state = get_state.__get__(obj, kind)()
        attributes, slots = state if type(state) is tuple and len(state) == 2 else (state, {})
        return attributes, slots or {}, False
    slots = {}
    for name in copyreg._slotnames(kind):  # type: ignore[attr-defined]  # typeshed lacks it
        if owners is not None and not any(name in vars(owner) for owner in owners):
            continue
        try:
            slots[name] = object.__getattribute__(obj, name)
        except AttributeError:  # not assigned
            continue
    return own_attributes(obj), slots, is_shared


def restore_attributes(obj: Any, state: tuple[Any, dict[str, Any], bool]) -> None:
    """Give an instance its attributes again."""
    attributes, slots, is_shared = state
    if is_shared:
        object.__setattr__(obj, "__dict__", attributes)
    elif attributes:
        object.__getattribute__(obj, "__dict__").update(attributes)
    for name, value in slots.items():
        object.__setattr__(obj, name, value)
