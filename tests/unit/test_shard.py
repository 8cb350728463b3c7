"""``hm.shard``: every rank's part is as long as the others', and together they are all there is."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hydrogen_magic as hm
from hydrogen_magic.node.worker.data.index_share import IndexShare
from hydrogen_magic.node.worker.data.parquet_shard import Piece, RowGroup, pools
from tests.documented import covers
from tests.shards import parts, write_parquet

RANKS = st.integers(1, 9)


# ── which items ──────────────────────────────────────────────────────────────────────────────────


@given(world_size=RANKS, extra=st.integers(0, 200))
def test_all_items_in_parts_of_one_length(world_size: int, extra: int) -> None:
    n_items = world_size + extra
    found = parts(range(n_items), world_size)
    assert len({len(part) for part in found}) == 1
    assert all(list(part) == list(range(part[0], part[0] + len(part))) for part in found)
    assert set().union(*found) == set(range(n_items))
    assert 0 <= sum(map(len, found)) - n_items < world_size, "repeats no more than it must"
    assert max(collections.Counter(item for part in found for item in part).values()) <= 2
    assert [part[0] for part in found] == sorted(part[0] for part in found)


@given(world_size=RANKS, extra=st.integers(0, 200))
def test_dropping_leaves_out_the_last_only(world_size: int, extra: int) -> None:
    n_items = world_size + extra
    found = parts(range(n_items), world_size, drop_last=True)
    dealt_out = [item for part in found for item in part]
    assert dealt_out == list(range(n_items - n_items % world_size))
    assert len({len(part) for part in found}) == 1


@given(world_size=RANKS, extra=st.integers(0, 100), seed=st.integers(), drop_last=st.booleans())
def test_a_shuffle_is_one_order_for_all_ranks(
    world_size: int, extra: int, seed: int, drop_last: bool
) -> None:
    items = [f"item {number}" for number in range(world_size + extra)]
    found = parts(items, world_size, shuffle=True, seed=seed, drop_last=drop_last)
    everything = [item for part in found for item in part]
    assert len({len(part) for part in found}) == 1
    left_out = len(items) % world_size if drop_last else 0
    assert len(set(everything)) == len(items) - left_out
    assert set(everything) <= set(items)


def test_a_shuffle_depends_on_its_seed_alone() -> None:
    first, again, other = (hm.shard(range(50), shuffle=True, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert sorted(first) == sorted(other) == list(range(50))
    assert hm.shard(range(50), shuffle=True, seed=np.int64(1)) == first


@pytest.mark.parametrize("seed", [None, 1.5, "a"])
def test_a_seed_is_an_int(seed: Any) -> None:
    with pytest.raises(TypeError, match=rf"got seed={seed!r}: pass an int"):
        hm.shard(range(50), shuffle=True, seed=seed)


@given(world_size=RANKS, n_items=st.integers(0, 60), drop_last=st.booleans(), sized=st.booleans())
def test_streams_are_dealt_out_in_rounds(
    world_size: int, n_items: int, drop_last: bool, sized: bool
) -> None:
    found = [list(part) for part in parts(stream(n_items, sized), world_size, drop_last=drop_last)]
    size = n_items // world_size if drop_last else -(-n_items // world_size)
    assert [len(part) for part in found] == [size] * world_size
    dealt_out = [item for round_ in zip(*found, strict=True) for item in round_]
    assert dealt_out[: size * world_size][:n_items] == list(range(n_items))[: size * world_size]
    assert set(dealt_out) <= set(range(n_items))
    if sized:
        assert {len(p) for p in parts(stream(n_items), world_size, drop_last=drop_last)} == {size}


def stream(n_items: int, sized: bool = True) -> Any:
    from torch.utils.data import IterableDataset

    class Stream(IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[int]:
            return iter(range(n_items))

    class Sized(Stream):
        def __len__(self) -> int:
            return n_items

    return Sized() if sized else Stream()


# ── kinds of data ────────────────────────────────────────────────────────────────────────────────


def frame() -> pd.DataFrame:
    return pd.DataFrame({"x": range(10), "y": list("abcdefghij")}, index=range(100, 110))


def arrow() -> Any:
    return pytest.importorskip("pyarrow").table({"x": range(10)})


def polars() -> Any:
    return pytest.importorskip("polars").DataFrame({"x": range(10)})


def tensor() -> Any:
    import torch

    return torch.arange(10)


def dataset() -> Any:
    import torch

    return torch.utils.data.TensorDataset(tensor())


def examples() -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({"x": list(range(10))})


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], list[int]]]] = {
    "list": (lambda: list(range(10)), list),
    "tuple": (lambda: tuple(range(10)), list),
    "range": (lambda: range(10), list),
    "user's list": (lambda: collections.UserList(range(10)), list),
    "array": (lambda: np.arange(10), np.ndarray.tolist),
    "matrix": (lambda: np.arange(20).reshape(10, 2), lambda part: (part[:, 0] // 2).tolist()),
    "tensor": (tensor, lambda part: part.tolist()),
    "frame": (frame, lambda part: part["x"].tolist()),
    "series": (lambda: frame()["x"], lambda part: part.tolist()),
    "index": (lambda: frame().index, lambda part: (part - 100).tolist()),
    "arrow table": (arrow, lambda part: part["x"].to_pylist()),
    "arrow batch": (lambda: arrow().to_batches()[0], lambda part: part["x"].to_pylist()),
    "arrow column": (lambda: arrow()["x"], lambda part: part.to_pylist()),
    "polars frame": (polars, lambda part: part["x"].to_list()),
    "hugging face": (examples, lambda part: list(part["x"])),
    "polars series": (lambda: polars()["x"], lambda part: part.to_list()),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_part_is_of_the_kind_of_the_whole(name: str) -> None:
    make, items = KINDS[name]
    found = parts(make(), 4)
    assert [items(part) for part in found] == [[0, 1, 2], [2, 3, 4], [5, 6, 7], [7, 8, 9]]
    assert {type(part) for part in found} == {type(make())}
    assert items(parts(make(), 1)[0]) == list(range(10)), "in a plain process: all of it"


@pytest.mark.parametrize("name", KINDS)
def test_shuffled_parts_have_the_same_order_in_every_kind(name: str) -> None:
    make, items = KINDS[name]
    expected = parts(range(10), 4, shuffle=True, seed=5)
    assert [items(part) for part in parts(make(), 4, shuffle=True, seed=5)] == expected


def test_arrays_and_tensors_are_not_copied() -> None:
    array, values = np.arange(10), tensor()
    for rank in range(4):
        start, _ = IndexShare(rank, 4, drop_last=False).bounds(10)
        assert np.shares_memory(parts(array, 4)[rank], array)
        assert parts(values, 4)[rank].data_ptr() == values[start:].data_ptr()


def test_rows_of_a_frame_keep_their_labels_and_take_columns() -> None:
    part = parts(frame(), 4)[1]
    assert part.index.tolist() == [102, 103, 104]
    part["z"] = 1  # pandas 2 warns of this where a part still is a slice
    assert list(part.columns) == ["x", "y", "z"]


def test_a_dict_keeps_rows_together() -> None:
    data = {"x": np.arange(10), "y": [str(n) for n in range(10)], "z": frame()}
    for part in (*parts(data, 4), *parts(data, 4, shuffle=True)):
        assert [str(n) for n in part["x"]] == part["y"]
        assert part["z"]["x"].tolist() == part["x"].tolist()


def test_a_dataset_gives_a_subset_for_a_loader() -> None:
    import torch

    found = parts(dataset(), 4)
    assert all(isinstance(part, torch.utils.data.Subset) for part in found)
    loader = torch.utils.data.DataLoader(found[3], batch_size=2)
    assert [batch[0].tolist() for batch in loader] == [[7, 8], [9]]


# ── Parquet ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    pytest.importorskip("pyarrow.parquet")
    return write_parquet(tmp_path / "data")


@covers("""`pq.EXCLUDED_PARQUET_PATHS.update(underscore_files)`""")
@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 23])
@pytest.mark.parametrize("drop_last", [False, True])
def test_rows_of_parquet_files(parquet: Path, world_size: int, drop_last: bool) -> None:
    found = parts(parquet, world_size, drop_last=drop_last)
    expected = parts(range(23), world_size, drop_last=drop_last)
    assert [part["x"].to_pylist() for part in found] == [list(rows) for rows in expected]
    years = [year for part in found for year in part["year"].to_pylist()]
    assert years == [2025 if row < 10 else 2026 for rows in expected for row in rows]


def test_a_rank_reads_no_row_group_of_others(parquet: Path) -> None:
    """The first group of each file is damaged: only ranks with rows of it notice."""
    for file in parquet.rglob("part-*.parquet"):
        data = bytearray(file.read_bytes())
        if b"PAR1" in data[:4] and len(data) > 600:
            data[4:24] = b"\xff" * 20
            file.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "23")
        patch.setenv("RANK", "5")
        assert hm.shard(str(parquet))["x"].to_pylist() == [5]
        patch.setenv("RANK", "0")
        with pytest.raises(OSError, match="deserialize"):
            hm.shard(str(parquet))


def test_a_pool_is_full_of_enough_rows_of_enough_row_groups() -> None:
    tiny = [Piece(RowGroup(None, 0, n, n_rows=4, n_bytes=32), 0, 4) for n in range(40_000)]
    assert [len(pool) for pool in pools(tiny)] == [16_384, 16_384, 7_232]
    large = [Piece(RowGroup(None, 0, n, n_rows=1, n_bytes=100 << 20), 0, 1) for n in range(5)]
    assert [len(pool) for pool in pools(large)] == [2, 2, 1]


def test_a_single_parquet_file_and_a_wrong_path(parquet: Path) -> None:
    first = parts(str(parquet / "year=2025" / "part-0.parquet"), 2)[1]
    assert first["x"].to_pylist() == [5, 6, 7, 8, 9]
    with pytest.raises(FileNotFoundError, match=f"nowhere/x .*existing folder is {parquet}$"):
        hm.shard(parquet / "nowhere" / "x")


def test_a_list_of_parquet_files(parquet: Path) -> None:
    """It is the data of these files, in the order of their paths, whatever the order of the list."""
    names = [str(parquet / "year=2026" / "part-1.parquet"), parquet / "year=2025" / "*.parquet"]
    for data in (names, tuple(reversed(names))):
        found = parts(data, 2)
        assert [part["x"].to_pylist() for part in found] == [[*range(12)], [*range(11, 23)]]
        assert [set(part["year"].to_pylist()) for part in found] == [{2025, 2026}, {2026}]
    assert len(hm.shard(names, batch_size=4)) == 6
    assert hm.shard(["a.png", "b.parquet"]) == ["a.png", "b.parquet"], "items"
    with pytest.raises(FileNotFoundError, match=r"no file or folder .*gone\.parquet"):
        hm.shard([names[0], str(parquet / "gone.parquet")])


@pytest.mark.parametrize("epoch", [1, True, np.int64(1), 1.0, None])
def test_an_epoch_is_an_integer(epoch: Any, parquet: Path) -> None:
    """Its text is part of the seed: 1.0 would be another order than 1."""
    part = hm.shard(parquet, batch_size=5, shuffle=True)
    is_integer = epoch is not None and not isinstance(epoch, float)
    expected = nullcontext() if is_integer else pytest.raises(TypeError, match=f"got {epoch}")
    with expected:
        part.set_epoch(epoch)
    assert repr(part.state_dict()["epoch"]) == repr(int(is_integer))


def test_a_list_of_several_file_systems(parquet: Path) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe("/lake/part.parquet", b"")
    with pytest.raises(ValueError, match="names several file systems"):
        hm.shard([str(parquet / "*" / "*.parquet"), "memory://lake/part.parquet"])
    memory.rm("/lake", recursive=True)


def test_urls_without_their_driver() -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(ImportError, match=r"^smb://host/x cannot be read: smb:// needs a .*smb"):
        hm.shard("smb://host/x")
    with pytest.raises(OSError, match="nowhere://x cannot be read: Protocol not known"):
        hm.shard("nowhere://x")


# ── what has no parts ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        ((n for n in range(9)), TypeError, "generator: make it a list first"),
        ({1, 2, 3, 4}, TypeError, "no order that all ranks agree on"),
        (collections.deque(range(9)), TypeError, "deque: make it a list first"),
        (np.array(3.0), TypeError, "without dimensions"),
        (b"data.parquet", TypeError, "a path is a str"),
        (7, TypeError, "cannot take a int. It accepts a list"),
        ((np.ones(9), np.ones(9)), TypeError, 'hm.shard({"x": x, "y": y})'),
        ({"x": range(9), "y": range(8)}, ValueError, "'x': 9, 'y': 8"),
        ({}, ValueError, "an empty dict"),
        ([1, 2, 3], ValueError, "got 3 items for 4 ranks"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_data_without_parts_is_refused(
    data: Any, error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(error) as caught:
        hm.shard(data)
    assert said in str(caught.value)


def test_a_loader_and_shuffled_streams_are_refused() -> None:
    import torch

    with pytest.raises(TypeError, match="shard its dataset"):
        hm.shard(torch.utils.data.DataLoader(dataset()))
    with pytest.raises(ValueError, match="read in its own order"):
        hm.shard(stream(9), shuffle=True)
    with pytest.raises(TypeError, match="streams Parquet data, not a list"):
        hm.shard([1, 2], batch_size=2)
    in_memory = pytest.importorskip("pyarrow.dataset").dataset(arrow())
    with pytest.raises(TypeError, match=r"of Parquet files only: pass its to_table\(\)"):
        hm.shard(in_memory)
