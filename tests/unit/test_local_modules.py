"""Which local packages are found through the imports of others, without parsing all of their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydrogen_magic.capture.modules import LocalModules

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
