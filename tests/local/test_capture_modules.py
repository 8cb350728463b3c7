"""Local modules travel as they are on disk now; scripts and modules run as Python runs them."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import types
from pathlib import Path

import pytest

from hydrogen_magic.capture import capture_call, capture_script
from hydrogen_magic.driver import launcher
from hydrogen_magic.driver.rendezvous.torch import TorchRendezvous
from hydrogen_magic.errors import ResultError
from hydrogen_magic.node.worker import namespace
from hydrogen_magic.serialization.payload import Payload
from tests.capture_rig import Notebook, RankError, Ranks, as_sent, write
from tests.rank_results import delivered

pytestmark = [pytest.mark.usefixtures("in_folder"), pytest.mark.xdist_group("capture")]


PACKAGE = {
    "pkg/__init__.py": "from .core import Model, VERSION",
    "pkg/core.py": """
        from . import deep
        from .deep.leaf import LEAF
        import beside
        VERSION = 1
        class Model:
            def __init__(self): self.x = 1
            def version(self): return (1, LEAF, beside.NAME)
        def decorator(function):
            def wrapper(*args): return (VERSION, function(*args))
            return wrapper
    """,
    "pkg/deep/__init__.py": "",
    "pkg/deep/leaf.py": "LEAF = 'leaf'",
    "pkg/data.txt": "hello",
    "beside.py": "NAME = 'beside'",
    "only_in_cell.py": "import namespaced.inner\nNAME = namespaced.inner.NAME",
    "namespaced/inner.py": "NAME = 'inner'",
}


def test_local_modules_have_display(notebook: Notebook, ranks: Ranks, tmp_path: Path) -> None:
    """IPython has it among the builtins."""
    write(tmp_path, {"shows.py": "def show(obj): display(obj)"})
    notebook.cell("import shows")
    assert ranks.run(notebook.capture("shows.show(b'seen')")).stdout == "b'seen'\n"


def test_who_lists_what_a_rank_has(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("import math\nx, y = 1, 2")
    assert ranks.run(notebook.capture("z = x\n%who")).stdout.split() == ["math", "x", "z"]


def test_a_package_edited_after_its_import(
    notebook: Notebook, ranks: Ranks, tmp_path: Path
) -> None:
    write(tmp_path, PACKAGE)
    notebook.cell("""
        import pkg
        from pkg import Model
        from pkg.core import decorator
        model = Model()
        @decorator
        def f(x): return x + 1
    """)
    core = tmp_path / "pkg/core.py"
    core.write_text(
        core.read_text().replace("VERSION = 1", "VERSION = 2").replace("(1, L", "(2, L")
    )
    captured = notebook.capture("""
        import only_in_cell, inspect, os, pickle, sys
        assert type(model) is Model is pkg.Model
        assert inspect.getsource(Model.version).count("(2, LEAF")
        text = open(os.path.join(os.path.dirname(pkg.__file__), "data.txt")).read()
        pickle.loads(pickle.dumps(model))
        model.version(), pkg.VERSION, f(1), only_in_cell.NAME, text, model
    """)
    kinds = {item.name for item in captured.inventory if item.kind == "module"}
    assert {"pkg", "pkg.core", "pkg.deep.leaf", "beside", "namespaced.inner"} <= kinds
    assert not any(name.startswith(("pkg", "hydrogen_magic")) for name in captured.preload)
    for path in tmp_path.rglob("*.py"):
        path.rename(path.with_suffix(".gone"))
    *values, model = ranks.run(captured).value
    assert values == [(2, "leaf", "beside"), 2, (2, 2), "inner", "hello"]
    assert type(model) is notebook.names["Model"]


def test_modules_whose_names_are_no_names_of_python(
    notebook: Notebook, ranks: Ranks, tmp_path: Path
) -> None:
    files = {"01_prepare.py": "def double(x): return 2 * x", "stages/02-fit.py": "LAYERS = 3"}
    write(tmp_path, files)
    notebook.cell("""
        from importlib import import_module
        prepare = import_module("01_prepare")
        fit = import_module("stages.02-fit")
    """)
    captured = notebook.capture("prepare.double(fit.LAYERS)")
    for path in tmp_path.rglob("*.py"):
        path.unlink()
    assert ranks.run(captured).value == 6


def test_a_module_that_was_loaded_from_its_file(
    notebook: Notebook, ranks: Ranks, tmp_path: Path
) -> None:
    tool = "from constants import K\ndef f(x): return x + K\nclass T:\n    k = K"
    write(tmp_path, {"lib/tool.py": tool, "constants.py": "K = 3"})
    notebook.cell("""
        import importlib.util, sys
        spec = importlib.util.spec_from_file_location("recipes_tool", "lib/tool.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["recipes_tool"] = module
        spec.loader.exec_module(module)
        g, t = module.f, module.T()
    """)
    captured = notebook.capture("module.f(1), g(2), t.k, type(t) is module.T")
    for path in tmp_path.rglob("*.py"):
        path.unlink()
    assert ranks.run(captured).value == (4, 5, 3, True)
    del sys.modules["recipes_tool"]


def test_local_modules_that_no_cell_uses_are_not_sent(notebook: Notebook, tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "plots.py": "'''Plots.'''\nimport json, used\nSIZE = (3, 4)\ndef draw(size=SIZE): pass",
            "shapes/__init__.py": "from .round import Circle",
            "shapes/round.py": "class Circle:\n    n: int = 0\n    def area(self): return max(1, 2)",
            "loud.py": "from reports import add",
            "reports.py": "def add(x): pass\nadd(1)",
            "registers.py": "import shapes\nshapes.n = 2",
            "derived.py": "from shapes import Circle\nclass C(Circle): pass",
            "kinds.py": "class Kind:\n    def __init_subclass__(cls): pass",
            "observed.py": "import kinds\nclass A(kinds.Kind): pass",
            "used.py": "X = 1",
        },
    )
    notebook.cell(
        "import plots, shapes.round, loud, registers, derived, observed\n"
        "from reports import add as a"
    )
    notebook.cell("from used import X")
    inventory = notebook.capture("X").inventory
    sent = {item.name.partition(".")[0] for item in inventory if item.kind == "module"}
    assert sent == {"loud", "reports", "registers", "shapes", "observed", "kinds", "used"}
    notebook.names.pop("registers"), notebook.names.pop("observed")
    for name in ("loud", "registers", "observed"):
        del sys.modules[name]
    inventory = notebook.capture("X").inventory
    assert [item.name for item in inventory if item.kind == "module"] == ["used"]


def test_a_module_that_is_written_or_deleted_between_two_cells(
    notebook: Notebook, tmp_path: Path
) -> None:
    write(tmp_path, {"optional.py": "try: import extra, pkg\nexcept ImportError: pass"})
    notebook.cell("import optional")

    def sent() -> set[str]:
        inventory = notebook.capture("optional").inventory
        return {item.name for item in inventory if item.kind == "module"}

    assert sent() == {"optional"}
    write(tmp_path, {"extra.py": "", "pkg/__init__.py": "", "pkg/inner.py": ""})
    assert sent() == {"optional", "extra", "pkg", "pkg.inner"}
    (tmp_path / "extra.py").unlink()
    (tmp_path / "pkg/inner.py").unlink()
    assert sent() == {"optional", "pkg"}


def test_a_reloaded_module(notebook: Notebook, ranks: Ranks, tmp_path: Path) -> None:
    write(tmp_path, {"mod.py": "class A:\n    def v(self): return 1"})
    notebook.cell("import importlib, mod\na = mod.A()")
    write(tmp_path, {"mod.py": "class A:\n    def v(self): return 'new'"})
    notebook.cell("importlib.reload(mod)")
    assert ranks.run(notebook.capture("a.v(), isinstance(a, mod.A)")).value == ("new", True)


def test_an_error_in_a_local_module_shows_its_line(
    notebook: Notebook, ranks: Ranks, tmp_path: Path
) -> None:
    write(tmp_path, {"broken.py": "def f():\n    raise KeyError('here')  # this line"})
    notebook.cell("import broken")
    captured = notebook.capture("broken.f()")
    (tmp_path / "broken.py").unlink()
    with pytest.raises(RankError, match=r"broken.py\", line 2, in f\n.*# this line"):
        ranks.run(captured)


def test_a_call_of_a_local_function(notebook: Notebook, ranks: Ranks, tmp_path: Path) -> None:
    write(tmp_path, {"jobs.py": "def work(x): return helper(x)\ndef helper(x): return x + 1"})
    import jobs  # type: ignore[import-not-found]

    captured = capture_call(jobs.work, (1,), {})
    (tmp_path / "jobs.py").unlink()
    assert ranks.run(captured).value == 2


def test_preload_names_what_ranks_import(notebook: Notebook) -> None:
    notebook.cell("""
        import torch, json
        import numpy as np
        import numpy.linalg
        net = torch.nn.Linear(1, 1)
        def f():
            import torch.utils.data
            from cloudpickle import dumps
    """)
    preload = notebook.capture("import psutil\nf(), net, np.linalg, json").preload
    expected = {"numpy", "numpy.linalg", "torch.utils.data", "cloudpickle", "psutil"}
    assert expected | {"torch.nn.modules.linear"} <= set(preload)
    assert "json" not in preload


@pytest.mark.parametrize(
    ("defined", "cell"),
    [
        ("", "import torch\ntorch.optim.SGD"),
        ("def train():\n    import torch\n    return torch.optim.SGD", "train()"),
        ("import steps", "steps.train()"),
    ],
    ids=["cell", "function", "module"],
)
def test_preload_names_what_code_accesses(
    notebook: Notebook, tmp_path: Path, defined: str, cell: str
) -> None:
    """An optimizer's first use takes long: processes that are forked share what it imports."""
    write(tmp_path, {"steps.py": "import torch\n\ndef train(): return torch.optim.SGD"})
    notebook.cell(defined)
    assert "torch.optim" in notebook.capture(cell).preload


@pytest.mark.parametrize(
    ("defined", "cell"),
    [
        ("", "from torch import nn\nnn.parallel.DistributedDataParallel"),
        ("from torch.nn.parallel import DistributedDataParallel as DDP", "DDP"),
    ],
    ids=["cell", "notebook"],
)
def test_preload_names_what_wraps_a_model(notebook: Notebook, defined: str, cell: str) -> None:
    """Which imports as much as an optimizer does when it is created."""
    notebook.cell(defined)
    assert "torch._dynamo" in launcher._preload(TorchRendezvous(), notebook.capture(cell).preload)


def test_preload_names_what_functions_import_that_the_notebook_has_not(
    notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The style of HorovodRunner: every import is inside of the function."""
    for name in [name for name in sys.modules if f"{name}.".startswith(("torch.", "sklearn."))]:
        monkeypatch.delitem(sys.modules, name)
    write(tmp_path, {"steps.py": "def fit():\n    import torch\n    return torch.optim.Adam"})
    notebook.cell("""
        import steps
        def train():
            from sklearn.ensemble import RandomForestClassifier
            from torch.utils.data import DataLoader
            import torch
            return torch.optim.SGD
    """)
    preload = notebook.capture("train()").preload
    assert {"torch", "torch.optim", "torch.utils.data", "sklearn.ensemble"} <= set(preload)
    assert "torch.optim" in notebook.capture("steps.fit()").preload
    cell = "import torch\nfrom torch.nn import Linear\ntorch.zeros"
    assert set(notebook.capture(cell).preload) == {"torch", "torch.nn"}, "names of modules only"
    assert "torch" not in sys.modules


# ── failures on the rank ─────────────────────────────────────────────────────────────────────────


def test_what_fails_while_loading_is_raised_as_it_is(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("""
        def boom(): raise LookupError("while loading")
        class Bomb:
            def __reduce__(self): return boom, ()
        bomb = Bomb()
    """)
    with pytest.raises(RankError, match="LookupError: while loading"):
        ranks.run(notebook.capture("bomb"))


@pytest.mark.parametrize(
    ("text", "out", "message"),
    [
        (
            "for model in (): pass\nmodels = 2",
            ["model"],
            r"`model` \(--out\) is not defined.*: models",
        ),
        ("import threading\nx = [threading.Lock()]", ["x"], r"`x\[0\]` \(_thread.lock\)"),
        (
            "(i for i in [])",
            [],
            r"last expression cannot be sent to the notebook: its value \(generator\) .*; "
            "turn it into a list first; or end the cell with `None`",
        ),
        (
            "import torch.utils.data as data\niter(data.DataLoader([1]))",
            [],
            r"its value \(.*\) cannot be sent: NotImplementedError: _SingleProcessDataLoaderIter cannot "
            "be pickled; bring back its data instead; or end the cell",
        ),
    ],
)
def test_results_that_cannot_come_back(
    notebook: Notebook, ranks: Ranks, text: str, out: list[str], message: str
) -> None:
    rank = ranks.run(notebook.capture(text, out=out))
    with pytest.raises(ResultError, match=message):
        _ = rank.out[out[0]] if out else rank.value


# ── scripts ──────────────────────────────────────────────────────────────────────────────────────

SCRIPT = """
import json, os, pickle, sys, helper
class Local: pass
if __name__ == "__main__":
    assert sys.modules["__main__"].Local is Local
    pickle.loads(pickle.dumps(Local()))
    found = [sys.argv, os.path.basename(__file__), os.path.basename(sys.path[0]), helper.NAME]
    print(json.dumps(found))
"""


def test_a_script_runs_as_main(notebook: Notebook, ranks: Ranks, tmp_path: Path) -> None:
    write(tmp_path, {"jobs/train.py": SCRIPT, "jobs/helper.py": "NAME = 'helper'"})
    rank = ranks.run(capture_script("jobs/train.py", ["--lr", "1"], as_module=False))
    assert rank.stdout == '[["jobs/train.py", "--lr", "1"], "train.py", "jobs", "helper"]\n'


def test_a_module_runs_as_main(notebook: Notebook, ranks: Ranks, tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "app/__init__.py": "",
            "app/__main__.py": "from . import x\nimport sys\n"
            "print(x.N, __name__, __package__, sys.argv[1:])\nsys.exit(3)",
            "app/x.py": "N = 1",
        },
    )
    captured = capture_script("app", ["a"], as_module=True)
    assert "app" not in sys.modules
    with pytest.raises(RankError, match="SystemExit: 3"):
        ranks.run(captured)


# ── one rank inside the kernel ───────────────────────────────────────────────────────────────────


def test_inline_leaves_the_notebook_alone(notebook: Notebook) -> None:
    notebook.cell("""
        import numpy as np
        data = np.zeros(10_000); items = [1]
        class A:
            def get(self): return items
        a = A()
        def f(): items.append(2); data[0] = 1; return a.get()
    """)
    method = notebook.names["A"].get
    before = dict(notebook.names), list(sys.meta_path)
    loaded = namespace.load(
        as_sent(notebook.capture("x = 1\nf(), a", out=["x"])), types.ModuleType("__main__")
    )
    result = delivered(loaded, loaded.run())
    assert result.value()[0] == [1, 2] and dict(result.variables()) == {"x": 1}
    assert type(result.value()[1]) is notebook.names["A"]
    assert sys.modules["__main__"] is notebook.module
    assert (dict(notebook.names), list(sys.meta_path)) == before
    assert notebook.names["A"].get is method
    assert notebook.names["items"] == [1] and not notebook.names["data"].any()


def test_capture_changes_nothing(notebook: Notebook) -> None:
    notebook.cell("""
        calls = []
        class Counted:
            def __reduce__(self):
                calls.append(1)
                return Counted, ()
        c = Counted()
    """)
    gc.collect()  # descriptors of earlier tests
    names, descriptors = dict(notebook.names), os.listdir("/proc/self/fd")
    notebook.capture("c")
    assert notebook.names["calls"] == [1], "user code ran more than once"
    assert dict(notebook.names) == names and os.listdir("/proc/self/fd") == descriptors


def test_a_payload_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="closure"):
        namespace.load(Payload(pickle.dumps(3)))
    with pytest.raises(TypeError, match="not callable"):
        capture_call(3, (), {})  # type: ignore[arg-type]


def test_data_files_of_a_package_are_found(
    notebook: Notebook, ranks: Ranks, tmp_path: Path
) -> None:
    write(
        tmp_path, {"words/__init__.py": "", "words/list.txt": "one two", "words/de/list.txt": "x"}
    )
    write(tmp_path, {"words/de/empty.py": ""})
    rank = ranks.run(
        notebook.capture("""
        import words, words.de
        from importlib.resources import files
        [(files(p) / "list.txt").read_text().strip() for p in (words, "words.de")]
    """)
    )
    assert rank.value == ["one two", "x"]


def test_files_that_cannot_be_read_concern_only_who_imports_them(
    notebook: Notebook, ranks: Ranks, tmp_path: Path
) -> None:
    write(tmp_path, {"mixed/__init__.py": "OK = 1", "gone.py": ""})
    (tmp_path / "mixed" / "latin.py").write_bytes(b"x = 1\ny = '\xe9'\n")
    (tmp_path / "mixed" / "dangling.py").symlink_to("/nowhere/at_all.py")
    notebook.cell("import mixed, gone")
    (tmp_path / "gone.py").unlink()
    assert ranks.run(notebook.capture("mixed.OK")).value == 1
    with pytest.raises(RankError, match=r"(?i)utf-8"):
        ranks.run(notebook.capture("import mixed.latin"))
    with pytest.raises(RankError, match="No module named 'gone'") as raised:
        ranks.run(notebook.capture("gone"))
    assert "import mixed" not in str(raised.value), "the traceback has the statement that failed"
    assert "    import gone\n" in str(raised.value)


def test_what_pickle_finds_by_names_that_ranks_lack(
    notebook: Notebook, ranks: Ranks, tmp_path: Path
) -> None:
    """A decorator's wrapper, caches of local modules that are no attributes, functions that are members."""
    write(
        tmp_path,
        {
            "caching.py": """
                import functools
                class Wrapper:
                    def __init__(self, function):
                        functools.update_wrapper(self, function)
                    def __call__(self, x): return self.__wrapped__(x) + 1
                    def __reduce__(self): return self.__qualname__
                class Words:
                    def __init__(self): self.count = functools.lru_cache(maxsize=9)(self._count)
                    def _count(self, text): return len(text.split())
                def times(k):
                    @functools.lru_cache
                    def scaled(x): return x * k
                    return scaled
            """
        },
    )
    notebook.cell("""
        import caching, enum, sys
        @caching.Wrapper
        def wrapped(x): return x * 2
        words, double = caching.Words(), caching.times(2)
        def plus(a, b): return a + b
        class Op(enum.Enum):
            ADD = enum.member(plus) if sys.version_info >= (3, 11) else 2
            ONE = 1
        op = Op.ADD
    """)
    captured = notebook.capture(
        "wrapped(3), words.count('a b'), double(4), op is Op.ADD, len(Op), words.count.cache_info().maxsize"
    )
    assert ranks.run(captured).value == (7, 2, 8, True, 2, 9)
