"""Threads that send cells of ``%%infer`` to one Spark session."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from hydrogen_magic.inference.spark import shipping
from hydrogen_magic.serialization.payload import Payload
from tests.gangs import PATIENCE_S


class Spark:
    """A classic session that takes long to send."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.sparkContext = self
        self.again = threading.Event()
        """Something is sent a third time."""

    def broadcast(self, value: Any) -> Any:
        self.sent.append(value)
        if len(self.sent) == 2:
            self.again.wait(0.2)
        elif len(self.sent) > 2:
            self.again.set()
        return object()


def test_threads_with_equal_cells_send_one() -> None:
    spark = Spark()
    session: Any = SimpleNamespace(spark=spark, is_connect=False)
    found: list[shipping.SentCell] = []

    def send() -> None:
        found.append(shipping.send(session, Payload(b"model")))

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert found[0] == found[1]
    assert len(spark.sent) == 2, "the package and the cell"
