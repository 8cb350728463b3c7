"""Types of command-line arguments of the magics; an error message shows the correct form."""

from __future__ import annotations

import argparse
import difflib
import keyword
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

_LONGEST_NAME = 100


def typed(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return ``convert`` so that argparse shows the message of its ValueError."""

    def checked(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def choice(choices: Sequence[str]) -> Callable[[str], str]:
    """Return a converter that accepts ``choices`` only and suggests the nearest."""

    def checked(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not supported; {not_one_of(text, choices)}"
            )
        return text

    return checked


def ranks(text: str) -> int:
    """Return a number of ranks, negative for this machine; ValueError for 0 and for other text."""
    number = _whole(text)
    if number == 0:
        raise ValueError("should not be 0: a gang has at least one rank")
    return number


def whole_number(least: int = 0, bits: int | None = None) -> Callable[[str], int]:
    """Return a converter that accepts whole numbers from ``least`` on, and below ``2**bits``."""

    def checked(text: str) -> int:
        number = _whole(text)
        if number < least:
            raise ValueError(f"should be {least} or more, got {text}")
        if bits is not None and number >= 2**bits:
            raise ValueError(f"should be below 2**{bits}, got {text}")
        return number

    return typed(checked)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"should be a whole number, got {text!r}") from None


def rank_numbers(text: str) -> tuple[int, ...]:
    """Return the ranks in ``0,2`` in order; ValueError for other text."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise ValueError(f"should be numbers of ranks, like 0,2; got {text!r}")
    return tuple(sorted(set(map(int, parts))))


def env_variable(text: str) -> tuple[str, str]:
    """Return name and value of ``K=V``, or raise ValueError."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError(f"should be NAME=VALUE, got {text!r}")
    return name, value


def variable_names(text: str) -> tuple[str, ...]:
    """Return the names in ``model,history``; ValueError for text that is not a name."""
    # As Python reads identifiers (PEP 3131).
    text = unicodedata.normalize("NFKC", text)
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    wrong = [name for name in names if not name.isidentifier() or keyword.iskeyword(name)]
    if wrong or not names:
        raise ValueError(f"should be variable names, like model,history; got {text!r}")
    return names


def displaying_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks in ``0,2`` in order, none for ``all``; ValueError for other text."""
    if text.strip() == "all":
        return ()
    try:
        return rank_numbers(text)
    except ValueError:
        raise ValueError(f"should be all, or numbers of ranks like 0,2; got {text!r}") from None


def swept_values(text: str) -> tuple[str, str]:
    """Return the name and the values of ``lr=0.1,0.01``; ValueError without a name or values."""
    name, _, values = text.partition("=")
    name = unicodedata.normalize("NFKC", name.strip())
    if not name.isidentifier() or keyword.iskeyword(name) or not values.strip():
        raise ValueError(f"should be NAME=VALUE,VALUE, like lr=0.1,0.01; got {text.strip()!r}")
    return name, values.strip()


def run_name(text: str) -> str:
    """Return the name without surrounding space; ValueError for an empty one or one of several lines."""
    name = text.strip()
    if not name.isprintable() or not 0 < len(name) <= _LONGEST_NAME:
        raise ValueError(f"should be a name of 1 to {_LONGEST_NAME} characters, got {text!r}")
    return name


def python_file(text: str) -> str:
    """Return the file name with ``~`` expanded; ValueError when it does not end in ``.py``."""
    if not text.endswith(".py"):
        raise ValueError(f"should be a file name that ends in .py, got {text!r}")
    return os.path.expanduser(text)


def new_file(text: str) -> str:
    """Return the file name with ``~`` expanded; ValueError when no file can be written there."""
    text = os.path.expanduser(text)
    path = Path(text)
    if path.is_dir():
        raise ValueError(f"should be a file, {text!r} is a directory")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {text!r}: there is no directory {str(path.parent)!r}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"cannot write {text!r}: permission denied")
    return text


_UNITS_S = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|min|[smhd])?")


def parse_duration_s(text: str) -> float:
    """Return the seconds in ``90``, ``1.5h``, ``5m`` or ``1h30m``; ValueError when not positive."""
    compact = text.strip().lower().replace(" ", "")
    parts = _DURATION_PART.findall(compact)
    seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != compact or seconds <= 0:
        raise ValueError(f"should be a time in seconds, or like 5m or 1h30m; got {text!r}")
    return seconds


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_size_bytes(text: str) -> int:
    """Return the bytes in ``2GiB``, ``500MB``, ``1g`` or ``1000000``; ValueError otherwise.

    A bare letter counts in powers of 1024, as in most command lines.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"should be a size like 500MB or 2GiB, got {text!r}")
    is_decimal = text.strip().lower().endswith("b") and not match[3]
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1000 if is_decimal else 1024) ** power)


def not_one_of(word: str, choices: Iterable[str]) -> str:
    """Return the end of an error message about ``word``, which is none of ``choices``."""
    known = list(choices)
    cutoff = 0.5 if len(word) == 2 else 0.7  # `ir` is closer to `lr` than `close` is to `logs`
    close = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    if close and len(known) > 8:  # a long list would bury the suggestion
        return f"did you mean {close[0]}?"
    start = f"did you mean {close[0]}? Choose" if close else "choose"
    return f"{start} {' or '.join(filter(None, (', '.join(known[:-1]), known[-1])))}"
