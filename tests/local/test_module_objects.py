"""What a module and the notebook both refer to is one object on ranks, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.capture_rig import Notebook, Ranks, write

pytestmark = [pytest.mark.usefixtures("in_folder"), pytest.mark.xdist_group("capture")]

HELPER = {
    "helper.py": """
        from argparse import Namespace
        from collections import defaultdict
        CONFIG = {"lr": 1.0, "layers": []}
        MISSING = object()
        args = Namespace(depth=1, names=["a"])
        counts = defaultdict(int)
        steps = [1]
        class Unset: pass
        UNSET = Unset()
        class Model:
            def __init__(self): self.weights = [bytearray(b"0")]
        model = Model()
        def rate(): return CONFIG["lr"], CONFIG["layers"]
        def is_missing(x=MISSING): return x is MISSING
    """,
}


def test_containers_of_a_local_module_under_other_names(
    notebook: Notebook, ranks: Ranks, tmp_path: Path
) -> None:
    write(tmp_path, HELPER)
    notebook.cell("""
        import helper
        config, layers = helper.CONFIG, helper.CONFIG["layers"]
        shown = {"steps": helper.steps, "args": [helper.args]}
        def count(key, into=helper.counts): into[key] += 1
        config["lr"] = 0.5
        config["function"] = count
        layers.append(64)
        helper.args.depth = 2
        shown["args"][0].names.append("b")
        count("x")
    """)
    captured = notebook.capture("""
        before = helper.rate(), helper.counts["x"], vars(helper.args).copy()
        config["lr"] = 0.25
        shown["steps"].append(2)
        count("x")
        (
            before, helper.rate(), layers is config["layers"], helper.steps, helper.counts["x"],
            shown["args"][0] is helper.args, config is helper.CONFIG, config["function"] is count,
        )
    """)
    for path in tmp_path.rglob("*.py"):
        path.unlink()
    assert ranks.run(captured).value == (
        ((0.5, [64]), 1, {"depth": 2, "names": ["a", "b"]}),
        (0.25, [64]),
        True,
        [1, 2],
        2,
        True,
        True,
        True,
    )
    assert captured.hints == ()


def test_a_module_that_is_not_sent_gives_its_values_alone(
    notebook: Notebook, ranks: Ranks, tmp_path: Path
) -> None:
    """Importing it may have effects, or fail, on a rank."""
    write(tmp_path, {"heavy.py": "import os\nos.mkdir('made')\nCONFIG = {'lr': 1}"})
    notebook.cell("import heavy\nconfig = heavy.CONFIG")
    captured = notebook.capture("config['lr']")
    assert ranks.run(captured).value == 1
    assert [item.name for item in captured.inventory] == ["config"]


def test_objects_with_a_state_of_their_own_are_copies(
    notebook: Notebook, ranks: Ranks, tmp_path: Path
) -> None:
    write(tmp_path, HELPER)
    notebook.cell("""
        import helper
        model = helper.model
        model.weights[0][0:1] = b"1"
    """)
    captured = notebook.capture("bytes(model.weights[0]), bytes(helper.model.weights[0])")
    assert ranks.run(captured).value == (b"1", b"0")


def test_sentinels(notebook: Notebook, ranks: Ranks, tmp_path: Path) -> None:
    write(tmp_path, HELPER)
    notebook.cell("""
        import contextlib, functools, inspect, torch
        import helper
        own = object()
        def f(x=helper.MISSING, y=own): return helper.is_missing(x), y is own
        unset = [helper.UNSET]
        of_functools = functools.partial(max, default=functools._initial_missing)
    """)
    captured = notebook.capture("""
        f(), unset[0] is helper.UNSET, of_functools.keywords["default"] is functools._initial_missing
    """)
    assert ranks.run(captured).value == ((True, True), True, True)


def test_the_state_of_the_process(
    notebook: Notebook, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_NOTEBOOK", "secret")
    notebook.cell("""
        import os, random, numpy as np, torch
        env, rand, choose = os.environ, np.random.rand, {"choose": random.random}
        generator = torch.default_generator
        draw = random.Random(0).random
        other = np.random.RandomState(0)
        random.Random(0).random(), np.random.RandomState(0).rand()
        expected = draw.__self__.getstate()[1][:3], other.rand()
    """)
    captured = notebook.capture("""
        env["ADDED"] = "1"
        def draws():
            return rand(), choose["choose"](), torch.rand(1, generator=generator).item()
        def seed():
            np.random.seed(0), random.seed(0), torch.manual_seed(0)
        seed()
        first = draws()
        seed()
        own = np.random.rand(), random.random(), torch.rand(1).item()
        seen = os.environ["ADDED"], env is os.environ
        first == own, seen, draw.__self__.getstate()[1][:3] == expected[0]
    """)
    assert b"secret" not in bytes(captured.payload.buffers[0])
    assert ranks.run(captured).value == (True, ("1", True), True)


LATER = {
    "options.py": """
        import argparse
        args, state, backend = None, None, None
        class Backend: pass
        def parse(lr):
            global args, state, added, backend
            args, state, added = argparse.Namespace(lr=lr), {"f": parse}, [lr]
            backend = Backend()
            return args
        def lr(): return 0.1 if args is None else args.lr
    """,
}


def test_what_a_module_has_made_since_its_import(
    notebook: Notebook, ranks: Ranks, tmp_path: Path
) -> None:
    write(tmp_path, LATER)
    notebook.cell("""
        import options
        args = options.parse(3)
        state, added, backend = options.state, options.added, options.backend
    """)
    captured = notebook.capture("""
        seen = args.lr, options.lr(), args is options.args, state["f"] is options.parse, added
        *seen, type(backend) is options.Backend
    """)
    rank = ranks.run(captured)
    assert rank.value == (3, 3, True, True, [3], True) and rank.warnings == []


def test_a_constant_that_a_module_lacks_on_a_rank(
    notebook: Notebook, ranks: Ranks, tmp_path: Path
) -> None:
    write(tmp_path, {"edited.py": "UNSET = object()\nclass Kind: pass\nKIND = Kind()"})
    notebook.cell("import edited\nunset, kind = [edited.UNSET] * 2, edited.KIND")
    write(tmp_path, {"edited.py": "class Kind: pass"})
    captured = notebook.capture("unset[0] is unset[1], type(kind) is edited.Kind")
    assert ranks.run(captured).value == (True, True)


def test_a_module_that_has_got_another_object(
    notebook: Notebook, ranks: Ranks, tmp_path: Path
) -> None:
    write(
        tmp_path,
        {
            "config.py": "CONFIG = {'lr': 1.0}\nALIAS = CONFIG",
            "user.py": "from config import CONFIG",
        },
    )
    notebook.cell("import config, user\nbase, alias = user.CONFIG, config.ALIAS")
    notebook.cell("config.CONFIG = {'lr': 7.0}\nnew = config.CONFIG")
    captured = notebook.capture(
        "base['lr'], base is alias, config.CONFIG['lr'], new is config.CONFIG, base is config.ALIAS"
    )
    assert ranks.run(captured).value == (1.0, True, 7.0, True, True)
    captured = notebook.capture("config.CONFIG['lr'], config.ALIAS['lr'], user.CONFIG is not None")
    assert ranks.run(captured).value == (7.0, 1.0, True)
