"""Which cells of ``%%infer`` over Spark are kept to be used again."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from hydrogen_magic.inference.spark import shipping
from hydrogen_magic.serialization.payload import Payload


class Broadcast:
    def __init__(self, value: Any) -> None:
        self.value = value


class Spark:
    """A classic session that remembers what it has sent."""

    def __init__(self) -> None:
        gc.freeze()  # collections look at what is made from here on
        self.sent: list[weakref.ref[Broadcast]] = []
        self.sparkContext = self

    def broadcast(self, value: Any) -> Broadcast:
        made = Broadcast(value)
        self.sent.append(weakref.ref(made))
        return made

    @property
    def kept(self) -> list[bool]:
        """Of each broadcast, the package first, whether it is still kept."""
        gc.collect()
        return [found() is not None for found in self.sent]


def sent(sizes: list[int]) -> Spark:
    """Send cells of these sizes, each with other contents."""
    spark = Spark()
    session: Any = SimpleNamespace(spark=spark, is_connect=False)
    for number, size in enumerate(sizes):
        shipping.send(session, Payload(bytes([number]) * size))
    return spark


def test_small_cells_are_kept_up_to_a_number() -> None:
    kept = sent([10] * (shipping._MAX_CELLS + 2)).kept
    assert kept == [True, False, False] + [True] * shipping._MAX_CELLS


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [([600, 600], [False, True]), ([400, 500], [True, True]), ([10, 5000], [False, True])],
)
def test_of_large_cells_only_the_newest_are_kept(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], kept: list[bool]
) -> None:
    monkeypatch.setattr(shipping, "_KEPT_BYTES", 1000)
    assert sent(sizes).kept == [True, *kept]


def test_an_equal_cell_is_not_sent_again() -> None:
    spark = Spark()
    session: Any = SimpleNamespace(spark=spark, is_connect=False)
    first, again = (shipping.send(session, Payload(b"model")) for _ in range(2))
    assert first == again and len(spark.sent) == 2
