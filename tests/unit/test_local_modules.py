"""Which local packages are found through the imports of others, without parsing all of their files."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hydrogen_magic.capture import capture_script
from hydrogen_magic.capture.import_effects import only_defines
from hydrogen_magic.capture.imports import Imports
from hydrogen_magic.capture.modules import (
    LocalModules,
    find_without_importing,
    importable_parts,
)
from hydrogen_magic.node.worker import module_importer
from tests.capture_rig import inline, write

IMPORTS = {
    "import {0}": True,
    "def f():\n    from {0} import (\n        a, b)": True,
    "import os, {0} as other": True,
    "import \\\n    os, {0}.inner": True,
    "if True: import {0}": True,
    "x = 1; from {0}.inner import a": True,
    "try:\n\timport\t{0}\nexcept ImportError: pass": True,
    "class A:\n    def f(self): import {0}": True,
    "from .{0} import a": False,
    '"""Text.\n\nimport {0}\n"""': False,
    "x = '''\nfrom {0} import a'''": False,
    "# import {0}": False,
}


def test_local_packages_that_a_module_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    main = tmp_path / "imports_others"
    main.mkdir()
    (main / "__init__.py").touch()
    for number, statement in enumerate(IMPORTS):
        (tmp_path / f"imported_{number}.py").write_text(f"import numpy\nnumber = {number}\n")
        (main / f"form_{number}.py").write_text(statement.format(f"imported_{number}") + "\n")
    (main / "broken.py").write_text("import imported_0 imported_8\n")
    modules = LocalModules()
    modules.add(["imports_others.form_0"])
    found = [f"imported_{number}" in modules.sources for number in range(len(IMPORTS))]
    assert found == list(IMPORTS.values())
    assert "imports_others.broken" in modules.sources and "numpy" not in modules.sources
    assert modules.reached(["imports_others.form_1"]) == {
        *("imports_others.form_1", "imports_others"),
        *("imported_1", "imported_1.a", "imported_1.b", "numpy"),
    }


def test_links_that_lead_nowhere_or_back_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "with_links"
    inner = package / "inner"
    inner.mkdir(parents=True)
    (package / "__init__.py").touch()
    (inner / "part.py").touch()
    (package / "itself").symlink_to("itself")
    (package / "other_name").symlink_to(inner)
    (inner / "back").symlink_to(package)
    modules = LocalModules()
    modules.add(["with_links"])
    below = ("inner", "inner.part", "other_name", "other_name.part")
    assert {*modules.sources} == {"with_links", *(f"with_links.{name}" for name in below)}


def test_a_link_leads_to_its_present_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    link = tmp_path / "linked_package"
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "__init__.py").write_text(version)
        link.unlink(missing_ok=True)
        link.symlink_to(version)
        modules = LocalModules()
        modules.add(["linked_package"])
        assert modules.sources["linked_package"].source == version


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Modules]:
    monkeypatch.syspath_prepend(str(tmp_path))
    made = _Modules(tmp_path)
    yield made
    for name in made.names:
        sys.modules.pop(name, None)


class _Modules:
    """Local modules that are written and imported."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.names: list[str] = []

    def add(self, name: str, text: str) -> None:
        (self._folder / f"{name}.py").write_text(text)
        self.names.append(name)
        importlib.invalidate_caches()
        importlib.import_module(name)


