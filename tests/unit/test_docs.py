"""README, documentation and metadata agree with the package and with each other."""

from __future__ import annotations

import argparse
import ast
import re
import sys
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
import yaml
from IPython.core.inputtransformer2 import TransformerManager

import hydrogen_magic
from benchmarks import _results
from docs import generated
from hydrogen_magic import plugins
from hydrogen_magic.__main__ import COMMANDS
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.notebook.arguments import distributed, gang, infer
from hydrogen_magic.notebook.arguments.gang import GANG_COMMANDS
from tests import documented, markdown
from tests.site_code import PYPROJECT, ROOT, blocks

SITE = ROOT / "docs"
PAGES = sorted(path for path in SITE.rglob("*.md") if "notebooks" not in path.parts)
NOTEBOOKS = sorted((ROOT / "example_notebooks").glob("*.ipynb"))
AT_ROOT = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
PROJECT = PYPROJECT["project"]
PARSERS = {
    "distributed": [distributed.distributed_parser(is_cell) for is_cell in (True, False)],
    "infer": [infer.infer_parser()],
    "gang": [gang.gang_parser(verb) for verb in GANG_COMMANDS],
}
"""Page of the reference -> the parsers whose options it lists."""


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ── links ────────────────────────────────────────────────────────────────────────────────────────


def test_links_and_images_lead_somewhere() -> None:
    relative = [
        (page, link)
        for page in [*AT_ROOT, *PAGES, *NOTEBOOKS]
        for link in markdown.targets(markdown.read(page))
        if not re.match(r"[a-z]+:", link)
    ]
    assert len(relative) > 100
    assert [f"{_name(page)}: {link}" for page, link in relative if not _exists(page, link)] == []


def _exists(page: Path, link: str) -> bool:
    file, _, anchor = link.partition("#")
    target = (page.parent / file).resolve() if file else page
    if target.parent == SITE / "notebooks":  # copies, made when the site is built
        target = ROOT / "example_notebooks" / target.name
    if (
        not file and page.suffix == ".ipynb"
    ):  # Jupyter's anchors have capitals, which the copies lose
        return anchor in _anchors_of_jupyter(page) and anchor.lower() in _anchors(page)
    return target.exists() and (not anchor or anchor in _anchors(target))


@lru_cache
def _anchors(page: Path) -> set[str]:
    headings = markdown.headings(markdown.read(page))
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def _anchors_of_jupyter(page: Path) -> set[str]:
    return {text.replace(" ", "-") for text in markdown.headings(markdown.read(page))}


def test_every_image_is_on_a_page_and_small() -> None:
    shown = {
        (page.parent / link).resolve()
        for page in [*AT_ROOT, *PAGES]
        for link in markdown.targets(markdown.read(page))
    }
    most_bytes = {".gif": 1_000_000, ".png": 200_000}
    images = {path for path in (SITE / "images").iterdir() if path.suffix in most_bytes}
    assert images and images - shown == set()
    assert [path.name for path in images if path.stat().st_size > most_bytes[path.suffix]] == []


def test_the_long_description_has_absolute_links() -> None:
    text = (ROOT / "README.md").read_text()
    hook = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    for each in hook["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    links = markdown.targets(text)
    repository = PROJECT["urls"]["Repository"].partition("github.com/")[2]
    assert links and all(link.startswith("https://") for link in links)
    assert all(repository in link for link in links)
    assert all("raw." in link for link in links if link.endswith((".png", ".gif")))


# ── code ─────────────────────────────────────────────────────────────────────────────────────────


def test_code_compiles() -> None:
    transform = TransformerManager().transform_cell
    for page in [*AT_ROOT, *PAGES]:
        for code in _python_blocks(page):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                ast.parse(transform(_body(code)), _name(page))


def _python_blocks(page: Path) -> Iterator[str]:
    return (block.text for block in blocks(page) if block.language == "python")


def _body(cell: str) -> str:
    """Return a cell without the line of its magic."""
    return cell.partition("\n")[2] if cell.startswith("%%") else cell


def test_every_magic_line_of_the_pages_is_valid() -> None:
    lines = [
        line
        for page in [*AT_ROOT, *PAGES]
        for code in _python_blocks(page)
        for line in code.splitlines()
        if re.match(r"%%?(distributed|infer)\b", line)
    ]
    assert len(lines) > 20
    for line in lines:
        name, _, rest = line.partition(" ")
        if name == "%%infer":
            infer.parse_infer(rest, defaults=JobSpec())
        else:
            distributed.parse(rest, is_cell=name == "%%distributed")


def test_every_terminal_command_of_the_pages_exists() -> None:
    pages = [*AT_ROOT, *PAGES, *NOTEBOOKS, ROOT / "binder" / "postBuild"]
    text = "".join(page.read_text() for page in pages)
    found = set(re.findall(r"python -m (hydrogen_magic\S* \w+ \w+)", text))
    known = {
        f"hydrogen_magic {' '.join(words.split()[:2])}" for words in generated.terminal_commands()
    }
    assert len(found) > 2 and found - known == set()


# ── what Databricks documents ────────────────────────────────────────────────────────────────────


def test_each_line_of_databricks_documentation_has_a_test() -> None:
    rows = documented.rows()
    lines = [row.line for row in rows]
    named = set(documented.named())
    assert [line for line in lines if line not in named] == []
    assert [line for line in named if line not in lines] == []
    assert len(set(lines)) == len(lines) > 100
    assert [row.line for row in rows if row.status != "works" and not row.here] == []
    lines_of_places = {
        row.line
        for row in rows
        if row.page in documented.IN_BOTH_PLACES and row.status != "refused"
    }
    in_one_place = lines_of_places - set(documented.named(in_both_places=True))
    assert in_one_place == set(documented.IN_ONE_PLACE.strip().splitlines())
    table_rows = re.findall(r"^\| .*\|$", documented.PAGE.read_text(), re.M)
    other_rows = [row for row in table_rows if row.split(" | ")[1] in ("status", "meaning |")]
    assert len(table_rows) == len(rows) + len(other_rows) + len(documented.STATUSES)


# ── the reference ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("page", PARSERS)
def test_every_option_is_described(page: str) -> None:
    found = [option for parser in PARSERS[page] for option in generated.options(parser)]
    assert [names for names, text, _ in found if not text] == []
    table = (SITE / "reference" / f"{page}.md").read_text()
    assert argparse.SUPPRESS not in table
    assert [names for names, *_ in found if names.replace("|", r"\|") not in table] == []


@pytest.mark.parametrize("verb", GANG_COMMANDS)
def test_the_line_of_a_gang_command_has_its_options(verb: str) -> None:
    arguments = re.findall(r"(-[-\w]+)", GANG_COMMANDS[verb][0])
    options = generated.options(gang.gang_parser(verb))
    assert arguments == [option.split()[0].strip(",") for option, *_ in options]


def test_every_command_of_a_terminal_is_described() -> None:
    commands = generated.terminal_commands()
    assert commands["horovod build --force"]
    assert set(plugins.commands()) == {name.split()[0] for name in commands} - {"gang"}
    assert [name for name, text in commands.items() if not text] == []
    assert {verb for _, verb, *_ in map(str.split, COMMANDS)} <= set(GANG_COMMANDS)


@pytest.mark.parametrize("page", generated.PAGES, ids=_name)
def test_tables_are_current(page: Path) -> None:
    text = page.read_text()
    assert text == generated.with_tables(text), "write them by: python -m docs.generated"


def test_every_table_of_the_package_is_on_a_page() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in generated.TABLES if f"<!-- table: {name} -->" not in text] == []


