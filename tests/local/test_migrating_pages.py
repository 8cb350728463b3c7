"""The code of ``docs/migrating`` runs: on this machine, and the pages for clusters on executors too."""

from __future__ import annotations

import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import hydrogen_magic as hm
from hydrogen_magic import compat

PAGES = Path(__file__).parents[2] / "docs" / "migrating"
ELSEWHERE = {
    "mirrored-strategy-runner": "local/test_mirrored_strategy_runner",
    "petastorm": "local/test_dataset",
    "horovod-estimator": "spark/test_torch_estimator",
    "pandas-udf": "spark/test_torch_estimator",
}
"""Pages whose code other modules run."""
pytestmark = pytest.mark.usefixtures("warm_agents")

Run = Callable[..., dict[str, Any]]


def code(page: str) -> str:
    return "\n".join(_blocks(page))


def _blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (PAGES / f"{page}.md").read_text(), re.S | re.M)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Runs a page's code as cells of one notebook, whose folders are temporary; returns its names."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)

    def run(page: str, *changes: tuple[str, str], **names: Any) -> dict[str, Any]:
        text = code(page).replace("/shared", str(tmp_path))
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        drop_in = {name: getattr(compat, name) for name in compat.__all__}
        vars(main).update({**drop_in, "hm": hm, "os": os, **names})
        exec(text, vars(main))
        return vars(main)

    yield run
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


def test_every_page_with_code_is_run() -> None:
    own = Path(__file__).read_text()
    pages = {page.stem for page in PAGES.glob("*.md") if code(page.stem)}
    assert [
        page for page in sorted(pages) if page not in ELSEWHERE and f'"{page}"' not in own
    ] == []
    others = {page: Path(__file__).parents[1] / f"{name}.py" for page, name in ELSEWHERE.items()}
    assert all(f"{page}.md" in path.read_text() for page, path in others.items())


HERE = ("local_mode=False", "local_mode=True")


def settings(run: Run, folder: Path, *changes: tuple[str, str]) -> None:
    names = run("settings", *changes)
    assert names["found"] == ("1", str(folder / "hf"))
    assert names["pid"] != os.getpid()
    assert names["seen"] == [0, 1, 2]
    assert (names["first"], names["second"]) == (0, 2)


def test_settings_here(run: Run, tmp_path: Path) -> None:
    settings(run, tmp_path, HERE)


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_settings_on_executors(run: Run, tmp_path: Path) -> None:
    settings(run, tmp_path, ("use_gpu=False", "use_gpu=False, local_mode=False"), *ON_SPARK)


ON_SPARK = (
    ("local_mode=False, use_gpu=False, local_mode=False", "local_mode=False, use_gpu=False"),
    ("local_mode=True, use_gpu=False, local_mode=False", "local_mode=False, use_gpu=False"),
)


@pytest.fixture
def part_of_page(monkeypatch: pytest.MonkeyPatch) -> Callable[[slice], None]:
    """Have :func:`code` return some of the blocks of a page."""
    whole = _blocks

    def choose(part: slice) -> None:
        monkeypatch.setattr(sys.modules[__name__], "_blocks", lambda page: whole(page)[part])

    return choose


@pytest.mark.horovod
def test_horovod_runner(run: Run, part_of_page: Callable[[slice], None]) -> None:
    part_of_page(slice(1))
    seen = run("horovod-runner", ("np=2", "np=-2"), train_hvd=lambda learning_rate: learning_rate)
    assert seen["model"] == 0.001


def get_dataset(num_classes: int, rank: int, size: int) -> Any:
    import keras
    import numpy as np

    x = np.random.default_rng(0).random((32, 4)).astype(np.float32)[rank::size]
    y = keras.utils.to_categorical(np.arange(32) % num_classes, num_classes)[rank::size]
    return (x, y), (x, y)


def get_model(num_classes: int) -> Any:
    import keras

    layers = [keras.Input((4,)), keras.layers.Dense(num_classes, activation="softmax")]
    return keras.Sequential(layers)


@pytest.mark.exhaustive  # ranks import Keras, which takes seconds
@pytest.mark.horovod
def test_keras_of_horovod_runner(run: Run, part_of_page: Callable[[slice], None]) -> None:
    part_of_page(slice(1, None))
    sizes = {"num_classes": 2, "batch_size": 8, "epochs": 2, "checkpoint_dir": "."}
    functions = {"get_dataset": get_dataset, "get_model": get_model}
    seen = run("horovod-runner", ("np=2", "np=-2"), **sizes, **functions)
    assert seen["model"].count_params() == 10


SCRIPT = "import sys\nassert '--lr=1e-3' in sys.argv"


def test_torch_distributor(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    here = ("num_processes=4, local_mode=False, use_gpu=True", "num_processes=2, use_gpu=False")
    assert run("torch-distributor", here, train=lambda rate: rate)["model"] == 1e-3


def test_deepspeed_torch_distributor(run: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    here = ("numGpus=4, nnodes=2, localMode=False", "numGpus=1, nnodes=2, useGpu=False")
    run("deepspeed-torch-distributor", here)
