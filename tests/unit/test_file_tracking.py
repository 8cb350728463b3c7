"""Files that a cell reads: by Python, and by code that Python's audit hooks do not see."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

from hydrogen_magic.node.worker.inference import file_names, file_tracking

HELD: list[object] = []


def below(folder: Path, files: Mapping[str, int]) -> dict[str, int]:
    """Return those of ``files`` below a folder: other threads may read others meanwhile."""
    return {name: time_ns for name, time_ns in files.items() if name.startswith(f"{folder}/")}


def by_python(path: Path) -> None:
    path.read_text()


def by_arrow(path: Path) -> None:
    with pa.OSFile(str(path)) as file:
        file.read()


def mapped(path: Path) -> None:
    HELD.append(pa.memory_map(str(path)))


def written(path: Path) -> None:
    with pa.OSFile(str(path), "wb") as file:
        file.write(b"2")


def appended(path: Path) -> None:
    with open(path, "a") as file:
        file.write("2")


@pytest.mark.parametrize(
    ("use", "is_read"),
    [(by_python, True), (by_arrow, True), (mapped, True), (written, False), (appended, False)],
)
def test_what_is_read_is_noted(
    use: Callable[[Path], None], is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a file that is named by its folder alone, or below it; a log is not read."""
    (tmp_path / "models" / "new").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "models")
    path = tmp_path / "models" / "new" / "net.pt"
    (tmp_path / "other").write_text("1")
    for named in ("new/net.pt", "new", str(path)):
        path.write_text("1")
        with file_tracking.noted([named, str(tmp_path / "other"), "", "\0", "a" * 5_000]) as files:
            use(path)
        found = {str(path): path.stat().st_mtime_ns} if is_read else {}
        assert below(tmp_path, files) == found
    HELD.clear()


def test_a_noted_file_that_is_written_later_is_the_run_s_own(tmp_path: Path) -> None:
    cache, weights = tmp_path / "cache", tmp_path / "weights"
    for path in (cache, weights):
        path.write_text("1")
    with file_tracking.noted() as files:
        by_python(cache)
        by_python(weights)
    assert not file_tracking.written()
    appended(cache)
    appended(tmp_path / "log")
    assert below(tmp_path, files).keys() == {str(cache), str(weights)}
    assert file_tracking.written() == {str(cache)}


def test_a_file_that_the_set_up_writes_is_its_own(tmp_path: Path) -> None:
    """Also one that it still has open, or reads afterwards."""
    log, base, config = paths = [tmp_path / name for name in ("log", "base", "config")]
    for path in paths:
        path.touch()
    with ExitStack() as stack, file_tracking.noted(map(str, paths)) as files:
        stack.enter_context(log.open("a"))
        connection = stack.enter_context(closing(sqlite3.connect(base)))
        connection.execute("create table t (x)")
        config.write_text("1")
        config.read_text()
    assert not below(tmp_path, files)


def test_a_large_folder_is_not_listed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_tracking, "_MOST_ENTRIES", 3)
    for n in range(5):
        (tmp_path / f"{n}" / "below").mkdir(parents=True)
    assert len(list(file_tracking._folders(str(tmp_path)))) == 1 + 3


def test_the_working_directory_is_not_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notebook's server reads there."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "notebook.ipynb"
    path.write_text("{}")
    with file_tracking.noted([".", "/", str(tmp_path)]) as files:
        by_arrow(path)
    assert not below(tmp_path, files)


def test_a_system_without_inotify_has_the_files_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_tracking.ctypes, "CDLL", lambda name: object())
    path = tmp_path / "net.pt"
    path.write_text("1")
    with file_tracking.noted([str(path)]) as files:
        by_python(path)
    assert list(below(tmp_path, files)) == [str(path)]


def test_files_of_code_are_no_data(tmp_path: Path) -> None:
    beside, weights = str(Path(pa.__file__).with_name("x.txt")), str(tmp_path / "m.pt")
    files = [os.__file__, pa.__file__, beside, str(tmp_path / "m.py"), weights]
    assert file_tracking.of_data(files) == [weights]


def test_texts_of_values() -> None:
    values = {"a": ["x.pt", Path("y.pt")], "b": SimpleNamespace(path="z.pt"), "c": 1}
    assert list(file_names.in_values(values)) == ["x.pt", "y.pt", "z.pt"]


def test_names_of_files_are_looked_for_without_code_of_the_user() -> None:
    class Remote(os.PathLike[str]):
        """As one of a library that downloads the file."""

        __slots__ = ()

        def __fspath__(self) -> str:
            raise AssertionError

        def __getattr__(self, name: str) -> str:
            raise AssertionError

    assert list(file_names.in_values([Remote(), "x.pt"])) == ["x.pt"]


def test_texts_of_code() -> None:
    code = """load('x.pt', "y.pt")  # don't"""
    assert list(file_names.in_code(code)) == ["x.pt", "y.pt"]
