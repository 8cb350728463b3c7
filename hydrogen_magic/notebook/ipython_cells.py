"""What the running IPython shell knows about its cells: numbers, sources, file names."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from hydrogen_magic.capture import CellText

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = [
    "cell_labels",
    "cell_labels_here",
    "cell_text",
    "earlier_sources",
    "first_line_of",
    "shell_here",
]


def cell_text(shell: InteractiveShell, body: str) -> CellText:
    """Return the cell that runs now, whose magic got ``body``."""
    # Its display hook knows whether this version of IPython counts before or after a cell has run.
    number = shell.displayhook.prompt_count
    return CellText(
        body=body,
        filename=f"<cell {number}>",
        label=f"Cell In[{number}]",
        first_line=first_line_of(body, _raw_sources(shell)[-1:]),
        transform=shell.transform_cell,
    )


def first_line_of(body: str, raw_cells: Sequence[str]) -> int:
    """Return the line number of the body's first line in the cell as the user sees it.

    IPython strips blank lines before the magic's own line and other magics may stand above it, so
    the body is looked up in the last of ``raw_cells``. 2 where it is not there (the cell was run
    without history).
    """
    wanted = body.rstrip().splitlines()
    for raw in raw_cells[-1:]:
        lines = raw.rstrip().splitlines()
        for index, line in enumerate(lines):
            if line.startswith("%%") and lines[index + 1 :] == wanted:
                return index + 2
    return 2


def earlier_sources(shell: InteractiveShell) -> list[str]:
    """Return the cells that ran before this one as the Python that IPython made of them."""
    history = shell.history_manager
    sources = list(history.input_hist_parsed) if history is not None else []
    return [source for source in sources[:-1] if source.strip()]


def cell_labels(shell: InteractiveShell) -> dict[str, str]:
    """Return what the user calls the files that tracebacks name: file name -> ``Cell In[3]``."""
    # Private, and the only place where IPython keeps it; without it tracebacks show file names.
    numbers: Mapping[str, int] = getattr(shell.compile, "_filename_map", {})
    return {filename: f"Cell In[{number}]" for filename, number in numbers.items()}


def cell_labels_here() -> dict[str, str]:
    """Return :func:`cell_labels` of this process's shell; empty where there is none."""
    shell = shell_here()
    return {} if shell is None else cell_labels(shell)


def shell_here() -> InteractiveShell | None:
    """Return this process's shell, None where there is none."""
    if "IPython" not in sys.modules:  # a script should not pay its import
        return None
    from IPython.core.getipython import get_ipython

    return get_ipython()


def _raw_sources(shell: InteractiveShell) -> list[str]:
    history = shell.history_manager
    return list(history.input_hist_raw) if history is not None else []
