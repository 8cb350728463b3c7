"""Data of ``hm.dataset`` and checkpoints on a host that shares no disk with the notebook's machine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from hydrogen_magic.core.messages import DATASETS, FilePart, FolderFile, KeepFolder, TransferKept
from hydrogen_magic.node.agent.host_folders import HostFolders

NAME = "cafe"
PART = 4


@pytest.fixture
def sent() -> list[TransferKept]:
    return []


@pytest.fixture
def folders(tmp_path: Path, sent: list[TransferKept]) -> HostFolders:
    return HostFolders(tmp_path / "datasets", sent.append)


def parts(transfer: int, data: bytes, file_name: str = "a") -> list[tuple[FilePart, bytes]]:
    label = FolderFile(DATASETS, NAME, transfer, file_name)
    return [
        (FilePart(label, 1, len(data), offset), data[offset : offset + PART])
        for offset in range(0, max(len(data), 1), PART)
    ]


def take(folders: HostFolders, found: Iterable[tuple[FilePart, bytes]]) -> None:
    for part, data in found:
        assert isinstance(part.label, FolderFile)
        folders.take(part.label, part, memoryview(data))


def test_a_folder_has_its_name_when_all_files_are_complete(
    folders: HostFolders, sent: list[TransferKept]
) -> None:
    take(folders, [*parts(1, b"abcdefghij"), *parts(1, b"", "empty"), *parts(1, b"xy", "b")])
    path = folders.folder / NAME
    assert not path.exists() and folders.is_empty and sent == []
    folders.keep(KeepFolder(DATASETS, NAME, 1))
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    assert files == {"a": b"abcdefghij", "b": b"xy", "empty": b""}
    assert sent == [TransferKept(1)] and not folders.is_empty
    folders.forget([NAME, "other"])
    assert not path.exists() and folders.is_empty


def test_transfers_that_overlap_do_not_mix(folders: HostFolders, sent: list[TransferKept]) -> None:
    first, second = parts(1, b"A" * 12), parts(2, b"C" * 12)
    order = [first[0], second[0], first[1], second[1], first[2], second[2]]
    take(folders, order)
    for number in (1, 2):
        folders.keep(KeepFolder(DATASETS, NAME, number))
        expected = {1: b"A" * 12, 2: b"C" * 12}[number]
        assert (folders.folder / NAME / "a").read_bytes() == expected
    assert sent == [TransferKept(1), TransferKept(2)]


@pytest.mark.parametrize("delete", [HostFolders.drop_incomplete, lambda each: each.forget([NAME])])
def test_what_was_on_its_way_is_deleted(
    delete: Callable[[HostFolders], None], folders: HostFolders, sent: list[TransferKept]
) -> None:
    """Also when its last parts arrive after the gang was stopped."""
    first, *others = parts(1, b"A" * 12)
    take(folders, [first])
    delete(folders)
    take(folders, [*others, *parts(1, b"B" * 4, "b")])
    folders.keep(KeepFolder(DATASETS, NAME, 1))
    assert list(folders.folder.iterdir()) == [] and sent == []


def test_a_full_disk_is_reported_once_and_leaves_nothing(
    folders: HostFolders, sent: list[TransferKept]
) -> None:
    first, *others = parts(1, b"A" * 12)
    take(folders, [first])
    (folders.folder / f".1.{NAME}" / "a").unlink()  # as if it could not be written
    take(folders, others)
    folders.keep(KeepFolder(DATASETS, NAME, 1))
    assert sent == [TransferKept(1, f"No such file or directory ({folders.folder})")]
    assert list(folders.folder.iterdir()) == []


def test_a_folder_that_could_not_be_replaced_is_no_longer_there(
    folders: HostFolders, sent: list[TransferKept]
) -> None:
    take(folders, parts(1, b"xy"))
    folders.keep(KeepFolder(DATASETS, NAME, 1))
    take(folders, parts(2, b"xy"))
    shutil.rmtree(folders.folder / f".2.{NAME}")  # as if it could not be renamed
    folders.keep(KeepFolder(DATASETS, NAME, 2))
    assert [kept.transfer for kept in sent if kept.error] == [2]
    assert list(folders.folder.iterdir()) == [] and folders.is_empty
