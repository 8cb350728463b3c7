"""A cell has the names on a rank that CPython gives it in the notebook."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrogen_magic.errors import CaptureError
from tests.capture_rig import Notebook, inline
from tests.cell_grammar import difference, write_cell


@settings(max_examples=60, derandomize=True, database=None)
@given(st.randoms(use_true_random=False))
def test_generated_cells(random: Random) -> None:
    text = write_cell(random)
    assert difference(text) == "", text


CELLS = {
    "[x for x in x]": [4, 5],
    "def f():\n    global n\n    n += 1\nf(); n": 2,
    "class C: n += 1\nC.n": 2,
    "class A:\n    class B:\n        n = n\nA.B.n": 1,
    "class C:\n    if n == 2: m = 0\n    k = m\nC.k": 7,
    "with suppress(KeyError):\n    raise KeyError\n    n = 2\nn": 1,
    "def f():\n    def g(a: T): pass\n    return g.__annotations__\nf()": {"a": int},
    "@now\ndef g(): return n\nn = 4\ng": 1,
    "exec('zz = 5'); zz": 5,
    "name = 'n'\neval('n'), globals()['m']": (1, 7),
    "from __future__ import annotations\ndef f(a: Undefined): return 1\nf(2)": 1,
    "calls[0]()": [4, 5],
    "n = 2 if later[0]() else 0\nn": 2,
}
"""Faults of the past: the cell, and its value."""


@pytest.mark.parametrize("text", CELLS)
def test_scopes(notebook: Notebook, text: str) -> None:
    notebook.cell("""
        from contextlib import suppress
        import collections
        x, n, m, T = [4, 5], 1, 7, int
        def now(function): return function()
        list = x
        calls = collections.deque([lambda: list])
        later = collections.deque([lambda: n])
    """)
    assert inline(notebook.capture(text)) == CELLS[text]


def test_a_name_that_the_cell_most_likely_assigns_first_stays_home_if_it_cannot_be_sent(
    notebook: Notebook,
) -> None:
    notebook.cell("""
        import threading, numpy as np
        lock, large, small = threading.Lock(), np.zeros(1 << 20), np.zeros(4)
        def decorator(function): return function
    """)
    captured = notebook.capture("""
        @decorator
        def use(): return lock, large, small
        lock, large, small = 1, 2, 3
        use()
    """)
    assert {item.name for item in captured.inventory} == {"decorator", "small"}
    assert inline(captured) == (1, 2, 3)
    with pytest.raises(CaptureError, match="`lock`"):
        notebook.capture("def use(): return lock\nuse()")


@pytest.mark.parametrize(
    "cell",
    [
        "for _ in range(2):\n    own = Lock()\nown.locked()",
        "if large is not None:\n    own = Lock()\nown.locked()",
        "def make():\n    global own\n    own = Lock()\nmake(); own.locked()",
    ],
)
def test_a_name_that_the_cell_assigns_above_may_be_one_that_cannot_be_sent(
    notebook: Notebook, cell: str
) -> None:
    notebook.cell("""
        from threading import Lock
        import numpy as np
        own, large = Lock(), np.zeros(1 << 18)
    """)
    captured = notebook.capture(cell)
    assert "own" not in {item.name for item in captured.inventory}
    assert inline(captured) is False
    for needs_it in (
        "own.locked()\nown = 1",
        "for _ in range(2):\n    own.locked()\n    own = Lock()",
        "if large is None:\n    own = None\nelse:\n    own.locked()",
        "def reset():\n    global own\n    own = None\nown.locked()",
        "own = own.locked()",
    ):
        with pytest.raises(CaptureError, match="`own`"):
            notebook.capture(needs_it)
    with pytest.raises(CaptureError, match="over the limit"):
        notebook.capture("for _ in range(2):\n    large = 1\nlarge", max_closure_bytes=1 << 20)


def test_a_lambda_is_called_later_in_a_cell_of_many_names(notebook: Notebook) -> None:
    """From the 257th name of its code on, Python needs two instructions to assign one."""
    notebook.cell("import threading; own = threading.Lock()")
    many = "\n".join(f"name{n} = {n}" for n in range(300))
    captured = notebook.capture(f"{many}\nget = lambda: own\nown = 1\nget()")
    assert "own" not in {item.name for item in captured.inventory} and inline(captured) == 1


def test_the_notebooks_value_of_a_name_is_sent_for_the_other_path(notebook: Notebook) -> None:
    notebook.cell("import numpy as np\nlarge = np.zeros(1 << 18)")
    captured = notebook.capture("for _ in ():\n    large = None\nlen(large)")
    assert inline(captured) == 1 << 18


def test_a_text_that_may_be_a_name_never_refuses_a_cell(notebook: Notebook) -> None:
    notebook.cell("""
        import threading, types
        lock, k, j, args = threading.Lock(), 1, 2, types.SimpleNamespace(x=1)
        def g(): return k
        def f(): return eval("g()") + globals()["j"]
    """)
    captured = notebook.capture("vars(args), eval('k'), f(), 'lock'")
    assert inline(captured) == ({"x": 1}, 1, 3, "lock")
