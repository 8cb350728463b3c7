"""``python -m hydrogen_magic horovod``: what it finds, keeps, refuses and says. No Horovod is compiled."""

from __future__ import annotations

import dataclasses
import io
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from hydrogen_magic.__main__ import main
from hydrogen_magic.frameworks import subprocess_log
from hydrogen_magic.frameworks.horovod import build, installation
from hydrogen_magic.frameworks.horovod.build import (
    cuda,
    fetching,
    source_patches,
    toolchain,
    wheel_cache,
)
from hydrogen_magic.frameworks.horovod.build.errors import BuildError
from hydrogen_magic.frameworks.horovod.build.plan import plan
from hydrogen_magic.frameworks.horovod.rendezvous import HorovodRendezvous
from tests import leaks
from tests.documented import covers
from tests.gangs import alive

ROOT = Path(__file__).parents[2]
USERS_CACHE = os.environ.get("XDG_CACHE_HOME", "")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where wheels are kept; no choice of the person who runs the tests counts."""
    for name in [name for name in os.environ if name.startswith("HOROVOD_") or "FLAGS" in name]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hydrogen_magic" / "horovod"


@pytest.fixture
def here(tmp_path: Path) -> toolchain.Machine:
    return toolchain.Machine(
        torch=installation.Torch("2.13.0+cpu", None, tmp_path / "torch"),
        compiler="c++",
        compiler_version="c++ 12.2.0",
        standard=20,
        mpi=None,
        cuda=None,
    )


def _program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def _file(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# ── what the wheel depends on ────────────────────────────────────────────────────────────────────


def test_the_key_differs_where_the_wheel_would(here: toolchain.Machine, tmp_path: Path) -> None:
    found = cuda.Cuda(tmp_path, "13.0", tmp_path, tmp_path / "libnccl.so.2")
    torch = dataclasses.replace(here.torch, version="2.13.0+cu130", cuda="13.0")
    others = [
        dataclasses.replace(here, torch=torch),
        dataclasses.replace(here, compiler_version="c++ 13.1.0"),
        dataclasses.replace(here, standard=17),
        dataclasses.replace(here, mpi="mpirun (Open MPI) 4.1.4"),
        dataclasses.replace(here, torch=torch, cuda=found),
    ]
    keys = [plan(one, {}).key for one in (here, *others)]
    keys.append(plan(here, {"HOROVOD_BUILD_ARCH_FLAGS": "-mavx2"}).key)
    assert len(set(keys)) == len(keys)
    assert keys[0].startswith("0.28.1-torch2.13.0.cpu-cp3") and "-gloo-" in keys[0]
    assert "-gloo-mpi-" in keys[4] and "-gloo-nccl-" in keys[5]


def test_the_key_is_that_of_another_environment_with_the_same_torch(
    here: toolchain.Machine, tmp_path: Path
) -> None:
    torch = dataclasses.replace(here.torch, directory=tmp_path / "elsewhere")
    same = dataclasses.replace(here, torch=torch, hint="something")
    assert plan(same, {"HOROVOD_RANK": "3", "PATH": "/bin"}).key == plan(here, {}).key


def test_the_user_may_do_without_what_there_is(here: toolchain.Machine) -> None:
    with_mpi = dataclasses.replace(here, mpi="mpirun (Open MPI) 4.1.4")
    assert plan(with_mpi, {}).operations == ("gloo", "mpi")
    assert plan(with_mpi, {"HOROVOD_WITHOUT_MPI": "1"}).operations == ("gloo",)


@pytest.mark.parametrize(
    ("text", "standard"),
    [
        ("common_cflags += ['-std=c++20', '-fPIC']\ncuda = ['-std=c++17']", 20),
        ('cpp_flags = cflags + ["-std=c++14"]', 14),
        ("# e.g. -std=c++23, which nobody passes", 17),
    ],
)
def test_the_standard_is_the_one_torch_compiles_extensions_with(
    tmp_path: Path, text: str, standard: int
) -> None:
    _file(tmp_path / "utils" / "cpp_extension.py", text)
    assert toolchain.wanted_standard(tmp_path) == standard


@pytest.mark.parametrize(
    ("environment", "most"),
    [({"MAKEFLAGS": "-j3"}, 3), ({"MAKEFLAGS": " -j64", "MAKELEVEL": "1"}, os.cpu_count())],
)
def test_an_outer_make_does_not_say_how_many_compilers_run(
    environment: Mapping[str, str], most: int
) -> None:
    assert 1 <= toolchain.jobs(environment) <= most


# ── GPUs ─────────────────────────────────────────────────────────────────────────────────────────


def _toolkit(home: Path, release: str) -> Path:
    _program(home / "bin" / "nvcc", f"echo 'Cuda compilation tools, release {release}, V1'")
    _file(home / "include" / "cuda_runtime.h")
    return home


def test_the_nccl_is_the_one_that_torch_brings(here: toolchain.Machine, tmp_path: Path) -> None:
    torch = installation.Torch("2.9.1+cu128", "12.8", tmp_path / "site" / "torch")
    home = _toolkit(tmp_path / "cuda", "12.6")
    header = _file(tmp_path / "site" / "nvidia" / "nccl" / "include" / "nccl.h")
    library = _file(tmp_path / "site" / "nvidia" / "nccl" / "lib" / "libnccl.so.2")
    found, hint = cuda.find_cuda(torch, {"CUDA_HOME": str(home)})
    assert (found, hint) == (cuda.Cuda(home, "12.6", header.parent, library), "")
    wanted = plan(dataclasses.replace(here, torch=torch, cuda=found), {})
    (place := tmp_path / "place").mkdir()
    environment = build._environment(wanted, tmp_path / "tools", place, 2)
    assert environment["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    linked = Path(environment["HOROVOD_NCCL_LIB"]) / "libnccl.so"
    assert linked.resolve() == library, "pip's NCCL has no file that a linker finds"
    assert environment["PATH"].startswith(f"{home}/bin:")


def test_a_torch_for_gpus_without_nvcc_says_what_will_be_slow(tmp_path: Path) -> None:
    torch = installation.Torch("2.9.1+cu99", "99.8", tmp_path / "torch")
    home = _toolkit(tmp_path / "cuda", "12.6")
    found, hint = cuda.find_cuda(torch, {"CUDA_HOME": str(home)})
    assert found is None
    assert "no nvcc of CUDA 99 was found" in hint and "cuda-toolkit=99.8" in hint


# ── missing requirements ─────────────────────────────────────────────────────────────────────────


def test_what_is_missing_is_named_with_the_command_before_anything_happens(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _program(tmp_path / "bin" / "apt-get", "true")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert main(["horovod", "build"]) == 3
    said = capsys.readouterr().err
    version = "{}.{}".format(*sys.version_info)
    assert "a C++ compiler" in said and "make" in said and "Python.h" in said
    assert f"apt-get install g++ make python{version}-dev" in said
    assert not home.exists()


def test_a_compiler_too_old_for_torch_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = 'case "$*" in *--version*) echo "old++ 4.8";; *) echo "error: -std=c++20?" >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", str(_program(tmp_path / "old++", script)))
    assert main(["horovod", "build"]) == 3
    said = capsys.readouterr().err
    assert "old++ 4.8" in said and "error: -std=c++20?" in said and "CXX=" in said


# ── source changes ───────────────────────────────────────────────────────────────────────────────


def test_a_source_that_is_not_the_release_is_refused(tmp_path: Path) -> None:
    change = source_patches.SourcePatch("a.cc", "yield()", "sleep()", "it spins")
    _file(tmp_path / "a.cc", "yield(); yield();")
    with pytest.raises(BuildError, match=r"a\.cc .* 2 times .*it spins"):
        source_patches.apply([change], tmp_path)
    with pytest.raises(BuildError, match=r"b\.cc .* 0 times"):
        source_patches.apply([dataclasses.replace(change, file="b.cc")], tmp_path)


def test_a_stretch_of_a_source_is_replaced_as_a_whole(tmp_path: Path) -> None:
    change = source_patches.SourcePatch("a.cc", "begin", "all", "it is ours", until="end\n")
    _file(tmp_path / "a.cc", "x begin y\nend\nz end\n")
    source_patches.apply([change], tmp_path)
    assert (tmp_path / "a.cc").read_text() == "x allz end\n"
    _file(tmp_path / "a.cc", "end\nbegin y\n")
    with pytest.raises(BuildError, match=r"a\.cc .* 0 times .*it is ours"):
        source_patches.apply([change], tmp_path)


@pytest.mark.horovod
@pytest.mark.exhaustive  # a build makes those of its own standard
def test_every_change_is_there_to_be_made_in_the_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", USERS_CACHE)  # pip's downloads are there
    try:
        release = fetching.source(tmp_path, tmp_path, tmp_path / "log")
    except BuildError as error:
        pytest.skip(str(error))
    for standard in (14, 17, 20):
        changes = source_patches.for_standard(standard)
        folder = tmp_path / str(standard)
        for name in {change.file for change in changes}:
            _file(folder / name, (release / name).read_text())
        source_patches.apply(changes, folder)
        torch = (folder / "horovod/torch/CMakeLists.txt").read_text()
        assert f"set(CMAKE_CXX_STANDARD {standard})" in torch and "distutils" not in torch


# ── the build itself, of a Horovod that takes a second ───────────────────────────────────────────


_SETUP = """
import sys
from setuptools import setup
print("[ 40%] Building CXX object a.cc.o", flush=True)
if {fails}:
    print("a.cc:3:1: error: boom")
    sys.exit(1)
