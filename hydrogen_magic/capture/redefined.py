"""Functions and classes that the notebook has defined again, after a session's ranks got the earlier ones."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

from hydrogen_magic.serialization.code_names import CODE
from hydrogen_magic.serialization.identity import ObjectIdentity, Originals
from hydrogen_magic.serialization.importable import is_main

_MAKING = ("__new__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__")
"""Methods of a class that say how its instances are made from what is sent."""
_LAYOUT = ("__basicsize__", "__itemsize__", "__dictoffset__", "__weakrefoffset__")


def name_of_earlier(obj: Any, namespace: Mapping[str, Any], originals: Originals) -> str | None:
    """Return the name of an earlier definition: on the ranks, what refers to it follows the present one.

    Not if it still has a name. The ranks keep a definition that the notebook has deleted.
    """
    if ObjectIdentity(obj) not in originals.definitions:
        return None
    name = str(obj.__qualname__).partition(".")[0]
    is_code = isinstance(namespace.get(name, obj), CODE)
    return None if not is_code or any(_names_of(obj, namespace)) else name


def present_one(obj: Any, namespace: Mapping[str, Any], originals: Originals) -> Any:
    """Return the definition that takes the place of an earlier one in what is sent; None: there is none.

    Not if it contains the earlier one, or may not fit instances of that: then the ranks get the earlier one.
    """
    name = name_of_earlier(obj, namespace, originals)
    if name is None or name != obj.__qualname__ or ObjectIdentity(obj) in originals.extended:
        return None
    present = namespace.get(name)
    is_definition = isinstance(present, CODE) and is_main(present) and present.__qualname__ == name
    return present if is_definition and _fits(obj, present) else None


def _names_of(obj: Any, namespace: Mapping[str, Any]) -> Iterator[str]:
    """Yield the variables that refer to ``obj``; IPython keeps the value of each cell as ``_`` and ``_5``."""
    found = (name for name, value in namespace.items() if value is obj)
    return (name for name in found if str(name).strip("_0123456789"))


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
