"""Sphinx configuration; ``make docs`` builds the site into ``build/docs``."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydrogen_magic
from hydrogen_magic.frameworks.horovod import installation

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).parent

project = "hydrogen_magic"
author = "The hydrogen_magic maintainers"
copyright = author  # noqa: A001  Sphinx's name
release = version = hydrogen_magic.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
suppress_warnings = [
    "mystnb.unknown_mime_type",  # the live view's widget: its saved HTML is shown instead
    "misc.highlighting_failure",  # cells with magics are no Python
]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
python_maximum_signature_line_length = 88

html_theme = "pydata_sphinx_theme"
html_title = f"hydrogen_magic {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options: dict[str, Any] = {
    "logo": {"text": "hydrogen_magic"},
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
    "navigation_with_keys": False,
}
html_show_sourcelink = False
copybutton_selector = "div:not(.output) > div.highlight-python pre, div.highlight-ipython3 pre"

# ── notebooks ────────────────────────────────────────────────────────────────────────────────────

NOTEBOOKS = HERE / "notebooks"
HAS_SPARK = bool(importlib.util.find_spec("pyspark") and shutil.which("java"))
NEEDS = {
    "02_horovod": installation.fault() is None,
    "03_spark_cluster": HAS_SPARK,
    "06_one_frame_every_framework": HAS_SPARK,
}
"""Notebooks that not every machine can run; they are then shown without outputs."""

nb_execution_mode = "off" if os.environ.get("DOCS_NOTEBOOKS") == "off" else "cache"
nb_execution_cache_path = str(HERE.parent / "build" / "notebook_cache")
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_execution_excludepatterns = [f"*{name}*" for name, runs in NEEDS.items() if not runs]
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # saved pictures need no script from a CDN
nb_merge_streams = True


def copy_notebooks() -> None:
    """Copy the example notebooks beside the pages, with links as seen from there."""
    NOTEBOOKS.mkdir(exist_ok=True)
    sources = {path.name: path for path in (HERE.parent / "example_notebooks").glob("*.ipynb")}
    for name, path in sources.items():
        text = path.read_text().replace("](../docs/", "](../")
        text = re.sub(r"\]\(#[^)]+\)", lambda link: link[0].lower(), text)
        copy = NOTEBOOKS / name
        if not copy.exists() or copy.read_text() != text:
            copy.write_text(text)
    for path in NOTEBOOKS.glob("*.ipynb"):
        if path.name not in sources:
            path.unlink()


def setup(app: Sphinx) -> None:
    copy_notebooks()
