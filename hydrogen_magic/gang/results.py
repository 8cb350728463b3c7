"""What the ranks of a gang sent back, kept until it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydrogen_magic import parcel, result_stream
from hydrogen_magic.errors import ResultError
from hydrogen_magic.parcel import Parcel
from hydrogen_magic.result_stream import CELL_VALUE, Part, UnopenedPart

__all__ = ["GangResults", "RankResults", "load_saved", "saved_path"]

_NONE_BYTES = 16
"""A pickled None is smaller."""
_SMALL_BYTES = 1 << 20
"""Smaller results are copied, so that they do not hold a file descriptor until they are opened."""


class RankResults(Mapping[str, Any]):
    """The results of one rank by name: ``--out`` variables, and the value under :data:`CELL_VALUE`.

    Opened when they are first asked for. A name whose result did not arrive is missing from the
    iteration, and raises ResultError with the reason when it is looked up.
    """

    def __init__(self, rank: int, parts: Sequence[tuple[Part, Parcel]], attempt: int = 0) -> None:
        self.rank = rank
        self.attempt = attempt
        self.parts = list(parts)
        self._opened: dict[str, Any] | None = None

    def add(self, part: Part, section: Parcel) -> None:
        """Take a part that has arrived."""
        small = section.nbytes <= _SMALL_BYTES
        self.parts.append((part, parcel.copied(section) if small else section))
        self._opened = None

    @property
    def errors(self) -> dict[str, str]:
        """Return why results are missing, by name; opens the results."""
        errors = {part.name: part.error for part, _ in self.parts if part.error}
        for name, obj in self._objects().items():
            if isinstance(obj, UnopenedPart):
                label = f"`{name}`" if name else "its value"
                errors[name] = f"{label} arrived but cannot be opened in the notebook: {obj.reason}"
        return errors

    @property
    def names(self) -> list[str]:
        """Names of the results that arrived, in whole or in part."""
        return list(dict.fromkeys(part.name for part, _ in self.parts if not part.error))

    def is_worth_saving(self, has_succeeded: bool) -> bool:
        """Whether the notebook may need these results from the run log."""
        if has_succeeded:
            opened = (self._opened or {}).values()
            return any(part.is_partial for part, _ in self.parts) or any(
                isinstance(obj, UnopenedPart) for obj in opened
            )
        return any(part.name or section.nbytes > _NONE_BYTES for part, section in self.parts)

    def variables(self) -> Mapping[str, Any]:
        """Return the ``--out`` variables alone."""
        return _Variables(self)

    def is_same_object(self, name: str) -> bool:
        """Whether the rank changed the notebook's object instead of assigning another one."""
        return any(part.is_same_object for part, _ in self.parts if part.name == name)

    def everything(self) -> dict[str, Any]:
        """Return all results, of incomplete ones the rest with ``NotSent`` in place of what is missing."""
        found = {
            part.name: result_stream.unpack([section])[0]
            for part, section in self.parts
            if part.is_partial
        }
        found.update(self._objects())
        return {
            name: obj.rest if isinstance(obj, UnopenedPart) else obj for name, obj in found.items()
        }

    def __getitem__(self, name: str) -> Any:
        obj = self._objects().get(name, self)
        if obj is self or isinstance(obj, UnopenedPart):
            why = self.errors.get(name, "it did not arrive")
            raise ResultError(f"rank {self.rank}: {why}")
        return obj

    def __contains__(self, name: object) -> bool:
        return any(name == known for known in self)

    def __iter__(self) -> Iterator[str]:
        opened = self._objects().items()
        return (name for name, obj in opened if not isinstance(obj, UnopenedPart))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _objects(self) -> dict[str, Any]:
        if self._opened is None:
            self._opened = {}
            for stream in sorted({part.stream for part, _ in self.parts}):
                self._opened.update(self._open(stream))
        return self._opened

    def _open(self, stream: int) -> dict[str, Any]:
        whole = [
            (part.name, section)
            for part, section in self.parts
            if part.stream == stream and not part.error and not part.is_partial
        ]
        objects = result_stream.unpack([section for _, section in whole])
        return dict(zip([name for name, _ in whole], objects, strict=True))


class _Variables(Mapping[str, Any]):
    """The results of a rank without its value."""

    def __init__(self, results: RankResults) -> None:
        self._results = results

    def __getitem__(self, name: str) -> Any:
        return self._results[name]

    def __contains__(self, name: object) -> bool:
        return name in self._results

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._results if name != CELL_VALUE)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class GangResults:
    """The results of all ranks, those of the newest attempt that sent any."""

    def __init__(self) -> None:
        self._ranks: dict[int, RankResults] = {}

    def add(self, rank: int, attempt: int, part: Part, section: Parcel) -> None:
        """Take a part that has arrived; results of earlier attempts of this rank are dropped."""
        known = self._ranks.get(rank)
        if known is None or known.attempt != attempt:
            known = self._ranks[rank] = RankResults(rank, [], attempt)
        known.add(part, section)

    def of(self, rank: int) -> RankResults:
        """Return what arrived from ``rank``, perhaps nothing."""
        return self._ranks.get(rank, RankResults(rank, []))

    def value(self, rank: int) -> Any:
        """Return the value of ``rank``; raises ResultError when it did not arrive."""
        return self.of(rank)[CELL_VALUE]

    def value_or_error(self, rank: int) -> Any:
        """Return the value of ``rank``, or the ResultError in its place."""
        try:
            return self.value(rank)
        except ResultError as error:
            return error

    def save(self, rank: int, folder: Path) -> None:
        """Write the results of ``rank`` to the run log. Raises OSError."""
        result_stream.save(self.of(rank).parts, saved_path(folder, rank))

    def clear(self) -> None:
        """Free the memory of all results."""
        self._ranks.clear()


def saved_path(folder: Path, rank: int) -> Path:
    """Return the file of a run log that holds the results of ``rank``."""
    return folder / f"results-{rank}"


def load_saved(folder: Path, rank: int) -> RankResults:
    """Return saved results. Raises OSError when there are none."""
    return RankResults(rank, result_stream.load(saved_path(folder, rank)))
