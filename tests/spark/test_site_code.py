"""The code of the pages about Spark runs on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from tests.site_code import Notebook, Page
from tests.site_pages import SPARK
from tests.spark.test_torch_estimator import accuracy, iris

pytestmark = [
    pytest.mark.spark,
    pytest.mark.usefixtures("warm_agents"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize(
    ("page", "is_whole"), [params for page in SPARK for params in page.params()]
)
def test_page(
    page: Page,
    is_whole: bool,
    classic: Any,
    notebook_shell: InteractiveShell,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    notebook_shell.push({"spark": classic, "df": iris(classic), "accuracy": accuracy})
    Notebook(notebook_shell, capsys, tmp_path).run(page, is_whole=is_whole)