DEFINITIONS = [
    "x, = 3,; y: int = 4",
    "import abc, torch.utils.data\nclass A(abc.ABC, torch.nn.Module): n = 0\nclass B(A): pass",
    "import enum, typing\nclass A(enum.Enum): X = enum.auto()\nclass B(typing.NamedTuple): n: int",
    "class A:\n @property\n def x(self): return 1\n @x.setter\n def x(self, value): pass",
    "from dataclasses import dataclass, field\n@dataclass(frozen=True)\nclass A: x: int = field()",
    "import torch\n@torch.no_grad()\ndef f(m=torch.device('cpu')): return print(m)",
    "import logging, pathlib as p\nlog = logging.getLogger(__name__)\nhere = p.Path(__file__).parent",
    "import torch\nDEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'\nkey = lambda b: sorted(b)",
    "import os, pathlib\nx = pathlib.Path(__file__).resolve().parent, os.path.join('a', 'b'), 'a b'.split()",
    "import sklearn.base\nclass A(sklearn.base.BaseEstimator): pass",
    "try: import lzma\nexcept ImportError: lzma = None\nif __name__ == '__main__': print()",
]
EFFECTS = [
    "print()",
    "class B:\n def __init_subclass__(cls): pass\nclass A(B): pass",
    "class M(type): pass\nclass A(metaclass=M): pass",
    "def f(g): return g\n@f\ndef g(): pass",
    "def list(): pass\nx = list()",
    "import sys\nsys.of_test = 3",
    "import torch\nx = torch.manual_seed(0)",
    "class A:\n x = print()",
    "if __name__ != 0: pass\nelse: print()",
    "if __name__ != '__main__': print()",
    "class A(print() or object): pass",
    "import functools\n@functools.partial(print)\ndef f(): pass",
    "class A: resolve = staticmethod(id)\ndef a(): return A\n@a().resolve\ndef f(): pass",
    "import typing\nT = typing.TypeVar('T')\n"
    "class B:\n def __init_subclass__(cls): super().__init_subclass__()\n"
    "class A(typing.Generic[T], B): pass",
    "class B:\n def __init_subclass__(cls): pass\nclass Meta: pass\nclass A:\n class Meta(B): pass",
]


@pytest.mark.parametrize("text", [*DEFINITIONS, *EFFECTS])
def test_imports_with_other_effects_than_definitions(modules: _Modules, text: str) -> None:
    number = [*DEFINITIONS, *EFFECTS].index(text)
    modules.add(name := f"of_test_{number}", text)
    modules.add(importer := f"{name}_importer", f"def f(): import {name}")
    assert only_defines(name) == only_defines(importer) == (text in DEFINITIONS)


def test_names_that_ranks_have_read_are_not_imported_for_effects_alone() -> None:
    cells = [
        "import ast, json",
        "get_ipython().run_cell_magic('distributed', '--np 2', 'json.dumps(1)')",
    ]
    modules = [each.module for each in Imports(cells).for_side_effects(())]
    assert modules == ["ast"]


def test_a_submodule_or_all_names_of_a_module_may_be_imported_for_their_effects() -> None:
    import concurrent.futures
    import fractions
    import xml.dom

    assert xml.dom and concurrent.futures and fractions
    cells = [
        "from xml import dom\nfrom fractions import *\nfrom concurrent.futures import *",
        "wait",
    ]
    modules = [each.module for each in Imports(cells).for_side_effects(())]
    assert modules == ["xml.dom", "fractions"], "a name of concurrent.futures has been read"


def test_a_cell_too_deep_for_the_parser_of_python_has_no_imports() -> None:
    assert Imports([f"x = {'1 + ' * 1500}1"]).futures == []


def test_a_namespace_package_in_one_that_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``google.cloud`` in ``google``: importlib would look for the outer one among the loaded modules."""
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "outer_space" / "inner_space" / "storage.py"
    file.parent.mkdir(parents=True)
    file.touch()
    name = "outer_space.inner_space.storage"
    assert importable_parts([f"{name}.Client"]) == {name}
    spec = find_without_importing(name)
    assert spec is not None
    assert spec.origin == str(file)
    assert find_without_importing("outer_space.other_space.storage") is None


def test_a_script_imports_the_modules_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may have loaded others of their names before: those that the notebook imports."""
    import colorsys

    import numpy

    monkeypatch.setitem(sys.modules, "colorsys", colorsys)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write(tmp_path, {"colorsys.py": "OWN = True", "numpy/__init__.py": "", "pathlib.txt": ""})
    module_importer.put_folder_first(str(tmp_path))
    assert importlib.import_module("colorsys").OWN
    assert sys.modules["numpy"] is numpy, "its extension modules cannot be loaded twice"
    module_importer.put_folder_first(str(tmp_path))
    assert sys.modules["colorsys"].OWN


def test_a_script_within_the_kernel_leaves_its_modules_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import colorsys

    monkeypatch.setitem(sys.modules, "colorsys", colorsys)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    write(tmp_path, {"colorsys.py": "", "train.py": "import colorsys"})
    inline(capture_script(str(tmp_path / "train.py"), [], as_module=False))
    assert sys.modules["colorsys"] is colorsys
