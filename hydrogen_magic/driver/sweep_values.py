"""The values of ``--sweep``: all combinations, and their texts."""

from __future__ import annotations

import ast
import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from hydrogen_magic.capture import Captured
from hydrogen_magic.capture.required_names import similar
from hydrogen_magic.core import syntax
from hydrogen_magic.core.library_types import python_scalar
from hydrogen_magic.core.masking import MASK, is_secret
from hydrogen_magic.core.units import clipped
from hydrogen_magic.errors import OptionValueError
from hydrogen_magic.node.worker.plain_values import is_plain

_LONGEST_VALUE = 40
"""Characters of a value in the name of a run."""
_LONGEST_FOLDER = 100
_NEXT_NAME = re.compile(r"\s+(?=[A-Za-z_]\w*=(?!=))")


def combinations(
    options: Sequence[tuple[str, str]], namespace: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return all combinations of the values of ``--sweep`` options, the last name varying fastest.

    ``options``: names, and their values as written. Values are Python expressions, evaluated in
    ``namespace``; of a name whose value there is text, words without quotation marks are text. Raises
    OptionValueError if they cannot be evaluated.
    """
    columns = [
        [(name, value) for value in _values(name, text, namespace)] for name, text in options
    ]
    return [dict(chosen) for chosen in itertools.product(*columns)]


def _values(name: str, text: str, namespace: Mapping[str, Any]) -> list[Any]:
    is_text = isinstance(namespace.get(name), str) and not _is_expression(text)
    words = [part.strip() for part in text.split(",") if part.strip()]
    values = words if is_text else _evaluated(name, text, namespace)
    if not values:
        raise OptionValueError(f"--sweep {name}={text} has no value")
    return values


def _is_expression(text: str) -> bool:
    """Whether it is no plain words: ``*names`` and ``f'a{n}',b`` are Python, ``don't,stop`` is not."""
    if text[0] in "*'\"":
        return True
    with suppress(SyntaxError, ValueError):
        return ("'" in text or '"' in text) and bool(syntax.parse(f"[{text}]", mode="eval"))
    return False


def _evaluated(name: str, text: str, namespace: Mapping[str, Any]) -> list[Any]:
    try:
        values: list[Any] = eval(f"[{text}]", dict(namespace))
    except Exception as error:  # the expressions are the user's
        words = _NEXT_NAME.split(f"{name}={text}")
        if isinstance(error, SyntaxError) and len(words) > 1 and "(" not in text:
            each = " ".join(f"--sweep {word}" for word in words)
            raise OptionValueError(f"--sweep takes one name: write {each}") from None
        hint = ""
        if isinstance(error, (NameError, SyntaxError)):
            hint = f"; text needs two kinds of quotation marks: --sweep \"{name}='a','b'\""
        raise OptionValueError(
            f"--sweep {name}={text}: {type(error).__name__}: {error}. Values are Python expressions{hint}"
        ) from None
    return values


def note_on(options: Sequence[tuple[str, str]], swept: Sequence[Mapping[str, Any]]) -> str | None:
    """Return how to sweep over the items of a list, if that is the only value of a sweep."""
    for name, text in options:
        value = swept[0][name]
        if len(swept) == 1 and isinstance(value, (list, tuple, range)):
            return (
                f"note: --sweep {name}={text} is one run, whose value is a {type(value).__name__}; "
                f"--sweep {name}=*{text} sweeps over its items"
            )
    return None


def label_of(values: Mapping[str, Any]) -> str:
    """Return ``lr=0.1 width=64``."""
    return " ".join(f"{name}={_value_text(name, value)}" for name, value in values.items())


def folders_of(swept: Iterable[tuple[Mapping[str, Any], Callable[[Any], str]]]) -> list[str]:
    """Return the name of a folder for each combination, the same in each sweep with these values.

    ``swept``: each combination, and a function that returns the digest of a value. A hash ends the names of
    values that are no file names, or whose text other values can have, too; a number those of equal values.
    """
    seen: Counter[str] = Counter()
    names: list[str] = []
    for values, digest_of in swept:
        name = _folder_name(values, digest_of)
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}~{seen[name]}")
    return names


def _folder_name(values: Mapping[str, Any], digest_of: Callable[[Any], str]) -> str:
    texts, digests = [], []
    for name, value in values.items():
        text = _text(name, value)
        if not _identifies(text, python_scalar(value)):
            digests.append(f"{name}={digest_of(value)}")
            # A repr can have addresses, and the items of a set in another order.
            text = _text(name, value if hasattr(value, "__name__") else type(value))
        texts.append(f"{name}={text}")
    text = ",".join(texts)
    whole = " ".join((text, *digests))
    name = re.sub(r"[^\w.,=+-]+", "_", text, flags=re.ASCII)[:_LONGEST_FOLDER]
    return name if name == whole else f"{name}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def _identifies(text: str, value: Any) -> bool:
    """Whether no other value has this text: the text ``'1'`` has that of the number 1."""
    if type(value) is str:
        return value == text and not _is_literal(text)
    return is_plain(value) and repr(value) == text


def _is_literal(text: str) -> bool:
    with suppress(ValueError):
        float(text)  # also nan
        return True
    with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        ast.literal_eval(syntax.parse(text, mode="eval"))
        return True
    return False


def params_of(values: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return the values as they are listed with a run: plain ones, and short texts of all others."""
    listed = {name: python_scalar(value) for name, value in values.items()}
    return {
        name: value if _is_number(value) else _value_text(name, value)
        for name, value in listed.items()
        if not is_secret(name, value)
    }


def _is_number(value: Any) -> bool:
    """Whether a record can have it as a number: its integers have 64 bits."""
    return type(value) in (bool, float) or (type(value) is int and value.bit_length() < 64)


def _value_text(name: str, value: Any) -> str:
    return clipped(_text(name, value), _LONGEST_VALUE)


def _text(name: str, value: Any) -> str:
    value = python_scalar(value)
    if is_secret(name, value):
        return MASK
    own_name = value if isinstance(value, str) else getattr(value, "__name__", None)
    return " ".join((own_name if isinstance(own_name, str) else repr(value)).split())


def check_used(names: Sequence[str], captured: Captured) -> None:
    """Raise OptionValueError if the cell does not use one of ``names`` of the notebook."""
    used = [item.name for item in captured.inventory if item.kind != "module"]
    for name in names:
        if name not in used and name in (captured.assigned or ()):
            raise OptionValueError(
                f"--sweep {name}: the cell assigns `{name}` before it uses it; drop that assignment"
            )
        if name not in used:
            values = [item.name for item in captured.inventory if item.kind == "value"]
            others = ", ".join(each for each in values if each not in names)
            instead = f"; it uses {others}" if others else ""
            near = similar(name, used)
            hint = f". Did you mean {near[0]}?" if near else ""
            raise OptionValueError(
                f"--sweep {name}: the cell does not use `{name}` of the notebook{instead}{hint}"
            )
