"""Which library reads a path or URL; nothing connects to a store."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hydrogen_magic.node import data_files

fs = pytest.importorskip("pyarrow.fs")


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/Volumes/main/default/rows", "/Volumes/main/default/rows"),
        ("dbfs:/Volumes/main/default/rows", "/dbfs/Volumes/main/default/rows"),
        ("dbfs:/mnt/rows", "/dbfs/mnt/rows"),
        ("dbfs:///mnt/rows", "/dbfs/mnt/rows"),
        ("file:///data/two%20words", "/data/two words"),
        ("file:/data/rows", "/data/rows"),
    ],
)
def test_paths_that_the_operating_system_reads(path: str, place: str) -> None:
    assert not data_files.is_url(path)
    assert data_files.local_path(path) == place == str(data_files.absolute(path))


def test_links_to_folders_are_followed(tmp_path: Path) -> None:
    """But not in a circle."""
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for file in (data / "a.parquet", elsewhere / "more" / "b.parquet"):
        file.parent.mkdir(parents=True)
        file.touch()
    (data / "part").symlink_to(elsewhere)
    (elsewhere / "more" / "up").symlink_to(data)
    (data / "gone").symlink_to(tmp_path / "nowhere")
    (data / "itself").symlink_to("itself")
    found = data_files.find(data).files
    assert found == (data / "a.parquet", data / "part" / "more" / "b.parquet")
    assert data_files.find(f"{data}/p*").files[0] == found[1]


def test_brackets_in_the_name_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "[2024] rows"
    file = here / "data" / "a.parquet"
    file.parent.mkdir(parents=True)
    file.touch()
    monkeypatch.chdir(here)
    for path in ("data", "data/*.parquet", "d*", "./[d]ata/**/*.parquet"):
        found = data_files.find(path)
        assert found.files == (file,), path
        assert found.contains(file) and not found.contains(here / "more" / "a.parquet")


@pytest.mark.parametrize(
    ("log", "kind"), [("_delta_log/00000000000000000000.json", "Delta"), (".hoodie/hoodie", "Hudi")]
)
def test_a_folder_whose_files_are_not_all_of_a_table_is_refused(
    log: str, kind: str, tmp_path: Path
) -> None:
    """Rows that the table has deleted or replaced would be read, too."""
    fsspec = pytest.importorskip("fsspec")
    for file in ("lake/table/day=1/a.parquet", "lake/table/b.parquet", f"lake/table/{log}"):
        place = tmp_path / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
        fsspec.filesystem("memory").pipe(f"/{tmp_path.name}/{file}", b"")
    for place in (str(tmp_path), f"memory://{tmp_path.name}"):
        for path in ("lake", "lake/table", "lake/t*"):
            with pytest.raises(
                ValueError, match=rf"has a {kind} table.*format\('{kind.lower()}'\)"
            ):
                data_files.find(f"{place}/{path}")
        names = [file.name for file in data_files.find(f"{place}/lake/table/*.parquet").files]
        assert names == ["b.parquet"]


@pytest.mark.parametrize(
    ("url", "kind", "place"),
    [
        ("s3://lake/rows?region=eu-west-1", "S3FileSystem", "lake/rows"),
        ("s3a://lake/rows?region=eu-west-1", "S3FileSystem", "lake/rows"),
        ("s3n://lake/rows?region=eu-west-1", "S3FileSystem", "lake/rows"),
        ("gs://lake/rows", "GcsFileSystem", "lake/rows"),
        ("gcs://lake/rows", "GcsFileSystem", "lake/rows"),
        ("abfss://lake@account.dfs.core.windows.net/rows", "AzureFileSystem", "lake/rows"),
        ("abfs://lake@account.dfs.core.windows.net/rows", "AzureFileSystem", "lake/rows"),
    ],
)
def test_stores_that_pyarrow_reads(url: str, kind: str, place: str) -> None:
    if not hasattr(fs, kind):
        pytest.skip(f"PyArrow was built without {kind}")
    assert data_files.is_url(url)
    filesystem, found = data_files._opened(url)
    assert (type(filesystem).__name__, found) == (kind, place)


def test_hdfs_is_read_by_pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client loads Java, and connects at once."""
    asked: list[str] = []

    def from_uri(url: str) -> tuple[Any, str]:
        asked.append(url)
        return None, "/rows"

    monkeypatch.setattr(fs, "FileSystem", SimpleNamespace(from_uri=from_uri))
    for url in ("hdfs://name-node:8020/rows", "viewfs://cluster/rows"):
        assert data_files.is_url(url)
        assert data_files._opened(url) == (None, "/rows")
    assert asked == ["hdfs://name-node:8020/rows", "viewfs://cluster/rows"]


@pytest.mark.parametrize(
    ("url", "package"),
    [
        ("s3a://lake/rows", "s3fs"),
        ("gs://lake/rows", "gcsfs"),
        ("abfss://lake@account.dfs.core.windows.net/rows", "adlfs"),
        ("abfs://lake@account.dfs.core.windows.net/rows", "adlfs"),
    ],
)
@pytest.mark.parametrize("reason", ["built without", "configured"])
def test_the_package_to_install_is_named(
    url: str, package: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where PyArrow was built without a store, and where the user has configured fsspec for it."""
    config = pytest.importorskip("fsspec.config")
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    if reason == "configured":
        for scheme in ("s3", "gs", "abfs", "abfss"):
            monkeypatch.setitem(config.conf, scheme, {"anon": True})
    else:
        monkeypatch.setattr(fs, "FileSystem", SimpleNamespace(from_uri=not_built))
    with pytest.raises(ImportError, match=rf"needs a package .* pip install {package}$"):
        data_files.find(url)


def not_built(url: str) -> Any:
    raise NotImplementedError(url)
