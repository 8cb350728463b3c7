"""The notebook's input line, with a gang that takes answers late."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.driver import input_line
from hydrogen_magic.driver.input_line import NotebookInputLine
from hydrogen_magic.driver.state.gang_state import fold, replay
from tests.gang_events import running


class LateGang:
    """A gang whose state still has a request after its answer."""

    def __init__(self) -> None:
        self.state = replay(running(2))
        self.ranks = self.state.ranks
        self.answers: list[tuple[int, int, str]] = []

    def request(self, rank: int, number: int) -> None:
        asked = ev.InputRequested(1.0, rank, number, "name? ", False)
        self.state = fold(self.state, asked)

    def snapshot(self) -> Any:
        return self.state

    def answer_input(self, rank: int, number: int, text: str, error: str) -> None:
        self.answers.append((rank, number, text))


@contextmanager
def nothing_interrupts() -> Iterator[Callable[[], None]]:
    yield lambda: None


@contextmanager
def interrupts() -> Iterator[Callable[[], None]]:
    with suppress(KeyboardInterrupt):
        yield lambda: None


def never() -> None:
    raise AssertionError("no question was withdrawn")


def test_each_request_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gang: Any = LateGang()
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return f"line {len(asked)}"

    monkeypatch.setattr(builtins, "input", answer)
    line = NotebookInputLine(gang, nothing_interrupts, never)
    gang.request(0, 1)
    for _ in range(3):
        line.serve(lambda: False)
    assert gang.answers == [(0, 1, "line 1")], "the gang has not taken the answer yet"
    gang.request(0, 1)  # of the next attempt, whose numbers begin again
    line.serve(lambda: False)
    assert gang.answers[1:] == [(0, 1, "line 2")]


def test_a_rank_keeps_the_line_while_it_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gang: Any = LateGang()
    monkeypatch.setattr(builtins, "input", lambda prompt: prompt)
    monkeypatch.setattr(input_line, "_NEXT_RANK_S", 1000.0)
    line = NotebookInputLine(gang, nothing_interrupts, never)
    gang.request(1, 1)
    line.serve(lambda: False)
    gang.request(0, 1)
    line.serve(lambda: False)
    assert [rank for rank, *_ in gang.answers] == [1], "rank 1 may ask again at once"
    gang.request(1, 2)
    line.serve(lambda: False)
    assert [rank for rank, *_ in gang.answers] == [1, 1]
    monkeypatch.setattr(input_line, "_NEXT_RANK_S", 0.0)
    line.serve(lambda: False)
    assert gang.answers == [(1, 1, "[1] name? "), (1, 2, "[1] name? "), (0, 1, "[0] name? ")]


def test_a_question_without_an_answer_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    gang: Any = LateGang()
    withdrawn: list[int] = []

    def interrupt(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "input", interrupt)
    line = NotebookInputLine(gang, interrupts, lambda: withdrawn.append(len(gang.answers)))
    gang.request(0, 1)
    line.serve(lambda: False)
    assert withdrawn == [0] and gang.answers == [(0, 1, "")]
