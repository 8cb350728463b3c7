"""Functions and classes that replace earlier ones of the same name, as IPython's autoreload does it.

Instances of the earlier class become instances of the new one, and its subclasses derive from the new one.
Functions that objects refer to, such as callbacks and bound methods, run the new code.
"""

from __future__ import annotations

import enum
import functools
import gc
import sys
import types
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from hydrogen_magic.core.lazy_annotations import annotations_of
from hydrogen_magic.core.units import counted

_SLOTS = ("__defaults__", "__kwdefaults__", "__doc__", "__dict__")
_Pair = tuple[Any, Any]
_followers: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
"""Functions of earlier definitions, which objects may still refer to, by the present one."""


def replace(
    earlier: Mapping[str, Any],
    namespace: Mapping[str, Any],
    users: Sequence[dict[str, Any]] = (),
) -> list[str]:
    """Replace the functions and classes in ``earlier`` by those of the same name in a module's namespace.

    Existing objects follow a definition only: after ``hook = make_hook(2)`` or ``f = functions["abs"]`` the
    name refers to another object, and the one before stays as it is. Definitions of other modules stay, too.
    ``users``: namespaces that may have imported them by name. Return warnings about objects that cannot
    change their class.
    """
    home = namespace.get("__name__", "__main__")  # a cell that deletes all globals deletes it, too
    kept = {id(value) for value in namespace.values()}
    """A name refers to these: ``earlier = f`` or ``earlier = Net.f`` before the new definition."""
    found = [
        (name, *pair)
        for name in earlier.keys() & namespace.keys()
        if not _extends(namespace[name], earlier[name])
        for pair in _pairs(earlier[name], namespace[name], home, kept)
    ]
    pairs = [(old, new) for name, old, new in found if _are_definitions(name, old, new)]
    current = {id(old): new for _, old, new in found}
    current |= {id(old): new for old, new in pairs}  # its other names may refer to others now
    for user in users:
        _rebind(user, current)
    classes = {old: new for old, new in pairs if isinstance(old, type)}
    warnings = _move_instances(classes) if classes else []
    for old, new in classes.items():
        _move_subclasses(old, new)
        if issubclass(new, enum.Enum) and new.__eq__ is object.__eq__:
            new.__eq__ = _is_same_member
    if classes and "jax" in sys.modules:  # its caches find instances, whose code is another now
        sys.modules["jax"].clear_caches()
    for old, new in pairs:
        if isinstance(old, types.FunctionType):
            followers = {each for each in (old, *_followers.pop(old, ())) if id(each) not in kept}
            _followers[new] = weakref.WeakSet(followers)
            for each in followers:
                _replace_code(each, new)
    return warnings


def _pairs(old: Any, new: Any, home: str, kept: Collection[int]) -> Iterator[_Pair]:
    """Yield the functions and classes of module ``home`` in ``old``, and what is in their place in ``new``.

    ``kept``: IDs of those to leave out.
    """
    old, new = _unwrapped(old), _unwrapped(new)
    if old is new or type(old) is not type(new) or id(old) in kept:
        return
    if isinstance(old, property):
        for part in ("fget", "fset", "fdel"):
            yield from _pairs(getattr(old, part), getattr(new, part), home, kept)
    elif isinstance(old, (type, types.FunctionType)) and old.__module__ == new.__module__ == home:
        yield old, new
        own, others = vars(old), vars(new)
        for name in own.keys() & others.keys() if isinstance(old, type) else ():
            yield from _pairs(own[name], others[name], home, kept)


def _are_definitions(name: str, old: Any, new: Any) -> bool:
    """Whether both are definitions of the global ``name`` or of a part of it: no lambdas or closures."""
    qualname: str = old.__qualname__
    is_global = qualname.partition(".")[0] == name and "<" not in qualname
    return is_global and new.__qualname__ == qualname


def _rebind(user: dict[str, Any], current: Mapping[int, Any]) -> None:
    for name, value in list(user.items()):
        if id(value) in current:
            user[name] = current[id(value)]


def _extends(new: Any, old: Any) -> bool:
    """Whether both are classes, and the new one derives from the old one, or from a copy that came with it.

    ``issubclass`` raises for a Protocol and a TypedDict.
    """
    if new is old or not (isinstance(new, type) and isinstance(old, type)):
        return False
    name = old.__module__, old.__qualname__
    n_old, n_new = (
        sum((base.__module__, base.__qualname__) == name for base in cls.__mro__)
        for cls in (old, new)
    )
    return n_new > n_old


def _unwrapped(obj: Any) -> Any:
    """Return the function in a static method, class method or cached property."""
    if isinstance(obj, (staticmethod, classmethod)):
        return obj.__func__
    return obj.func if isinstance(obj, functools.cached_property) else obj


def _move_instances(classes: Mapping[type, type]) -> list[str]:
    """Make instances of the earlier classes instances of the new ones; return warnings."""
    n_left: dict[type, int] = {}
    for obj in gc.get_objects():
        kind = type(obj)
        if kind in classes:
            try:
                object.__setattr__(obj, "__class__", classes[kind])
            except TypeError:  # their layouts differ
                n_left[kind] = n_left.get(kind, 0) + 1
    return [
        f"{counted(n, 'instance')} of the earlier class {kind.__qualname__} cannot become an "
        "instance of the new one, whose __slots__ or bases differ: create it again"
        for kind, n in n_left.items()
    ]


def _is_same_member(member: enum.Enum, other: Any) -> Any:
    """``__eq__`` of an enum of which there are two sets of members: those of the earlier class live on."""
    if type(other) is not type(member):
        return NotImplemented
    return (member._name_, member._value_) == (other._name_, other._value_)


def _move_subclasses(old: type, new: type) -> None:
    subclasses: list[type] = type.__subclasses__(old)
    for subclass in subclasses:
        bases = tuple(new if base is old else base for base in subclass.__bases__)
        try:
            subclass.__bases__ = bases
        except TypeError:  # their layouts differ
            continue


def _replace_code(old: types.FunctionType, new: types.FunctionType) -> None:
    """Let ``old`` run the code of ``new``; functions with different free variables stay as they are."""
    if len(old.__code__.co_freevars) != len(new.__code__.co_freevars):
        return
    for cell, fresh in zip(old.__closure__ or (), new.__closure__ or (), strict=True):
        cell.cell_contents = fresh.cell_contents
    old.__code__ = new.__code__
    for name in _SLOTS:
        setattr(old, name, getattr(new, name))
    old.__annotations__ = annotations_of(new)
