"""``python -m hydrogen_magic deepspeed build``: with a stand-in for DeepSpeed, and with the real one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hydrogen_magic as hm
from hydrogen_magic.__main__ import main
from hydrogen_magic.node.worker.observe import compilation
from tests.gangs import PATIENCE_S

FILE_BATON = """
import os, time

class FileBaton:
    def __init__(self, lock_file_path):
        self.lock_file_path = lock_file_path
        self.fd = None

    def try_acquire(self):
        try:
            self.fd = os.open(self.lock_file_path, os.O_CREAT | os.O_EXCL)
            return True
        except FileExistsError:
            return False

    def wait(self):
        while os.path.exists(self.lock_file_path):
            time.sleep(0.1)

    def release(self):
        os.close(self.fd)
        os.remove(self.lock_file_path)
"""
"""That of torch, which takes seconds to import."""
ALL_OPS = """
import threading, time
from pathlib import Path
from torch.utils.cpp_extension import FileBaton

LOCK = Path(__file__).with_name("lock")

class Quick:
    def load(self, verbose):
        print("[1/2] c++ a.cpp" if verbose else "")

class Missing:
    def load(self, verbose):
        raise RuntimeError("Unable to JIT load the op due to ninja not being installed.")

class Waiting:
    def load(self, verbose):
        LOCK.touch()
        threading.Timer(8, LOCK.unlink).start()
        FileBaton(str(LOCK)).wait()

class Endless:
    def load(self, verbose):
        lock = FileBaton(str(LOCK))
        assert lock.try_acquire()
        try:
            print("[1/2] c++ a.cpp")
            time.sleep(600)
        finally:
            lock.release()

accelerator_name = "cpu"
ALL_OPS = {
    "deepspeed_shm_comm": Quick(), "missing": Missing(), "waiting": Waiting(), "endless": Endless(),
}
"""


@pytest.fixture
def operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package ``deepspeed`` with nothing but operators; returns the path of its lock file.

    The processes that compile have a package ``torch`` beside it, with nothing but locks.
    """
    folder = tmp_path / "deepspeed" / "ops" / "op_builder"
    utilities = tmp_path / "compiling" / "torch" / "utils"
    for packages in (folder, folder.parent, folder.parent.parent), (utilities, utilities.parent):
        packages[0].mkdir(parents=True)
        for package in packages:
            (package / "__init__.py").touch()
    (folder / "all_ops.py").write_text(ALL_OPS)
    (utilities / "cpp_extension.py").write_text(FILE_BATON)
    monkeypatch.syspath_prepend(tmp_path)
    path = [str(tmp_path / "compiling"), str(tmp_path), *filter(None, sys.path)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    return folder / "lock"


def test_without_deepspeed_the_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    assert main(["deepspeed", "build"]) == 3
    assert "not installed here: run `pip install" in capsys.readouterr().err


def test_operators_are_compiled_with_progress(
    operators: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deepspeed", "build"]) == 0
    found = capsys.readouterr()
    assert "deepspeed_shm_comm can be loaded" in found.out
    assert "compiling: 50 % after" in found.err


@pytest.mark.exhaustive  # test_observe has the explanation
def test_a_lock_file_without_a_process_is_named(
    operators: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deepspeed", "build", "waiting"]) == 0
    assert f"· waits for {operators}, which no process" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing", "RuntimeError: Unable to JIT load the op due to ninja not being installed."),
        ("fused", "not an operator for cpu: fused; choose from deepspeed_shm_comm, missing"),
    ],
)
def test_the_cause_of_a_failure_is_shown(
    name: str, reason: str, operators: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["deepspeed", "build", name]) == 1
    said = capsys.readouterr().err
    assert f"{name} cannot be loaded:" in said and reason in said
    assert "Traceback" not in said


def test_a_process_that_exits_during_the_search_for_a_lock_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(listed: Callable[..., Any]) -> Callable[..., Any]:
        def listing(path: Any = ".") -> Any:
            if str(path) == "/proc/1/fd":
                raise FileNotFoundError(path)
            return listed(path)

        return listing

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, gone(getattr(os, name)))
    lock = tmp_path / "lock"
    with lock.open("w"):
        assert not compilation._is_abandoned(lock)


def test_a_stop_leaves_no_lock_file(operators: Path) -> None:
    """Ranks would wait for it."""
    command = [sys.executable, "-m", "hydrogen_magic", "deepspeed", "build", "endless"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as building:
        assert building.stderr is not None
        assert "50 %" in building.stderr.readline()
        assert operators.exists()
        building.send_signal(signal.SIGTERM)
        assert building.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert not operators.exists()


def communicate() -> bool:
    import deepspeed
    from deepspeed.comm import comm

    deepspeed.init_distributed()
    return comm.cdb.shm_comm_op is not None


@pytest.mark.exhaustive
@pytest.mark.deepspeed
@pytest.mark.timeout(600)  # an operator is compiled
def test_ranks_load_what_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the folder where ``make`` has compiled it, the command only tests it."""
    folder = os.environ.get("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    assert main(["deepspeed", "build"]) == 0
    [library] = Path(folder).rglob("deepspeed_shm_comm.so")
    made = library.stat().st_mtime_ns
    assert hm.run(communicate, np=2, quiet=True, env={"TORCH_EXTENSIONS_DIR": folder})
    assert library.stat().st_mtime_ns == made
