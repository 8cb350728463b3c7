"""Functions and classes that are defined again in a session."""

from __future__ import annotations

import copy
import pickle
import sys
import textwrap
import types
from typing import Any

import pytest

from hydrogen_magic.node.worker.module_importer import SessionFinder
from hydrogen_magic.node.worker.session import redefinition
from hydrogen_magic.node.worker.session.name_watch import NameWatch
from hydrogen_magic.serialization.closure import ModuleSource

EARLIER = """
class Base:
    def name(self): return "base"
class Net(Base):
    class Part:
        def of(self): return 1
    @property
    def size(self): return 1
    @staticmethod
    def kind(): return 1
    def name(self): return "net of " + super().name()
    def gone(self): return 1
class Deep(Net):
    def name(self): return "deep " + super().name()
def scale(x, by=1): return x * by
"""
LATER = """
class Net(Base):
    class Part:
        def of(self): return 2
    @property
    def size(self): return 2
    @staticmethod
    def kind(): return 2
    def name(self): return "new net of " + super().name()
    def added(self): return self.value
def scale(x, by=10): return x * by + 1
"""


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the namespace of a ``__main__``."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(EARLIER, vars(module))
    return vars(module)


def redefine(main: dict[str, Any], source: str) -> list[str]:
    """Run ``source`` as a later cell, whose definitions replace those of the ranks."""
    earlier = dict(main)
    exec(source, main)
    return redefinition.replace(earlier, main)


def test_existing_instances_get_the_new_class(main: dict[str, Any]) -> None:
    net, deep, part = main["Net"](), main["Deep"](), main["Net"].Part()
    net.value = 3
    assert redefine(main, LATER) == []
    assert isinstance(net, main["Net"]) and isinstance(deep, main["Net"])
    assert (net.name(), net.size, net.kind(), net.added()) == ("new net of base", 2, 2, 3)
    assert deep.name() == "deep new net of base"
    assert part.of() == 2
    assert not hasattr(net, "gone")
    assert pickle.loads(pickle.dumps(net)).added() == copy.deepcopy(net).added() == 3


@pytest.mark.skipif(sys.version_info < (3, 14), reason="Python evaluates annotations at once")
def test_annotations_that_cannot_be_evaluated(main: dict[str, Any]) -> None:
    scale = main["scale"]
    later = compile("def scale(x: Missing): return -x", "<cell>", "exec", dont_inherit=True)
    earlier = dict(main)
    exec(later, main)
    redefinition.replace(earlier, main)
    assert scale(1) == -1 and scale.__annotations__ == {"x": "Missing"}


def test_classes_that_refuse_issubclass_stay_or_are_replaced(main: dict[str, Any]) -> None:
    typed = """
import typing
class Batch(typing.TypedDict): x: int
class Loader(typing.Protocol):
    size: int
class Mine(Loader):
    def of(self): return SIZE
"""
    exec(typed.replace("SIZE", "1"), main)
    mine = main["Mine"]()
    assert redefine(main, LATER) == []
    assert redefine(main, typed.replace("SIZE", "2")) == []
    assert mine.of() == 2 and isinstance(mine, main["Mine"])


@pytest.mark.parametrize("kind", ["Enum", "Flag"])
def test_members_of_an_enum_equal_those_of_the_new_one(main: dict[str, Any], kind: str) -> None:
    exec(f"import enum\nclass Color(enum.{kind}): RED = 1; BLUE = 2", main)
    red, names = main["Color"].RED, {main["Color"].RED: "r"}
    for blue in (4, 8):
        redefine(main, f"class Color(enum.{kind}): RED = 1; GREEN = 2; BLUE = {blue}")
    new = main["Color"]
    assert red == new.RED != new.BLUE and red in new and names[new.RED] == "r"
    assert red != new.GREEN and red != 1


def test_functions_that_objects_refer_to_run_the_new_code(main: dict[str, Any]) -> None:
    net = main["Net"]()
    callbacks = [main["scale"], net.name, main["Net"].kind]
    redefine(main, LATER.replace("10", "5").replace("2", "3").replace("new net", "net"))
    redefine(main, LATER)
    assert [callbacks[0](2), callbacks[1](), callbacks[2]()] == [21, "new net of base", 2]


def test_a_decorated_function_runs_the_new_one(main: dict[str, Any]) -> None:
    decorator = """
import functools
def plus(n):
    def decorate(f):
        @functools.wraps(f)
        def call(x): return f(x) + n
        return call
    return decorate
"""
    exec(f"{decorator}@plus(1)\ndef add(x): return x", main)
    callback = main["add"]
    redefine(main, f"{decorator}@plus(5)\ndef add(x): return 2 * x")
    assert callback(10) == 25


def test_objects_stay_where_only_the_name_refers_to_another_one(main: dict[str, Any]) -> None:
    makers = """
def make(n):
    def hook(): return n
    return hook
def model(n):
    class Model:
        def of(self): return n
    return Model
"""
    exec(f"{makers}zoo = [model(1), model(2)]; by = [lambda: 1, lambda: 2]", main)
    exec("hook, Model, f, g = make(1), zoo[0], by[0], scale\nclass Part: of = by[0]", main)
    before = [main["hook"], main["Model"]().of, main["f"], main["Part"].of]
    redefine(main, "hook, Model, f, g = make(2), zoo[1], by[1], make\nclass Part: of = by[1]")
    assert [each() for each in before] == [1, 1, 1, 1]
    assert (main["zoo"][0]().of(), main["scale"](3)) == (1, 3)


