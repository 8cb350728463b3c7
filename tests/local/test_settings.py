"""Notebook-wide settings are on the ranks, and what stays behind is listed before the launch."""

from __future__ import annotations

import decimal
import importlib
import io
import logging
import multiprocessing
import random
import string
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from hydrogen_magic.capture import Captured
from hydrogen_magic.capture.settings import SortedSettings
from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.known_gangs import gangs
from hydrogen_magic.inference import fingerprints
from hydrogen_magic.node.worker import settings
from hydrogen_magic.node.worker.plain_values import is_plain
from hydrogen_magic.serialization.closure import Setting
from tests.capture_rig import Notebook, Ranks, write

pytestmark = [pytest.mark.usefixtures("in_folder"), pytest.mark.xdist_group("capture")]

LOCAL = {
    "mylib.py": """
        LR, seen = 0.1, 0
        CONFIG = {"lr": 0.1}
        class Options: depth = 1
        options = Options()
        class Net:
            def forward(self): return "old"
        def settings(): return LR, CONFIG["lr"], options.depth, Net().forward()
    """,
    "taker.py": "from mylib import CONFIG",
    "unused.py": "RATE = 1",
}

SETTINGS = """
import torch, numpy as np, pandas as pd, matplotlib.pyplot as plt, logging, sys, warnings, decimal
import sklearn.preprocessing
torch.set_default_dtype(torch.float64)
torch.set_grad_enabled(False)
torch.use_deterministic_algorithms(True, warn_only=True)
torch.backends.cudnn.benchmark = True
np.seterr(all="raise")
np.set_printoptions(precision=2, formatter={"float": lambda x: f"<{x}>"})
pd.set_option("display.max_rows", 7)
pd.set_option("display.float_format", lambda x: f"{x * scale:.1f}")
scale = 10
sklearn.set_config(transform_output="pandas", working_memory=512)
plt.rcParams["figure.figsize"] = (3, 4)
plt.rcParams["axes.prop_cycle"] = plt.cycler("color", ["r", "g"])
class Shout(logging.Formatter):
    def format(self, record): return record.getMessage().upper()
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(name)s: %(message)s", force=True)
loud = logging.getLogger("loud")
loud.propagate = False
loud.addHandler(logging.StreamHandler(sys.stdout))
loud.handlers[0].setFormatter(Shout())
logging.getLogger("quiet").setLevel("ERROR")
class Redact(logging.Filter):
    def filter(self, record): return "secret" not in record.getMessage()
loud.addFilter(Redact())
logging.getLogger("torch").addFilter(lambda record: "hidden" not in record.getMessage())
logging.root.handlers[0].addFilter(logging.Filter("root"))
warnings.filterwarnings("ignore", category=UserWarning)
warnings.filterwarnings("error", message="fatal")
decimal.getcontext().prec = 5
sys.setrecursionlimit(1234)
torch.multiprocessing.set_start_method("spawn", force=True)
torch.multiprocessing.set_sharing_strategy("file_system")
"""

USE = """
loud.info("a secret"); logging.getLogger("torch").warning("hidden")
logging.getLogger("other").error("hidden")
logging.info("seen"); loud.info("seen"); logging.getLogger("quiet").warning("hidden")
warnings.warn("hidden")
try:
    warnings.warn("fatal")
except UserWarning as error:
    print(error)
try:
    np.float64(1) / np.zeros(1)
except FloatingPointError as error:
    print(error)
print(torch.get_default_dtype(), torch.is_grad_enabled())
print(torch.is_deterministic_algorithms_warn_only_enabled(), torch.backends.cudnn.benchmark)
print(np.array([1.5]), pd.Series([0.25]).to_string(), pd.get_option("display.max_rows"))
scaled = sklearn.preprocessing.MinMaxScaler().fit_transform(pd.DataFrame({"a": [1, 2]}))
print(type(scaled).__name__, sklearn.get_config()["working_memory"])
print(plt.rcParams["figure.figsize"], plt.rcParams["axes.prop_cycle"].by_key())
print(decimal.getcontext().prec, sys.getrecursionlimit())
print(torch.multiprocessing.get_start_method(), torch.multiprocessing.get_sharing_strategy())
"""

