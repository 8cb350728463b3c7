"""Annotations, which Python evaluates when they are first read, from 3.14 on (PEP 649).

They may contain names that do not exist, such as those of imports under ``if TYPE_CHECKING``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def annotations_of(obj: Any) -> dict[str, Any]:
    """Return the annotations of a function, or a class's own; all as text if one cannot be evaluated."""
    if sys.version_info >= (3, 14):
        import annotationlib

        with suppress(Exception):  # an annotation may be any expression
            found: dict[str, Any] = obj.__annotations__
            return found
        return annotationlib.get_annotations(obj, format=annotationlib.Format.STRING)
    own = vars(obj).get("__annotations__") if isinstance(obj, type) else obj.__annotations__
    return own if isinstance(own, dict) else {}


def signature_of(function: Callable[..., Any], **options: Any) -> inspect.Signature:
    """Return what ``inspect.signature`` does; annotations are text if one cannot be evaluated.

    Raises:
        TypeError, ValueError: Python does not know the parameters.
    """
    if sys.version_info >= (3, 14):
        import annotationlib

        with suppress(Exception):
            return inspect.signature(function, **options)
        options["annotation_format"] = annotationlib.Format.STRING
    return inspect.signature(function, **options)
