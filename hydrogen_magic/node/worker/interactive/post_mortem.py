"""The last exception of a rank whose process stays, for the debugger."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.node.worker import main_thread

_NAMES = ("last_type", "last_value", "last_traceback", "last_exc")


def keep(error: BaseException) -> None:
    """Keep ``error`` with the user's frames, where Python's debuggers look for it."""
    error.__traceback__ = main_thread.users_part(error.__traceback__)
    kept = (type(error), error, error.__traceback__, error)
    for name, value in zip(_NAMES, kept, strict=True):
        setattr(sys, name, value)


def forget() -> None:
    """Let go of it: its frames hold tensors."""
    for name in _NAMES:
        vars(sys).pop(name, None)


def debug() -> None:
    """Open the debugger at the exception that is kept, for ``%debug``."""
    error = getattr(sys, "last_value", None)
    if error is None:
        print("nothing to debug: this rank has run another cell since it failed", file=sys.stderr)
    else:
        examine(error, error.__traceback__, "%debug")


def examine(error: BaseException, found: TracebackType | None, asked_by: str) -> None:
    """Print ``error`` and open the debugger where it was raised."""
    import pdb

    print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)
    try:
        pdb.post_mortem(found)
    except HydrogenError as refused:  # there is no input line; the error itself matters more
        print(f"{asked_by}: {refused}", file=sys.stderr)
