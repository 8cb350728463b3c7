"""Classes of the notebook whose base or metaclass, from a local module, observes how they are made."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydrogen_magic.capture import capture_call, class_statements
from hydrogen_magic.errors import CaptureError
from hydrogen_magic.serialization.closure import unbundle
from tests.capture_rig import Notebook, RankError, Ranks, write

pytestmark = [pytest.mark.xdist_group("capture"), pytest.mark.usefixtures("in_folder")]

KINDS = '''
    import functools
    from hydrogen_magic.core.lazy_annotations import annotations_of

    class Field:
        def __init__(self, size=0): self.size = size

    class Column:
        """What the metaclass puts in the place of a field."""
        def __init__(self, name, size): self.name, self.size = name, size
        def __get__(self, obj, kind): return self

    class Meta(type):
        fields = {}
        def __new__(meta, name, bases, body, **options):
            found = {key: each.size for key, each in body.items() if isinstance(each, Field)}
            body.update({key: Column(key, size) for key, size in found.items()})
            body = {key: Meta.wrapped(each) if key == "call" else each for key, each in body.items()}
            cls = super().__new__(meta, name, bases, body)
            known = tuple(annotations_of(cls))
            Meta.fields[cls] = (*known, *found.items(), *options.items())
            return cls
        def __init__(cls, name, bases, body, **options): super().__init__(name, bases, body)
        @staticmethod
        def wrapped(function):
            @functools.wraps(function)
            def wrapper(*args): return "wrapped", function(*args)
            return wrapper

    class Module(metaclass=Meta):
        def leaves(self): return [getattr(self, name) for name in Meta.fields[type(self)]]

    class Named:
        named = {}
        def __init_subclass__(cls, *, name, **options):
            super().__init_subclass__(**options)
            Named.named[name] = cls

    class Checked:
        def __init_subclass__(cls):
            if not cls.layers: raise TypeError(f"{cls.__name__} has no layers")
            cls.depth = len(cls.layers)
'''


@pytest.fixture(autouse=True)
def kinds(tmp_path: Path, in_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a module with what equinox, msgspec and SQLAlchemy do."""
    monkeypatch.setattr(class_statements, "_NEEDING_BODIES", {"kinds"})
    write(tmp_path, {"kinds.py": KINDS})


def run(notebook: Notebook, ranks: Ranks, cell: str, test: str) -> object:
    """Return the value of a cell on a rank, after a cell of the notebook."""
    notebook.cell(cell)
    return ranks.run(notebook.capture(test)).value


