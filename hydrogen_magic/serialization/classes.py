"""Classes that a stream has by value: what it has of them, and how they are made of that."""

from __future__ import annotations

import enum
import functools
import sys
import types
import typing
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from hydrogen_magic.core.lazy_annotations import annotations_of
from hydrogen_magic.serialization.bindings import UNBOUND, Binding, bind

SKELETON_CLASS_ARGS = 4
"""Type, name, bases, keywords; cloudpickle's form of enums is longer, and contains qualified names."""

Registration = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function that registers a class with a library, and its arguments after the class."""


class Registrations(NamedTuple):
    """The calls by which a process registers a class with libraries."""

    calls: tuple[Registration, ...] = ()
    know_fields: bool = False
    """They depend on the fields, of which a base of the class knows nothing while there are no attributes."""


complete_classes: weakref.WeakSet[type] = weakref.WeakSet()
"""Classes that need no state from a stream: defined here, or restored by an earlier stream."""

_SET_BY_ENUM = {"_name_", "_value_", "_sort_order_", "__objclass__"}
"""Attributes that ``enum`` itself gives each member."""

_SET_BY_TYPE = {
    "__module__",
    "__slots__",
    "__dict__",
    "__weakref__",
    "__firstlineno__",
    "__static_attributes__",
    "__annotate_func__",
    "__annotations_cache__",
}
"""Attributes that Python itself gives each class, or that it must be made with."""


def layout_of(cls: type) -> dict[str, Any]:
    """Return what a class must be made with, since it cannot be set later."""
    slots = vars(cls).get("__slots__", UNBOUND)
    if typing.NamedTuple in vars(cls).get("__orig_bases__", ()):  # which sets them itself
        slots = UNBOUND
    found = (
        {}
        if slots is UNBOUND
        else {"__slots__": [slots] if isinstance(slots, str) else list(slots)}
    )
    return {**found, "__qualname__": cls.__qualname__} if "." in cls.__qualname__ else found


def attributes_of(cls: type, found: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a class in their order, with those that cloudpickle leaves out.

    It sorts them, and drops what is the very object that a base has, as in ``class B(A): count = 0`` where
    ``A`` has ``count = 0``, too. ``A.count = 1`` would then change ``B`` on a rank.
    """
    attributes = {name: (name, value) for name, value in found.items()}
    # An enum makes its special methods when it is made.
    left_out = set(filter(_is_special, vars(cls))) if issubclass(cls, enum.Enum) else _SET_BY_TYPE
    for name, value in vars(cls).items():
        if name not in found and name not in left_out and _is_of_a_base(cls, name, value):
            # A copy of the name, as cloudpickle makes: streams must not depend on what Python interns.
            attributes[name] = "".join(name), value
    own = dict(attributes[name] for name in vars(cls) if name in attributes)
    if sys.version_info >= (3, 14):  # cloudpickle sends them only if they have been read
        own.pop("__annotations_cache__", None)
        own |= {"__annotations__": found} if (found := annotations_of(cls)) else {}
    return own


def _is_special(name: str) -> bool:
    return name.startswith("__")


def _is_of_a_base(cls: type, name: str, value: Any) -> bool:
    return any(vars(base).get(name, UNBOUND) is value for base in cls.__bases__)


def member_attributes(cls: type) -> dict[str, dict[str, Any]]:
    """Return what the code of an enum has set on its members, which are made before that code is there."""
    if not issubclass(cls, enum.Enum):
        return {}
    own = {
        name: {key: value for key, value in vars(member).items() if key not in _SET_BY_ENUM}
        for name, member in cls.__members__.items()
    }
    return {name: attributes for name, attributes in own.items() if attributes}


def restore_class(
    make: Callable[..., type], args: tuple[Any, ...], binding: Binding, is_quiet: bool
) -> type:
    """Make a class without its attributes. ``is_quiet``: no ``__init_subclass__`` hook runs."""
    cls = _make_quietly(make, args, is_quiet)
    bind(cls, binding)
    return cls