UNDO = """
torch.set_default_dtype(torch.float32)
torch.set_grad_enabled(True)
torch.use_deterministic_algorithms(False)
torch.backends.cudnn.benchmark = False
np.seterr(**np_errors)
np.set_printoptions(precision=8, formatter=None)
pd.reset_option("display")
sklearn.set_config(transform_output="default", working_memory=1024)
plt.rcdefaults()
logging.basicConfig(level="WARNING", force=True, handlers=handlers)
loud.handlers.clear(); loud.filters.clear(); logging.getLogger("torch").filters.clear()
loud.propagate = True
logging.getLogger("quiet").setLevel("NOTSET")
decimal.getcontext().prec = 28
sys.setrecursionlimit(limit)
torch.multiprocessing.set_start_method(None, force=True)
torch.multiprocessing.set_sharing_strategy("file_descriptor")
"""


def test_libraries_have_the_notebooks_settings(
    notebook: Notebook, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook.cell("""
        import logging, sys, numpy as np
        handlers, np_errors, limit = logging.root.handlers[:], np.geterr(), sys.getrecursionlimit()
    """)
    notebook.cell(SETTINGS)
    try:
        modules = set(sys.modules)
        settings.read()
        assert set(sys.modules) == modules
        capsys.readouterr()
        notebook.cell(USE)
        expected = capsys.readouterr().out
        captured = notebook.capture(USE)
        digests = captured.digests()
    finally:
        notebook.cell(UNDO)
    rank = ranks.run(captured)
    assert (rank.stdout, rank.warnings) == (expected, [])
    assert {
        "torch: default dtype",
        "scale",
    } <= digests.keys() and "pandas: display.max_rows" not in digests
    assert "root: seen\nSEEN\nfatal\n" in expected and "<1.5>" in expected and "2.5" in expected
    assert "DataFrame 512" in expected and "spawn file_system" in expected
    listed = {item.name for item in captured.inventory if item.kind == "setting"}
    libraries = {name.partition(": ")[0] for name in listed}
    assert {"torch", "numpy", "pandas", "sklearn", "matplotlib", "logging"} <= libraries
    assert "torch: default dtype" in listed


def test_a_library_that_a_rank_imports_later_gets_its_settings(
    notebook: Notebook, ranks: Ranks
) -> None:
    notebook.cell("import pandas as pd\npd.set_option('display.max_rows', 7)")
    try:
        captured = notebook.capture("""
            import sys
            before = "pandas" in sys.modules
            import pandas
            before, pandas.get_option("display.max_rows")
        """)
    finally:
        notebook.cell("pd.reset_option('display')")
    assert ranks.run(captured).value == (False, 7)


def test_a_session_replaces_the_notebooks_filters_of_logging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logger, refused = logging.getLogger("of_filters"), list[str]()
    own, first, second = logging.Filter("own"), logging.Filter("first"), logging.Filter("second")
    monkeypatch.setattr(logger, "filters", [own])  # or captures of later tests have a setting more
    kept = settings.NotebookSettings()
    for digest, sent in enumerate(([first], [second], [])):
        state = (10, True, False, [], sent)
        setting = Setting("logging", "logging", "of_filters", state)
        kept.apply([setting], {setting.label: str(digest)}, refused.append)
        assert logger.filters == [own, *sent]
    kept.undo_others([], refused.append)
    assert (logger.level, logger.filters, refused) == (0, [own], [])


def test_a_session_undoes_what_its_cells_no_longer_bring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger, own = logging.getLogger("of_a_rank"), logging.NullHandler()
    context, refused = decimal.getcontext(), list[str]()
    sent = [
        Setting("decimal", "decimal", "precision", 5),
        Setting(
            "logging", "logging", "of_a_rank", (10, True, False, [("stdout", 0, None, [])], [])
        ),
        Setting("warnings", "warnings", "error UserWarning", ("error", "x", UserWarning, "", 0)),
        Setting("attribute", "mylib_of_later", "RATE", 1),
    ]
    digests = {setting.label: "" for setting in sent}
    before = context.prec, warnings.filters[:]
    kept = settings.NotebookSettings()
    with warnings.catch_warnings():
        for _ in range(2):  # the second cell finds the settings of the first
            kept.undo_others([setting.label for setting in sent], refused.append)
            kept.apply(sent, digests, refused.append)
        assert (context.prec, logger.level, len(logger.handlers)) == (5, 10, 1)
        logger.addHandler(own)
        warnings.filterwarnings("ignore", "of the rank")
        kept.undo_others([], refused.append)
        assert (context.prec, logger.level, logger.handlers) == (before[0], 0, [own])
        assert warnings.filters[1:] == before[1] and warnings.filters[0][0] == "ignore"
    write(tmp_path, {"mylib_of_later.py": "RATE = 0"})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.import_module("mylib_of_later").RATE == 1 and refused == []


def test_changes_of_modules_travel(notebook: Notebook, ranks: Ranks, tmp_path: Path) -> None:
    write(tmp_path, LOCAL)
    notebook.cell(
        "import mylib, taker, unused\nfrom mylib import Net, options\nimport PIL.ImageFile"
    )
    notebook.cell("""
        depth = 4
        mylib.LR = 0.5
        mylib.CONFIG["lr"] = 0.7
        options.depth = depth
        def forward(self): return depth
        Net.forward = forward
        unused.RATE = 2
        PIL.ImageFile.LOAD_TRUNCATED_IMAGES = True
        setattr(mylib, "added", lambda: scale)
        scale = 3
        mylib.lock = __import__("threading").Lock()
    """)
    captured = notebook.capture("""
        import sys
        early = "PIL.ImageFile" in sys.modules
        from PIL import ImageFile
        found = *mylib.settings(), mylib.added(), taker.CONFIG is mylib.CONFIG
        found, early, ImageFile.LOAD_TRUNCATED_IMAGES, options.depth
    """)
    notebook.cell("PIL.ImageFile.LOAD_TRUNCATED_IMAGES = False")
    assert ranks.run(captured).value == ((0.5, 0.7, 4, 4, 3, True), False, True, 4)
    (warning,) = captured.hints
    assert warning.endswith(" mylib.lock; set them in the cell or function that ranks run")
    assert "unused" not in {item.name for item in captured.inventory}


def test_a_change_under_the_name_of_another_module_is_sent(
    notebook: Notebook, ranks: Ranks, tmp_path: Path
) -> None:
    write(tmp_path, {"inner.py": "CONFIG = {'lr': 1}", "outer.py": "from inner import CONFIG"})
    notebook.cell("import inner, outer\nouter.CONFIG['lr'] = 2")
    captured = notebook.capture("inner.CONFIG['lr'], outer.CONFIG is inner.CONFIG")
    assert captured.hints == () and ranks.run(captured).value == (2, True)


def test_functions_in_modules_that_the_cell_does_not_mention(
    notebook: Notebook, ranks: Ranks
) -> None:
    """As for ``ssl._create_default_https_context = ssl._create_unverified_context``, which urllib uses."""
    notebook.cell("""
        import colorsys, functools, textwrap
        before, high = (colorsys.rgb_to_hsv, textwrap.indent, textwrap.dedent), 7
        colorsys.rgb_to_hsv = lambda *colors: high
        textwrap.indent = functools.partial(textwrap.indent, prefix="> ")
        textwrap.dedent = functools.singledispatch(textwrap.dedent)  # a wrapper, under the same name
    """)
    try:
        captured = notebook.capture("""
            import importlib
            modules = [importlib.import_module(name) for name in ("colorsys", "textwrap")]
            modules[0].rgb_to_hsv(1, 1, 1), modules[1].indent("a"), hasattr(modules[1].dedent, "registry")
        """)
    finally:
        notebook.cell("colorsys.rgb_to_hsv, textwrap.indent, textwrap.dedent = before")
    assert ranks.run(captured).value == (7, "> a", True)


def test_properties_of_modules(notebook: Notebook, ranks: Ranks) -> None:
    try:
        notebook.cell("""
            import torch
            torch.backends.cudnn.allow_tf32 = False
            torch.backends.mkldnn.enabled = False
            torch.set_printoptions(precision=2, sci_mode=True)
        """)
        captured = notebook.capture("""
            backends = torch.backends.cudnn.allow_tf32, torch.backends.mkldnn.enabled
            backends, str(torch.tensor(0.5))
        """)
    finally:
        torch.backends.cudnn.allow_tf32 = torch.backends.mkldnn.enabled = True
        torch.set_printoptions(profile="default")
    assert not captured.hints
    rank = ranks.run(captured)
    assert rank.warnings == []
    assert rank.value == ((False, False), "tensor(5.00e-01)")
    before = torch.backends.mkldnn.enabled
    setting = Setting("attribute", "torch", "backends.mkldnn.enabled", False)
    with settings.apply([setting], pytest.fail):
        assert not torch.backends.mkldnn.enabled
    assert torch.backends.mkldnn.enabled is before


def test_changes_deep_inside_of_containers_travel(
    notebook: Notebook, ranks: Ranks, tmp_path: Path
) -> None:
    write(
        tmp_path,
        {
            "deep.py": """
                import collections, array
                CONFIG = {"optim": {"lr": 0.1}, "steps": [3]}
                ORDERED, COUNTS = collections.OrderedDict(a=1), collections.defaultdict(int)
                QUEUE, NAMES, GONE = collections.deque([1]), ["b", "a"], {"x": 1, "y": 2}
                RATES, KEPT = array.array("d", [1.0]), ["a"]
            """,
            "reader.py": "from deep import COUNTS, ORDERED",
        },
    )
    notebook.cell("import deep, reader")
    notebook.cell("""
        deep.CONFIG["optim"]["lr"] = 0.5
        deep.CONFIG["steps"].append(4)
        deep.ORDERED["a"] = 2; deep.COUNTS["n"] += 1
        deep.QUEUE.appendleft(0); deep.NAMES.sort()
        del deep.GONE["x"]
        deep.RATES[0] = 2.0
        deep.KEPT.index("a")
    """)
    captured = notebook.capture("""
        same = reader.COUNTS is deep.COUNTS, reader.ORDERED is deep.ORDERED
        dict(deep.ORDERED), deep.COUNTS["n"] + deep.COUNTS["m"], list(deep.QUEUE), deep.NAMES, deep.GONE, \
            same, deep.CONFIG
    """)
    assert ranks.run(captured).value == (
        {"a": 2},
        1,
        [0, 1],
        ["a", "b"],
        {"y": 2},
        (True, True),
        {"optim": {"lr": 0.5}, "steps": [3, 4]},
    )
    (warning,) = captured.hints
    assert "not sent: deep.RATES; set" in warning


def test_changes_reach_modules_that_are_imported_late(
    notebook: Notebook, ranks: Ranks, tmp_path: Path
) -> None:
    write(tmp_path, LOCAL | {"between.py": "def rate():\n    import mylib\n    return mylib.LR"})
    notebook.cell("import between, mylib\nmylib.LR = 0.5")
    notebook.cell("""
        import importlib
        def here():
            from mylib import LR
            return LR
        def by_name(): return importlib.import_module("mylib").LR
    """)
    cells = ["here()", "by_name()", "between.rate()"]
    assert [ranks.run(notebook.capture(cell)).value for cell in cells] == [0.5] * 3
    write(tmp_path, {"mylib.py": "LR, NEW = 0.9, 1"})
    assert ranks.run(notebook.capture("here(), mylib.NEW")).value == (0.5, 1)


def test_a_changed_module_shares_memory_with_the_notebooks_values(
    notebook: Notebook, ranks: Ranks, tmp_path: Path
) -> None:
    write(tmp_path, {"tables.py": "RATES = None"})
    notebook.cell("""
        import numpy as np, tables
        part = np.arange(10)[2:]
        tables.RATES = part.base
        tables.lazy = lambda: undefined_here
    """)
    captured = notebook.capture("part[0] = 100; len(tables.RATES), tables.RATES[2]")
    assert ranks.run(captured).value == (10, 100)
    assert captured.hints == ()


def test_settings_of_a_spark_task_are_undone_at_its_end() -> None:
    importlib.import_module("sklearn")
    chosen = [
        Setting("decimal", "decimal", "precision", 5),
        Setting("torch", "torch", "grad mode", False),
        Setting("numpy", "numpy", "seterr(divide)", "raise"),
        Setting("sklearn", "sklearn", "transform_output", "pandas"),
        Setting("logging", "logging", "root", (10, True, False, [("stdout", 0, None, [])], [])),
        Setting("warnings", "warnings", "", ("error", "x", ("builtins", "UserWarning"), "", 0)),
        Setting("attribute", "string", "added", 1),
        Setting("attribute", "string", "digits", "x"),
        Setting("deletion", "string", "hexdigits", "deleted"),
        Setting("deletion", "string", "absent", "deleted"),
    ]

    assert decimal.getcontext().prec == 28

    def state() -> list[object]:
        names = vars(string).get("added"), string.digits, vars(string).get("hexdigits")
        return [settings.read(), warnings.filters[:], logging.getLogger().handlers[:], *names]

    before, refused = state(), list[str]()
    with settings.apply(chosen, refused.append):
        assert all(now != then for now, then in zip(state(), before, strict=True))
    assert (state(), refused) == (before, [])


def test_a_start_method_that_has_only_been_used_is_no_setting() -> None:
    multiprocessing.get_start_method()  # makes the default the chosen one
    labels = [one.label for one in settings.read() if isinstance(one, Setting)]
    assert not any(label.startswith("multiprocessing") for label in labels)


def test_only_small_values_are_plain() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    values = [1, "a", None, (1, [2.0, {"a": b"b"}]), cycle, "a" * 100_000, np.zeros(1), {1: int}]
    values.append([[0] * 10_000] * 10_000)  # small in memory, and large to look at
    assert [is_plain(value) for value in values] == [True] * 4 + [False] * 5


def test_settings_that_stay_are_listed(notebook: Notebook, tmp_path: Path) -> None:
    notebook.cell("""
        import logging
        logger = logging.getLogger("of_the_test")
        logger.addHandler(logging.FileHandler("app.log", delay=True))
    """)
    try:
        (warning,) = notebook.capture("1").hints
    finally:
        notebook.cell("logger.handlers.pop().close()")
    assert (
        "the FileHandler of the logger 'of_the_test'; set them in the cell or function that ranks run"
        in warning
    )


def test_a_gang_lists_settings_that_stay_once_before_its_ranks(
    notebook_shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(cell: str) -> Any:
        done = notebook_shell.run_cell(cell, store_history=True)
        done.raise_error()
        return done.result

    run("import logging\nlogger = logging.getLogger('of_the_gang')")
    run("logger.addHandler(logging.FileHandler('app.log', delay=True))")
    try:
        assert run("%%distributed --np 2\nlogger.warning('seen')\n3") == 3
    finally:
        run("logger.handlers.pop().close()")
    events = [*gangs().values()][-1].events()
    listed = [e for e in events if isinstance(e, ev.Notice) and "FileHandler" in e.text]
    assert [
        (e.level, "set them in the cell or function that ranks run" in e.text) for e in listed
    ] == [("warning", True)]
    first_start = next(n for n, event in enumerate(events) if isinstance(event, ev.RankStarted))
    assert events.index(listed[0]) < first_start
    assert capsys.readouterr().out.count("the FileHandler of the logger 'of_the_gang'") == 1


def test_what_mlflow_sets_on_loggers_of_others_is_not_of_the_notebook(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OfMlflow(io.StringIO):
        __module__ = "mlflow.utils.logging_utils"

    logger = logging.getLogger("of_another")
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(OfMlflow())])
    assert notebook.capture("1").hints == ()


@pytest.mark.parametrize(("maker", "n_warnings"), [("pyspark.logger", 0), ("logging", 1)])
def test_loggers_of_a_librarys_own_class_are_not_of_the_notebook(
    maker: str, n_warnings: int, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyspark makes one when a statement fails."""
    of_library = type("Made", (logging.Logger,), {"__module__": maker})("made")
    formatter = type("JSONFormatter", (logging.Formatter,), {"__module__": "pyspark.logger.json"})
    of_library.addHandler(logging.StreamHandler(sys.stderr))
    of_library.handlers[0].setFormatter(formatter())
    monkeypatch.setitem(logging.root.manager.loggerDict, "made", of_library)
    assert len(notebook.capture("1").hints) == n_warnings


def ranks_of(captured: Captured) -> str:
    return fingerprints.of_ranks(captured, fingerprints.of_cell(captured))


KEPT = {
    "np.set_printoptions(precision=3)": ("np.set_printoptions(precision=8)", False),
    "np.set_printoptions(formatter={'int': hex})": (
        "np.set_printoptions(formatter=None)",
        False,
    ),
    "pd.set_option('display.max_rows', 7)": ("pd.reset_option('display.max_rows')", False),
    "pd.set_option('mode.sim_interactive', True)": (
        "pd.reset_option('mode.sim_interactive')",
        True,
    ),
    "sklearn.set_config(display='text')": ("sklearn.set_config(display='diagram')", False),
    "sklearn.set_config(transform_output='pandas')": (
        "sklearn.set_config(transform_output='default')",
        True,
    ),
    "torch.set_default_dtype(torch.float64)": ("torch.set_default_dtype(torch.float32)", True),
    "decimal.getcontext().prec = 5": ("decimal.getcontext().prec = 28", True),
}
"""Settings that differ for ranks: how to undo them, and whether results may depend on them."""


@pytest.mark.parametrize("change", KEPT)
def test_ranks_and_results_are_kept_only_for_the_same_settings(
    notebook: Notebook, change: str
) -> None:
    notebook.cell("import decimal, numpy as np, pandas as pd, sklearn, torch")
    undo, affects_results = KEPT[change]
    before = notebook.capture("np")
    assert ranks_of(notebook.capture("np")) == ranks_of(before)
    notebook.cell(change)
    try:
        after = notebook.capture("np")
        assert ranks_of(after) != ranks_of(before)
        assert (fingerprints.of_cell(after) != fingerprints.of_cell(before)) is affects_results
    finally:
        notebook.cell(undo)


def test_results_depend_on_how_jax_computes() -> None:
    names = ("enable_x64", "default_prng_impl", "numpy_dtype_promotion", "debug_nans", "debug_infs")
    chosen = tuple(Setting("jax", "jax", f"jax_{name}", True) for name in names)
    assert [*SortedSettings(chosen).of_results()] == [f"jax: jax_{name}" for name in names[:3]]


DRAW = """
import random
random.random(), float(np.random.rand()), float(torch.rand(1))
"""


def test_backward_on_a_loss_of_an_earlier_cell(notebook: Notebook) -> None:
    notebook.cell("import torch\nmodel = torch.nn.Linear(2, 1)\nloss = model(torch.ones(2)).sum()")
    (hint,) = notebook.capture("loss.backward()", seed=1).hints
    assert "without the autograd graph: `loss`;" in hint and "inside the cell" in hint
    assert notebook.capture("loss.item()").hints == ()
    assert notebook.capture("model(torch.ones(2)).sum().backward()").hints == ()
    own = "with torch.enable_grad():\n    loss = model(torch.ones(2)).sum()\nloss.backward()"
    assert notebook.capture(own).hints == ()
    loop = "for _ in range(2):\n    loss = model(torch.ones(2)).sum()\n    loss.backward()\nloss.item()"
    assert notebook.capture(loop).hints == ()


def test_seeds(notebook: Notebook, ranks: Ranks) -> None:
    notebook.cell("import torch, numpy as np")
    assert notebook.capture(DRAW).hints == ()
    notebook.cell("def seed_all(seed):\n    torch.manual_seed(seed)")
    assert notebook.capture(DRAW).hints == ()
    notebook.cell("for _ in range(2): seed_all(3)")
    (hint,) = notebook.capture(DRAW).hints
    assert "the notebook called seed_all(3), which" in hint
    assert notebook.capture("seed_all(0)" + DRAW).hints == ()
    notebook.cell("if False: torch.manual_seed(3)")
    (hint,) = notebook.capture(DRAW).hints
    assert "seed_all(3) and torch.manual_seed(3)" in hint and "--seed N" in hint
    assert notebook.capture("torch.manual_seed(0)" + DRAW).hints == ()
    seeded = notebook.capture(DRAW, seed=5)
    assert seeded.hints == ()
    generator = torch.Generator().manual_seed(5)
    expected = random.Random(5).random(), np.random.RandomState(5).rand()
    assert ranks.run(seeded).value == (*expected, float(torch.rand(1, generator=generator)))
