"""A cell finds on a rank what it finds in the notebook."""

from __future__ import annotations

import ast
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from hydrogen_magic.capture import capture_call
from tests.capture_rig import Notebook, RankError, Ranks, write

pytestmark = pytest.mark.xdist_group("capture")

# ── names, imports, one namespace ────────────────────────────────────────────────────────────────


def test_everything_a_cell_uses_is_there(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("""
        import numpy.linalg as la
        import concurrent.futures, os.path
        from collections import OrderedDict as OD
        from math import *
        import functools, dataclasses
    """)
    notebook.cell("""
        scale = 3
        class Base:
            def go(self): return la.norm([3, 4]) * scale
        class Sub(Base):
            def go(self): return super().go() + floor(pi)
        def double(function):
            @functools.wraps(function)
            def doubled(*args): return 2 * function(*args)
            return doubled
        @double
        def decorated(x, table=OD(a=1)): return inner(x) + table["a"]
        def inner(x): return functions["add"](x)
        functions = {"add": lambda x: x + scale}
        @dataclasses.dataclass
        class Point:
            x: int
            tags: list = dataclasses.field(default_factory=lambda: [scale])
    """)
    rank = ranks.run(
        notebook.capture("""
        executor = concurrent.futures.ThreadPoolExecutor
        made = [decorated(1), Sub().go(), Point(1).tags, os.path.sep, executor.__name__]
        made
    """)
    )
    assert rank.value == [10, 18.0, [3], "/", "ThreadPoolExecutor"]
    assert rank.modules == []


def test_names_are_found_in_every_place_of_a_cell(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("""
        element, source, condition, key = 2, [1, 2], 1, "k"
        def function_decorator(function): return lambda: 1 + function()
        def class_decorator(cls): return cls
        class Meta(type): pass
        default, shown, index = 5, 6, 0
        from contextlib import nullcontext as context
        class Problem(Exception): pass
        body, factor = 7, 3
    """)
    rank = ranks.run(
        notebook.capture("""
        found = [element * n for n in source if n > condition]
        by_key = {key: n for n in [1]}
        @function_decorator
        def decorated(value=default): return value
        @class_decorator
        class Made(metaclass=Meta): pass
        with context() as nothing:
            pass
        try:
            raise Problem
        except Problem:
            found[index] *= factor
        (found, by_key, decorated(), type(Made).__name__, f"{shown}", (lambda: body)())
    """)
    )
    assert rank.value == ([12], {"k": 1}, 6, "Meta", "6", 7)


def test_one_namespace(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("""
        model = object()
        count = 0
        def train(): return model
        def step():
            global count
            count += 1
    """)
    rank = ranks.run(
        notebook.capture("""
        model = "the cell's"
        step(); step()
        (train(), count, train.__globals__ is globals(), __name__)
    """)
    )
    assert rank.value == ("the cell's", 2, True, "__main__")


def test_a_stale_value_that_the_cell_assigns_first_stays_home(notebook: Notebook) -> None:
    notebook.cell("""
        import threading
        model = threading.Lock()
        data = threading.Lock()
        batch = threading.Lock()
        def train(): return model, data
    """)
    captured = notebook.capture("""
        def load(): return batch
        model = 1
        with open("/dev/null") as f:
            data = 2
        if data: batch = 3
        else: batch = 4
        train(), load(), [batch for batch in [1]]
    """)
    assert [item.name for item in captured.inventory] == ["train"]


def test_conditional_assignment_needs_the_notebook(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("a = 1; b = 2; c = 3; d = 4")
    rank = ranks.run(
        notebook.capture("""
        import random
        if random.random() > 2: a = 10
        for b in []: pass
        try:
            raise KeyError
            c = 30
        except KeyError: pass
        d += 1
        [a, b, c, d]
    """)
    )
    assert rank.value == [1, 2, 3, 5]


def test_sharing_survives(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("""
        import torch
        from torch import nn
        net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
        net[2].weight = net[0].weight
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        whole = torch.zeros(10, 1000); view = whole[3]
        double = torch.ones(5, dtype=torch.float64).t()
        def counter():
            n = 0
            def up():
                nonlocal n
                n += 1
            def get(): return n
            return up, get
        up, get = counter()
    """)
    rank = ranks.run(
        notebook.capture(
            """
        assert net[2].weight is net[0].weight is optimizer.param_groups[0]["params"][0]
        view += 7
        assert whole[3, 5] == 7 and whole[2, 5] == 0
        up(); up()
        net(torch.ones(3)).sum().backward(); optimizer.step()
        whole, view, get(), net, optimizer, double
    """,
            out=["net"],
        )
    )
    whole, view, count, net, optimizer, double = rank.value
    assert count == 2 and double.dtype is torch.float64
    view += 1
    assert whole[3, 5] == 8
    assert rank.out["net"] is net
    assert optimizer.param_groups[0]["params"][0] is net[2].weight is net[0].weight
    assert notebook.names["view"][5] == 0, "the notebook's own tensor was touched"


def test_arrays_are_writable_copies(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("""
        import numpy as np
        big = np.zeros(100_000); small = np.zeros(3); fortran = np.asfortranarray(np.eye(200))
    """)
    rank = ranks.run(
        notebook.capture("""
        big[0] = small[0] = fortran[0, 1] = 5
        big, small, fortran
    """)
    )
    assert [array.sum() for array in rank.value] == [5, 5, 205]
    rank.value[0][1] = 1
    assert notebook.names["big"][0] == 0


def test_a_deleted_function_does_not_hide_a_builtin(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("def max(a, b): return a\nways = {'first': max}\ndel max")
    cell = notebook.capture("[ways['first']('ab', 'c'), max([1, 3, 2])]")
    assert ranks.run(cell).value == ["ab", 3]


def test_statement_loses_against_a_rebound_name(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("from math import sqrt, floor\nimport json")
    notebook.cell("def sqrt(x): return 'mine'\njson = 'text'")
    assert ranks.run(notebook.capture("sqrt(4), json, floor(1.5)")).value == ("mine", "text", 1)


def test_earlier_cells_are_parsed_once(notebook: Notebook, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook has hundreds of cells, and each parse of one takes a fraction of a millisecond."""
    notebook.cell("import math\ndef area(r): return math.pi * r ** 2")
    notebook.capture("area(1)")
    parsed, parse = [], ast.parse
    monkeypatch.setattr(ast, "parse", lambda text, *a, **k: parsed.append(text) or parse(text))
    notebook.capture("area(2)")
    assert not [text for text in parsed if "import math" in text]


def test_conditional_imports_and_side_effects(
    notebook: Notebook, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path,
        {
            "registry.py": "known = []",
            "plugin.py": "import registry; registry.known.append('plugin')",
            "kernel_only.py": "import sys\nif '__main__' not in sys.modules or not hasattr("
            "sys.modules['__main__'], 'get_ipython'): raise OSError('no kernel')",
        },
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    notebook.cell("""
        try:
            import does_not_exist as js
        except ImportError:
            import json as js
        try:
            import does_not_exist
        except ImportError:
            does_not_exist = None
        import plugin
        import kernel_only
        import registry
    """)
    rank = ranks.run(notebook.capture("does_not_exist or js.dumps(registry.known)"))
    assert rank.value == '["plugin"]'
    assert len(rank.warnings) == 1 and "`import kernel_only` (from an earlier" in rank.warnings[0]
    own = notebook.capture("try:\n    import kernel_only\nexcept OSError as e:\n    m = str(e)\nm")
    rank = ranks.run(own)
    assert (rank.value, rank.warnings) == ("no kernel", [])


def test_an_import_that_failed_in_the_notebook_is_not_repeated(
    notebook: Notebook, ranks: Ranks
) -> None:
    for text in ("import does_not_exist", "import json.nowhere", "from absent import thing"):
        with pytest.raises(ImportError):
            notebook.cell(text)
        notebook.history.append(text)
    assert ranks.run(notebook.capture("1 + 1")).warnings == []
    with pytest.raises(RankError, match="No module named 'does_not_exist'") as raised:
        ranks.run(notebook.capture("import does_not_exist"))
    assert "earlier cell" not in str(raised.value)


def test_lazily_loading_modules_travel_by_name(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("""
        import importlib.util, sys
        spec = importlib.util.find_spec("wave")
        sys.modules.pop("wave", None)
        spec.loader = importlib.util.LazyLoader(spec.loader)
        wave = importlib.util.module_from_spec(spec)
        sys.modules["wave"] = wave
        spec.loader.exec_module(wave)
        held = {"module": wave}
    """)
    captured = notebook.capture("wave.Error.__name__, held['module'] is wave")
    assert object.__getattribute__(notebook.names["wave"], "__dict__").get("Error") is None
    assert ranks.run(captured).value == ("Error", True)


def test_without_history_modules_travel_as_values(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("import xml.etree.ElementTree, os as system\nfrom functools import *")
    notebook.history.clear()
    rank = ranks.run(
        notebook.capture(
            "[xml.etree.ElementTree.Element('a').tag, system.sep, reduce(max, [1, 3, 2])]"
        )
    )
    assert rank.value == ["a", "/", 3]


# ── the notebook's classes are the rank's ────────────────────────────────────────────────────────


def test_plain_pickle_and_torch_save_find_notebook_classes(
    notebook: Notebook, ranks: Ranks, tmp_path: Path
) -> None:
    notebook.cell("""
        import torch, enum, typing
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.lin = torch.nn.Linear(2, 2)
            def forward(self, x): return self.lin(x)
        class Outer:
            class Inner: pass
        class Color(enum.Enum): RED = 1
        class Pair(typing.NamedTuple):
            a: int
        net, box = Net(), {"deep": [Outer.Inner(), Color.RED, Pair(1)]}
    """)
    rank = ranks.run(
        notebook.capture(f"""
        import pickle
        torch.save(net, {str(tmp_path / "net.pt")!r})
        assert box["deep"][1] is Color.RED
        class Mine(Net): pass
        pickle.dumps(box), box, net, Mine()
    """)
    )
    dumped, box, net, mine = rank.value
    names = notebook.names
    loaded = torch.load(tmp_path / "net.pt", weights_only=False)
    assert type(loaded) is names["Net"] is type(net)
    assert isinstance(mine, names["Net"]) and type(mine).__name__ == "Mine"
    for deep in (pickle.loads(dumped)["deep"], box["deep"]):
        assert type(deep[0]) is names["Outer"].Inner
        assert deep[1] is names["Color"].RED
        assert type(deep[2]) is names["Pair"]


def test_a_class_reached_through_an_instance_alone(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("""
        import collections
        factor = 2
        def helper(x): return x * factor
        class Thing:
            def __init__(self): self.v = 1
            def __setstate__(self, state): self.v = helper(state["v"])
        thing = collections.deque([collections.deque([Thing()])])
    """)
    rank = ranks.run(
        notebook.capture("""
        import pickle
        len(pickle.dumps(thing)) > 0, thing[0][0].v, sorted(n for n in globals() if n[0] != "_")
    """)
    )
    assert rank.value == (True, 2, ["Thing", "factor", "helper", "pickle", "thing"])


def test_calls_from_python(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("""
        import math
        k = 2
        def f(x, y=1): return math.floor(x * k) + y
        class A:
            def m(self, x): return f(x)
        async def later(): return k
    """)
    names = notebook.names
    calls = [
        (names["f"], (1.5,), {"y": 2}, 5),
        (names["A"]().m, (2,), {}, 5),
        (lambda x: x, ([1],), {}, [1]),
        (np.sum, ([1, 2],), {}, 3),
        (names["later"], (), {}, 2),
    ]
    for function, args, kwargs, expected in calls:
        captured = capture_call(function, args, kwargs)
        assert ranks.run(captured).value == expected


def test_objects_that_pickle_alone_cannot_take(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("""
        import contextlib, enum, functools, typing, torch
        class Lazy:
            @functools.cached_property
            def x(self): return 5
        @functools.lru_cache(maxsize=3)
        def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
        @functools.singledispatch
        def kind(x): return "object"
        @kind.register
        def _(x: int): return "int"
        @contextlib.contextmanager
        def managed(): yield 3
        @torch.no_grad()
        def frozen(): return not torch.is_grad_enabled()
        registry = {}
        class Base:
            def __init_subclass__(cls, key, **options):
                super().__init_subclass__(**options)
                registry[key] = cls
        class Sub(Base, key="s"): pass
        class Outer:
            class Flag(enum.IntFlag):
                A = 1
                B = 2
        UserId = typing.NewType("UserId", int)
        T = typing.TypeVar("T")
        class Box(typing.Generic[T]): pass
        box = Box[int]()
    """)
    rank = ranks.run(
        notebook.capture("""
        import pickle
        with managed() as got: pass
        assert registry == {"s": Sub} and pickle.loads(pickle.dumps(fib)) is fib
        %time timed = got + 1
        Lazy().x, fib(10), kind(1), kind(""), frozen(), timed, UserId(3), Outer.Flag.A | Outer.Flag.B, box
    """)
    )
    *values, flags, box = rank.value
    assert values == [5, 55, "int", "object", True, 4, 3]
    assert flags is notebook.names["Outer"].Flag(3)
    assert type(box) is notebook.names["Box"]


def test_globals_whose_classes_pickle_them_by_name(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("""
        import pickle
        from typing import Callable, Generic, NewType, ParamSpec, TypeVar
        P, T, UserId = ParamSpec("P"), TypeVar("T"), NewType("UserId", int)
        def timed(f: Callable[P, T]) -> Callable[P, T]:
            def call(*args: P.args, **options: P.kwargs) -> T: return f(*args, **options)
            return call
        class Task(Generic[P]): pass
        class Missing:
            def __init__(self): self.text = "missing"
            def __reduce__(self): return "MISSING"
        MISSING = Missing()
        def get(value=MISSING): return value.text if value is MISSING else value
    """)
    rank = ranks.run(
        notebook.capture(
            """
            Q, Id = ParamSpec("Q"), NewType("Id", UserId)
            class Unset(Missing):
                def __reduce__(self): return "UNSET"
            UNSET = Unset()
            @timed
            def own(value=UNSET, *, of: Callable[Q, Id] = get): return value is UNSET, of()
            kept = {"spec": [Q, Q.args], "none": MISSING, "unset": UNSET, "id": Id}
            assert pickle.loads(pickle.dumps([P, MISSING])) == [P, MISSING]
            get(), own(), Task[P].__args__[0] is P, timed.__annotations__["f"].__args__[0] is P
            """,
            out=["own", "kept"],
        )
    )
    assert rank.value == ("missing", (True, "missing"), True, True)
    assert rank.out["own"]() == (True, "missing")
    kept, names = rank.out["kept"], notebook.names
    assert kept["none"] is names["MISSING"] and kept["id"].__supertype__ is names["UserId"]
    assert (
        kept["spec"][1].__origin__ is kept["spec"][0] and kept["spec"][0].__module__ == "__main__"
    )
    assert kept["unset"].text == "missing" and "UNSET" not in names


def test_functions_of_a_cell_share_their_variables_in_the_notebook(
    notebook: Notebook, ranks: Ranks
) -> None:
    rank = ranks.run(
        notebook.capture(
            """
            def counter():
                n = 0
                def add():
                    nonlocal n
                    n += 1
                    return n
                def show(): return n
                def again(times): return again(times - 1) + add() if times else n
                return add, show, again
            add, show, again = counter()
            class Base:
                def kind(self): return "base"
            class Own(Base):
                def kind(self): return __class__, super().kind()
            add(), add()
            """,
            out=["add", "show", "again", "Own"],
        )
    )
    out = rank.out
    assert (out["show"](), out["add"](), out["show"](), out["again"](1)) == (2, 3, 3, 7)
    assert out["Own"]().kind() == (out["Own"], "base")


def test_spawned_pools_send_notebook_objects_back(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("""
        from concurrent.futures import ProcessPoolExecutor
        import multiprocessing
        k = 5
        class Result:
            def __init__(self, v): self.v = v
        class Missing:
            def __reduce__(self): return "MISSING"
        MISSING = Missing()
        def work(x, y=MISSING):
            global k
            assert y is MISSING
            k += 1
            return Result(x + k)
    """)
    rank = ranks.run(
        notebook.capture("""
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool:
            found = list(pool.map(work, [1, 2]))
        k, [type(r) is Result for r in found], len(found)
    """)
    )
    assert rank.value == (5, [True, True], 2)


# ── the cell's text ──────────────────────────────────────────────────────────────────────────────


def test_tracebacks_show_the_notebook(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("def fails(x):\n    return 1 / x  # here")
    captured = notebook.capture("a = 1\n\nfails(\n   0)")
    with pytest.raises(RankError) as caught:
        ranks.run(captured)
    text = str(caught.value)
    assert '"<cell 9>", line 4, in <module>\n    fails(' in text
    assert "return 1 / x  # here" in text
    assert sorted(captured.cells.values()) == ["Cell In[1]", "Cell In[9]"]


def test_awaiting_and_shell_lines(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("import asyncio\nname = 'world'; n = 2")
    rank = ranks.run(
        notebook.capture("""

        !echo hello {name} $n $HOME_NOT_SET '{n + 1}'
        lines = !printf 'a\\nb'
        display({"x": 1})
        await asyncio.sleep(0)
        x = await asyncio.sleep(0, lines)
        x, lines.s, lines.n, lines.l is lines, hasattr(lines, "x")
    """)
    )
    assert rank.stdout == "hello world 2 3\n{'x': 1}\n"
    assert rank.value == (["a", "b"], "a b", "a\nb", True, False)
    assert rank.modules == []
    found = ranks.run(
        notebook.capture("lines = !printf 'ab c\\nd'\nlines.grep('d'), lines.fields(0)")
    )
    assert found.value == (["d"], ["ab", "d"])


def test_inspect_and_postponed_annotations(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("from __future__ import annotations")
    notebook.cell("import inspect\ndef f(x):\n    return x  # shown")
    rank = ranks.run(
        notebook.capture("""
        def g(x: NotDefinedAnywhere): return x
        inspect.getsource(f), inspect.getsource(g), g.__annotations__
    """)
    )
    source, own, annotations = rank.value
    assert "# shown" in source and own.startswith("def g(x: Not")
    assert annotations == {"x": "NotDefinedAnywhere"}


def test_plain_ipython_objects_stay_home(notebook: Notebook, ranks: Ranks) -> None:
    rank = ranks.run(
        notebook.capture("""
        with open("/dev/null") as file: text = file.read()
        (text, type(get_ipython()).__name__)
    """)
    )
    assert rank.value == ("", "RankShell") and rank.modules == []


# ── children ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.exhaustive  # those of a pool know them above; this one imports torch
def test_spawned_loader_workers_know_notebook_classes(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("""
        import torch
        from torch.utils.data import ConcatDataset, DataLoader, Dataset
        from typing import NamedTuple
        offset = 10
        class Item(NamedTuple):
            x: torch.Tensor
        def collate(items): return Item(torch.stack(items))
        class Data(Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return torch.tensor(i + offset)
    """)
    rank = ranks.run(
        notebook.capture("""
        class Here(Data):
            def __getitem__(self, i): return super().__getitem__(i) + shift
        shift = 100
        found = []
        both = ConcatDataset([Data(), Here()])
        for batch in DataLoader(both, 2, num_workers=1, collate_fn=collate,
                                multiprocessing_context="spawn"):  # it imports torch anew
            assert type(batch) is Item
            found += batch.x.tolist()
        found
    """)
    )
    assert rank.value == [10, 11, 12, 13, 110, 111, 112, 113]


def test_io_buffers_are_no_open_files(notebook: Notebook, ranks: Ranks) -> None:
    notebook.names["held"] = io.BytesIO(b"x")
    notebook.cell("import sys\ndef say(text, file=sys.stdout): print(text, file=file)")
    rank = ranks.run(notebook.capture("say(held.getvalue())"))
    assert rank.stdout == "b'x'\n"


def test_tensors_of_newer_types_travel_and_share(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("""
        import torch
        tokens = torch.arange(6).to(torch.uint16)
        part = tokens[2:4]
        small = torch.ones(2).to(torch.float8_e4m3fn)
    """)
    rank = ranks.run(
        notebook.capture("part.fill_(9)\n(tokens, part.data_ptr() - tokens.data_ptr(), small)")
    )
    tokens, offset, small = rank.value
    assert tokens.tolist() == [0, 1, 9, 9, 4, 5] and tokens.dtype.itemsize == 2 and offset == 4
    assert small.float().tolist() == [1.0, 1.0]


def test_queries_of_pandas_name_variables(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("""
        import pandas as pd
        frame, low, high, twice = pd.DataFrame({"x": [1, 2, 3]}), 1, 3, 2
        \N{MICRO SIGN} = 2  # the same name as with the Greek letter
        def below(frame):
            least = 0
            return frame.query("x < @high and x > @least")
    """)
    rank = ranks.run(
        notebook.capture("""
        def scaled(frame): return frame.eval("x * @twice")
        frame.query(f"x > @low").x.tolist(), below(frame).x.tolist(), scaled(frame).tolist(), len(
            frame.query("x > @\N{MICRO SIGN}")
        )
    """)
    )
    assert rank.value == ([2, 3], [1, 2], [2, 4, 6], 1)
    notebook.capture("frame.query('x > @nobody and x != \"me@low\"')")


def test_sql_names_variables(notebook: Notebook, ranks: Ranks) -> None:
    pytest.importorskip("duckdb")
    notebook.cell("""
        import duckdb, polars as pl, pyarrow as pa
        rows, more = pa.table({"x": [1, 2]}), pa.table({"x": [2], "y": [5]})
        frame, unused = pl.DataFrame({"z": [7]}), [1]
        def joined():
            return duckdb.query("select y from rows r join more using (x)").fetchall()
    """)
    captured = notebook.capture("""
        total = duckdb.sql("SELECT sum(rows.x + unused) FROM rows, (SELECT 1 AS unused)").fetchall()
        total, joined(), pl.sql("select z from frame", eager=True).to_dicts()
    """)
    assert ranks.run(captured).value == ([(5,)], [(5,)], [{"z": 7}])
    assert "unused" not in {item.name for item in captured.inventory}


def test_what_an_object_leaves_behind_is_not_captured(notebook: Notebook) -> None:
    notebook.cell("""
        import threading
        lock = threading.Lock()
        def locked(): return lock
        class Keeps:
            def __getstate__(self): return {}
        class Makes:
            def __reduce__(self): return int, ()
        keeps, makes = Keeps(), Makes()
        keeps.callback = makes.callback = locked
    """)
    names = {item.name for item in notebook.capture("keeps, makes").inventory}
    assert names == {"keeps", "makes"}


def test_an_error_after_await_has_no_context_of_ours(notebook: Notebook, ranks: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(notebook.capture("import asyncio\nawait asyncio.sleep(0)\n1 / 0"))
    assert "During handling" not in str(caught.value)


def test_ipython_lines_of_a_cell(notebook: Notebook, ranks: Ranks, tmp_path: Path) -> None:
    notebook.cell("k = 4\ndef documented():\n    'About it.'")
    rank = ranks.run(
        notebook.capture("""
        %matplotlib inline
        %time x = k + 1
        %matplotlib inline
        y = %time x + 1
        documented?
        x, y
    """)
    )
    assert rank.value == (5, 6)
    assert rank.stdout.count("Wall time") == 2 and "About it." in rank.stdout
    script = tmp_path / "binds.py"
    script.write_text("bound = 8")
    assert ranks.run(notebook.capture(f"%run {script}\nbound")).value == 8
    timed = ranks.run(notebook.capture("%%time\nz = k + 3\nz"))
    assert timed.value == 7 and "Wall time" in timed.stdout
    with pytest.raises(RankError, match="ValueError: 4"):
        ranks.run(notebook.capture("%%time\nraise ValueError(k)"))


def test_warnings_name_cells_as_ipython_does(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("import warnings, sys\n\ndef warns(): warnings.warn('from a function')")
    rank = ranks.run(
        notebook.capture("""
        sys.stderr = sys.stdout
        warns()
        warnings.warn("from the cell")
    """)
    )
    assert "Cell In[1], line 3: UserWarning: from a function" in rank.stdout
    assert "Cell In[9], line 4: UserWarning: from the cell" in rank.stdout
