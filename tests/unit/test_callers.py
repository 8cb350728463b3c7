"""Changes of modules by cells are sent, and those by a script, and by local modules that call ranks."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest

from hydrogen_magic.capture import Captured, capture_call
from hydrogen_magic.capture.callers import code_of_callers
from hydrogen_magic.serialization.closure import unbundle
from tests.capture_rig import Notebook, write

MODEL = "import sklearn.base, torch\nmodel, weight = torch.nn.Linear(1, 1), torch.ones(1)\n"
MODEL += "class C(sklearn.base.BaseEstimator):\n x = 1\n def fit_transform(self): pass\n"
MODEL += (
    "class Box:\n def eval(self): pass\n fit = to = zero_ = eval\nestimator, box = C(), Box()\n"
)
CONF = MODEL + "import json\nLR = 1\nCONFIG = {'lr': 1}\ndef rate(): return LR, CONFIG\n"
CHANGES: dict[str, dict[str, Any]] = {
    "conf.LR = 5": {"conf.LR": 5},
    "setattr(conf, 'LR', 5)": {"conf.LR": 5},
    "patch.setattr(conf, 'LR', 5)": {"conf.LR": 5},
    "import conf as other; other.LR = 5": {"conf.LR": 5},
    "conf.CONFIG['lr'] = 5": {"conf.CONFIG": {"lr": 5}},
    "patch.setitem(conf.CONFIG, 'lr', 5)": {"conf.CONFIG": {"lr": 5}},
    "from conf import CONFIG; CONFIG.update(lr=5)": {"conf.CONFIG": {"lr": 5}},
    "first = conf.rate; conf.rate = print; conf.rate = first": {},
}

CELLS: dict[str, dict[str, Any]] = {
    "%%time\nconf.LR = 5": {"conf.LR": 5},
    "%%capture out\nconf.LR = 5": {"conf.LR": 5},
    "%%timeit -n 1 -r 1\nconf.LR = 5": {"conf.LR": 5},
    "%time conf.LR = 5": {"conf.LR": 5},
    "%timeit -n 1 -r1 conf.LR = 5": {"conf.LR": 5},
    "%%time\nif conf:\n  %pwd\n  conf.LR = 5": {"conf.LR": 5},
    "%%time\nx = !true a \\\n  b\n!true\nconf.LR = 5": {"conf.LR": 5},
    "%%time\nwhere = %pwd\nconf.LR = 5": {"conf.LR": 5},
    "%%time\nconf.rate?\nconf.LR = 5": {"conf.LR": 5},
    "%%capture\n%time conf.LR = 5": {"conf.LR": 5},
    "%prun -s cumulative -q conf.CONFIG.update(lr=5)": {"conf.CONFIG": {"lr": 5}},
    "conf.other = string": {"conf.other": None},
    "conf.json = string": {"conf.json": None},
    "from conf import *\nCONFIG['lr'] = 5": {"conf.CONFIG": {"lr": 5}},
    "vars(conf)['LR'] = 5; text = 'CONFIG'": {"conf.LR": 5},
    "vars(conf)['CONFIG']['lr'] = 5": {"conf.CONFIG": {"lr": 5}},
    "del conf.__dict__['LR']": {"conf.LR": "deleted"},
    "conf.__dict__.update(LR=5)": {},
    "name, text = 'LR', 'CONFIG'; setattr(conf, name, 5)": {},
    "name = 'x'; delattr(conf.C, name)": {},
    "for m in (conf, string): m.LR = 5\nfor m in [string.Template]: m.CONFIG = 5": {"conf.LR": 5},
    "for m in (conf, string): m.LR = 5\nfor m in (1, 2): pass": {"conf.LR": 5},
    "for m, value in zip((conf.C, string), (5, 6)): m.x = value": {"conf.C.x": 5},
    "mods = [conf, string]\nfor m in mods: m.LR = 5": {"conf.LR": 5},
    "for each in conf.CONFIG.keys(), conf.CONFIG:\n  if not each: del each.x": {},
    "_ = [setattr(m, 'LR', 5) for m in (conf, string)]": {"conf.LR": 5},
    "del conf.LR": {"conf.LR": "deleted"},
    "delattr(conf.C, 'x')": {"conf.C.x": "deleted"},
    "del conf.LR; conf.LR = 5": {"conf.LR": 5},
    "conf.model.eval()": {},
    "same = conf.model.half()": {},
    "from conf import model; model.requires_grad_(False); model.to('cpu')": {},
    "conf.estimator.fit_transform()": {},
    "same = conf.weight.half(); same = conf.weight.to('cpu')": {},
    "conf.weight.zero_()": {},
    "conf.box.eval(); conf.box.fit(); conf.box.to(); conf.box.zero_()": {},
    "%%time\nfrom conf import CONFIG as C; C['lr'] = 5": {"conf.CONFIG": {"lr": 5}},
}

COMPUTED = "* (changed by a computed name or in __dict__)"
NOTED = {
    "conf.model.eval()": ["model"],
    "same = conf.model.half()": ["model"],
    "from conf import model; model.requires_grad_(False); model.to('cpu')": ["model"],
    "conf.estimator.fit_transform()": ["estimator"],
    "conf.weight.zero_()": ["weight"],
    "conf.__dict__.update(LR=5)": [COMPUTED],
    "name, text = 'LR', 'CONFIG'; setattr(conf, name, 5)": [COMPUTED],
    "name = 'x'; delattr(conf.C, name)": [f"C.{COMPUTED}"],
}
"""Attributes of ``conf`` that are listed as not sent."""


def changes_in(captured: Captured) -> dict[str, Any]:
    """Return the changes of modules that a closure has; None for values that are not plain."""
    manifest, _ = unbundle(captured.payload)
    plain = {setting.label: setting.value for setting in manifest.settings}
    listed = [item.name for item in captured.inventory if item.kind == "setting"]
    return {name: plain.get(name) for name in listed if name.startswith("conf.")}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with local modules, which no test has imported."""
    write(tmp_path, {"conf.py": CONF, "jobs.py": "import conf\ndef work(): return conf.LR"})
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("conf", "caller", "jobs"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))  # removed after the test
        del sys.modules[name]
    return tmp_path


