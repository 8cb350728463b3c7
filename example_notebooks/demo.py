"""``make demo``: run the first example notebook without a browser, and show what came out."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parent.parent
NOTEBOOK = Path(__file__).with_name("01_first_gang.ipynb")
EXECUTED = ROOT / "build" / NOTEBOOK.name
SHOWN = "demo-show"
"""Tag of the cells whose outputs are worth a look."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def main() -> None:
    shown = NOTEBOOK.relative_to(ROOT)
    print(f"· running {shown} (nothing is shown until it has finished)", flush=True)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    start = time.monotonic()
    run(notebook)
    seconds = time.monotonic() - start
    EXECUTED.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, EXECUTED)
    for cell in notebook.cells:
        if SHOWN in cell.metadata.get("tags", []):
            show(cell)
    print(f"\nIt took {seconds:.1f} s. The notebook with all outputs: {EXECUTED.relative_to(ROOT)}")
    lab = Path(sys.executable).with_name("jupyter")
    lab = lab.relative_to(ROOT) if lab.is_relative_to(ROOT) else lab
    print(f"To run it yourself:  {lab} lab {shown}")


def run(notebook: NotebookNode) -> None:
    """Execute all cells, in the notebook's own folder."""
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(NOTEBOOK.parent)}},
        extra_arguments=["--log-level=ERROR"],
    )
    client.execute()


def show(cell: NotebookNode) -> None:
    """Print a cell's first lines and what it gave."""
    lines = cell.source.splitlines()
    print(f"\n┌─ {lines[0]}" + (f"   (+ {len(lines) - 1} lines)" if len(lines) > 1 else ""))
    for text in map(as_text, cell.outputs):
        for line in text.splitlines():
            print(f"│ {line}".rstrip())


def as_text(output: NotebookNode) -> str:
    """Return an output as a terminal would show it, without colours."""
    if output.output_type == "stream":
        text = output.text
    elif output.output_type == "error":
        text = "\n".join(output.traceback)
    else:
        text = output.data.get("text/plain", "")
    return _ESCAPES.sub("", text)


if __name__ == "__main__":
    main()
