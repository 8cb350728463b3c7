"""Functions and classes that the notebook has defined again, after a session's ranks got the earlier ones."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from hydrogen_magic.serialization.code_names import CODE
from hydrogen_magic.serialization.identity import ObjectIdentity, Originals
from hydrogen_magic.serialization.importable import is_main

_MAKING = ("__new__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")
"""Methods of a class that say how its instances are made from what is sent."""
_LAYOUT = ("__basicsize__", "__itemsize__", "__dictoffset__", "__weakrefoffset__")


def name_of_earlier(obj: Any, namespace: Mapping[str, Any], originals: Originals) -> str | None:
    """Return the name of an earlier definition: on the ranks, what refers to it follows the present one.

    Not if it still has a name.
    """
    if ObjectIdentity(obj) not in originals.definitions:
        return None
    name = str(obj.__qualname__).partition(".")[0]
    is_replaced = isinstance(namespace.get(name), CODE)
    return name if is_replaced and not any(value is obj for value in namespace.values()) else None


def present_one(obj: Any, namespace: Mapping[str, Any], originals: Originals) -> Any:
    """Return the definition that takes the place of an earlier one in what is sent; None: there is none.

    Not if it contains the earlier one, or may not fit instances of that: then the ranks get the earlier one.
    """
    name = name_of_earlier(obj, namespace, originals)
    if name is None or name != obj.__qualname__ or ObjectIdentity(obj) in originals.extended:
        return None
    present = namespace[name]
    is_definition = is_main(present) and present.__qualname__ == name
    return present if is_definition and _fits(obj, present) else None


def _fits(earlier: Any, present: Any) -> bool:
    """Whether ``present`` is of the same kind, and its instances can take the contents of earlier ones."""
    if isinstance(earlier, type) and isinstance(present, type):
        is_alike = type(earlier) is type(present) and _layout(earlier) == _layout(present)
        return is_alike and not (_makes(earlier) or _makes(present))
    return type(earlier) is type(present) is types.FunctionType


def _layout(cls: type) -> tuple[Any, ...]:
    slots = [vars(base).get("__slots__") for base in cls.__mro__]
    return *(getattr(cls, name) for name in _LAYOUT), [str(each) for each in slots if each]


def _makes(cls: type) -> bool:
    return any(getattr(cls, name, None) is not getattr(object, name, None) for name in _MAKING)
