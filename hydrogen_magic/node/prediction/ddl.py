"""Types of columns as text: the subset of Spark's DDL that a person writes after ``--schema``.

``score double, vector array<float>, box struct<x: int, y: int>``. Words mean what they mean to Spark:
``timestamp`` is a moment (kept in UTC), ``timestamp_ntz`` what a clock on the wall shows.
"""

from __future__ import annotations

import re
from typing import NoReturn

import pyarrow as pa

from hydrogen_magic.core.argument_types import not_one_of
from hydrogen_magic.errors import InferError

__all__ = ["parse_schema", "type_text", "schema_text"]

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
    "bool": "boolean", "byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint",
    "real": "float", "str": "string", "text": "string", "bytes": "binary",
    "int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint",
    "float32": "float", "float64": "double", "timestamp_ltz": "timestamp", "dec": "decimal",
    "numeric": "decimal",
}  # fmt: skip
"""Spark's other names, and those of NumPy and Arrow."""

_COMPOUND = ("decimal", "array", "struct", "map")
_TOKEN = re.compile(r"\s*(`(?:[^`]|``)+`|\w+|[<>(),:]|\S)")
_EXAMPLE = 'as in --schema "score double, label string"'
_MAX_DEPTH = 50


def parse_schema(text: str) -> pa.Schema:
    """Return the columns in ``text``; InferError where it cannot be read."""
    return pa.schema(_DdlParser(text).columns())


class _DdlParser:
    """One reading of a text, from left to right."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[str] = [*_TOKEN.findall(text), ""]
        self.place = 0
        self.depth = 0

    def columns(self) -> list[pa.Field]:
        fields = self._fields(end="")
        if not fields:
            self._refuse(f"names no column, {_EXAMPLE}")
        return fields

    def _fields(self, end: str) -> list[pa.Field]:
        """Read ``name type, name: type`` up to ``end``; names are not repeated."""
        fields: list[pa.Field] = []
        while self._peek() != end:
            if fields:
                self._expect(",")
            name = self._name()
            if name in {field.name for field in fields}:
                self._refuse(f"names {name!r} twice")
            if self._peek() == ":":
                self._next()
            fields.append(pa.field(name, self._type()))
        return fields

    def _name(self) -> str:
        token = self._next()
        if token.startswith("`") and len(token) > 1:
            return token[1:-1].replace("``", "`")
        if not re.fullmatch(r"\w+", token):
            self._refuse(f"has {_seen(token)} where a column's name should be, {_EXAMPLE}")
        return token

    def _type(self) -> pa.DataType:
        word = self._next().lower()
        word = _ALIASES.get(word, word)
        if word in _PLAIN:
            return _PLAIN[word]
        if word not in _COMPOUND:
            known = not_one_of(word, [*_PLAIN, *_COMPOUND]) if word else _EXAMPLE
            self._refuse(f"has {_seen(word)} where a type should be: {known}")
        return self._decimal() if word == "decimal" else self._nested(word)

    def _decimal(self) -> pa.DataType:
        if self._peek() != "(":
            return pa.decimal128(10, 0)  # what Spark means by it
        self._next()
        precision = self._number()
        scale = 0
        if self._peek() == ",":
            self._next()
            scale = self._number()
        self._expect(")")
        if not (1 <= precision <= 38 and scale <= precision):
            self._refuse(
                f"has decimal({precision}, {scale}): at most 38 digits, the scale among them"
            )
        return pa.decimal128(precision, scale)

    def _nested(self, word: str) -> pa.DataType:
        self._expect("<")
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            self._refuse(f"is nested more than {_MAX_DEPTH} deep")
        found: pa.DataType
        if word == "struct":
            found = pa.struct(self._fields(end=">"))
        elif word == "array":
            found = pa.list_(self._type())
        else:
            key = self._type()
            self._expect(",")
            found = pa.map_(key, self._type())
        self._expect(">")
        self.depth -= 1
        return found

    def _number(self) -> int:
        token = self._next()
        if not token.isdecimal():
            self._refuse(f"has {_seen(token)} where a number should be")
        return int(token)

    def _peek(self) -> str:
        return self.tokens[self.place]

    def _next(self) -> str:
        token = self._peek()
        self.place = min(self.place + 1, len(self.tokens) - 1)
        return token

    def _expect(self, wanted: str) -> None:
        token = self._next()
        if token != wanted:
            self._refuse(f"has {_seen(token)} where {wanted!r} should be")

    def _refuse(self, why: str) -> NoReturn:
        raise InferError(f"--schema {self.text!r} {why}")


def _seen(token: str) -> str:
    return repr(token) if token else "its end"


# ── back to text ─────────────────────────────────────────────────────────────────────────────────


def schema_text(schema: pa.Schema) -> str:
    """Return ``schema`` as DDL; InferError naming the column where Spark has no such type."""
    parts = []
    for field in schema:
        text = type_text(field.type)
        if text is None:
            raise InferError(
                f"column {field.name!r} is {field.type}, and Spark has no such type: let predict"
                " return another, or name one with --schema"
            )
        parts.append(f"{_quoted(field.name)} {text}")
    return ", ".join(parts)


def type_text(found: pa.DataType) -> str | None:
    """Return Spark's word for an Arrow type, or None where it has none.

    Unsigned whole numbers become the next wider signed ones, half floats floats; what is encoded
    by a dictionary is named by its values, and a list of fixed size is an array.
    """
    types = pa.types
    if types.is_dictionary(found):
        return type_text(found.value_type)
    if types.is_timestamp(found):
        return "timestamp_ntz" if found.tz is None else "timestamp"
    if types.is_decimal(found):
        is_known = found.precision <= 38 and 0 <= found.scale <= found.precision
        return f"decimal({found.precision},{found.scale})" if is_known else None
    nested = _nested_text(found)
    return nested if nested is not None else _PLAIN_TEXT.get(str(found))


_PLAIN_TEXT = {
    **{str(found): word for word, found in _PLAIN.items()},
    "uint8": "smallint", "uint16": "int", "uint32": "bigint", "uint64": "decimal(20,0)",
    "halffloat": "float", "large_string": "string", "string_view": "string",
    "large_binary": "binary", "binary_view": "binary", "date64[ms]": "date", "null": "void",
}  # fmt: skip


def _nested_text(found: pa.DataType) -> str | None:
    types = pa.types
    if types.is_list(found) or types.is_large_list(found) or types.is_fixed_size_list(found):
        item = type_text(found.value_type)
        return item and f"array<{item}>"
    if types.is_map(found):
        key, item = type_text(found.key_type), type_text(found.item_type)
        return key and item and f"map<{key},{item}>"
    if types.is_struct(found):
        fields = [(field.name, type_text(field.type)) for field in found]
        if all(text for _, text in fields):
            return f"struct<{','.join(f'{_quoted(name)}:{text}' for name, text in fields)}>"
    if types.is_fixed_size_binary(found):
        return "binary"
    if isinstance(found, pa.BaseExtensionType):
        return type_text(found.storage_type)
    return None


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"\w+", name) else "`" + name.replace("`", "``") + "`"
