"""The code of the README and the documentation runs, and prints the output that is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from tests.site_code import Notebook, Page
from tests.site_pages import LOCAL

pytestmark = pytest.mark.usefixtures("warm_agents")


@pytest.mark.parametrize(
    ("page", "is_whole"), [params for page in LOCAL for params in page.params()]
)
def test_page(
    page: Page,
    is_whole: bool,
    notebook_shell: InteractiveShell,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    Notebook(notebook_shell, capsys, tmp_path).run(page, is_whole=is_whole)
