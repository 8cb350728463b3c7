"""``--save`` writes a script that torchrun runs."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

import hydrogen_magic as hm
from hydrogen_magic.capture import CellText, write_script
from hydrogen_magic.errors import CaptureError
from tests.capture_rig import Notebook, write

pytestmark = pytest.mark.usefixtures("in_folder")


def save(notebook: Notebook, text: str, path: str | Path) -> None:
    cell = CellText(text, "<cell 9>", "Cell In[9]", 2, notebook.shell.transform_cell)
    write_script(path, cell, notebook.names, notebook.history)


@pytest.mark.exhaustive  # others run scripts in this process
def test_torchrun_runs_the_saved_cell(notebook: Notebook, tmp_path: Path) -> None:
    write(tmp_path, {"lib/beside.py": "def name(): return 'beside'"})
    sys.path.insert(0, str(tmp_path / "lib"))
    notebook.cell("""
        import functools
        import torch
        import torch.distributed as dist
        from torch import nn
        import dataclasses
        import beside
    """)
    notebook.cell("""
        scale = 2
        options = {"lr": 0.5, "names": ["a"]}
        def timed(function):
            @functools.wraps(function)
            def wrapper(*args): return function(*args)
            return wrapper
        class Base(nn.Module):
            pass
        @dataclasses.dataclass
        class Point:
            x: int
        class Net(Base):
            def __init__(self):
                super().__init__()
                self.lin = nn.Linear(2, 2)
            @timed
            def forward(self, x): return self.lin(x) * scale
        @timed
        def evaluate(x, net=None): return (net or globals()["net"])(x)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=options["lr"])
        point = Point(3)
    """)
    text = (
        "dist.init_process_group('gloo')\n"
        "assert optimizer.param_groups[0]['params'][0] is net.lin.weight\n"
        "assert type(net) is Net and isinstance(net, Base) and point == Point(3)\n"
        "one = torch.ones(1); dist.all_reduce(one)\n"
        "found = int(one), tuple(evaluate(torch.ones(1, 2)).shape), beside.name()\n"
        "open(f'out-{dist.get_rank()}', 'w').write(repr(found))\n"
        "dist.destroy_process_group()\n"
        "one"
    )
    save(notebook, text, tmp_path / "saved.py")
    save(notebook, text, tmp_path / "saved.py")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "saved.py"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    outputs = sorted(tmp_path.glob("out-*"))
    assert [path.read_text() for path in outputs] == ["(2, (1, 2), 'beside')"] * 2, done.stderr
    for path in outputs:
        path.unlink()
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == [
        "saved.data.pkl",
        "saved.py",
    ]


def test_the_script_names_the_command_for_as_many_ranks(
    notebook_shell: InteractiveShell, tmp_path: Path
) -> None:
    cell = "%%distributed --np 3 --cpu --dry-run --save 'my saved.py'\n1"
    notebook_shell.run_cell(cell).raise_error()
    text = (tmp_path / "my saved.py").read_text()
    assert ': torchrun --nproc-per-node 3 \'my saved.py\'"""' in text


def test_what_cannot_stand_in_a_script(notebook: Notebook, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"line 3 \(`!ls`\)"):
        save(notebook, "x = 1\n!ls\n", "s.py")
    with pytest.raises(CaptureError, match=r"line 3 \(`await asyncio\.sleep\(0\)`\)"):
        save(notebook, "import asyncio\nawait asyncio.sleep(0)\n", "s.py")
    with pytest.raises(CaptureError, match="no directory"):
        save(notebook, "x = 1", "nowhere/s.py")
    exec("def f(): pass", notebook.names)
    with pytest.raises(CaptureError, match="`f` cannot be saved: its source is not available"):
        save(notebook, "f()", "s.py")
    (tmp_path / "mine.py").write_text("precious")
    with pytest.raises(CaptureError, match="was not written by --save"):
        save(notebook, "x = 1", "mine.py")
    assert (tmp_path / "mine.py").read_text() == "precious"
    assert not (tmp_path / "s.py").exists()


