"""Options that the classes have beyond their originals, and their names in messages."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hydrogen_magic.core.job import JobSpec, variables
from hydrogen_magic.errors import HydrogenError, RankFailedError

Words = Sequence[tuple[str, str]]
"""Patterns of options of the magics, and a class's own names for them."""

_COMMON: Words = (
    (r"`--pack`", "`pack=True`"),
    (r"`--spread`", "`pack=False`"),
    (r"`?--max-closure`?", "`%config Distributed.max_closure`"),
    (r"`--wait ", "`%%distributed --wait "),
    (r"`--on inline --np 1`", "`%%distributed --on inline --np 1`"),
)


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


def launch_words(*, num_processes: str, local_mode: str, use_gpu: str) -> Words:
    """Return the names that a class has for options of the magics."""
    return (
        (
            r"`--on spark` needs a Spark session, but (.*?: )",
            rf"`{local_mode}=False` needs a Spark session, but \1use `{local_mode}=True` to run on this "
            r"machine, or ",
        ),
        (r"`--np (\d+) --gpu`", rf"`{num_processes}=\1, {use_gpu}=True`"),
        (r"drop `--gpu`", f"pass `{use_gpu}=False`"),
        (r"--np (\d+)", rf"{num_processes}=\1"),
        (r"\bnp (\d+),", rf"{num_processes}=\1,"),
        (r"`--on spark`", f"`{local_mode}=False`"),
        (r"--on local", f"{local_mode}=True"),
        (r" ?--gpu\b", f" {use_gpu}=True"),
        (r"\buse_gpu=", f"{use_gpu}="),
    )


@contextmanager
def reworded(words: Words) -> Iterator[None]:
    """Replace the magics' options in error messages by a class's own."""
    try:
        yield
    except RankFailedError:
        raise  # its text is the user's own
    except HydrogenError as error:
        error.args = (_in_words(str(error), words),)
        error.report = _in_words(error.report, words)
        raise


def _in_words(text: str, words: Words) -> str:
    for pattern, replacement in (*words, *_COMMON):
        text = re.sub(pattern, replacement, text)
    return text
