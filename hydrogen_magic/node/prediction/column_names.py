"""Names of columns in messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hydrogen_magic.errors import InferError

_MAX_LISTED = 8


def refuse_repeated(names: Sequence[str], owner: str, remedy: str) -> None:
    """Raise InferError if two columns have the same name."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise InferError(f"{owner} more than one column {listed(repeated)}: {remedy}")


def listed(names: Sequence[str]) -> str:
    """Return names for a message: ``'a', 'b' and 12 more``."""
    shown = ", ".join(repr(name) for name in names[:_MAX_LISTED])
    more = len(names) - _MAX_LISTED
    return (shown + (f" and {more} more" if more > 0 else "")) or "no columns"
