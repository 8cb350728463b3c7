"""How handlers of classes are listed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Handler: TypeAlias = Callable[[Any], Any]
"""Reduces an object, as ``__reduce_ex__`` does; NotImplemented: pickle does."""
Handlers: TypeAlias = tuple[tuple[str, str, Handler], ...]
"""Module and name of a class, and the handler of its objects and of those of subclasses."""
