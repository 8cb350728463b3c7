"""Options that the classes have beyond their originals, and their names in messages."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hydrogen_magic.core.job import JobSpec, variables
from hydrogen_magic.errors import HydrogenError, RankFailedError

_COMMON = {
    "--pack": "`pack=True`",
    "--spread": "`pack=False`",
    "--max-closure": "`%config Distributed.max_closure`",
    "--wait": "an option of `%%distributed`",
}
"""Names for options of the magics that all classes have in common."""


@dataclass(frozen=True)
class GangOptions:
    """Options of a gang that the originals do not have; None: the setting of ``%config Distributed.*``."""

    env: Mapping[str, str] | None = None
    retries: int | None = None
    timeout: float | None = None
    start_timeout: float | None = None
    pack: bool | None = None

    def __post_init__(self) -> None:
        """Raise TypeError or ValueError for invalid values."""
        JobSpec(**self._chosen())

    def spec(self, **fields: Any) -> JobSpec:
        """Return a spec of these options; ``fields``: those that the class sets itself."""
        return replace(_configured(), **fields, **self._chosen())

    def _chosen(self) -> dict[str, Any]:
        given = {
            "env": None if self.env is None else variables(self.env),
            "retries": self.retries,
            "timeout_s": self.timeout,
            "start_timeout_s": self.start_timeout,
            "pack": self.pack,
        }
        return {name: value for name, value in given.items() if value is not None}


def _configured() -> JobSpec:
    """Return the settings of ``%config Distributed.*`` in this notebook."""
    magics = sys.modules.get("hydrogen_magic.notebook.magics")
    if magics is None:
        return JobSpec()
    from hydrogen_magic.views import shell_here

    shell = shell_here()
    found = [
        each for each in getattr(shell, "configurables", ()) if type(each) is magics.Distributed
    ]
    spec: JobSpec = found[-1].defaults() if found else JobSpec()
    return spec


def whole(name: str, number: int) -> int:
    """Return an argument, which may be of any integer type, as an int; raise TypeError for others."""
    try:
        return operator.index(number)
    except TypeError:
        kind = type(number).__name__
        raise TypeError(f"{name} should be an int, got {number!r}, a {kind}") from None


def positive(name: str, number: int) -> int:
    """Return an argument, which may be of any integer type, as an int.

    Raises TypeError if it is not a whole number, ValueError if it is not positive.
    """
    found = whole(name, number)
    if found <= 0:
        raise ValueError(f"{name} has to be a positive integer, got {found}")
    return found


@contextmanager
def own_names(names: Mapping[str, str]) -> Iterator[None]:
    """Add a class's own names for the options of the magics to the errors that mention these."""
    try:
        yield
    except RankFailedError:
        raise  # its text is the user's own
    except HydrogenError as error:
        # "--np" is also the beginning of torchrun's --nproc-per-node.
        used = [
            f"`{option}` is {own}"
            for option, own in {**names, **_COMMON}.items()
            if re.search(rf"{re.escape(option)}(?![\w-])", error.report)
        ]
        if used:
            line = f"\nhere {', '.join(used)}"
            error.args = (f"{error}{line}",)
            error.report += line
        raise
