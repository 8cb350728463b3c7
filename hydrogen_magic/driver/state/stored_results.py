"""Results of gangs that outlive their kernel: the owner stores them in the run log, kernels load them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hydrogen_magic.driver.state.gang_results import (
    LOST,
    GangResults,
    RankResults,
    load_saved,
    saved_path,
)
from hydrogen_magic.serialization import result_stream

_AGAIN_S = 5.0
_PATIENCE_S = 600.0
"""How long a full disk may delay the end of a gang, which would lose its results."""


def attempts(folder: Path) -> Iterator[None]:
    """Yield at once, and again for ten minutes, in which a full disk may get space for ``folder``.

    A folder that was deleted does not come back.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    yield
    while folder.is_dir() and time.monotonic() < deadline_s:
        time.sleep(_AGAIN_S)
        yield


class StoredResults(GangResults):
    """Results that are in the run log at the end of the gang. They are never unpickled here."""

    _not_saved = LOST  # with this process, which the notebook cannot ask for them

    def __init__(self, gang_id: str, folder: Path, first_rank: int = 0) -> None:
        super().__init__(gang_id, folder, first_rank)
        self.on_problem: Callable[[str], None] = lambda text: None
        """Called with a sentence while the results cannot be stored."""
        self._are_lost = False

    @property
    def are_complete(self) -> bool:
        return super().are_complete and not self._are_lost

    def are_worth_saving(self, has_succeeded: bool) -> bool:
        return bool(self._ranks) if has_succeeded else super().are_worth_saving(False)

    def save(self, has_succeeded: bool, n_attempts: int = 1) -> str:
        """Save the results of all ranks."""
        if not has_succeeded:
            return super().save(False, n_attempts)
        for n_failed, _ in enumerate(attempts(self._folder), 1):
            problem = self._try_to_store()
            if not problem:
                return ""
            if n_failed == 1 and self._folder.is_dir():
                self.on_problem(f"{problem}; trying again for {_PATIENCE_S / 60:.0f} minutes")
        self._are_lost = True
        return f"{problem}; they are lost"

    def keep(self, checkpoints: Path) -> str:
        if self.are_complete:  # they are saved
            shutil.rmtree(checkpoints, ignore_errors=True)
        return ""

    def _try_to_store(self) -> str:
        """Return why the results cannot be stored, empty once they are."""
        try:
            for rank, results in self._ranks.items():
                result_stream.save(results.parts, saved_path(self._folder, rank))
        except OSError as error:
            return f"the results cannot be stored in the record of the gang ({error})"
        return ""


class SavedResults(GangResults):
    """Results in the run log, loaded on first use."""

    def of(self, rank: int) -> RankResults:
        if rank not in self._ranks:
            found = load_saved(self._folder, rank)
            if not found.parts:  # the gang has not ended, or the file is damaged
                return found
            self._ranks[rank] = found
        return self._ranks[rank]
