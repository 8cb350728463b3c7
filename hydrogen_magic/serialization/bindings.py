"""Names in the reader's ``__main__`` of the functions, classes and other globals that a stream makes."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple


class Binding(NamedTuple):
    """The name of a function, class or other global in the reader's ``__main__``."""

    name: str
    """Empty: no name."""
    is_writers: bool
    """The writer's ``__main__`` has the same object under that name."""


UNBOUND = Binding("", False)


def bind(obj: Any, binding: Binding) -> None:
    """Give an object its name in ``__main__``, unless another one has it."""
    if binding.name:
        sys.modules["__main__"].__dict__.setdefault(binding.name, obj)
    if binding.is_writers:
        # A class that its metaclass lists is made within itself; pickle drops the outer one.
        _writers.setdefault(binding.name or obj.__qualname__, obj)


_writers: dict[str, Any] = {}
"""Objects of streams that their writer's ``__main__`` also has; see :func:`take_writers`."""


def take_writers() -> dict[str, Any]:
    """Return the objects read since the last call that can go back to their writer by name."""
    taken = dict(_writers)
    _writers.clear()
    return taken


def restore_global(
    kind: Any, binding: Binding, args: tuple[Any, ...], options: dict[str, Any] | None
) -> Any:
    """Make an object whose class pickles it as a global.

    ``options`` is None for one whose state follows. Such objects are compared by identity, so that of
    ``__main__`` is used if there is one.
    """
    if options is not None:
        # These take the module of their caller for their own.
        names = {"__name__": "__main__", "kind": kind, "args": args, "options": options}
        obj = eval("kind(*args, **options)", names)
    else:
        known = vars(sys.modules["__main__"]).get(binding.name)
        obj = known if type(known) is kind else kind.__new__(kind)
    bind(obj, binding)
    return obj
