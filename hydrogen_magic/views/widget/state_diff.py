"""Changes of header, rows and summary since the last message to pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hydrogen_magic.core.frozen_values import replaced
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.driver.state.stragglers import stragglers
from hydrogen_magic.views.text_table import MOST_ROWS
from hydrogen_magic.views.widget.rank_rows import (
    gang_row,
    marks,
    rank_row,
    shown_ranks,
    summary_columns,
)

_EVERY_S = 0.2
"""Numbers that change more often are unreadable."""
_EVERY_S_OF_MANY = 0.5
"""The same for more than 16 ranks: comparing a thousand of them takes milliseconds."""


class StateDiff:
    """Remembers the last sent state of a gang, and returns the differences."""

    def __init__(self) -> None:
        self._gang: dict[str, Any] = {}
        self._rows: dict[int, dict[str, Any]] = {}
        self._summary: tuple[dict[str, Any], bytes] | None = None
        self._compared_s = -math.inf
        self._glance: tuple[object, ...] = ()

    def reset_interval(self) -> None:
        """Compare the state at the next call in any case."""
        self._compared_s = -math.inf

    def changes(
        self, state: GangState, watched: Sequence[int], now_s: float, buffers: list[bytes]
    ) -> dict[str, Any]:
        """Return those of ``gang``, ``ranks`` and ``summary`` of a ``Delta`` that have changed."""
        if not self._is_time(state, now_s):
            return {}
        content: dict[str, Any] = {}
        behind = stragglers(state, now_s)
        found_marks = marks(state, behind, now_s)
        gang = gang_row(state, now_s)
        if gang != self._gang:
            content["gang"] = self._gang = gang
        shown = shown_ranks(state, watched, behind)
        found = {
            rank: rank_row(state.ranks[rank], found_marks[rank], now_s, why)
            for rank, why in shown.items()
        }
        changed = [row for rank, row in found.items() if self._rows.get(rank) != row]
        self._rows = found
        if changed:
            content["ranks"] = changed
        if len(state.ranks) > MOST_ROWS:
            summary = summary_columns(state, found_marks, shown, watched)
            if summary != self._summary:
                self._summary = summary
                content["summary"] = _placed(summary, buffers)
        return content

    def full(self, buffers: list[bytes]) -> dict[str, Any]:
        """Return the last sent state."""
        content: dict[str, Any] = {"gang": self._gang} if self._gang else {}
        if self._rows:
            content["ranks"] = [row for _, row in sorted(self._rows.items())]
        if self._summary is not None:
            content["summary"] = _placed(self._summary, buffers)
        return content

    def _is_time(self, state: GangState, now_s: float) -> bool:
        """Return whether to compare: at intervals, and at once if the gang as a whole changes."""
        # The time, the ranks and the progress of rows change all the time.
        glance = replaced(state, now_s=0.0, ranks=(), rows=None), len(state.ranks)
        every_s = _EVERY_S if len(state.ranks) <= MOST_ROWS else _EVERY_S_OF_MANY
        is_same = glance == self._glance and now_s - self._compared_s < every_s
        if is_same and not state.is_terminal:
            return False
        self._glance, self._compared_s = glance, now_s
        return bool(state.ranks)


def _placed(summary: tuple[dict[str, Any], bytes], buffers: list[bytes]) -> dict[str, Any]:
    head, columns = summary
    buffers.append(columns)
    return {**head, "at": len(buffers) - 1}
