"""The README's cells run, and give the outputs that it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

README = Path(__file__).parents[2] / "README.md"
_STEP = re.compile(r"<!-- run -->\n```python\n(.*?)```\n(?:```text\n(.*?)```)?", re.S)


@pytest.mark.usefixtures("warm_agents")
def test_cells_give_the_outputs_shown(
    notebook_shell: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    steps = _STEP.findall(README.read_text())
    assert len(steps) == README.read_text().count("<!-- run -->") > 3
    for cell, shown in steps:
        result = notebook_shell.run_cell(cell.strip(), store_history=True)
        printed = capsys.readouterr().out + repr(result.result)
        missing = [line for line in shown.splitlines() if _plain(line) not in _plain(printed)]
        assert missing == [], printed


def _plain(text: str) -> str:
    """Return output without colours, and without what differs from run to run."""
    without_colours = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return re.sub(r"127\.0\.0\.1\]:\d+", "127.0.0.1]:PORT", without_colours)