@pytest.mark.parametrize("text", CHANGES)
def test_a_module_that_calls_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    body = f"    {text}\n    return capture(conf.rate, (), {{}})\n"
    caller = f"import conf\ndef call(capture, patch):\n{body}"
    write(folder, {"caller.py": caller})
    captured = importlib.import_module("caller").call(capture_call, monkeypatch)
    assert changes_in(captured) == CHANGES[text]


@pytest.mark.parametrize("cell", CELLS)
def test_a_cell(notebook: Notebook, cell: str) -> None:
    notebook.cell("import conf, string")
    notebook.shell.system = notebook.shell.getoutput = len  # starts no process
    notebook.cell(cell)
    captured = notebook.capture("conf.rate()")
    noted = [hint.partition(" conf.")[2].partition(";")[0] for hint in captured.hints]
    assert (changes_in(captured), noted) == (CELLS[cell], NOTED.get(cell, []))


@pytest.mark.parametrize("is_file", [True, False])
def test_a_script(folder: Path, monkeypatch: pytest.MonkeyPatch, is_file: bool) -> None:
    text = "import conf, jobs\nconf.LR = 5"
    write(folder, {"script.py": text})
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "orig_argv", ["python", "-c", text, "5"])
    if is_file:
        main.__file__ = str(folder / "script.py")
    exec(text, vars(main))
    assert changes_in(capture_call(vars(main)["jobs"].work, (), {})) == {"conf.LR": 5}


def test_objects_of_a_module_that_ranks_may_lack_are_noted(folder: Path) -> None:
    write(
        folder,
        {
            "caller.py": """
                import conf, jobs
                def call(capture):
                    conf.rate = lambda: 5
                    return capture(jobs.work, (), {})
            """
        },
    )
    captured = importlib.import_module("caller").call(capture_call)
    assert changes_in(captured) == {} and "that are not sent: conf.rate" in captured.hints[0]


@pytest.mark.parametrize("wrapped", [lambda function: function, partial, lru_cache])
def test_the_module_of_the_function(folder: Path, wrapped: Callable[[Any], Any]) -> None:
    (folder / "jobs.py").write_text(
        "import conf\ndef work(): return conf.LR\ndef set_up(): conf.LR = 5"
    )
    jobs = importlib.import_module("jobs")
    jobs.set_up()
    assert changes_in(capture_call(wrapped(jobs.work), (), {})) == {"conf.LR": 5}


def test_an_object_that_answers_every_attribute_is_not_asked() -> None:
    class Odd:
        def __getattr__(self, name: str) -> Any:
            return Odd()

        def __call__(self) -> None: ...

    assert all(code.sources for code in code_of_callers(Odd()))