def test_data_that_is_deleted_with_the_notebook(notebook: Notebook, tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"x": [1, 2, 3]})
    with hm.dataset(table) as rows:
        notebook.names["parts"] = {"train": rows}
        with pytest.raises(
            CaptureError, match=r"^`parts\['train'\]`.*deleted with the notebook; write"
        ):
            save(notebook, "print(parts)\n", "train.py")
    assert not list(tmp_path.glob("train*"))
    pq.write_table(table, "rows.parquet")
    notebook.names["parts"] = {"train": hm.dataset("rows.parquet")}
    save(notebook, "print(parts['train'].n_rows)\n", "train.py")
    done = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, check=True)
    assert done.stdout == "3\n"


def test_a_data_file_is_replaced_with_its_own_script_only(
    notebook: Notebook, tmp_path: Path
) -> None:
    notebook.cell("import fractions; third = fractions.Fraction(1, 3)")
    data = tmp_path / "s.data.pkl"
    data.write_text("precious")
    for _ in range(2):
        with pytest.raises(
            CaptureError, match=r"s\.data\.pkl exists and was not written by --save"
        ):
            save(notebook, "third", "s.py")
        save(notebook, "x = 1", "s.py")  # needs none
        assert data.read_text() == "precious"
    data.unlink()
    for text in ("third", "third", "x = 1", "third"):
        save(notebook, text, "s.py")
        assert data.exists() == (text == "third")


