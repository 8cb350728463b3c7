"""Data of ``hm.dataset`` on a host that shares no disk with the notebook's machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from hydrogen_magic.core.messages import DatasetFile, FilePart, KeepDataset, TransferKept
from hydrogen_magic.node.agent.host_datasets import HostDatasets

NAME = "cafe"
PART = 4


@pytest.fixture
def sent() -> list[TransferKept]:
    return []


@pytest.fixture
def datasets(tmp_path: Path, sent: list[TransferKept]) -> HostDatasets:
    return HostDatasets(tmp_path / "datasets", sent.append)


def parts(transfer: int, data: bytes, file_name: str = "a") -> list[tuple[FilePart, bytes]]:
    label = DatasetFile(NAME, transfer, file_name)
    return [
        (FilePart(label, 1, len(data), offset), data[offset : offset + PART])
        for offset in range(0, max(len(data), 1), PART)
    ]


def take(datasets: HostDatasets, found: Iterable[tuple[FilePart, bytes]]) -> None:
    for part, data in found:
        assert isinstance(part.label, DatasetFile)
        datasets.take(part.label, part, memoryview(data))


def test_a_dataset_has_its_name_when_all_files_are_complete(
    datasets: HostDatasets, sent: list[TransferKept]
) -> None:
    take(datasets, [*parts(1, b"abcdefghij"), *parts(1, b"", "empty"), *parts(1, b"xy", "b")])
    path = datasets.folder / NAME
    assert not path.exists() and datasets.is_empty and sent == []
    datasets.keep(KeepDataset(NAME, 1))
    files = {file.name: file.read_bytes() for file in path.iterdir()}
    assert files == {"a": b"abcdefghij", "b": b"xy", "empty": b""}
    assert sent == [TransferKept(1)] and not datasets.is_empty
    datasets.forget([NAME, "other"])
    assert not path.exists() and datasets.is_empty


def test_transfers_that_overlap_do_not_mix(
    datasets: HostDatasets, sent: list[TransferKept]
) -> None:
    first, second = parts(1, b"A" * 12), parts(2, b"C" * 12)
    order = [first[0], second[0], first[1], second[1], first[2], second[2]]
    take(datasets, order)
    for number in (1, 2):
        datasets.keep(KeepDataset(NAME, number))
        expected = {1: b"A" * 12, 2: b"C" * 12}[number]
        assert (datasets.folder / NAME / "a").read_bytes() == expected
    assert sent == [TransferKept(1), TransferKept(2)]


@pytest.mark.parametrize("delete", [HostDatasets.drop_incomplete, lambda each: each.forget([NAME])])
def test_what_was_on_its_way_is_deleted(
    delete: Callable[[HostDatasets], None], datasets: HostDatasets, sent: list[TransferKept]
) -> None:
    """Also when its last parts arrive after the gang was stopped."""
    first, *others = parts(1, b"A" * 12)
    take(datasets, [first])
    delete(datasets)
    take(datasets, [*others, *parts(1, b"B" * 4, "b")])
    datasets.keep(KeepDataset(NAME, 1))
    assert list(datasets.folder.iterdir()) == [] and sent == []


def test_a_full_disk_is_reported_once_and_leaves_nothing(
    datasets: HostDatasets, sent: list[TransferKept]
) -> None:
    first, *others = parts(1, b"A" * 12)
    take(datasets, [first])
    (datasets.folder / f".1.{NAME}" / "a").unlink()  # as if it could not be written
    take(datasets, others)
    datasets.keep(KeepDataset(NAME, 1))
    assert sent == [TransferKept(1, f"No such file or directory ({datasets.folder})")]
    assert list(datasets.folder.iterdir()) == []
