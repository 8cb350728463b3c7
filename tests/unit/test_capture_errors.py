"""What cannot travel is named before anything starts, with the line that uses it and the remedy."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hydrogen_magic.capture import capture_call, capture_script
from hydrogen_magic.errors import CaptureError
from tests.capture_rig import Notebook, inline


def refusal(notebook: Notebook, text: str, **options: object) -> str:
    with pytest.raises(CaptureError) as caught:
        notebook.capture(text, **options)
    return str(caught.value)


# ── undefined names ──────────────────────────────────────────────────────────────────────────────


def test_undefined_in_the_cell(notebook: Notebook) -> None:
    notebook.cell("learning_rate = 1")
    message = refusal(notebook, "a = 1\nprint(a,\n  learning_rat)")
    assert "`learning_rat`, line 4: learning_rat)" in message
    assert "did you mean `learning_rate`?" in message
    message = refusal(notebook, "a = 1\n\f\nprint(learning_rat)")  # for Python, \f ends no line
    assert "`learning_rat`, line 4: print(learning_rat)" in message
    assert "run `import hydrogen_magic as hm` in" in refusal(notebook, "hm.rank()")


def test_undefined_in_a_function_of_another_cell(notebook: Notebook) -> None:
    notebook.cell("import functools\nunrelated = 1")
    notebook.cell("""
        def normalize(x):
            y = x
            return y * scale
        class Net:
            @functools.lru_cache
            def forward(self, x):
                return [normalize(i) for i in x]
        nets = {"a": Net}
    """)
    message = refusal(notebook, "nets['a']().forward([1])")
    assert "`scale`, used by normalize() in Cell In[2], line 3, is not defined" in message
    notebook.capture("scale = 2\nnets['a']().forward([1])")


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    maybe\nexcept NameError:\n    maybe = 1",
        "def f():\n    global late\n    late = 1\nf(); late",
        "def f(): return later()\ndef later(): return f",
        "class A:\n    x = 1\n    y = x\n    def m(self): return __class__, A",
        "[i for i in range(3) if (last := i)]; last",
        "import os.path as p; from math import sin as s; p, s",
        "for i in []: pass\nprint(i)",
        "with open('x') as f, open('y'): f",
        "match 1:\n    case {'a': b, **rest}: b, rest\n    case [c, *d]: c, d",
        "f = lambda a, *b, c=1, **d: (a, b, c, d); f",
        "async def g():\n    async for x in y(): yield x\nasync def y(): yield 1\nawait g().__anext__()",
        "from os.path import *\njoin('a', 'b')",
        "def f(a: int, *, b: str = 'x') -> list[int]: return {k: v for k, v in a}",
        "!echo {not_here} $HOME ${x}\nfiles = !ls\n%cd .\nfiles",
        "%timeit -n1 x = 1",
        "del_me = 1\ndel del_me\n__name__, __builtins__, NotImplemented, display, get_ipython",
        "x: int = 1\nx",
    ],
)
def test_valid_cells_pass(notebook: Notebook, text: str) -> None:
    notebook.capture(text)


def test_a_chain_of_functions_may_be_longer_than_pythons_stack(notebook: Notebook) -> None:
    lines = [f"def f{n}(): return f{n - 1}()" for n in range(1, 1200)]
    notebook.cell("\n".join(["def f0(): return 1", *lines]))
    captured = notebook.capture("f1199")
    assert [item.kind for item in captured.inventory].count("function") == 1200
    assert inline(captured).__name__ == "f1199"
    assert inline(notebook.capture("f480()")) == 1


def test_what_is_perhaps_never_read_may_lack_names(notebook: Notebook) -> None:
    notebook.cell("def helper(): return undefined_name")
    notebook.capture("eval('helper')")


def test_missing_out_name(notebook: Notebook) -> None:
    message = refusal(notebook, "model = 1", out=["modle"])
    assert message == "`modle` (--out) is never assigned in the cell; did you mean `model`?"
    notebook.cell("open = open")  # as IPython does
    assert refusal(notebook, "1", out=["nope"]) == "`nope` (--out) is never assigned in the cell"


# ── values that cannot travel ────────────────────────────────────────────────────────────────────

UNPICKLABLE = {
    "import threading; x = threading.Lock()": ("`x` (_thread.lock)", "create it inside the cell"),
    "import threading\nclass M: pass\nx = M(); x.lock = threading.RLock()": (
        "`x.lock` (_thread.RLock)",
        "__getstate__",
    ),
    "import threading; x = [{'e': threading.Event()}]": (
        "`x[0]['e']._cond._lock` (_thread.lock)",
        "create it inside the cell",
    ),
    "import io, zipfile; s = zipfile.ZipFile(io.BytesIO(), 'w'); x = s": (
        "`x._lock` (_thread.RLock)",
        "open the archive inside the cell",
    ),
    "import io, zipfile; s = zipfile.ZipFile('/dev/null', 'w'); x = s": (
        "`x.fp` (_io.BufferedRandom)",
        "open the archive inside the cell",
    ),
    "import threading\nclass Pool: __module__ = 'sqlalchemy.pool'\nx = Pool(); x.lock = threading.Lock()": (
        "`x.lock` (_thread.lock)",
        "connect inside the cell",
    ),
    "import threading\nx = threading.Lock()\nfor _ in range(50): x = [x]": (
        "`x` (list), because of a _thread.lock inside it,",
        "create it inside the cell",
    ),
    "x = (i for i in [])": ("`x` (generator)", "list"),
    "import socket; x = s = socket.socket()": ("`x` (socket.socket)", "open it inside the cell"),
    "x = s = open('/etc/hostname')": ("`x` (_io.TextIOWrapper)", "open it inside the cell"),
    "x = s = open('/etc/hostname', 'rb')": ("`x` (_io.BufferedReader)", "open it inside the cell"),
    "import sqlite3; x = s = sqlite3.connect(':memory:')": (
        "`x` (sqlite3.Connection)",
        "open the connection inside the cell",
    ),
    "def make():\n    import threading; lock = threading.Lock()\n    def f(): return lock\n    return f\n"
    "x = make()": ("`x()'s variable lock` (_thread.lock)", "create it inside the cell"),
    "x = []\nfor _ in range(100_000): x = [x]": ("`x` (list)", "nested too deeply"),
    "class Deep:\n    def __reduce__(self): return (list, ([Deep()],))\nx = Deep()": (
        "`x` (Deep)",
        "RecursionError",
    ),
    "class Bad:\n    def __getstate__(self): raise OSError('no')\nx = Bad()": (
        "`x` (Bad)",
        "OSError: no",
    ),
}


def test_definitions_of_the_main_script_in_a_spawned_process(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """multiprocessing names its main module ``__mp_main__`` there."""
    monkeypatch.setitem(sys.modules, "__mp_main__", notebook.module)
    notebook.cell("__name__ = '__mp_main__'\ndef work(): return 1\nclass Item: pass\nx = [Item()]")
    for text, name in [("work()", "work"), ("x", "Item")]:
        assert f"define {name} in a module and import it" in refusal(notebook, text)
    with pytest.raises(CaptureError, match="define work in a module and import it"):
        capture_call(notebook.names["work"], (), {})


@pytest.mark.parametrize("setup", UNPICKLABLE)
def test_unpicklable_values_are_named(notebook: Notebook, setup: str) -> None:
    notebook.cell(setup)
    found, remedy = UNPICKLABLE[setup]
    message = refusal(notebook, "a = 1\nprint(x)")
    assert found in message and remedy in message and "line 3: print(x)" in message
    if "s" in notebook.names:
        notebook.names["s"].close()


def test_through_a_function(notebook: Notebook) -> None:
    notebook.cell("import threading; lock = threading.Lock()\ndef f():\n    with lock: pass")
    assert "(used by f() in Cell In[1], line 3)" in refusal(notebook, "f()")


@pytest.mark.parametrize(
    ("module", "name", "remedy"),
    [
        ("pyspark", "SparkContext", "use Spark in the notebook"),
        ("pyspark.sql", "SparkSession", "use Spark in the notebook"),
        ("pyspark", "RDD", "send its data (.toPandas(), .collect()), or use %%infer"),
        (
            "pyspark.sql.classic.dataframe",
            "DataFrame",
            "use hm.dataset(df), which ranks read with hm.shard(); or send its data",
        ),
    ],
)
def test_spark_is_refused(notebook: Notebook, module: str, name: str, remedy: str) -> None:
    pytest.importorskip("pyspark")
    notebook.cell(f"from {module} import {name}\nx = [object.__new__({name})]")
    message = refusal(notebook, "x")
    assert (
        "`x[0]`" in message and f"{name} exists only in the notebook's process; {remedy}" in message
    )


def test_too_large_names_the_biggest(notebook: Notebook) -> None:
    notebook.cell("""
        import numpy as np
        big, small = np.zeros(10 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
        texts = ["x" * 1000 + str(i) for i in range(20_000)]
    """)
    message = refusal(notebook, "big, small", max_closure_bytes=8 << 20)
    assert "`big` 10.5 MB, `small` 1.0 MB" in message and "--max-closure" in message
    assert "`texts`" in refusal(notebook, "texts", max_closure_bytes=8 << 20)


def test_much_is_a_warning_and_costs_no_copy(notebook: Notebook, tmp_path: Path) -> None:
    notebook.names["path"] = str(tmp_path / "sparse")
    notebook.cell("""
        import numpy as np
        huge = np.memmap(path, np.uint8, "w+", shape=(4 << 30,))
        half = huge[: 300 << 20]
    """)
    message = refusal(notebook, "huge.sum()")
    assert "4.3 GB" in message
    (warning,) = notebook.capture("half.sum()").warnings
    assert "315 MB" in warning and "arrays take this memory once on every host" in warning


def test_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(CaptureError, match=r"did you mean train\.py"):
        capture_script("trian.py", [], as_module=False)
    with pytest.raises(CaptureError, match=r"no module train\.py"):
        capture_script("train.py", [], as_module=True)
    with pytest.raises(CaptureError, match=r"no module json\.nothing"):
        capture_script("json.nothing", [], as_module=True)
    capture_script("json.tool", [], as_module=True)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(CaptureError, match=r"no script train\.py in .*/gone \(deleted\)"):
        capture_script("train.py", [], as_module=False)


@pytest.mark.parametrize("text", ["return x", "break", "nonlocal x", "b = = 2"])
def test_wrong_syntax_is_found_before_anything_starts(notebook: Notebook, text: str) -> None:
    """Also what only the compiler refuses; with the line of the visible cell."""
    with pytest.raises(SyntaxError) as caught:
        notebook.capture(f"x = 1\n{text}")
    assert caught.value.lineno == 3 and caught.value.filename == "<cell 9>"
    assert (caught.value.text or "").rstrip() == text


def test_objects_of_libraries_have_their_own_remedies(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    notebook.cell("from tqdm import tqdm\nbar = tqdm([1], disable=True)")
    message = refusal(notebook, "bar.update()")
    assert "`bar` (tqdm.std.tqdm) cannot be sent: a progress bar" in message
    assert "create the bar inside the cell" in message


@pytest.mark.parametrize("made", ["bar", "[bar]", "{'bars': [bar]}"])
def test_a_bar_of_a_notebook_is_refused_as_one(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, made: str
) -> None:
    """It has widgets, which know the whole kernel: neither these nor the kernel's history are named."""
    pytest.importorskip("ipywidgets")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    notebook.cell(f"from tqdm.notebook import tqdm\nbar = tqdm(range(3))\nx = {made}")
    message = refusal(notebook, "x")
    assert "tqdm.notebook.tqdm" in message and "create the bar inside the cell" in message
    assert "istory" not in message and "SQLite" not in message and "idget" not in message


def test_names_of_functions_that_the_cell_only_defines_may_come_later(notebook: Notebook) -> None:
    notebook.cell("""
        k = 2
        def same(function): return function
        def earlier(): return device
        def first(): return earlier()
    """)
    captured = notebook.capture("""
        def show(): return report(), k
        def report() -> int: return device + first()
        class Model:
            def forward(self): return device
        k
    """)
    assert inline(captured) == 2
    uses = (
        "show()",
        "[report]",
        "same(Model)",
        "@same\ndef f(): return device",
        "first()",
        "first",
    )
    for use in uses:
        with pytest.raises(CaptureError, match="`device`"):
            notebook.capture(
                "def report(): return device\ndef show(): return report()\ndef second(): return first()\n"
                "class Model:\n    def forward(self): return device\n" + use
            )
    with pytest.raises(CaptureError, match="`device`"):
        notebook.capture("def predict(batch): return device")


def test_a_rank_names_a_class_that_a_file_refers_to(notebook: Notebook) -> None:
    notebook.cell("import pickle\nclass Net: pass\nsaved = pickle.dumps(Net())")
    with pytest.raises(AttributeError, match="'Net'") as caught:
        inline(notebook.capture("pickle.loads(saved)"))
    (note,) = caught.value.__notes__
    assert note.startswith("`Net` was not sent, since the cell does not use it")
    assert inline(notebook.capture("Net; type(pickle.loads(saved)) is Net")) is True


def test_a_rank_names_the_value_that_it_cannot_restore(notebook: Notebook) -> None:
    """As pickle: an object of a cycle is put into a set before it has its attributes."""
    notebook.cell("""
        class Node:
            def __init__(self, n): self.n, self.others = n, set()
            def __hash__(self): return hash(self.n)
        a, b = Node(1), Node(2)
        a.others.add(b); b.others.add(a)
        def count(node): return len(node.others)
    """)
    calls = capture_call(notebook.names["count"], [notebook.names["a"]], {})
    for captured, named in ((notebook.capture("a"), "the notebook's `a`"), (calls, "the call")):
        with pytest.raises(AttributeError, match="no attribute 'n'") as caught:
            inline(captured)
        (note,) = caught.value.__notes__
        assert note.startswith(f"raised while the rank restored {named}; ")


def test_a_rank_says_why_it_lacks_a_value_that_the_cell_seemed_not_to_need(
    notebook: Notebook,
) -> None:
    """The cell replaces it before it reads it, but not on every path."""
    notebook.cell("import threading\nn = 0\nlock = threading.Lock()")
    captured = notebook.capture("for _ in range(n):\n    lock = None\nlock")
    with pytest.raises(NameError, match="name 'lock' is not defined") as caught:
        inline(captured)
    (note,) = caught.value.__notes__
    assert note.startswith("the notebook's `lock`, a _thread.lock, was not sent")
    notebook.cell("n = 1")
    assert inline(notebook.capture("for _ in range(n):\n    lock = None\nlock")) is None
