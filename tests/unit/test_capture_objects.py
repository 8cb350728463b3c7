"""Objects of a notebook keep their classes, functions and shared parts on a rank."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from hydrogen_magic.errors import CaptureError
from tests.capture_rig import Notebook, inline, write

# ── functions with globals of their own ──────────────────────────────────────────────────────────


def test_attrs_classes(notebook: Notebook) -> None:
    pytest.importorskip("attr")
    notebook.cell("""
        import attr
        lowest = 0
        @attr.define
        class Point:
            x: int = attr.field(default=3, converter=int)
            tags: list = attr.field(factory=list)
            @x.validator
            def check(self, attribute, value):
                if value < lowest: raise ValueError(value)
        @attr.s(frozen=True)
        class Fixed:
            x = attr.ib(default=1)
        point = Point(4)
    """)
    value = inline(
        notebook.capture("repr(point), Point('4') == point, attr.asdict(Point()), hash(Fixed())")
    )
    assert value[:3] == ("Point(x=4, tags=[])", True, {"x": 3, "tags": []})


def test_classes_of_a_module_that_is_registered_to_be_sent_by_value(notebook: Notebook) -> None:
    notebook.cell("""
        import cloudpickle, textwrap
        cloudpickle.register_pickle_by_value(textwrap)
        kind = textwrap.TextWrapper
    """)
    try:
        captured = notebook.capture(
            "import textwrap\nkind is textwrap.TextWrapper, kind(width=5).width"
        )
        assert inline(captured) == (False, 5)
    finally:
        notebook.cell("cloudpickle.unregister_pickle_by_value(textwrap)")


def test_functions_made_by_exec_share_their_own_globals(notebook: Notebook) -> None:
    notebook.cell("""
        names, k = dict(globals()), 1
        names["k"] = 5
        exec("def f(): return k\\ndef g():\\n    global k; k += 1\\n    return f()", names)
        f, g = names["f"], names["g"]
    """)
    assert inline(notebook.capture("f(), g(), f(), k")) == (5, 6, 6, 1)


@pytest.mark.parametrize(
    ("place", "new", "cell", "value"),
    [
        ("f", "functools.wraps(first)(lambda: 5)", "new()", 5),
        ("f", "wrapped.wrap(first)", "new()", 2),
        ("f", "torch.no_grad()(first)", "new()", 0),
        ("f", "functools.cache(first)", "new.cache_info().misses", 0),
        ("C.m", "wrapped.wrap(first)", "new(1)", 3),
        ("C.k", "classmethod(wrapped.wrap(first.__func__))", "new.__func__(1)", 4),
    ],
)
def test_a_wrapper_in_the_place_of_the_function_that_it_wraps(
    notebook: Notebook, tmp_path: Path, place: str, new: str, cell: str, value: Any
) -> None:
    code = """
        import functools, torch
        def f(): return int(torch.is_grad_enabled())
        def wrap(f):
            @functools.wraps(f)
            def inner(*args): return 1 + f(*args)
            return inner
        class C:
            def m(self): return 2
            @classmethod
            def k(cls): return 3
    """
    write(tmp_path, {"wrapped.py": code})
    notebook.cell(f"import sys, functools, torch; sys.path.insert(0, {str(tmp_path)!r})")
    notebook.cell("import wrapped")
    notebook.cell(f"first = wrapped.{place}\nnew = wrapped.{place} = {new}")
    captured = notebook.capture(cell)
    notebook.cell(f"wrapped.{place} = first")
    assert inline(captured) == value


@pytest.mark.parametrize(
    ("hidden", "text"), [("none", "low\nassert 1 == 2"), ("_pytest.assertion.rewrite", "")]
)
def test_assertions_that_pytest_has_rewritten(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hidden: str, text: str
) -> None:
    code = "def made():\n    def f(x):\n        assert x == 2, 'low'\n    return f\n"
    write(tmp_path, {"test_checks.py": code})
    notebook.cell(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport test_checks")
    notebook.cell("f = test_checks.made()")
    captured = notebook.capture("f(1)")
    for name in ("@pytest_ar", "@py_builtins"):  # a rank imports the source as it is
        del vars(notebook.names["test_checks"])[name]
    monkeypatch.setitem(sys.modules, hidden, None)
    with pytest.raises(AssertionError) as caught:
        inline(captured)
    assert str(caught.value) == text


def test_modules_that_cannot_be_imported(notebook: Notebook, tmp_path: Path) -> None:
    """Such as one of a file that another module has the name of; its functions use its variables."""
    code = (
        "LR = {}\nclass Net:\n    def rate(self): return LR\ndef rates(): return LR, Net().rate()\n"
    )
    write(tmp_path, {"rates.py": code.format(1), "old/rates.py": code.format(2)})
    notebook.cell(f"""
        import importlib.util, sys, types
        sys.path.insert(0, {str(tmp_path)!r})
        import rates as new
        spec = importlib.util.spec_from_file_location("rates", {str(tmp_path / "old" / "rates.py")!r})
        old = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(old)
        a_call, net = old.rates, old.Net()
        made = types.ModuleType("made")
        exec("k = 1\\ndef get(): return k", made.__dict__)
    """)
    before = notebook.capture(
        "old.rates(), new.rates(), a_call(), net.rate(), type(net) is old.Net"
    )
    assert inline(before) == ((2, 2), (1, 1), (2, 2), 2, True)
    after = notebook.capture(
        "old.LR = 5; made.k = 3\nold.rates(), a_call(), net.rate(), made.get()"
    )
    assert inline(after) == ((5, 5), (5, 5), 5, 3)
    assert notebook.names["old"].LR == 2


# ── objects that answer every attribute ──────────────────────────────────────────────────────────

ANSWERING: dict[str, tuple[str, Any]] = {
    """
    class Config(dict):
        __getattr__ = dict.__getitem__
        __setattr__ = dict.__setitem__
    x = Config(lr=1, deep=Config(a=2))
    """: ("x.lr, x.deep.a, type(x) is Config", (1, 2, True)),
    """
    class Config(dict):
        def __init__(self, **items):
            super().__init__(items)
            self.__dict__ = self
    x = Config(lr=1)
    """: ("x.lr, x['k'] = 5, 2\nx.__dict__ is x, x['lr'], x.k", (True, 5, 2)),
    """
    class Decorator:
        def __new__(cls, function): return super().__new__(cls)
        def __init__(self, function): self.function = function
        def __getattr__(self, name): return getattr(self.function, name)
    x = Decorator(len)
    """: ("x.function('ab'), x.__name__", (2, "len")),
    """
    class Proxy:
        def __init__(self, inner): self.inner = inner
        def __getattr__(self, name): return getattr(self.inner, name)
    x = Proxy([1])
    """: ("x.inner, x.count(1)", ([1], 1)),
    """
    class Anything:
        def __init__(self): self.x = 1
        def __getattr__(self, name): return lambda *args: self
    x = Anything()
    """: ("x.x, x.y() is x", (1, True)),
    """
    class Shared:
        state = {}
        def __init__(self): self.__dict__ = self.state
    x, y = Shared(), Shared()
    """: ("x.z = 3\ny.z, Shared().z", (3, 3)),
    """
    class Slots:
        __slots__ = ("a", "b")
        def __getattr__(self, name): raise KeyError(name)
    x = Slots(); x.a = 1
    """: ("x.a", 1),
    """
    class Saves:
        def __init__(self): self.data = {"u": 1}
        def __getattr__(self, name): return self.data[name]
        def __getstate__(self): return {"data": {"u": 2}}
    x = Saves()
    """: ("x.u", 2),
}


# ── optimizers ───────────────────────────────────────────────────────────────────────────────────

OPTIMIZERS: dict[str, tuple[str, str, Any]] = {
    "hooks": (
        "opt = torch.optim.SGD([w], lr=0.1); calls = []\n"
        "opt.register_step_pre_hook(lambda *args: calls.append(args[0] is opt))",
        "w.sum().backward(); opt.step()\ncalls",
        [True],
    ),
    "an optimizer with a closure": (
        "opt = torch.optim.LBFGS([w])",
        "def closure():\n    opt.zero_grad(); loss = (w**2).sum(); loss.backward(); return loss\n"
        "opt.step(closure).item()",
        2,
    ),
    "an optimizer around another": (
        "class SAM(torch.optim.Optimizer):\n"
        "    def __init__(self, params):\n"
        "        super().__init__(params, {})\n"
        "        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)\n"
        "        self.param_groups = self.inner.param_groups\n"
        "    def step(self, closure=None): self.inner.step()\n"
        "opt = SAM([w])",
        "w.sum().backward(); opt.step()\n"
        "opt.param_groups is opt.inner.param_groups, round(w[0].item(), 4)",
        (True, 0.9),
    ),
    "a scheduler": (
        "opt = torch.optim.SGD([w], lr=0.1); sched = torch.optim.lr_scheduler.StepLR(opt, 1)",
        "import warnings\nwarnings.simplefilter('error')\n"
        "opt.step(); sched.step()\nopt.param_groups[0]['lr']",
        0.1 * 0.1,
    ),
}


def test_an_optimizer_that_a_library_has_wrapped_is_sent_as_torch_does(notebook: Notebook) -> None:
    """What the library adds belongs to one process."""
    notebook.cell("""
        import threading, torch
        kind = type("SGD", (torch.optim.SGD,), {"__module__": "logging"})
        opt = kind([torch.ones(2, requires_grad=True)], lr=0.1)
        opt.handles = threading.Lock()
    """)
    assert inline(notebook.capture("hasattr(opt, 'handles'), opt.param_groups[0]['lr']")) == (
        False,
        0.1,
    )


# ── objects that cloudpickle changes ─────────────────────────────────────────────────────────────

CHANGED: dict[str, tuple[str, Any]] = {
    """
    class Point:
        __slots__ = ("x", "_Point__y", "__weakref__")
        def __init__(self): self.x, self.__y = 1, 2
        def y(self): return self.__y
    x = Point()
    """: ("x.x, x.y(), hasattr(x, '__dict__')", (1, 2, False)),
    """
    import typing
    class Pair(typing.NamedTuple): a: int = 1
    class Same(Pair): __slots__ = ()
    x = Same()
    """: ("x.a, hasattr(x, '__dict__'), repr(x)", (1, False, "Same(a=1)")),
    """
    import enum
    class Planet(enum.Enum):
        EARTH = (6, 3)
        TWIN = (6, 3)
        MARS = (1, 2)
        def __init__(self, mass, radius):
            self.mass, self.radius, self.peers = mass, radius, []
            if mass == 1: self.peers.append(type(self).EARTH)
    class Code(enum.IntEnum):
        def __new__(cls, number, label):
            self = int.__new__(cls, number)
            self._value_, self.label = number, label
            return self
        OK = (1, "fine")
    class Perm(enum.Flag): R = 1; W = 2; RW = 3
    x = {Planet.EARTH: Code.OK}
    """: (
        "Planet.TWIN is Planet['TWIN'] is Planet((6, 3)), Perm['RW'].value,"
        " [(p.mass, p.radius, len(p.peers)) for p in Planet],"
        " Planet.MARS.peers[0] is Planet.EARTH, x[Planet.EARTH] + 1, Code(1).label",
        (True, 3, [(6, 3, 0), (1, 2, 1)], True, 2, "fine"),
    ),
    """
    import abc
    class Meta(abc.ABCMeta):
        made = {}
        @classmethod
        def __prepare__(meta, name, bases, *, key): return {"key": key}
        def __new__(meta, name, bases, body, *, key):
            body["table"] = body["fields"]
            return super().__new__(meta, name, bases, body)
        def __init__(cls, name, bases, body, *, key):
            super().__init__(name, bases, body)
            Meta.made[key] = cls
    class Base(metaclass=Meta, key="b"):
        fields = ["a"]
        def __init_subclass__(cls, **options): Meta.made[cls.key + "!"] = cls
        @abc.abstractmethod
        def f(self): ...
    class Model(Base, key="m"):
        fields = ["x"]
        def f(self): return self.table
    x = Model()
    """: (
        "class More(Model, key='n'): fields = ['y']\n"
        "x.f(), More().f(), sorted(Meta.made), Meta.made['m'] is Model, type(Model) is Meta,"
        " Base.__abstractmethods__",
        (["x"], ["y"], ["b", "m", "m!", "n", "n!"], True, True, frozenset({"f"})),
    ),
    """
    import argparse
    x = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    x.add_argument("--lr", type=float)
    x.add_argument("--secret", help=argparse.SUPPRESS)
    x.add_subparsers(dest="command").add_parser("run").add_argument("--n", default=2)
    """: (
        "vars(x.parse_args(['run'])), x.parse_args(['--lr', '1']).lr, 'SUPPRESS' in x.format_help()",
        ({"command": "run", "n": 2}, 1.0, False),
    ),
    """
    from torch.nn.functional import ScalingType as x
    """: (
        "import torch\nx is torch.nn.functional.ScalingType, x.__qualname__",
        (True, "_ScalingType"),
    ),
    "import numpy as np\nx = np.zeros(2, [('age', int)]).view(np.recarray)": (
        "import numpy as np\ntype(x) is np.recarray, x.age.sum(), x[0].age",
        (True, 0, 0),
    ),
    """
    import enum
    class Meta(enum.EnumMeta):
        made = []
        def __new__(meta, name, *args, **options):
            Meta.made.append(name)
            return super().__new__(meta, name, *args, **options)
        def __contains__(cls, value): return any(value == one.value for one in cls)
        def __call__(cls, value, *args): return super().__call__(value.lower(), *args)
    class Base(enum.Enum, metaclass=Meta):
        def shown(self): return self.name
    class x(Base): RED = "red"; CRIMSON = RED
    """: (
        "'red' in x, x('RED') is x.RED is x.CRIMSON, x.RED.shown(), type(Base) is Meta, Meta.made",
        (True, True, "RED", True, ["Base", "x"]),
    ),
    """
    import typing
    T = typing.TypeVar("T")
    class Pair(typing.NamedTuple, typing.Generic[T]):
        first: T
        second: T
    x = Pair[int](1, 2)
    """: ("x.first, Pair[str]('a', 'b'), Pair[int] == Pair[int]", (1, ("a", "b"), True)),
    """
    import functools
    def make():
        @functools.cache
        def count(n): return n and count(n - 1) + 1
        @functools.singledispatch
        def shown(n): return [shown("")] if n else "any"
        @shown.register
        def _(n: int): return "int", shown(None)
        count.tag = shown.tag = 3
        return count, shown
    x, y = make()
    """: ("x(3), x.tag, y(1), y([1]), y.tag", (3, 3, ("int", "any"), ["any"], 3)),
    """
    import weakref
    class Node:
        def __init__(self, parent=None):
            self.value, self.children, self.parent = 1, [], parent and weakref.proxy(parent)
        def __call__(self): return self.value
    root = Node(); root.children.append(Node(root)); x = root.children[0]
    def of_another(node): return weakref.proxy(node), node
    y, kept = of_another(Node())
    """: (
        "root.value = 5\nx.parent.value, x.parent(), y.value, type(y).__name__",
        (5, 5, 1, "CallableProxyType"),
    ),
    """
    import weakref
    class Node:
        def __init__(self, parent=None):
            self.value, self.children, self.parent = 1, [], parent and weakref.ref(parent)
    root = Node(); root.children.append(Node(root)); x = root.children[0]; y = x.parent
    """: (
        "root.value = 5\nx.parent().value, y() is root, root.children[0].parent() is root",
        (5, True, True),
    ),
    """
    class Both(dict):
        def __init__(self): self.keys_of = {}
        def __setitem__(self, key, value):
            self.keys_of[value] = key
            super().__setitem__(key, [value])
    class Doubling(list):
        def append(self, item): super().append(item * 2)
        def extend(self, items): [self.append(item) for item in items]
    x = Both(); x["a"] = 1; y = Doubling(); y.append(2); y.me = y
    """: ("x, x.keys_of, y, y.me is y", ({"a": [1]}, {1: "a"}, [4], True)),
    """
    import collections, datetime, decimal, fractions, pathlib, random
    class Day(datetime.date):
        __slots__ = ("name",)
        def __new__(cls, name):
            self = super().__new__(cls, 2024, 1, 2)
            self.name = name
            return self
    class Price(decimal.Decimal):
        def __new__(cls, value, unit):
            self = super().__new__(cls, value)
            self.unit = unit
            return self
    class Draws(random.Random):
        def __init__(self, name):
            super().__init__(3)
            self.name = name
    class Logged(collections.OrderedDict):
        def __init__(self, log): self.log = log
        def __setitem__(self, key, value): self.log.append(key); super().__setitem__(key, value)
    class Several(set):
        def __init__(self, *items): super().__init__(items)
    class Folder(type(pathlib.Path())): pass
    x = [Day("new"), Price("1.5", "EUR"), Logged([]), Several(1, 2), Draws("d"), Folder("a")]
    x[2]["k"] = x; x[5].tag = hash(x[5]) and 4
    """: (
        "x[0].name, x[0].day, x[1] * 2, x[1].unit, x[2].log, x[2]['k'] is x, x[3] == {1, 2}, x[4].name,"
        " round(x[4].random(), 3), x[5].tag, {x[5]: 1}[pathlib.Path('a')], type(x[5]) is Folder",
        ("new", 2, 3, "EUR", ["k"], True, True, "d", 0.238, 4, 1, True),
    ),
    """
    import numpy as np
    class Length(np.ndarray):
        def __new__(cls, values, unit):
            self = np.asarray(values).view(cls)
            self.unit = unit
            return self
        def __array_finalize__(self, other): self.unit = getattr(other, "unit", None)
    x = [Length([1, 2], "km"), Length([[1, 2], [3, 4]], "m")[:, 1], np.ma.array([1, 2], mask=[0, 1])]
    """: (
        "(x[0] * 2).unit, x[1].unit, x[1].tolist(), type(x[1]) is Length, x[2].sum(), x[2].fill_value,"
        " __import__('numpy').ma.array([1]).mask is __import__('numpy').ma.nomask",
        ("km", "m", [2, 4], True, 1, 999999, True),
    ),
    """
    import polars
    x = [type(iter([])), type(polars.DataFrame()._df)]
    """: ("x == [type(iter([])), __import__('polars')._plr.PyDataFrame]", True),
    """
    import dataclasses, torch
    class Base:
        count, tag = 0, "m"
    class Other:
        tag = "m"
    class Sub(Base, Other):
        size = None
        def zeta(self): ...
        count, tag = 0, "m"
        def alpha(self): ...
    class Shown(int, Base):
        "A documented class."
        def __eq__(self, other): return True
        __repr__ = int.__repr__
        __hash__ = None
    class Again(Shown):
        __doc__ = Shown.__doc__
        def __eq__(self, other): return False
        __hash__ = None
    @dataclasses.dataclass
    class Point:
        y: int = 0
    @dataclasses.dataclass
    class Point3(Point):
        y: int = 0
        b: int = 1
    class Net(torch.nn.Module):
        training = torch.nn.Module.dump_patches
    x = Sub()
    """: (
        "Base.count, Base.tag, Other.tag, Point.y = 1, 'n', 'n', 1\n"
        "def own(cls): return [name for name in vars(cls) if not name.startswith('_')]\n"
        "Shown.__repr__, Shown.__hash__ = repr, lambda self: 0\n"
        "(Sub.count, Sub.tag, Point3.y, own(Sub), own(Point3), own(Net), Again.__hash__, Again.__doc__)",
        (
            *(0, "m", 0, ["size", "zeta", "count", "tag", "alpha"], ["y", "b"], ["training"]),
            *(None, "A documented class."),
        ),
    ),
    """
    import dataclasses
    @dataclasses.dataclass
    class Base:
        name: str
        tags: list = dataclasses.field(default_factory=list)
    x = dataclasses.fields(Base)
    """: (
        "@dataclasses.dataclass\nclass More(Base): n: int = 0\n"
        "More('a').tags, x[0].default is dataclasses.MISSING, __import__('inspect').signature(Base)"
        ".parameters['tags'].default is dataclasses._HAS_DEFAULT_FACTORY",
        ([], True, True),
    ),
    """
    class Base:
        __slots__ = ()
        made = []
        def __init_subclass__(cls): cls.made.append(cls.__name__)
    class Small(Base): __slots__ = ("a",)
    class Large(Small): pass
    x = Large()
    """: (
        "x.made, hasattr(x, '__dict__'), hasattr(Small(), '__dict__')",
        (["Small", "Large"], True, False),
    ),
    """
    class Failed(OSError):
        def __init__(self, code, *, why):
            super().__init__(code, f"failed: {why}")
            self.why = why
    x = Failed(5, why="disk")
    x.__cause__ = OSError(2, open("/dev/null"))
    """: (
        "x.errno, x.strerror, x.why, x.args, x.__cause__",
        (5, "failed: disk", "disk", (5, "failed: disk"), None),
    ),
    """
    def scaled(by, offset=None):
        def x(n, *, times=by): return n * times if offset is None else n * times + offset
        return x
    x = scaled(3)
    """: ("x(2), x(2, times=5)", (6, 10)),
    "import torch\nx = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])": (
        "[each.tolist() for each in x.unbind()]",
        [[1], [1, 1]],
    ),
    """
    import pydantic, threading
    unsent = threading.Lock()
    class Item(pydantic.BaseModel): n: int
    @pydantic.validate_call
    def x(n: int, item: "Item | None" = None) -> int: return n * 2
    """: ("x('4', Item(n=1)), x(1, {'n': 2}), x.__name__", (8, 2, "x")),
    "x = type('x', (), {'__module__': None, 'v': 1, 'f': lambda self: self.v})()": (
        "x.f(), type(x).__module__",
        (1, None),
    ),
    "import sys\nx = {'python': sys.version_info}": ("x['python'] is sys.version_info", True),
}


@pytest.mark.parametrize("setup", ANSWERING | CHANGED)
def test_objects_arrive_unchanged(notebook: Notebook, setup: str) -> None:
    notebook.cell(setup)
    cell, value = (ANSWERING | CHANGED)[setup]
    assert inline(notebook.capture(cell)) == value


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_arrive_with_all_they_have(notebook: Notebook, kind: str) -> None:
    setup, cell, value = OPTIMIZERS[kind]
    notebook.cell(f"import torch\nw = torch.ones(2, requires_grad=True)\n{setup}")
    assert inline(notebook.capture(cell)) == value


@pytest.mark.parametrize("made", ["threading.local()", "mmap.mmap(-1, 9)"])
def test_state_that_only_c_code_sees_is_refused(notebook: Notebook, made: str) -> None:
    notebook.cell(f"import mmap, threading\nx = [{made}]")
    with pytest.raises(CaptureError, match=r"`x\[0\]` .* cannot be sent"):
        notebook.capture("x")


# ── memory that objects share ────────────────────────────────────────────────────────────────────

SHARED: dict[str, tuple[str, str, Any]] = {
    "views of a small array": (
        "a = np.zeros(10); x = a[2:5]; y = a.reshape(2, 5)",
        "x[:] = 1\na.tolist() == y.ravel().tolist(), a.sum()",
        (True, 3),
    ),
    "a view and its base, reversed": (
        "a = np.zeros(5000); x = a[2:5]; y = a[::-1]",
        "x[:] = 1\na.sum(), y[-5:-2].tolist(), y.strides",
        (3, [1, 1, 1], (-8,)),
    ),
    "views without their base": (
        "base = np.zeros(5000); x = base[2:50]; y = base[40:60]",
        "x[:] = 1\ny.sum()",
        10,
    ),
    "columns of one array": (
        "base = np.zeros((500, 500)); x = base[:, 0]; y = base[:, 0]; z = base[5]",
        "x[:] = 1\ny.sum(), z.sum()",
        (500, 1),
    ),
    "Fortran order": (
        "a = np.asfortranarray(np.zeros((2, 3000))); x = a[0]",
        "x[:] = 1\na.sum(), a.flags.f_contiguous",
        (3000, True),
    ),
    "an array with gaps that cannot be written": (
        "x = np.eye(40)[::2, ::2]; x.flags.writeable = False; y = np.eye(40)[::2]",
        "x.flags.writeable, x.sum(), y.flags.writeable",
        (False, 20, True),
    ),
    "a field and a view that cannot be written": (
        "a = np.zeros(9, [('p', int), ('q', float)]); x = a['q']; y = a[:3]; y.flags.writeable = False",
        "x[:] = 1\na['q'].sum(), y['q'].sum(), y.flags.writeable, a.flags.writeable",
        (9, 3, False, True),
    ),
    "a matrix and a masked array": (
        "a = np.arange(4.0).reshape(2, 2); x = np.ma.array(a, copy=False, mask=a > 2); m = np.asmatrix(a)",
        "x[0] = 9\na.tolist(), m.tolist(), x.sum()",
        ([[9, 9], [2, 3]], [[9, 9], [2, 3]], 20),
    ),
    "records": (
        "a = np.zeros(3, [('p', int), ('q', float)]); x = a.view(np.recarray); y = x.q",
        "x.p[0] = 9; y[1] = 5\na.tolist(), type(x).__name__",
        ([(9, 0), (0, 5), (0, 0)], "recarray"),
    ),
    "torch.from_numpy": (
        "a = np.zeros(5000); x = torch.from_numpy(a)[:10]",
        "x[:] = 1\na.sum()",
        10,
    ),
    "Tensor.numpy": (
        "a = torch.zeros(4000); x = a.numpy()[10:20]; y = a[5:15]",
        "x[:] = 1\na.sum().item(), y.sum().item()",
        (10, 5),
    ),
    "a parameter and views": (
        "base = torch.zeros(9000); w = torch.nn.Parameter(base[:10]); x = base[5:15]; y = base[:, None]",
        "x[:] = 1\nw.sum().item(), y.sum().item(), w.requires_grad",
        (5, 10, True),
    ),
    "a memory map's view": (
        "file = tempfile.TemporaryFile(); a = np.memmap(file, float, 'w+', shape=(2000,)); x = a[:9]",
        "x[:] = 1\na.sum()",
        9,
    ),
}


@pytest.mark.parametrize("kind", SHARED)
def test_memory_stays_shared(notebook: Notebook, kind: str) -> None:
    setup, cell, value = SHARED[kind]
    notebook.cell(f"import numpy as np, tempfile, torch\n{setup}")
    before = {name: repr(notebook.names.get(name)) for name in ("a", "x", "base")}
    assert inline(notebook.capture(cell)) == value
    assert {name: repr(notebook.names.get(name)) for name in before} == before


FRAMES: dict[str, tuple[str, str, Any]] = {
    "frames": (
        "y = x.assign(r=x.a * 2, when=pd.to_datetime(['2024', '2025']))",
        "y.loc[0, 'a'] = 9.0\nx.a.tolist(), y.a.tolist()",
        ([1.0, 2.0], [9.0, 2.0]),
    ),
    "columns that are no arrays of NumPy": (
        "x['when'] = pd.to_datetime(['2024', '2025']); y = x.copy(deep=False)",
        "y.loc[0, 'when'] = y.when[1]\nx.when.dt.year.tolist(), y.when.dt.year.tolist()",
        ([2024, 2025], [2025, 2025]),
    ),
    "a frame and its column": (
        "y = x.a",
        "y.iloc[0] = 9.0\nx.a.tolist(), y.tolist()",
        ([1.0, 2.0], [9.0, 2.0]),
    ),
    "a column and the index over it": (
        "y = pd.Series([1.0, 2.0]); x.index = pd.Index(y)",
        "y.iloc[0] = 9.0\nx.index.tolist(), y.tolist()",
        ([1.0, 2.0], [9.0, 2.0]),
    ),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_frames_over_the_same_memory_are_copied_on_write(notebook: Notebook, kind: str) -> None:
    pytest.importorskip("pandas", "3")
    setup, cell, value = FRAMES[kind]
    notebook.cell(f"import pandas as pd; x = pd.DataFrame({{'a': [1.0, 2.0]}})\n{setup}")
    assert inline(notebook.capture(cell)) == value


PARTS = {
    "np.broadcast_to(np.float32(3), (10_000, 10_000))": "x.strides == (0, 0) and x[5, 5] == 3",
    "torch.tensor(3.0).expand(10_000, 10_000)": "x.stride() == (0, 0) and x[5, 5] == 3",
    "torch.zeros(1000, 1000)[:3]": "x.shape == (3, 1000)",
    "torch.zeros(1000, 1000)[:, 3]": "x.shape == (1000,) and not x.any()",
    "torch.zeros(1000, 1000).to(torch.uint16)[7]": "x.shape == (1000,) and x.dtype is torch.uint16",
    "np.zeros((1000, 1000))[:, 3]": "x.shape == (1000,)",
    "np.zeros((1000, 1000))[5:8]": "x.shape == (3, 1000)",
}


@pytest.mark.parametrize("made", PARTS)
def test_only_the_part_in_use_is_sent(notebook: Notebook, made: str) -> None:
    notebook.cell(f"import numpy as np, torch\nx = {made}")
    captured = notebook.capture(PARTS[made])
    assert captured.payload.nbytes < 30_000
    assert inline(captured)


def test_a_weak_proxy_of_an_object_that_is_gone_is_refused(notebook: Notebook) -> None:
    notebook.cell("import weakref\nclass C: pass\nc = C(); x = [weakref.proxy(c)]; del c")
    with pytest.raises(CaptureError, match=r"`x\[0\]` .* object that is gone; delete it"):
        notebook.capture("x")


def test_overlapping_views_are_sent_once(notebook: Notebook) -> None:
    notebook.cell("import numpy as np\nbase = np.zeros(1 << 19)\nx = [base[n:] for n in range(9)]")
    captured = notebook.capture("x[0][8] = 1\n[view[8 - n] for n, view in enumerate(x)]")
    assert captured.payload.nbytes < 5 << 20
    assert inline(captured) == [1] * 9
    assert inline(notebook.capture("x", max_closure_bytes=5 << 20))[8].size == (1 << 19) - 8


def test_captured_values_are_released_with_the_closure(notebook: Notebook) -> None:
    notebook.cell("import numpy as np\nx = np.zeros(1000); y = x[5:]\nclass Box: pass\nbox = Box()")
    notebook.cell("large = np.ones(1 << 20)")
    released = [weakref.ref(notebook.names[name]) for name in ("box", "large")]
    captured = notebook.capture("x, y, box, large")
    del notebook.names["box"], notebook.names["large"], captured
    assert all(reference() is None for reference in released)


def test_one_changed_number_changes_the_fingerprint(notebook: Notebook) -> None:
    """However large the array is: a resumed run must not mix the rows of two models."""
    notebook.cell("import numpy as np\nlarge = np.zeros(1 << 20)")
    before = notebook.capture("large").digests()
    assert notebook.capture("large").digests() == before
    notebook.names["large"][12_345] = 1
    assert notebook.capture("large").digests()["large"] != before["large"]
