"""Displays of ranks as outputs of the cell: Jupyter's own messages, so that front ends draw any MIME type.

``clear_output`` concerns the rank's own displays: Jupyter can only clear all outputs of a cell, the live view
among them. A cleared output stays empty until the rank's next display takes its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydrogen_magic.core import events as ev
from hydrogen_magic.views.widget.display import CellOutput, running_cell

_EMPTY = {"text/html": "", "text/plain": ""}


@dataclass
class _PageOutput:
    """One output of the cell."""

    display: CellOutput
    name: str = ""
    """The rank's own id for updates."""
    is_empty: bool = False

    def show(self, data: Mapping[str, Any], metadata: Mapping[str, Any] | None = None) -> None:
        try:
            self.display.show(data, metadata)
        except Exception as error:  # the gang and its other output matter more
            text = f"this display cannot be shown: {type(error).__name__}: {error}"
            self.display.show({"text/plain": text})


class _RankPage:
    """The outputs of one rank since its last ``clear_output``, and empty ones behind them."""

    def __init__(self) -> None:
        self.outputs: list[_PageOutput] = []
        self.n_used = 0
        self.is_ending = False
        """The next display begins another page."""


class RankDisplays:
    """Shows displays below the cell in which it is created; ``new_display`` makes an output there."""

    def __init__(self, new_display: Callable[[], CellOutput] | None = None) -> None:
        cell = running_cell()
        self._new_display = new_display or (lambda: CellOutput(cell))
        self._pages: dict[int, _RankPage] = {}

    def show(self, displays: Sequence[ev.Display]) -> None:
        """Carry out ``displays`` in order."""
        for display in displays:
            is_content = display.action in (ev.SHOW, ev.UPDATE)
            if display.data or not is_content:  # the content of old ones is not kept
                self._carry_out(display)
        for page in self._pages.values():
            if not page.is_ending:
                _empty(page.outputs[page.n_used :])

    def _carry_out(self, display: ev.Display) -> None:
        page = self._pages.setdefault(display.rank, _RankPage())
        match display.action:
            case ev.SHOW:
                self._show(page, display)
            case ev.UPDATE:
                _update(page, display)
            case ev.CLEAR:
                page.n_used, page.is_ending = 0, False
            case ev.CLEAR_LATER:
                page.is_ending = True

    def _show(self, page: _RankPage, display: ev.Display) -> None:
        if page.is_ending:
            page.n_used, page.is_ending = 0, False
        if display.label:
            self._put(page, "", {"text/plain": display.label})
        self._put(page, display.display_id, *_contents(display))

    def _put(self, page: _RankPage, name: str, data: Any, metadata: Any = None) -> None:
        if page.n_used == len(page.outputs):
            page.outputs.append(_PageOutput(self._new_display()))
        output = page.outputs[page.n_used]
        output.name, output.is_empty = name, False
        page.n_used += 1
        output.show(data, metadata)


def _update(page: _RankPage, display: ev.Display) -> None:
    data, metadata = _contents(display)
    for output in page.outputs[: page.n_used]:
        if output.name == display.display_id:
            output.show(data, metadata)


def _empty(outputs: Sequence[_PageOutput]) -> None:
    for output in outputs:
        if not output.is_empty:
            output.is_empty = True
            output.show(_EMPTY)


def _contents(display: ev.Display) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return data and metadata for Jupyter's message."""
    data = {kind: _content(kind, text) for kind, text in display.data.items()}
    metadata = _content("application/json", display.metadata or "{}")
    return data, metadata if isinstance(metadata, dict) else {}


def _content(kind: str, text: str) -> Any:
    is_json = kind == "application/json" or kind.endswith("+json")
    try:
        return json.loads(text) if is_json else text
    except (ValueError, RecursionError):  # a masked secret may have left no JSON
        return text
