"""Results of a rank without a gang."""

from __future__ import annotations

from typing import Any

from hydrogen_magic.core.messages import ResultPart
from hydrogen_magic.driver.state.gang_results import RankResults
from hydrogen_magic.node.worker.namespace import LoadedClosure
from hydrogen_magic.node.worker.results import results
from hydrogen_magic.serialization.payload import Payload


def delivered(loaded: LoadedClosure, value: Any, rank: int = 0) -> RankResults:
    """Return what a kernel has once this rank has sent ``value`` and its variables."""
    sent: list[tuple[ResultPart, Payload]] = []
    results.deliver(
        loaded, value, rank == 0, lambda part, section, on_write: sent.append((part, section))
    )
    return RankResults(rank, sent)
