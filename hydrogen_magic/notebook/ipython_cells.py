"""Cells of the running IPython shell: numbers, sources, file names."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydrogen_magic.capture import CellText
from hydrogen_magic.core.library_types import is_a
from hydrogen_magic.node.worker.module_importer import show_source

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def cell_text(shell: InteractiveShell, body: str) -> CellText:
    """Return the running cell, whose magic got ``body``."""
    # Its display hook knows whether this version of IPython counts before or after a cell has run.
    number = shell.displayhook.prompt_count
    filename = f"<Cell In[{number}]>"
    # Private; with it, IPython's tracebacks name the cell as they name others.
    getattr(shell.compile, "_filename_map", {})[filename] = number
    cell = CellText(
        body=body,
        filename=filename,
        label=f"Cell In[{number}]",
        first_line=first_line_of(body, _raw_source(shell)),
        # Without automagic: a name that only ranks have may be that of a magic.
        transform=shell.input_transformer_manager.transform_cell,
    )
    show_source(filename, cell.visible)  # of functions that come back from ranks
    return cell


def run_name(shell: InteractiveShell) -> str:
    """Return ``lab.ipynb, cell 7``; without the notebook where the front end does not name it."""
    # VS Code sets the variable; Jupyter Server 2 sets the other one in the kernel's environment.
    path = shell.user_ns.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME", "")
    notebook = f"{Path(path).name}, " if str(path).endswith(".ipynb") else ""
    return f"{notebook}cell {shell.displayhook.prompt_count}"


def first_line_of(body: str, raw: str) -> int:
    """Return the line number of the body's first line in ``raw``, the cell as displayed.

    IPython strips blank lines before the magic's own line, and other magics may precede it, so the body is
    looked up. 2 if it is not there (the cell was run without history).
    """
    wanted, lines = body.rstrip().splitlines(), raw.rstrip().splitlines()
    for index, line in enumerate(lines):
        if line.startswith("%%") and lines[index + 1 :] == wanted:
            return index + 2
    return 2


def show_figures(shell: InteractiveShell, values: Iterable[Any]) -> None:
    """Let a kernel show figures among ``values`` as pictures: it can once it has drawn one of its own."""
    is_kernel = getattr(shell, "kernel", None) is not None
    if is_kernel and any(is_a(value, "matplotlib.figure", "Figure") for value in values):
        with suppress(ImportError):
            # It registers its hooks on import if it is the chosen backend.
            importlib.import_module("matplotlib_inline.backend_inline")


def earlier_sources(shell: InteractiveShell) -> list[str]:
    """Return the earlier cells as IPython transformed them to Python."""
    history = shell.history_manager
    sources = list(history.input_hist_parsed) if history is not None else []
    return [source for source in sources[:-1] if source.strip()]


def _raw_source(shell: InteractiveShell) -> str:
    history = shell.history_manager
    return "" if history is None else history.input_hist_raw[-1]
