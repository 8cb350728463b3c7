"""Names of columns, in messages and checks for duplicates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hydrogen_magic.errors import InferError

__all__ = ["listed", "refuse_repeated"]

_MOST_LISTED = 8
"""Maximum number of names in a message; a frame may have thousands."""


def refuse_repeated(names: Sequence[str], who: str, remedy: str) -> None:
    """Raise InferError if two columns have the same name, which would be ambiguous."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise InferError(f"{who} more than one column {listed(repeated)}: {remedy}")


def listed(names: Sequence[str]) -> str:
    """Return names for a message: ``'a', 'b' and 12 more``."""
    shown = ", ".join(repr(name) for name in names[:_MOST_LISTED])
    more = len(names) - _MOST_LISTED
    return (shown + (f" and {more} more" if more > 0 else "")) or "no columns"
