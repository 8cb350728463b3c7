"""Every example notebook runs from top to bottom; only cells tagged for it may raise."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

MARKERS = ("horovod", "spark")
"""A notebook that has one of these in its name needs what the marker stands for."""
NOTEBOOKS = [
    pytest.param(
        path,
        marks=[getattr(pytest.mark, marker) for marker in MARKERS if marker in path.stem],
        id=path.stem,
    )
    for path in sorted((Path(__file__).parents[2] / "example_notebooks").glob("*.ipynb"))
]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    # The notebook's own folder stays as it is: what cells write goes to a temporary one.
    resources = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources)
    asyncio.run(client.async_execute())  # execute() would leave its event loop open
    for cell in notebook.cells:
        if "raises-exception" in cell.metadata.get("tags", []):
            kinds = [output.output_type for output in cell.outputs]
            assert "error" in kinds, f"expected an error from:\n{cell.source}"
