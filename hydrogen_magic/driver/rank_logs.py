"""The output of ranks, from their log files, or from events where there is no file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydrogen_magic.core.events import Event, Output
from hydrogen_magic.driver.state.output_lines import final_lines

_LAST_LINES = 10
"""How much of the culprit's output an error shows."""
_TAIL_BYTES = 1 << 16
"""Size of the end of a log that is searched for those lines."""


class RankLogs:
    """The output of each rank of a gang. ``events`` grows during the run."""

    def __init__(self, folder: Path, events: Sequence[Event]) -> None:
        self.folder = folder
        self._events = events

    def path(self, rank: int) -> Path:
        """Return the log of the rank; it does not exist before the first output."""
        return self.folder / f"rank-{rank}.log"

    def text(self, rank: int) -> str:
        """Return all output."""
        path = self.path(rank)
        if path.exists():
            return path.read_bytes().decode("utf-8", "replace")
        return self._live(rank)

    def last_lines(self, rank: int) -> list[str]:
        """Return the last ten lines."""
        path = self.path(rank)
        if not path.exists() or path.stat().st_size == 0:
            return final_lines(self._live(rank))[-_LAST_LINES:]
        with path.open("rb") as file:  # a log may be gigabytes long
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return final_lines(file.read().decode("utf-8", "replace"))[-_LAST_LINES:]

    def _live(self, rank: int) -> str:
        shown = (e for e in self._events if isinstance(e, Output) and e.rank == rank)
        return "".join(event.text for event in shown)


class RankOutputs(Mapping[int, str]):
    """All output of each rank, read when it is asked for: logs of many ranks may not fit into memory."""

    def __init__(self, logs: RankLogs, n_ranks: int) -> None:
        self._logs = logs
        self._ranks = range(n_ranks)

    def __getitem__(self, rank: int) -> str:
        if rank not in self._ranks:
            raise KeyError(rank)
        return self._logs.text(rank)

    def __contains__(self, rank: object) -> bool:
        return rank in self._ranks  # that of Mapping reads the whole log

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)
