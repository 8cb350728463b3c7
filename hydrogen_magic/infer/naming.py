"""Names of columns: which come back, and which cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydrogen_magic.errors import InferError

if TYPE_CHECKING:
    from hydrogen_magic.predict.options import InferOptions

__all__ = ["kept_names", "listed", "refuse_repeated"]

_MOST_LISTED = 8
"""Names in a message; a frame may have thousands."""


def kept_names(names: Sequence[str], options: InferOptions) -> list[str]:
    """Return which of the frame's columns come back, in the order that was asked for."""
    kept = list(options.kept(names))
    refuse_repeated(kept, "--columns names", "name each once")
    return kept


def refuse_repeated(names: Sequence[str], who: str, remedy: str) -> None:
    """Raise InferError where two columns have one name: nobody could say which was meant."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise InferError(f"{who} more than one column {listed(repeated)}: {remedy}")


def listed(names: Sequence[str]) -> str:
    """Return names for a message: ``'a', 'b' and 12 more``."""
    shown = ", ".join(repr(name) for name in names[:_MOST_LISTED])
    more = len(names) - _MOST_LISTED
    return (shown + (f" and {more} more" if more > 0 else "")) or "no columns"
