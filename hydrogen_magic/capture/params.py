"""Parameters of a run: the plain values by which lists and trackers distinguish it from others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

from hydrogen_magic.core.library_types import python_scalar
from hydrogen_magic.core.masking import is_secret, is_secret_name

Param = bool | int | float | str

_LONGEST = 100
"""Characters of a text that tells runs apart."""


def among(values: Mapping[str, Any]) -> dict[str, Param]:
    """Return the numbers, flags and short texts among ``values``, without secrets."""
    plain = {name: python_scalar(value) for name, value in values.items()}
    return {name: value for name, value in plain.items() if _is_param(name, value)}


def of_arguments(arguments: Sequence[str]) -> dict[str, Param]:
    """Return the options among a script's arguments: ``--lr 0.1``, ``--lr=0.1``, ``lr=0.1``, ``--amp``."""
    found: dict[str, Any] = {}
    for place, word in enumerate(arguments, 1):
        name, has_value, value = word.partition("=")
        key = name.lstrip("-").replace("-", "_")
        if has_value and key:
            found[key] = _number_or_text(value)
        elif word.startswith("--") and key:
            found[key] = _value_of(arguments[place:])
    return among({name: value for name, value in found.items() if not is_secret_name(name)})


def _value_of(following: Sequence[str]) -> bool | int | float | str:
    """Return the value of an option before these words: several numbers as text, True without a value."""
    numbers = [*takewhile(lambda word: not isinstance(_number_or_text(word), str), following)]
    if len(numbers) > 1:
        return " ".join(numbers)
    is_flag = not following or following[0].startswith("--")
    return True if is_flag else _number_or_text(following[0])


def _number_or_text(word: str) -> int | float | str:
    for number in (int, float):
        with suppress(ValueError):
            return number(word)
    return word


def _is_param(name: str, value: Any) -> bool:
    is_short = type(value) is str and len(value) <= _LONGEST
    is_int = type(value) is int and value.bit_length() < 64
    return (is_short or is_int or type(value) in (bool, float)) and not is_secret(name, value)