def test_an_instance_of_another_layout_is_reported_and_keeps_its_class(
    main: dict[str, Any],
) -> None:
    exec("class Row:\n __slots__ = ('a',)\n def of(self): return 1", main)
    row = main["Row"]()
    (warning,) = redefine(main, "class Row:\n __slots__ = ('a', 'b')\n def of(self): return 2")
    assert "1 instance of the earlier class Row" in warning and "create it again" in warning
    assert not isinstance(row, main["Row"])


def test_definitions_of_other_modules_stay(main: dict[str, Any]) -> None:
    exec("import textwrap\nclass Net(Base):\n of = textwrap.dedent\nf = textwrap.dedent", main)
    redefine(main, "class Net(Base):\n of = textwrap.indent\nf = textwrap.indent")
    assert textwrap.dedent("  a") == "a"


def test_a_method_that_has_a_name_stays(main: dict[str, Any]) -> None:
    redefine(main, "of = Net.Part.of\nclass Net:\n class Part:\n  def of(self): return -of(self)")
    assert main["Net"].Part().of() == -1


def test_an_alias_and_a_base_keep_the_earlier_definition(main: dict[str, Any]) -> None:
    redefine(main, "earlier = scale\ndef scale(x): return earlier(x) + 1")
    assert main["scale"](2) == 3
    extend, net = "class Net(Net):\n def name(self): return '{} ' + super().name()", main["Net"]()
    redefine(main, extend.format("more"))
    assert (main["Net"]().name(), net.name()) == ("more net of base", "net of base")
    extended = main["Net"]()
    redefine(main, f"{LATER}\n{extend.format('other')}")
    assert (extended.name(), net.name()) == ("other new net of base", "net of base")


# ── local modules ────────────────────────────────────────────────────────────────────────────────


def sources(**texts: str) -> dict[str, ModuleSource]:
    return {name: ModuleSource(text, f"/nowhere/{name}.py") for name, text in texts.items()}


@pytest.fixture
def finder(monkeypatch: pytest.MonkeyPatch) -> SessionFinder:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("low_level", "high_level"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    return SessionFinder()


@pytest.mark.parametrize("order", [("high_level", "low_level"), ("low_level", "high_level")])
def test_an_edited_module_is_loaded_again_where_it_is_used(
    finder: SessionFinder, main: dict[str, Any], order: tuple[str, str]
) -> None:
    low = "class Layer:\n def of(self): return {0}\n{1}\ndef scale(): return {0}\n"
    high = "import low_level\nfrom low_level import Layer, scale\ncount = []\ndef make(): return Layer()"
    assert finder.update(sources(low_level=low.format(1, ""), high_level=high)) == []
    for name in order:
        exec(f"import {name}", main)
    exec("from low_level import Layer, scale; layer = Layer(); hook = [scale]", main)
    count = main["high_level"].count
    edited = low.format(2, " def added(self): return 3")
    (note,) = finder.update(sources(low_level=edited, high_level=high))
    assert note == "the ranks loaded edited modules again: low_level"
    made = main["high_level"].make()
    assert (made.added(), main["layer"].added(), main["scale"](), main["hook"][0]()) == (3, 3, 2, 2)
    assert type(made) is main["Layer"] is main["low_level"].Layer is type(main["layer"])
    assert main["high_level"].count is count, "an unchanged module is left alone"
    assert finder.update(sources(low_level=edited, high_level=high)) == []


def test_imported_names_follow_an_edited_module_by_their_definitions(
    finder: SessionFinder, main: dict[str, Any]
) -> None:
    module = (
        "def f(): return 1\ndef g(): return 2\nadd = lambda x: x + {0}\na = b = c = d = e = {1}"
    )
    finder.update(sources(low_level=module.format(1, "f")))
    exec("from low_level import f, add", main)
    finder.update(sources(low_level=module.format(5, "g")))
    assert (main["f"](), main["add"](1)) == (1, 6)


@pytest.mark.usefixtures("finder")
def test_instances_that_follow_an_edited_module_have_not_changed(main: dict[str, Any]) -> None:
    watch = NameWatch(main)
    finder = SessionFinder(watch.following)
    finder.update(sources(low_level="class Layer: n = 1"))
    exec("from low_level import Layer; layer = Layer()", main)
    watch.begin(["layer"])
    watch.end(())
    finder.update(sources(low_level="class Layer: n = 2"))
    watch.start()
    watch.begin(())
    assert main["layer"].n == 2 and watch.end(()).changed == ()


def test_a_broken_edit_raises_in_each_cell_until_it_is_repaired(
    finder: SessionFinder, main: dict[str, Any]
) -> None:
    finder.update(sources(low_level="x = 1"))
    exec("import low_level", main)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            finder.update(sources(low_level="1 / 0"))
    finder.update(sources(low_level="x = 2"))
    assert main["low_level"].x == 2


def test_jax_traces_again_with_an_instance_of_a_redefined_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An argument that is static has the same identity as before."""
    cleared: list[str] = []
    jax = types.SimpleNamespace(clear_caches=lambda: cleared.append("all"))
    monkeypatch.setitem(sys.modules, "jax", jax)
    earlier: dict[str, Any] = {"__name__": "__main__"}
    later = dict(earlier)
    for names, body in ((earlier, "def f(): return 1"), (later, "def f(): return 2")):
        exec(f"{body}\nclass Net: pass", names)
    redefinition.replace({"f": earlier["f"]}, later)
    assert not cleared
    redefinition.replace(earlier, later)
    assert cleared == ["all"]