def test_every_table_of_the_benchmarks_is_on_a_page() -> None:
    pages = "".join(page.read_text() for page in PAGES)
    names = re.findall(r"<!-- table: benchmark (\w+) -->", pages)
    found = [stem for name in names for stem in generated.measured(name)]
    assert sorted(found) == sorted(path.stem for path in _results.RESULTS.glob("*.json"))
    scripts = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
    assert [name for name in names if f'"{name}' not in scripts] == []


def test_a_table_of_a_benchmark_is_saved_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/launch.py", "--save", str(tmp_path)])
    run = _results.parse_arguments("Launch", rounds=5, quick_rounds=2)
    rows: list[list[_results.Cell]] = [["hydrogen_magic, warm", 5, 0.09712345]]
    columns = {"": "", "n": "", "median": "s"}
    _results.report(run, _results.Table("launch", "call to result", columns, rows))
    assert "| hydrogen_magic, warm | 5 |    0.0971 |" in capsys.readouterr().out
    text = generated.with_tables(
        "<!-- table: benchmark launch -->\n<!-- end of table -->", tmp_path
    )
    assert "\n| hydrogen_magic, warm | 5 | 0.0971 |\n" in text


def test_every_public_name_is_in_the_reference() -> None:
    text = (SITE / "reference" / "api.md").read_text() + (SITE / "reference/errors.md").read_text()
    assert [name for name in hydrogen_magic.__all__ if f"hydrogen_magic.{name}" not in text] == []


def test_every_environment_variable_is_in_the_reference() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "hydrogen_magic").rglob("*.py"))
    used = set(re.findall(r"\bHYDROGEN_MAGIC_[A-Z_]*[A-Z]\b", sources))
    text = (SITE / "reference" / "environment.md").read_text()
    assert [name for name in sorted(used) if f"`{name}`" not in text] == []


# ── metadata ─────────────────────────────────────────────────────────────────────────────────────


def test_metadata_names_one_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    versions = {PROJECT["version"], citation["version"], recipe["context"]["version"]}
    assert versions == {hydrogen_magic.__version__}
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]
    sections = re.findall(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert PROJECT["version"] in sections


def test_metadata_has_the_same_addresses() -> None:
    urls = PROJECT["urls"]
    about = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())["about"]
    assert about["repository"] == urls["Repository"]
    assert about["documentation"] == urls["Documentation"]
    files = [url.partition("/blob/main/")[2] for url in urls.values() if "/blob/" in url]
    assert len(files) == 2 and all((ROOT / file).is_file() for file in files)


def test_the_conda_recipe_has_the_requirements_of_the_package() -> None:
    recipe = yaml.safe_load((ROOT / "conda" / "recipe.yaml").read_text())
    needed = {re.sub(r"\s*[;].*", "", line).replace(" ", "") for line in PROJECT["dependencies"]}
    listed = {line.replace(" ", "") for line in recipe["requirements"]["run"]}
    assert needed <= listed
    assert "__linux" in listed  # as the package's classifier says
    assert PROJECT["requires-python"] == f">={recipe['context']['python_min']}"


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "hydrogen_magic" / "py.typed").exists()
