"""Gangs in unusual environments, each of which a process of its own has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hydrogen_magic as hm
from hydrogen_magic.driver import launcher
from tests.gangs import PATIENCE_S, ended, notices_of

SCRIPT = textwrap.dedent(
    """
    import os, queue, sys
    from pathlib import Path
    import hydrogen_magic as hm
    from hydrogen_magic.notebook import doctor, gang_command
    from hydrogen_magic.notebook.arguments.gang import GangCommand
    from hydrogen_magic.errors import PlacementError
    from hydrogen_magic.driver.placements import local_agents

    def where():
        import queue, urllib3.connectionpool
        return os.environ["RANK"], queue.__file__

    assert not Path("/proc/sys/kernel").exists()
    sys.path[0] = ""  # as in a notebook
    for name in ("zmq", "queue"):
        Path(name + ".py").write_text("raise RuntimeError('this file hides a module')")
    gang = hm.launch(where, np=2)
    assert gang.results == [(str(rank), queue.__file__) for rank in range(2)]
    notices = [notice.text for notice in gang.snapshot().notices]
    assert any("not recorded" in text and "HYDROGEN_MAGIC_HOME" in text for text in notices), notices
    gang_command.manage(GangCommand("list"))

    here = os.getcwd()
    for file in Path(here).iterdir():
        file.unlink()
    os.rmdir(here)
    local_agents.close()
    try:
        hm.run(where, np=2)
    except PlacementError as error:
        assert "working directory no longer exists" in str(error), error
    else:
        raise AssertionError("it ran in a directory that does not exist")
    bad = {check.name for check in doctor.examine() if not check.is_well}
    assert {"run directory", "2 ranks all_reduce"} <= bad, bad
    os.chdir("/")
    assert hm.run(where, np=2)[0] == "0"
    print("well")
    """
)


def test_no_home_no_proc_sys_hidden_modules_and_a_deleted_directory(tmp_path: Path) -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare for a mount namespace")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "notebooks").mkdir()
    absent = ("HYDROGEN_MAGIC_HOME", "XDG_STATE_HOME")
    env = {name: value for name, value in os.environ.items() if name not in absent}
    setup = f"mount -t tmpfs none /proc/sys && cd {tmp_path}/notebooks"
    done = subprocess.run(
        [
            "unshare",
            "--mount",
            "sh",
            "-c",
            f"{setup} && exec {sys.executable} {tmp_path}/script.py",
        ],
        text=True,
        capture_output=True,
        timeout=4 * PATIENCE_S,
        check=False,
        env={**env, "HOME": "/proc/no-home"},
    )
    assert done.stdout.endswith("well\n"), done.stderr


FAILING = """
import hydrogen_magic as hm
def train():
    return {}["missing"]
hm.run(train, np=2)
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_a_script_has_the_traceback_of_the_rank_and_no_warnings_of_ours(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(FAILING)
    done = subprocess.run(
        [sys.executable, script],
        text=True,
        capture_output=True,
        timeout=4 * PATIENCE_S,
        env={**os.environ, "PYTHONWARNINGS": "default::ResourceWarning"},
    )
    assert "ResourceWarning" not in done.stderr
    message, *lines = done.stderr.partition("RankFailedError: ")[2].splitlines()
    assert re.fullmatch("rank [01] failed: KeyError: 'missing'", message), done.stderr
    assert lines[:3] == [
        f"  File {script}, line 4, in train",
        '      return {}["missing"]',
        "KeyError: 'missing'",
    ]


WITHOUT_PYARROW = textwrap.dedent(
    """
    import importlib.machinery
    finder = importlib.machinery.PathFinder
    find = finder.find_spec
    finder.find_spec = lambda name, *rest: None if name == "pyarrow" else find(name, *rest)

    import importlib.metadata
    installed = ""
    version_of = importlib.metadata.version
    def version(name):
        if name == "pyarrow" and not installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed if name == "pyarrow" else version_of(name)
    importlib.metadata.version = version

    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "hydrogen_magic")
    shell.run_cell("import pandas as pd, hydrogen_magic as hm; df = pd.DataFrame(dict(x=[1]))")
    for installed in ("", "18.1.0"):
        shell.run_cell("%%infer df\\ndef predict(batch):\\n    return batch")
        shell.run_cell("hm.dataset(df)")
    """
)


def test_a_pyarrow_that_cannot_be_used_is_named_with_the_remedy() -> None:
    command = [sys.executable, "-c", WITHOUT_PYARROW]
    done = subprocess.run(command, text=True, capture_output=True, timeout=PATIENCE_S, check=False)
    for said in ("which is not installed", "here is 18.1.0"):
        for caller in ("%%infer", "hm.dataset()"):
            needed = (
                f"{caller} needs PyArrow 21 or newer, {said}: pip install 'hydrogen_magic[infer]'"
            )
            assert needed in done.stdout + done.stderr


@pytest.fixture
def time_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A notebook that changes its time zone, after its agent has started."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Kolkata")
        time.tzset()
        yield
    time.tzset()


def test_ranks_have_the_time_zone_of_the_notebook(time_zone: None) -> None:
    def zone() -> tuple[str | None, tuple[str, str], int]:
        return os.environ.get("TZ"), time.tzname, time.localtime(0).tm_min

    expected = ("Asia/Kolkata", ("IST", "IST"), 30)
    assert zone() == expected
    assert ended(hm.launch(zone, np=2)).results == [expected, expected]


def test_an_update_under_a_running_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "has been updated since this kernel imported it: restart the kernel"
    assert text not in notices_of(ended(hm.launch(len, "a", np=1, on="inline")))
    monkeypatch.setattr(launcher, "_IMPORTED_NS", 1)
    assert text in notices_of(ended(hm.launch(len, "a", np=1, on="inline")))


def test_a_number_of_threads_that_is_none_is_ignored() -> None:
    assert hm.run(torch.get_num_threads, np=1, env={"OMP_NUM_THREADS": "0"}) > 0