def _make_quietly(make: Callable[..., type], args: tuple[Any, ...], is_quiet: bool) -> type:
    """Make a class; the notebook's hooks and the code of its metaclasses do not run again.

    ``is_quiet``: hooks of libraries do not run, either.
    """
    if len(args) != SKELETON_CLASS_ARGS + 2:
        return make(*args)
    kind, name, bases, *rest = args
    if _has_notebooks_code(kind):
        kind = functools.partial(_made_by_library, kind)
    if not _has_hook(bases, is_quiet):
        return make(kind, name, bases, *rest)
    first = types.resolve_bases(bases)[0]
    quiet = _Quiet if first.__dictoffset__ else _QuietWithSlots  # Python compares their layouts
    cls = make(kind, name, (quiet, *bases), *rest)
    cls.__bases__ = types.resolve_bases(bases)
    return cls


def _has_notebooks_code(metaclass: type) -> bool:
    """Whether the notebook says how classes of ``metaclass`` are made: that needs the body of the class."""
    own = (vars(base) for base in metaclass.__mro__ if base.__module__ == "__main__")
    return any(not attributes.keys().isdisjoint(MAKING) for attributes in own)


MAKING = {"__init__", "__new__", "__prepare__"}
"""Methods of a metaclass that are called when a class is made."""


def _made_by_library(
    metaclass: type, name: str, bases: tuple[type, ...], attributes: dict[str, Any]
) -> Any:
    """Make a class of ``metaclass`` as the first of its bases does that is not the notebook's."""
    library: Any = next(base for base in metaclass.__mro__ if base.__module__ != "__main__")
    cls = library.__new__(metaclass, name, bases, attributes)
    library.__init__(cls, name, bases, attributes)
    return cls


def make_enum(
    track: Callable[..., type], kind: Any, bases: tuple[type, ...], name: str, *rest: Any
) -> type:
    """Make an enum of metaclass ``kind`` with its members; cloudpickle uses the metaclass of its base.

    Code of the notebook's metaclasses does not run again. ``track``: cloudpickle's function by which a class
    that is read twice is the same class.
    """
    qualname, members, module, tracker, _ = rest
    library: Any = next(base for base in kind.__mro__ if base.__module__ != "__main__")
    body = library.__prepare__(name, bases)
    for member, value in members.items():
        body[member] = _as_member(value)
    cls = library.__new__(kind, name, bases, body)
    cls.__module__, cls.__qualname__ = module, qualname
    return track(tracker, cls)


def _as_member(value: Any) -> Any:
    """Return what makes a member of ``value`` in the body of an enum, where functions are methods."""
    if sys.version_info >= (3, 11) and (hasattr(value, "__get__") or isinstance(value, type)):
        return enum.member(value)
    return value


class _Quiet:
    """A first base class that prevents the hooks of the other bases from running."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Do nothing."""


class _QuietWithSlots:
    """The same beside bases without attribute dictionaries."""

    __slots__ = ()

    __init_subclass__ = vars(_Quiet)["__init_subclass__"]


def _has_hook(bases: tuple[Any, ...], is_quiet: bool) -> bool:
    """Whether a base has a hook of the notebook, or any hook if ``is_quiet``."""
    hooks = (
        getattr(base.__init_subclass__, "__func__", None) for base in types.resolve_bases(bases)
    )
    return any(is_quiet or hook.__globals__.get("__name__") == "__main__" for hook in hooks if hook)


def restore_class_state(
    cls: Any,
    state: tuple[
        Callable[..., Any],
        Any,
        dict[str, Any],
        dict[str, dict[str, Any]],
        tuple[Registration, ...],
    ],
) -> None:
    """Set the attributes of a class and of an enum's members, and register it.

    Does nothing to a class that this process already had.
    """
    set_state, attributes, companions, members, registrations = state
    for name, value in companions.items():
        sys.modules["__main__"].__dict__.setdefault(name, value)
    if cls in complete_classes:
        return
    set_state(cls, attributes)
    for name, of_member in members.items():
        vars(cls[name]).update(of_member)
    for register, args in registrations:
        with suppress(ValueError):  # a hook of the library has registered it
            register(cls, *args)
    complete_classes.add(cls)
