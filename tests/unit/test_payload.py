"""Parcels keep what they are given, through memory files too, without copies that are not needed."""

from __future__ import annotations

import os
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrogen_magic.serialization import payload
from hydrogen_magic.serialization.payload import Payload
from hydrogen_magic.serialization.pickler import Pickler
from hydrogen_magic.serialization.result_stream import Packer, unpack


def packed(obj: Any) -> Payload:
    return Packer(Pickler).pack("", obj)


def mapped(fd: int) -> Any:
    (obj,) = unpack([payload.from_memfd(fd)])
    return obj


def through_memory(obj: Any) -> Any:
    fd = payload.to_memfd(packed(obj))
    try:
        assert not os.get_inheritable(fd)
        return mapped(fd)
    finally:
        os.close(fd)


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=9000), max_size=8), st.binary(max_size=100))
def test_any_parts_come_back(parts: list[bytes], pickled: bytes) -> None:
    fd = payload.to_memfd(Payload(pickled, tuple(parts)))
    back = payload.from_memfd(fd)
    os.close(fd)
    assert bytes(back.pickled) == pickled and [bytes(b) for b in back.buffers] == parts
    assert back.nbytes == len(pickled) + sum(map(len, parts))


def test_a_digest_tells_where_parts_end() -> None:
    two = [
        Payload(b"ab", (b"c",)),
        Payload(b"a", (b"bc",)),
        Payload(b"abc"),
        Payload(b"ab", (b"d",)),
    ]
    assert len(set(map(payload.digest, two))) == 4
    assert payload.digest(two[0]) == payload.digest(Payload(memoryview(b"ab"), (bytearray(b"c"),)))


def test_arrays_and_tensors() -> None:
    whole = torch.arange(10_000.0).reshape(100, 100)
    values = {
        "whole": whole,
        "row": whole[5],
        "turned": whole.t(),
        "bf16": torch.ones(3000, dtype=torch.bfloat16),
        "empty": torch.zeros(0),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "array": np.arange(6000).reshape(60, 100)[:, ::2],
        "objects": np.array([{}, None], dtype=object),
        "sparse": torch.eye(3).to_sparse(),
    }
    back = through_memory(values)
    for name in ("whole", "row", "turned", "bf16", "empty", "parameter"):
        assert torch.equal(back[name], values[name]), name
        assert back[name].dtype is values[name].dtype
    assert (back["array"] == values["array"]).all() and back["objects"][0] == {}
    assert torch.equal(back["sparse"].to_dense(), torch.eye(3))
    back["row"].zero_()
    assert back["whole"][5].sum() == 0 == back["turned"][:, 5].sum()
    assert isinstance(back["parameter"], torch.nn.Parameter)
    assert whole[5].sum() > 0


def test_a_large_payload_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may have reached the limit of its threads."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    values = np.arange(3 << 20)
    np.testing.assert_array_equal(through_memory(values), values)


def test_big_buffers_stay_where_they_are() -> None:
    array, tensor = np.zeros(1 << 20), torch.zeros(1 << 18)
    section = packed([array, tensor])
    assert len(section.pickled) < 1000
    addresses = {np.frombuffer(b, np.uint8).ctypes.data for b in section.buffers}
    assert addresses == {array.ctypes.data, tensor.data_ptr()}


def test_a_mapped_payload_is_this_readers_own() -> None:
    fd = payload.to_memfd(packed(np.zeros(10_000)))
    one, two = mapped(fd), mapped(fd)
    one[0] = 1
    assert two[0] == 0 and mapped(fd)[0] == 0
    os.close(fd)


def test_what_is_no_payload() -> None:
    whole = payload.to_memfd(packed(np.zeros(10_000)))
    data = os.pread(whole, 1 << 20, 0)
    os.close(whole)
    for wrong, why in {
        b"something else entirely": "no payload",
        data[: len(data) // 2]: "cut off: it has 4.* of 8.* bytes",
        data[:8] + b"\xff" * 40: "cut off",
    }.items():
        fd = os.memfd_create("x")
        os.write(fd, wrong)
        with pytest.raises(ValueError, match=why):
            payload.from_memfd(fd)
        os.close(fd)