@pytest.mark.parametrize("full", ["s.py", "s.data.pkl"])
def test_a_full_disk_leaves_the_script_and_its_data_as_they_were(
    full: str, notebook: Notebook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def write_bytes(path: Path, data: bytes) -> int:
        if path.name == f"{full}.partial":
            path.touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_whole(path, data)

    notebook.cell("import fractions; third = fractions.Fraction(1, 3)")
    save(notebook, "third", "s.py")
    before, write_whole = written(), Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    notebook.cell("third = fractions.Fraction(2, 3)")
    with pytest.raises(CaptureError, match=r"--save s\.py: it cannot be written \(No space left"):
        save(notebook, "third, third", "s.py")
    assert written() == before


def test_a_script_computes_what_the_cell_does(notebook: Notebook, tmp_path: Path) -> None:
    notebook.cell("""
        default = [3]
        def append(item, to=default): to.append(item)
        class Text(str): pass
        texts = [Text("a")]
        alone = {"names": ["b", None], "at": (1.5, {2})}
        def score(x): return x + 1
        baseline = score
    """)
    notebook.cell("def score(x): return x * 2")
    notebook.cell("import math\n\f\ndef scale(x):\n    y = x * 3\n    return y")  # from a file
    save(
        notebook,
        "append(4)\n"
        "print(default, type(texts[0]).__name__, alone, baseline(3), score(3), scale(3))",
        "s.py",
    )
    done = subprocess.run([sys.executable, "s.py"], capture_output=True, text=True, timeout=100)
    expected = "[3, 4] Text {'names': ['b', None], 'at': (1.5, {2})} 4 6 9\n"
    assert done.stdout == expected, done.stderr
    text = (tmp_path / "s.py").read_text()
    assert "alone = {'names'" in text and "default = [3]" in text


def test_a_script_makes_what_the_notebook_has_made(notebook: Notebook, tmp_path: Path) -> None:
    """Instances before the classes that need other values, lambdas of a dict, and names in texts."""
    notebook.cell("""
        import dataclasses
        import numpy as np
        @dataclasses.dataclass
        class Config:
            width: int = 2
        config = Config()
        class Net:
            def __init__(self, width=config.width): self.width, self.config = width, config
        net = Net()
        ACTIVATIONS = {"relu": lambda x: max(x, 0)}
        act = ACTIVATIONS["relu"]
        twice = lambda x: 2 * x
        limit = 1
        column = np.arange(3)
    """)
    body = """# \f
from __future__ import annotations; first = 1
import numpy as np
def annotated(x: undefined) -> int: return x
print(net.width, net.config is config, act(-1), twice(annotated(first)), eval("column" + "[limit]"))
"""
    save(notebook, body, "s.py")
    done = subprocess.run([sys.executable, "s.py"], capture_output=True, text=True, timeout=100)
    assert done.stdout == "2 True 0 2 1\n", done.stderr


def test_a_script_has_the_definitions_as_they_stand_in_the_cells(
    notebook: Notebook, tmp_path: Path
) -> None:
    notebook.cell("""
        lr = 0.1
        class Config:
            rate: float = 0.2
            layers = []
        def rate(): return lr, Config.layers
    """)
    notebook.cell("lr = 0.5; Config.rate = 0.7; Config.layers.append(2)")
    save(notebook, "print(rate(), Config.rate)", "s.py")
    done = subprocess.run([sys.executable, "s.py"], capture_output=True, text=True, timeout=100)
    assert done.stdout == "(0.5, []) 0.2\n", done.stderr


def test_a_function_that_was_wrapped_after_its_definition_is_refused(notebook: Notebook) -> None:
    notebook.cell("import functools\ndef f(x): return x")
    save(notebook, "print(f)", "s.py")
    notebook.cell("f = functools.lru_cache(f)")
    with pytest.raises(CaptureError, match="`f` cannot be saved: it was wrapped after"):
        save(notebook, "print(f)", "s.py")
    notebook.cell("def f(x): return x")
    save(notebook, "print(f)", "s.py")


@pytest.mark.parametrize(
    "definition",
    [
        "def f(x=lr, *, key=len, n=[]): return x",
        "@dataclass\nclass f:\n x: float = lr\n y: float = x",
        "class f:\n z: float = lr\n def g(self): z = 1\nf.n = 1",
    ],
)
def test_a_definition_with_a_name_that_has_another_value_now_is_refused(
    notebook: Notebook, definition: str
) -> None:
    notebook.cell(f"from dataclasses import dataclass\nlr = 0.5\n{definition}")
    for same in ("lr = 0.5", "lr = 1 / 2"):
        notebook.cell(same)
        save(notebook, "print(f())", "s.py")
    for change in ("lr = 9", "del lr"):
        notebook.cell(change)
        with pytest.raises(CaptureError, match=r"`f` cannot be saved: .* present value of `lr`"):
            save(notebook, "print(f())", "s.py")


@pytest.mark.parametrize(
    "definition",
    [
        "n = lr",
        "n = lr\n n = other",
        "n = lr\n n += 1",
        "n: float = lr\n if n: n = 5.0",
        "__new__ = made",
        "a = lr\n n = a\n a = 1",
    ],
)
@pytest.mark.parametrize("head", ["class f:\n", "class f(Base):\n", "@dataclass\nclass f(Base):\n"])
def test_attributes_that_are_no_present_values_by_their_definition(
    notebook: Notebook, head: str, definition: str
) -> None:
    notebook.cell(
        "from dataclasses import dataclass\nlr = other = 0.5\nother = 2\n"
        "def made(cls): return object.__new__(cls)\n@dataclass\nclass Base:\n n: float = 0.1"
    )
    notebook.cell(head + " " + definition)
    save(notebook, "print(f())", "s.py")


def test_a_function_whose_own_name_has_another_value_is_refused(notebook: Notebook) -> None:
    notebook.cell("def h(): return 1\nother = h\nh = 3")
    save(notebook, "print(other())", "s.py")
    with pytest.raises(CaptureError, match="`other` cannot be saved: it was defined as `h`"):
        save(notebook, "print(other() + h)", "s.py")


def test_a_second_wrapper_is_refused_under_each_name(notebook: Notebook, tmp_path: Path) -> None:
    notebook.cell("""
        import functools
        def add_one(function):
            @functools.wraps(function)
            def wrapper(x): return function(x) + 1
            return wrapper
        def keep(function): return function
    """)
    definition = "@add_one\n@keep\ndef shifted(x): return x"
    notebook.cell(definition)
    notebook.cell("alias = shifted; twice = add_one(shifted); thrice = add_one(twice)")
    for redefined in (False, True):
        if redefined:
            notebook.cell(definition.replace("return x", "return 5 * x"))
        with pytest.raises(CaptureError, match="`thrice` cannot be saved: it was wrapped after"):
            save(notebook, "print(thrice(1))", "s.py")
        save(notebook, "print(alias(1), shifted(1))", "s.py")
        done = subprocess.run([sys.executable, "s.py"], capture_output=True, text=True, timeout=100)
        assert done.stdout == ("2 6\n" if redefined else "2 2\n"), done.stderr
    notebook.cell("twice = add_one(shifted)")
    with pytest.raises(CaptureError, match="`twice` cannot be saved: it was wrapped after"):
        save(notebook, "print(twice(1))", "s.py")


def test_what_a_cell_may_need_is_saved_if_it_can_be(notebook: Notebook, tmp_path: Path) -> None:
    """Values that it replaces are not, nor is anything refused for them."""
    notebook.cell("import decimal, numpy as np\nlimit = decimal.Decimal(3)\nbig = bytes(5_000_000)")
    notebook.cell("""
        registry = [decimal.Decimal(1)]
        def register(cls):
            registry.append(cls.__name__)
            return cls
        @register
        class Net: limit = limit
        def old(): pass
    """)
    exec("class Unknown: pass\nstale = Unknown()", notebook.names)
    body = "for big in range(2): pass\nfor stale in range(2): pass\n"
    body += "print(big, stale, eval('np.zeros(2)' + '.sum()'), registry[-1], Net.limit)\n"
    save(notebook, body, "s.py")
    assert (tmp_path / "s.data.pkl").stat().st_size < 10_000
    done = subprocess.run([sys.executable, "s.py"], capture_output=True, text=True, timeout=100)
    assert done.stdout == "1 1 0.0 Net 3\n", done.stderr


def test_a_script_imports_for_effects_and_names_settings_that_it_lacks(
    notebook_shell: InteractiveShell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {"envs/__init__.py": "import atexit\natexit.register(int)"})
    sys.path.insert(0, str(tmp_path))
    try:
        save = "%%distributed --np 1 --cpu --dry-run --save saved.py\nnp.zeros(1)"
        for cell in ("import envs, numpy as np\nnp.seterr(all='raise')", save):
            notebook_shell.run_cell(cell, store_history=True).raise_error()
        assert "saved.py leaves out settings of the notebook" in capsys.readouterr().err
        assert "import envs" in (tmp_path / "saved.py").read_text()
        save = save.replace("saved.py", "elsewhere/saved.py")
        (tmp_path / "elsewhere").mkdir()
        notebook_shell.run_cell(save, store_history=True).raise_error()
        subprocess.run([sys.executable, "elsewhere/saved.py"], check=True, timeout=100)
    finally:
        sys.path.remove(str(tmp_path))
        notebook_shell.run_cell("np.seterr(all='warn', under='ignore')")  # numpy's defaults


def test_what_functions_read_of_the_cell_is_not_saved(notebook: Notebook, tmp_path: Path) -> None:
    notebook.cell("""
        import threading
        class Meter:
            def __init__(self): self.lock, self.n = threading.Lock(), 0
        meter = Meter()
        def count(): meter.n += 1; return meter.n
        class Model:
            def forward(self): return count()
        model = Model()
    """)
    save(notebook, "meter = Meter()\nprint(count(), model.forward(), Model().forward())", "s.py")
    done = subprocess.run([sys.executable, "s.py"], capture_output=True, text=True, timeout=100)
    assert done.stdout == "1 2 3\n", done.stderr
    with pytest.raises(CaptureError, match=r"^`meter.lock` \(_thread.lock\) cannot be sent"):
        save(notebook, "print(model.forward())", "s.py")


@pytest.mark.filterwarnings("error::SyntaxWarning")
def test_the_warnings_of_cells_that_have_run_are_not_repeated(
    notebook: Notebook, tmp_path: Path
) -> None:
    with pytest.warns(SyntaxWarning):
        notebook.cell("""
            def is_five(x): return x is 5
        """)
    save(notebook, "is_five(3)", tmp_path / "saved.py")
    assert "x is 5" in (tmp_path / "saved.py").read_text()
