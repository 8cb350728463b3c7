"""The comparison of what a cell leaves behind sees into values of all kinds."""

from __future__ import annotations

import collections
import copy
import datetime
import decimal
import enum
import fractions
import functools
import types
import uuid
from typing import Any

import numpy as np
import pytest
import torch

from tests.cell_grammar import canonical


class Pair(collections.namedtuple("Pair", "a b")):
    """With attributes of its own."""


class Text(str):
    def __repr__(self) -> str:
        return "Text"


class Number(int):
    def __repr__(self) -> str:
        return "Number"


class Items(list[Any]):
    def __repr__(self) -> str:
        return "Items"


class Table(dict[str, Any]):
    def __repr__(self) -> str:
        return "Table"


class Slots:
    __slots__ = ("a", "unset")

    def __init__(self, a: int) -> None:
        self.a = a


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Plain:
    def __init__(self, a: int) -> None:
        self.a = a

    def method(self) -> int:
        return self.a


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "numbers": (1, 1.0),
    "bool": (1, True),
    "zeros": (0.0, -0.0),
    "complex": (1j, 2j),
    "bytes": (b"a", b"b"),
    "bytearray": (bytearray(b"a"), bytearray(b"b")),
    "tuple": ((1,), (2,)),
    "namedtuple": (Pair(1, 2), Pair(1, 3)),
    "str subclass": (Text("a"), Text("b")),
    "int subclass": (Number(1), Number(2)),
    "list subclass": (Items([1]), Items([2])),
    "dict subclass": (Table(a=1), Table(a=2)),
    "OrderedDict": (collections.OrderedDict(a=1), collections.OrderedDict(a=2)),
    "order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "deque": (collections.deque([1]), collections.deque([2])),
    "set": ({1}, {2}),
    "frozenset": (frozenset({1}), frozenset({2})),
    "range": (range(2), range(3)),
    "slots": (Slots(1), Slots(2)),
    "attributes": (Plain(1), Plain(2)),
    "method": (Plain(1).method, Plain(2).method),
    "default": (lambda a=1: a, lambda a=2: a),
    "partial": (functools.partial(int, base=2), functools.partial(int, base=3)),
    "namespace": (types.SimpleNamespace(a=1), types.SimpleNamespace(a=2)),
    "error": (ValueError(1), ValueError(2)),
    "Enum": (Color.RED, Color.BLUE),
    "class": (int, bool),
    "Fraction": (fractions.Fraction(1, 2), fractions.Fraction(1, 3)),
    "Decimal": (decimal.Decimal("1.0"), decimal.Decimal("1.00")),
    "UUID": (uuid.UUID(int=1), uuid.UUID(int=2)),
    "date": (datetime.date(2024, 1, 1), datetime.date(2024, 1, 2)),
    "NumPy scalar": (np.int8(1), np.int8(2)),
    "NumPy float": (np.float64(1), np.float64(2)),
    "NumPy dtype": (np.dtype("i4"), np.dtype("i8")),
    "array": (np.zeros(2), np.ones(2)),
    "tensor": (torch.zeros(2), torch.ones(2)),
    "torch.Size": (torch.Size([1]), torch.Size([2])),
    "torch.dtype": (torch.float32, torch.float64),
    "torch.device": (torch.device("cpu"), torch.device("meta")),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different_values_have_different_forms(kind: str) -> None:
    one, other = DIFFERENT[kind]
    assert canonical(one) != canonical(other)
    assert canonical([one]) != canonical([other])
    assert canonical(one) == canonical(copy.deepcopy(one))


def test_sets_of_other_orders_have_the_same_form() -> None:
    assert list({8, 0}) != list({0, 8})
    assert canonical({8, 0}) == canonical({0, 8})