setup(name="horovod", version="0.28.1")
"""


def _release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, fails: bool) -> None:
    """Have a small project be the source release, and this Python's setuptools good enough."""
    project = _file(tmp_path / "setup.py", _SETUP.format(fails=fails))
    packed = tmp_path / "horovod.tar.gz"
    with tarfile.open(packed, mode="w:gz") as archive:
        archive.add(project, f"horovod-{source_patches.VERSION}/setup.py")
    monkeypatch.setattr(fetching, "_release", lambda tools, place, log: packed)
    monkeypatch.setattr(source_patches, "for_standard", lambda standard: ())
    monkeypatch.setattr(fetching, "tools", lambda target, log: target)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()


def _make_wheel(said: list[str]) -> build.BuildOutcome:
    return build.build(is_forced=False, is_installed=False, say=said.append)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, here: toolchain.Machine) -> toolchain.Machine:
    monkeypatch.setattr(toolchain, "detect", lambda: here)
    return here


def test_a_wheel_is_built_once_and_used_from_a_read_only_cache(
    known: toolchain.Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _release(monkeypatch, tmp_path, fails=False)
    said: list[str] = []
    first, second = _make_wheel(said), _make_wheel(said)
    assert (first.was_compiled, second.was_compiled) == (True, False)
    assert first.wheel == second.wheel == wheel_cache.find(plan(known, {}).key)
    assert "torch2.13.0.cpu" not in first.wheel.name, "the small project takes no local version"
    assert len(said) == 1 and "with gloo" in said[0]
    assert "40 %" in capsys.readouterr().err
    assert list((tmp_path / "tmp").iterdir()) == []
    # A directory stands for a file that cannot be written, which root always can.
    log = wheel_cache.directory() / f"{plan(known, {}).key}.log"
    log.unlink()
    log.mkdir()
    assert _make_wheel([]).wheel == first.wheel
    first.wheel.unlink()
    with pytest.raises(BuildError, match="set XDG_CACHE_HOME to a folder that can be written"):
        _make_wheel([])


def test_a_cache_that_cannot_be_is_told(
    known: toolchain.Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert main(["horovod", "build", "--no-install"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("Horovod cannot be built here: ")
    assert "set XDG_CACHE_HOME to a folder that can be written" in told


def test_a_build_that_fails_shows_its_errors_and_keeps_nothing(
    known: toolchain.Machine, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _release(monkeypatch, tmp_path, fails=True)
    with pytest.raises(BuildError, match=r"a\.cc:3:1: error: boom") as failed:
        _make_wheel([])
    log = Path(str(failed.value).rpartition("Full log: ")[2])
    assert "error: boom" in log.read_text()
    assert list(home.glob("*/*.whl")) == [] and list((tmp_path / "tmp").iterdir()) == []


def test_pip_checks_the_digest_of_the_source_before_it_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloaded = tmp_path / "release" / "horovod-0.28.1.tar.gz"
    monkeypatch.setattr(fetching, "pip", lambda arguments, *rest: _file(downloaded))
    assert fetching._release(tmp_path, tmp_path, tmp_path / "log") == downloaded
    assert source_patches.SDIST_SHA256 in (tmp_path / "horovod.txt").read_text()


def test_what_ends_the_build_ends_its_compilers(tmp_path: Path) -> None:
    script = "sleep 600 & echo $!; echo '[ 1%] Building'; wait"
    pids: list[int] = []

    def interrupt(line: str) -> None:
        if line.strip().isdigit():
            pids.append(int(line))
        else:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        subprocess_log.run(
            ["sh", "-c", script],
            cwd=tmp_path,
            environment=os.environ,
            log=tmp_path / "log",
            on_line=interrupt,
        )
    assert leaks.settle(lambda: alive(pids), 60.0) == []


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_few_elsewhere() -> None:
    lines = [f"[{percent:3}%] Building CXX object" for percent in range(0, 101, 2)]
    terminal, file = _Terminal(), io.StringIO()
    for out in (terminal, file):
        clock = iter(range(0, 1000, 10))
        progress = subprocess_log.CompilerProgress(out, lambda clock=clock: float(next(clock)))  # type: ignore[misc]
        for line in lines:
            progress.feed(line)
        progress.close()
    assert "\n" not in terminal.getvalue() and "100 % after 8:30" in terminal.getvalue()
    assert len(file.getvalue().splitlines()) == 6


def test_of_a_long_log_the_errors_are_shown() -> None:
    log = "a.cc:1:2: error: first\n" + "note: candidate\n" * 50 + "make[2]: *** [a.o] Error 1\n"
    assert subprocess_log.relevant(log) == ["a.cc:1:2: error: first"]
    looks = "-- Looking for dlopen - not found\n"
    cmake = looks + "CMake Error at x.cmake:60 (message):\n  Could not\n\n  find it\n"
    assert subprocess_log.relevant(cmake) == [
        "CMake Error at x.cmake:60 (message):",
        "  Could not",
        "  find it",
    ]
    numbers = [str(n) for n in range(20)]
    assert subprocess_log.relevant("\n\n".join(numbers)) == numbers[-12:]


# ── what is installed ────────────────────────────────────────────────────────────────────────────


def _fault(site: Path) -> str:
    """Return what is said by a Python that has this and nothing else."""
    code = (
        f"import sys; sys.path += [{str(ROOT)!r}, {str(site)!r}]\n"
        "from hydrogen_magic.frameworks.horovod import installation; print(installation.fault())\n"
        "assert not {'torch', 'horovod'} & set(sys.modules)"
    )
    command = [sys.executable, "-S", "-E", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=site, timeout=60, check=True)
    return done.stdout.strip()


def _site(tmp_path: Path, *, torch: str, built_for: str | None) -> Path:
    _file(tmp_path / "torch" / "__init__.py", "raise ImportError('not to be imported')")
    _file(
        tmp_path / "torch" / "version.py",
        f"from x import y\n__version__ = '{torch}'\ncuda: str = '1'",
    )
    (tmp_path / "torch-1.dist-info").mkdir()
    if built_for is not None:
        _file(tmp_path / "horovod" / "__init__.py", "raise ImportError('not to be imported')")
        _file(
            tmp_path / "horovod" / "metadata.json",
            f'{{"pytorch": "{built_for}",\n"dummy": "none"\n}}',
        )
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        _file(tmp_path / "horovod" / "torch" / f"mpi_lib_v2{suffix}")
    return tmp_path


@covers("""`pip install horovod==0.18.1 --force-reinstall` after an upgrade""")
def test_a_horovod_for_another_torch_must_be_rebuilt(tmp_path: Path) -> None:
    said = _fault(_site(tmp_path, torch="2.14.0+cpu", built_for="2.13.0+cpu"))
    assert "was built for torch 2.13.0+cpu, and torch 2.14.0+cpu is installed" in said
    assert said.endswith("rebuild it with `python -m hydrogen_magic horovod build`.")


def test_a_horovod_that_somebody_else_built_for_this_torch_will_do(tmp_path: Path) -> None:
    assert _fault(_site(tmp_path, torch="2.13.0+cu130", built_for="2.13.0+cu130")) == "None"


def test_a_horovod_of_another_python_must_be_rebuilt(tmp_path: Path) -> None:
    site = _site(tmp_path, torch="2.13.0", built_for="2.13.0")
    shutil.rmtree(site / "horovod" / "torch")
    assert "no library for PyTorch that this Python can load" in _fault(site)
    (site / "horovod" / "metadata.json").write_text("{")
    assert "was built without PyTorch" in _fault(site)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    assert "Horovod needs torch, which is not installed" in _fault(tmp_path)
    (tmp_path / "horovod").mkdir()  # somebody's folder of that name
    said = _fault(_site(tmp_path, torch="2.13.0", built_for=None))
    assert said.startswith("Horovod is not installed here") and "for torch 2.13.0" in said


def test_the_doctor_knows_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    diagnose = HorovodRendezvous().diagnose
    monkeypatch.setattr(installation, "horovod", lambda: None)
    missing = diagnose()
    assert missing.is_well and installation.BUILD in missing.found
    found = installation.Horovod("0.28.1", "2.1.0", True, ("gloo", "nccl"), None)
    monkeypatch.setattr(installation, "horovod", lambda: found)
    other = diagnose()
    assert not other.is_well and "built for torch 2.1.0" in other.found
    assert other.remedy == installation.BUILD
    monkeypatch.setattr(installation, "fault", lambda: None)
    assert "0.28.1 with gloo, nccl" in diagnose().found


def test_trying_out_a_horovod_that_does_not_fit_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(installation, "fault", lambda: "built for torch 1")
    assert main(["horovod", "check"]) == 1
    assert capsys.readouterr().err == "built for torch 1\n"


@pytest.mark.horovod
def test_the_installed_horovod_reduces_a_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["horovod", "check"]) == 0
    torch = installation.torch()
    assert torch is not None
    assert f"works with torch {torch.version}" in capsys.readouterr().out
