"""Which cells of ``%%infer`` over Spark are kept to be used again."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

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


def test_the_last_cell_is_kept() -> None:
    spark = Spark()
    session: Any = SimpleNamespace(spark=spark, is_connect=False)
    for content in (b"one", b"other"):
        shipping.send(session, Payload(content))
    assert spark.kept == [True, False, True]


def test_an_equal_cell_is_not_sent_again() -> None:
    spark = Spark()
    session: Any = SimpleNamespace(spark=spark, is_connect=False)
    first, again = (shipping.send(session, Payload(b"model")) for _ in range(2))
    assert first == again and len(spark.sent) == 2
