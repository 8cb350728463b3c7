"""Where things are on the pages of the three front ends."""

from __future__ import annotations

from dataclasses import dataclass

_ANSWERS = """async () => {
  const kernel = window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel;
  if (kernel?.status !== "idle") return false;
  const later = new Promise((resolve) => setTimeout(() => resolve(false), 500));
  return Promise.race([kernel.requestKernelInfo().then(() => true), later]);
}"""
"""Idle is not enough for kernels that leave requests unread (``tests.kernels.LEAVE_UNREAD``), as they do
between the replies to what a fresh page asks: a test's first cell comes once they have answered."""

_SHOWN = ".jp-NotebookPanel:not(.lm-mod-hidden)"
"""The notebook in sight: JupyterLab keeps others that are open in the page."""


@dataclass(frozen=True)
class FrontEnd:
    """Addresses and CSS selectors of one front end."""

    name: str
    path: str
    """Of a notebook's page, up to its name."""
    has_kernel: str
    """JavaScript that is true once a fresh page's kernel takes cells."""
    cell: str
    """Code cells, in their order."""
    prompt: str
    """Below a cell: its number, or a star while it runs."""
    output: str
    """Below a cell: all that came out of it."""
    interrupt: str
    """The square button."""


LAB = FrontEnd(
    name="lab",
    path="lab/tree/",
    has_kernel=_ANSWERS,
    cell=f"{_SHOWN} .jp-CodeCell",
    prompt=".jp-InputPrompt",
    output=".jp-Cell-outputWrapper .jp-OutputArea",
    interrupt=f"{_SHOWN} [data-command='notebook:interrupt-kernel']",
)
NOTEBOOK = FrontEnd(
    name="notebook",
    path="notebooks/",
    has_kernel=_ANSWERS,
    cell=LAB.cell,
    prompt=LAB.prompt,
    output=LAB.output,
    interrupt=LAB.interrupt,
)
CLASSIC = FrontEnd(
    name="nbclassic",
    path="nbclassic/notebooks/",
    has_kernel="() => window.Jupyter?.notebook?.kernel?.is_connected()",
    cell="#notebook .code_cell",
    prompt=".input_prompt",
    output=".output_wrapper",
    interrupt="button[data-jupyter-action='jupyter-notebook:interrupt-kernel']",
)