CASES = {
    "annotations": (
        """
        import kinds
        class Net(kinds.Module):
            weight: int
            bias: float = 0.5
            def __init__(self, weight): self.weight = weight
        net = Net(3)
        """,
        "net.leaves(), Net.bias, Net.__doc__",
        ([3, 0.5], 0.5, None),
    ),
    "keyword": (
        """
        from kinds import Named
        suffix = "!"
        class A(Named, name="x" + suffix):
            def f(self): return super().__repr__()[:3]
        a = A()
        """,
        "Named.named == {'x!': A}, a.f()",
        (True, "<__"),
    ),
    "in a magic": (
        """
        %%time
        from kinds import Named
        class A(Named, name="x"):
            def f(self): return 3
        a = A()
        """,
        "from kinds import Named\nNamed.named == {'x': A}, a.f()",
        (True, 3),
    ),
    "checked": (
        "from kinds import Checked\nclass Deep(Checked): layers = [1, 2]\nx = Deep()",
        "x.depth, x.layers",
        (2, [1, 2]),
    ),
    "metaclass": (
        """
        from kinds import Field, Meta
        size = 3
        class Row(metaclass=Meta, table="rows"):
            id = Field(size)
            width = 2 * size
            def call(self): return self.width
            @property
            def twice(self): return 2 * self.width
        row = Row()
        """,
        "import kinds\n"
        "kinds.Meta.fields[Row], Row.id.size, row.call(), row.twice, type(Row).__name__",
        ((("id", 3), ("table", "rows")), 3, ("wrapped", 6), 12, "Meta"),
    ),
    "decorators": (
        """
        import dataclasses, kinds
        @dataclasses.dataclass(frozen=True)
        class Point(kinds.Named, name="p"):
            x: int = 1
            y: list = dataclasses.field(default_factory=list)
        p = Point(2)
        """,
        "p, Point(), dataclasses.replace(p, x=5).x, kinds.Named.named['p'] is Point, hash(Point) != 0\n"
        "repr(p), Point().x, kinds.Named.named['p'] is Point",
        ("Point(x=2, y=[])", 1, True),
    ),
    "helpers of the body": (
        """
        import kinds
        from kinds import Field
        step = 2
        def scaled(n): return n * step
        def traced(function): return lambda self: ["traced", function(self)]
        class Row(kinds.Module):
            id = Field(scaled(4))
            sizes = [scaled(n) for n in range(3)]
            @traced
            def f(self): return __class__.sizes
        row = Row()
        """,
        "kinds.Meta.fields[Row], row.f()",
        ((("id", 8),), ["traced", [0, 2, 4]]),
    ),
    "subclasses": (
        """
        import kinds
        class Base(kinds.Module): a: int = 1
        class Leaf(Base):
            b: int
            def __init__(self): self.b = 2
        class Tree(Base):
            leaf: Leaf
            def __init__(self): self.leaf = Leaf()
            def copy(self): return Tree()
        tree = Tree()
        """,
        "[type(x).__name__ for x in tree.leaves()], tree.leaf.leaves(), isinstance(tree.copy().leaf, Base)",
        (["Leaf"], [2], True),
    ),
    "futures": (
        """
        from __future__ import annotations
        import kinds
        class Net(kinds.Module):
            other: Net | None = None
            def f(self, other: Net): return other
        x = Net()
        """,
        "x.leaves(), x.f(x) is x, Net.__annotations__",
        ([None], True, {"other": "Net | None"}),
    ),
    "set since": (
        """
        import kinds
        class Net(kinds.Module):
            a: int = 1
            count = 0
            seen = []
            def f(self): return "old"
            def g(self): return "g"
        def f(self): return "new"
        Net.f = f
        Net.extra = {"k": Net.g}
        Net.count += 1
        Net.seen.append(Net)
        kept = Net.g
        x = Net()
        """,
        "x.f(), Net.extra['k'] is Net.g is kept, Net.count, Net.seen == [Net], x.leaves()",
        ("new", True, 1, True, [1]),
    ),
    "expressions that have another value now": (
        """
        import dataclasses, kinds
        config = {"n": 1, "k": "a"}
        @dataclasses.dataclass
        class Net(kinds.Module):
            n: int = config["n"]
            def f(self, x=config["n"], *, key=config["k"]): return x, key
            @classmethod
            def g(cls, x=config["n"]): return x
        config.update(n=2, k="b")
        x = Net()
        """,
        "x.n, Net().n, x.f(), Net.g(), Net(n=5).n, Net.f(x, 7, key='c')",
        (1, 1, (1, "a"), 1, 5, (7, "c")),
    ),
    "random": (
        """
        import kinds, random
        class Net(kinds.Module): seed = random.random()
        seed, x = Net.seed, Net()
        """,
        "x.seed == seed",
        True,
    ),
    "made by a call": (
        """
        from kinds import Meta, Module
        Base = Meta("Base", (), {"x": 1}, table="t")
        class Part(Base): y: int = 2
        """,
        "import kinds\n"
        "kinds.Meta.fields[Base], kinds.Meta.fields[Part], Part.x, Base.__subclasses__() == [Part]",
        ((("table", "t"),), ("y",), 1, True),
    ),
    "named in texts": (
        """
        import kinds
        def scaled(n): return n * 2
        class Tree(kinds.Module):
            kind: "Leaf"
            def grown(self): return kinds.Meta
        class Leaf(Tree):
            part: "list[Tree]"
            def f(self): return scaled(2)
        x = Tree()
        """,
        "import sys\nsys.modules['__main__'].Leaf().f(), issubclass(sys.modules['__main__'].Leaf, Tree)",
        (4, True),
    ),
    "a part of a cycle": (
        """
        import kinds
        made = {}
        class Net(kinds.Named, name="n"):
            table = made
        made["net"] = Net
        x = Net()
        """,
        "import kinds\nx.table['net'] is Net is kinds.Named.named['n'], x.table is made",
        (True, True),
    ),
    "nested": (
        """
        import kinds
        class Net(kinds.Module):
            a: int = 1
            class Config(kinds.Module): b: int = 2
        x = [Net.Config(), Net()]
        """,
        "type(x[0]) is Net.Config, x[0].leaves(), x[1].leaves()",
        (True, [2], [1]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_class_is_made_by_its_statement(case: str, notebook: Notebook, ranks: Ranks) -> None:
    cell, test, expected = CASES[case]
    assert run(notebook, ranks, cell, test) == expected


def test_an_unsaid_class_is_made_of_its_attributes(notebook: Notebook, ranks: Ranks) -> None:
    """Made in a function, by a decorator of the notebook, or with a hook of the notebook."""
    cell = """
        import kinds
        def made(n):
            class Local(kinds.Module): a: int = n
            return Local
        listed = []
        def noted(cls): listed.append(cls); return cls
        @noted
        class Noted(kinds.Module): a: int = 1
        class Hooked(kinds.Module):
            def __init_subclass__(cls): listed.append(cls)
        class Below(Hooked): b: int = 2
        x = [made(3)(), Noted(), Below()]
    """
    test = (
        "[type(each).__name__ for each in x], x[0].a, len(listed), Noted in listed, Below in listed"
    )
    assert run(notebook, ranks, cell, test) == (["Local", "Noted", "Below"], 3, 2, True, True)


NET = """
    import kinds
    hidden = 64
    class Net(kinds.Module):
        size: int = hidden
        def fail(self):
            raise ValueError(self.size)
    net = Net()
"""


def test_tracebacks_show_the_cell(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell(NET)
    with pytest.raises(RankError, match=r"line 6, in fail\n +raise ValueError\(self.size\)"):
        ranks.run(notebook.capture("net.fail()"))


def test_the_notebook_gets_its_own_class_back(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell(NET)
    rank = ranks.run(
        notebook.capture("net.size = 3\nother = Net()\nnet, Net", out=["net", "other"])
    )
    names = notebook.names
    assert rank.value[1] is names["Net"]
    found = [rank.value[0], rank.out["net"], rank.out["other"]]
    assert all(type(each) is names["Net"] for each in found)
    assert [each.size for each in found] == [3, 3, 64]


def test_a_name_with_another_value_does_not_change_a_class(
    notebook: Notebook, ranks: Ranks
) -> None:
    notebook.cell(NET)
    test = "import kinds\nNet.size, net.leaves(), kinds.Meta.fields[Net]"
    first = notebook.capture(test)
    before = first.digests()
    assert ranks.run(first).value == (64, [64], ("size",))
    notebook.cell("hidden = 128")
    again = notebook.capture(test)
    assert again.digests() == before and not again.hints
    assert ranks.run(again).value == (64, [64], ("size",))
    notebook.cell("Net.size = 5\ndef fail(self): return 6\nNet.fail = fail")
    changed = notebook.capture(test + ", net.fail()")
    assert changed.digests()["Net"] != before["Net"]
    assert ranks.run(changed).value == (5, [5], ("size",), 6)


def test_a_class_that_may_have_read_another_value(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell(NET)
    notebook.cell("hidden = 128")
    captured = notebook.capture("Net.size, net.size")
    (hint,) = captured.hints
    assert "`Net` has read `hidden`, which has been assigned since" in hint
    assert ranks.run(captured).value == (64, 64)
    notebook.cell(NET)
    assert not notebook.capture("net").hints


def test_cells_that_have_failed(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell(NET)
    for failing in (
        "return 1",
        "1 / 0\nclass Net(kinds.Module):\n    size: int = 1\n    def fail(self): return 2",
    ):
        notebook.shell.run_cell(failing, store_history=True)
    with pytest.raises(RankError, match="ValueError: 64"):
        ranks.run(notebook.capture("assert net.leaves() == [64]\nnet.fail()"))


def test_earlier_classes_of_the_same_name(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("import kinds\nclass Net(kinds.Module):\n    a: int = 1\nold = Net()")
    notebook.cell("class Net(kinds.Module):\n    b: int = 2\nnew = Net()")
    captured = notebook.capture("old.leaves(), new.leaves(), Net is type(new), Net is type(old)")
    assert ranks.run(captured).value == ([1], [2], True, False)


def test_a_call_gets_classes_by_their_statements(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell(NET)
    notebook.cell("def leaves(net): return net.leaves(), type(net) is Net")
    names = notebook.names
    assert ranks.run(capture_call(names["leaves"], [names["net"]], {})).value == ([64], True)


def test_classes_of_trusted_packages_are_made_of_their_attributes(notebook: Notebook) -> None:
    """No code of the body runs again for these: it prints."""
    notebook.cell("""
        import abc, dataclasses, enum, typing, pydantic, torch
        class A(torch.nn.Module): print("made")
        class B(pydantic.BaseModel, frozen=True): x: int = print("made") or 1
        class C(typing.Protocol): print("made")
        class D(abc.ABC, typing.Generic[typing.TypeVar("T")]): print("made")
        class E(typing.NamedTuple): x: int = 2
        class F(enum.Enum): X = 1
        class G(torch.autograd.Function): print("made")
        class H(torch.utils.data.Dataset[int]): print("made")
        class I(typing.TypedDict, total=False): x: int
    """)
    _, body = unbundle(notebook.capture("[A, B, C, D, E, F, G, H, I]").payload)
    assert b"by_statement" not in bytes(body.pickled)
    notebook.cell(NET)
    _, body = unbundle(notebook.capture("Net").payload)
    assert b"by_statement" in bytes(body.pickled)


def test_a_base_that_requires_a_keyword_gets_the_present_class(
    notebook: Notebook, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(class_statements, "_NEEDING_BODIES", set())
    notebook.cell("from kinds import Named\nclass A(Named, name='a'): n = 1\nearlier = A()")
    notebook.cell("class A(Named, name='a'):\n    @classmethod\n    def set(cls): cls.n = 2")
    notebook.cell("A.set(); a = A()")
    captured = notebook.capture("Named.named['a'] is type(a) is A, a.n")
    assert ranks.run(captured).value == (True, 2)
    with pytest.raises(
        CaptureError, match=r"Named\.__init_subclass__ requires .* in a local module"
    ):
        notebook.capture("earlier.n")
