"""Names of columns in messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hydrogen_magic.core.units import first_of
from hydrogen_magic.errors import InferError, OptionValueError

_MAX_LISTED = 8


def refuse_repeated(names: Sequence[str], owner: str, remedy: str) -> None:
    """Raise InferError if two columns have the same name."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise InferError(f"{owner} more than one column {listed(repeated)}: {remedy}")


def refuse_taken(
    names: Sequence[str], taken: Sequence[str], column: str, *, is_case_sensitive: bool
) -> None:
    """Raise OptionValueError if a DataFrame with the columns ``taken`` has a predicted column already.

    ``column``: the ``predictionCol`` of Spark ML.
    """
    keys = {name if is_case_sensitive else name.lower(): name for name in names}
    for name in taken:
        predicted = keys.get(name if is_case_sensitive else name.lower())
        if predicted is not None:
            other = (
                "choose another name with predictionCol"
                if predicted == column
                else "give it another name in predict"
            )
            raise OptionValueError(
                f"the DataFrame already has a column {name!r}: drop it, or {other}"
            )


def listed(names: Sequence[str]) -> str:
    """Return names for a message: ``'a', 'b' and 12 more``."""
    return first_of(map(repr, names), _MAX_LISTED) or "no columns"
