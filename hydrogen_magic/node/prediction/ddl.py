"""Column types as text, as in ``--schema "score double, vector array<float>, box struct<x: int>"``.

A subset of Spark's DDL with Spark's meaning: ``timestamp`` is a point in time (stored in UTC),
``timestamp_ntz`` is a local date and time.
"""

from __future__ import annotations

import re
from typing import NoReturn

import pyarrow as pa

from hydrogen_magic.core.argument_types import not_one_of
from hydrogen_magic.errors import InferError
from hydrogen_magic.node.prediction.arrow_types import NESTED, family

_PLAIN = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}
_ALIASES = {
    "boolean": "bool",
    "tinyint": "byte int8",
    "smallint": "short int16",
    "int": "integer int32",
    "bigint": "long int64",
    "float": "real float32",
    "double": "float64",
    "string": "str text",
    "binary": "bytes",
    "timestamp": "timestamp_ltz",
    "decimal": "dec numeric",
}
"""Spark's other names, and those of NumPy and Arrow."""
_NAMES = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}
_COMPOUND = ("decimal", "array", "struct", "map")
_TOKEN = re.compile(r"\s*(`(?:[^`]|``)+`|\w+|[<>(),:]|\S)")
_EXAMPLE = 'as in --schema "score double, label string"'
_MAX_DEPTH = 50


def parse_schema(text: str) -> pa.Schema:
    """Return the columns in ``text``. Raises InferError if it is not valid."""
    return pa.schema(_Parser(text).columns())


class _Parser:
    """A recursive descent parser."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[str] = [*_TOKEN.findall(text), ""]
        self._depth = 0

    def columns(self) -> list[pa.Field]:
        fields = self._fields(end="")
        if not fields:
            self._refuse(f"has no column, {_EXAMPLE}")
        return fields

    def _fields(self, end: str) -> list[pa.Field]:
        """Read ``name type, name: type`` up to ``end``."""
        fields: dict[str, pa.Field] = {}
        while self._tokens[0] != end:
            if fields:
                self._expect(",")
            name = self._name()
            if name in fields:
                self._refuse(f"has two columns {name!r}")
            self._skip(":")
            fields[name] = pa.field(name, self._type())
        return [*fields.values()]

    def _name(self) -> str:
        token = self._next()
        if len(token) > 1 and token[0] == "`":
            return token[1:-1].replace("``", "`")
        if not re.fullmatch(r"\w+", token):
            self._refuse(f"has {_shown(token)} instead of a column's name, {_EXAMPLE}")
        return token

    def _type(self) -> pa.DataType:
        word = self._next().lower()
        word = _NAMES.get(word, word)
        if word in _PLAIN:
            return _PLAIN[word]
        if word not in _COMPOUND:
            known = not_one_of(word, [*_PLAIN, *_COMPOUND]) if word else _EXAMPLE
            self._refuse(f"has {_shown(word)} instead of a type: {known}")
        return self._decimal() if word == "decimal" else self._nested(word)

    def _decimal(self) -> pa.DataType:
        if not self._skip("("):
            return pa.decimal128(10, 0)  # Spark's default
        precision = self._number()
        scale = self._number() if self._skip(",") else 0
        self._expect(")")
        if not (1 <= precision <= 38 and scale <= precision):
            self._refuse(
                f"has decimal({precision}, {scale}), but a decimal has at most 38 digits, including"
                " its scale"
            )
        return pa.decimal128(precision, scale)

    def _nested(self, word: str) -> pa.DataType:
        self._expect("<")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._refuse(f"is nested more than {_MAX_DEPTH} levels deep")
        kind: pa.DataType
        if word == "struct":
            kind = pa.struct(self._fields(end=">"))
        elif word == "array":
            kind = pa.list_(self._type())
        else:
            key = self._type()
            self._expect(",")
            kind = pa.map_(key, self._type())
        self._expect(">")
        self._depth -= 1
        return kind

    def _number(self) -> int:
        token = self._next()
        if not token.isdecimal():
            self._refuse(f"has {_shown(token)} instead of a number")
        return int(token)

    def _next(self) -> str:
        return self._tokens.pop(0) if self._tokens[0] else ""

    def _skip(self, token: str) -> bool:
        is_next = self._tokens[0] == token
        if is_next:
            self._next()
        return is_next

    def _expect(self, wanted: str) -> None:
        token = self._next()
        if token != wanted:
            self._refuse(f"has {_shown(token)} instead of {wanted!r}")

    def _refuse(self, reason: str) -> NoReturn:
        raise InferError(f"--schema {self._text!r} {reason}")


def _shown(token: str) -> str:
    return repr(token) if token else "its end"


# ── types of Spark ───────────────────────────────────────────────────────────────────────────────

_WIDENED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.date64(): pa.date32(),
}


def spark_schema(schema: pa.Schema, *, as_text: bool = False) -> pa.Schema:
    """Return ``schema`` in the types that Spark has.

    Unsigned integers become the next wider signed ones, for which uint64 becomes a decimal, and dictionaries
    their values. ``as_text``: columns of types that Spark lacks are text. Otherwise raises InferError with
    the first of them.
    """
    fields = {field.name: spark_type(field.type) for field in schema}
    for name, kind in fields.items():
        if kind is None and not as_text:
            raise InferError(
                f"column {name!r} has type {schema.field(name).type}, which Spark does not support:"
                " return another type from predict, or make it text with --on-error collect"
            )
    return pa.schema({name: pa.string() if kind is None else kind for name, kind in fields.items()})


def name_of(kind: pa.DataType) -> str:
    """Return the words for a type in ``--schema``, or Arrow's name if it has none."""
    of_family = family(kind)
    if of_family == "decimal":
        return f"decimal({kind.precision}, {kind.scale})"
    if of_family == "list":
        return f"array<{name_of(kind.value_type)}>"
    if of_family == "map":
        return f"map<{name_of(kind.key_type)}, {name_of(kind.item_type)}>"
    if of_family == "struct":
        return (
            f"struct<{', '.join(f'{_quoted(part.name)}: {name_of(part.type)}' for part in kind)}>"
        )
    return next((word for word, known in _PLAIN.items() if known == kind), str(kind))


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"\w+", name) else f"`{name.replace('`', '``')}`"


def spark_type(kind: pa.DataType) -> pa.DataType | None:
    """Return ``kind`` as Spark has it, None if it has no such type."""
    if isinstance(kind, pa.BaseExtensionType):
        return spark_type(kind.storage_type)
    of_family = family(kind)
    if of_family == "dictionary":
        return spark_type(kind.value_type)
    if of_family in ("text", "bytes"):
        return pa.string() if of_family == "text" else pa.binary()
    if of_family == "timestamp":
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if of_family == "duration":
        return pa.duration("us")
    if of_family == "decimal":
        is_valid = kind.precision <= 38 and 0 <= kind.scale <= kind.precision
        return pa.decimal128(kind.precision, kind.scale) if is_valid else None
    if of_family in NESTED:
        return _spark_nested(kind, of_family)
    return _WIDENED.get(kind, kind if kind in _PLAIN.values() else None)


def _spark_nested(kind: pa.DataType, of_family: str) -> pa.DataType | None:
    if of_family == "list":
        item = spark_type(kind.value_type)
        return None if item is None else pa.list_(item)
    if of_family == "map":
        key, value = spark_type(kind.key_type), spark_type(kind.item_type)
        return None if key is None or value is None else pa.map_(key, value)
    parts = {field.name: spark_type(field.type) for field in kind}
    return None if None in parts.values() else pa.struct(parts)
