"""Files that a page asks for are made in threads, one after the other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from hydrogen_magic.errors import HydrogenError
from hydrogen_magic.views.widget import downloads


class Made:
    """Takes what a maker makes; the first file waits until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.goes_on = threading.Event(), threading.Event()
        self.n_made = 0
        self.came: queue.Queue[tuple[str, Any]] = queue.Queue()
        self.maker = downloads.DownloadMaker(lambda order, made: self.came.put((order["id"], made)))
        monkeypatch.setattr(downloads, "make_file", self._make)

    def _make(self, gang: Any, order: Mapping[str, Any]) -> downloads.DownloadFile:
        self.n_made += 1
        self.has_begun.set()
        assert self.goes_on.wait(10)
        if order["id"] == "2":
            raise MemoryError("not enough")
        return downloads.DownloadFile(order["id"], "", b"")

    def ask(self, number: int) -> None:
        self.maker.make(None, {"id": str(number), "do": "csv"})  # type: ignore[arg-type]


def test_files_are_made_one_after_the_other_while_nobody_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Made(monkeypatch)
    made.ask(1)
    assert made.has_begun.wait(10)
    for number in range(2, 9):
        made.ask(number)
    with pytest.raises(HydrogenError, match="try again later"):
        made.ask(9)
    assert made.n_made == 1, "the others wait for it"
    made.goes_on.set()
    came = dict(made.came.get(timeout=10) for _ in range(8))
    assert came.keys() == {str(number) for number in range(1, 9)}
    assert came["2"] == "the file could not be created: MemoryError: not enough"
    made.ask(10)
    assert made.came.get(timeout=10)[0] == "10"
