"""Every example notebook runs from top to bottom; only cells tagged for it may raise."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import v4

from tests import kernels, spark_classes, spark_rig

FOLDER = Path(__file__).parents[2] / "example_notebooks"
MARKERS = ("horovod", "spark")
"""A notebook that has one of these in its name needs what the marker stands for."""
FRAMEWORKS = "06_one_frame_every_framework"
FEWER_ROWS = "N_ROWS = 5_000\nTURNS = 1"
SMALLER = {
    "05_sharded_models": 'EPOCHS = 5\nBACKEND = "eager"',
}
"""Cells that follow a notebook's cell with the tag ``parameters``, as papermill puts one there."""
CELL_S = 240
"""A cell of a notebook on Spark starts several JVMs, on a machine that is busy with other tests."""
LONG_S = 1800
"""For six trainings, each of which imports another framework; DeepSpeed's may have to compile an operator."""
MARKS: dict[str, tuple[pytest.MarkDecorator, ...]] = {
    "03_spark_cluster": (pytest.mark.exhaustive,),  # tests/spark has a cluster already
    "02_horovod": (pytest.mark.exhaustive,),  # tests/horovod
    "05_sharded_models": (pytest.mark.exhaustive,),  # test_results gathers sharded models
    "07_session": (pytest.mark.exhaustive,),  # test_session
}
STARTS = 3
NOT_STARTED = "Kernel died before replying to kernel_info"
"""In jupyter_client's error: no cell has run yet."""

ON_SPARK = """ON = "spark"
import os, sys
from pyspark.sql import SparkSession
os.environ["PYSPARK_PYTHON"] = sys.executable
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()"""
"""Follows the parameters of a notebook that also runs on Spark."""

ON_SPARK_ONLY = ("04_infer_dataframe", FRAMEWORKS)
"""Those that other tests run with Spark, one of them in TensorFlow's environment."""

NOTEBOOKS = [
    pytest.param(
        path,
        marks=[
            *(getattr(pytest.mark, marker) for marker in MARKERS if marker in path.stem),
            *MARKS.get(path.stem, ()),
        ],
        id=path.stem,
    )
    for path in sorted(FOLDER.glob("*.ipynb"))
    if path.stem not in ON_SPARK_ONLY
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(path, SMALLER.get(path.stem, ""), tmp_path, monkeypatch)


@pytest.mark.exhaustive  # each training has tests of its own, which are smaller
@pytest.mark.spark
@pytest.mark.horovod
@pytest.mark.jax
@pytest.mark.deepspeed
@pytest.mark.tensorflow
@pytest.mark.timeout(LONG_S)
def test_every_framework_reads_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the accuracy that the notebook itself asserts."""
    notebook = _run(FOLDER / f"{FRAMEWORKS}.ipynb", "", tmp_path, monkeypatch)
    table = _table(notebook)
    names = ("PyTorch", "Horovod", "JAX", "TensorFlow", "Keras 3", "DeepSpeed")
    assert all(name in table for name in names) and "not installed" not in table, table


@pytest.mark.exhaustive
@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "parameters"), [("04_infer_dataframe", FEWER_ROWS), ("07_session", ON_SPARK)]
)
def test_notebook_runs_on_spark(
    name: str, parameters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(FOLDER / f"{name}.ipynb", parameters, tmp_path, monkeypatch)


def _table(notebook: nbformat.NotebookNode) -> str:
    [cell] = [cell for cell in notebook.cells if cell.id == "table"]
    text: str = cell.outputs[-1].data["text/plain"]
    return text


def _run(
    path: Path, parameters: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> nbformat.NotebookNode:
    """Run a notebook, and return it. ``parameters``: code that follows its own parameters."""
    _start_spark_quickly(tmp_path, monkeypatch)
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    if parameters:
        _override(notebook, parameters)
    notebook.cells.insert(0, v4.new_code_cell(kernels.QUIET))
    # The notebook's own folder stays as it is: what cells write goes to a temporary one.
    resources = {"metadata": {"path": str(tmp_path)}}
    timeout_s = LONG_S if path.stem == FRAMEWORKS else CELL_S
    client = NotebookClient(notebook, timeout=timeout_s, kernel_name="python3", resources=resources)
    _execute(client)
    for cell in notebook.cells:
        if "raises-exception" in _tags(cell):
            kinds = [output.output_type for output in cell.outputs]
            assert "error" in kinds, f"expected an error from:\n{cell.source}"
    return notebook


def _start_spark_quickly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have its JVMs and Python workers begin with what other tests have loaded."""
    spark_rig.add_daemon(folder)
    options = f"--conf spark.python.daemon.module={spark_rig.DAEMON} pyspark-shell"
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", options)
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", spark_classes.JVM_OPTIONS)


def _execute(client: NotebookClient) -> None:
    """Run all cells. A kernel that has no ports is started again.

    jupyter_client looks for free ports before the kernel binds them: another test may be faster.
    """
    for _ in range(STARTS):
        try:
            asyncio.run(client.async_execute())  # execute() would leave its event loop open
            return
        except RuntimeError as error:
            if NOT_STARTED not in str(error):
                raise
    pytest.fail(f"the kernel did not start {STARTS} times")


def _override(notebook: nbformat.NotebookNode, code: str) -> None:
    """Put a cell with smaller numbers behind the cell with the notebook's own."""
    [place] = [n for n, cell in enumerate(notebook.cells) if "parameters" in _tags(cell)]
    names = [line.partition(" = ")[0] for line in code.splitlines() if line[:1].isupper()]
    assert all(f"{name} = " in notebook.cells[place].source for name in names), code
    notebook.cells.insert(place + 1, v4.new_code_cell(code))


def _tags(cell: nbformat.NotebookNode) -> list[str]:
    tags: list[str] = cell.metadata.get("tags", [])
    return tags
