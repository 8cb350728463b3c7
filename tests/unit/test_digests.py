"""Digests of values for the comparison of notebooks: equal for equal values, and different for others."""

from __future__ import annotations

import copy
import threading
import types
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from benchmarks._digests import describe

SOURCE = """
def f(x, y=[1]): return x + g(y)
class C:
    a = 1
    def __init__(self): super().__init__(); self.b = [self]
    def m(self): return self.b
c = C()
"""


def _notebook(source: str) -> Any:
    module = types.ModuleType("__main__")
    exec(compile(source, "<cell>", "exec", dont_inherit=True), module.__dict__)
    return module


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (1, True),
        ([1, [2]], [1, [3]]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (np.arange(3), np.arange(3.0)),
        (np.array([1, "a"], object), np.array([1, "b"], object)),
        (np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[1, 0])),
        (torch.ones(2), torch.ones(2, requires_grad=True)),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16)),
        (torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)),
        (pd.DataFrame({"a": [1, None]}), pd.DataFrame({"a": [1, 2.0]})),
        (pd.Series(["x"], name="a"), pd.Series(["x"], name="b")),
        (pd.date_range("2024", periods=2), pd.date_range("2024", periods=2, freq="h")),
    ],
)
def test_equal_values_alone_have_equal_digests(value: Any, other: Any) -> None:
    assert describe(copy.deepcopy(value)).digest == describe(value).digest
    assert describe(other).digest != describe(value).digest


def test_code_of_the_notebook_counts_by_what_it_does() -> None:
    first, again = _notebook(SOURCE), _notebook("\n\n" + SOURCE)
    for name in ("f", "C", "c"):
        assert describe(vars(first)[name]).digest == describe(vars(again)[name]).digest
    for change in (("x + g", "x - g"), ("[1]", "[2]"), ("a = 1", "a = 2"), ("self.b", "self.d")):
        other = _notebook(SOURCE.replace(*change))
        digests = [[describe(vars(n)[name]).digest for name in ("f", "C")] for n in (first, other)]
        assert digests[0] != digests[1], change


def test_recursion_is_followed_once() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert describe(deep).digest == describe([deep]).digest, "too deep"
    module = _notebook(SOURCE)
    other = _notebook(SOURCE.replace("return self.b", "return self.d"))
    assert describe(module.C).digest not in (describe(other.C).digest, describe(deep).digest)


def test_a_function_is_the_same_if_it_is_compiled_with_the_import_that_it_uses() -> None:
    with_import = _notebook("import math\ndef f(x): return math.sqrt(x)")
    other = _notebook("def f(x): return math.sqrt(x)")
    assert describe(with_import.f).digest == describe(other.f).digest


def test_objects_that_cannot_be_pickled_count_by_their_types() -> None:
    assert describe(threading.Lock())[:2] == describe(threading.Lock())[:2]
    assert describe(n for n in ()).form == "generator"


def test_the_form_has_the_shape_and_no_values() -> None:
    assert (
        describe(np.zeros((2, 3))).form
        == describe(np.ones((2, 3))).form
        == "ndarray (2, 3) float64"
    )
    assert describe([1, 2]).form == describe([3, 4]).form != describe([3]).form
