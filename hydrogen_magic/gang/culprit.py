"""Which rank failed, as opposed to which one complained first.

When a rank fails, its peers soon fail too: a collective breaks or times out. Three things tell the
culprit from its victims: what kind of failure it is, when it began (a rank may spend seconds in a
``finally`` while its peers already report broken connections), and what the others were doing.

Strong evidence is a failure that stands by itself: the user's own exception, a fatal signal, an exit
without a result. Weak evidence is one that a peer's end would cause: a closed connection, a
collective that timed out. The earliest strong evidence wins; without any, a rank that was stopped or
missing from the collective is to blame before the earliest that complained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hydrogen_magic.events import ErrorReport
from hydrogen_magic.gang.state import GangState, RankState

__all__ = ["Missing", "Verdict", "evidence", "is_victim_error", "missing", "verdict"]

_SETTLE_S = 0.15
"""After strong evidence: others' may be on the way, and it may be older."""
_SETTLE_WEAK_S = 1.0
"""After weak evidence alone: long enough for a rank in its ``finally`` to be noticed (0.15 s)."""
_UNWINDING_S = 30.0
"""How long a rank may clean up after its own exception when its peers only say what follows from it:
a checkpoint may be written there."""
_UNWINDING_STRONG_S = 5.0
"""The same when another rank failed by itself meanwhile: the older exception may be one it handles."""

_SEEN_WAITING_S = 1.5
"""A rank that waits is seen to after a second: one that has just come is not missing."""

_VICTIM_TYPES = frozenset(
    [
        "DistBackendError",
        "DistNetworkError",
        "DistStoreError",
        "ConnectionResetError",
        "BrokenPipeError",
        "ConnectionAbortedError",
        "ConnectionRefusedError",
        "HorovodInternalError",
    ]
)
_VICTIM_WORDS = re.compile(
    r"Connection closed by (remote )?peer|Connection reset by peer|Connection refused|Broken pipe"
    r"|Timed out waiting \d+ms|Socket Timeout|wait timeout after|gloo/transport|connectFullMesh"
    r"|NCCL (error|communicator|operation)|ncclRemoteError|ncclSystemError|collective operation timeout"
    r"|failed to recv, got 0 bytes|Application timeout caused pair closure"
)


@dataclass(frozen=True)
class Evidence:
    """What speaks against one rank."""

    rank: int
    at_s: float
    strong: bool
    final: bool
    """False while its exception is still unwinding."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of weighing: a culprit, or that it is too early to say."""

    culprit: int | None
    wait_until_s: float
    """When to weigh again; meaningless once there is a culprit."""


@dataclass(frozen=True)
class Missing:
    """Ranks that others wait for in vain."""

    absent: tuple[int, ...]
    waiting: tuple[int, ...]


def is_victim_error(error: ErrorReport | None) -> bool:
    """True for an error (or one it was raised from) that the end of a peer would cause."""
    while error is not None:
        name = error.type.rpartition(".")[2]
        if name in _VICTIM_TYPES or (
            name == "RuntimeError" and _VICTIM_WORDS.search(error.message)
        ):
            return True
        error = error.cause
    return False


def evidence(rank: RankState) -> Evidence | None:
    """Return what speaks against ``rank``, None when nothing does."""
    if rank.failure is not None:
        strong = not is_victim_error(rank.failure.error)
        return Evidence(rank.rank, rank.failure.at_s, strong, final=not rank.failure.in_flight)
    ended = rank.exited
    if ended is None or ended.asked or (ended.exit_code == 0 and rank.result_bytes is not None):
        return None
    # NCCL's watchdog aborts the ranks that wait for a dead peer.
    strong = ended.signal_name != "SIGABRT"
    return Evidence(rank.rank, ended.at_s, strong, final=True)


def verdict(state: GangState, now_s: float) -> Verdict | None:
    """Return who is to blame, or until when to wait, or None when nothing has failed.

    An exception that is still unwinding is no failure by itself (the rank may handle it), but it is
    older evidence than what its peers say meanwhile.
    """
    found = [one for one in map(evidence, state.ranks) if one is not None]
    finals = [one for one in found if one.final]
    if not finals:
        return None
    first_final_s = min(one.at_s for one in finals)
    strong = [one for one in found if one.strong]
    ended = _earliest(one for one in strong if one.final)
    unwinding = _earliest(one for one in strong if not one.final)
    if ended is not None:
        older = unwinding is not None and unwinding.at_s < ended.at_s
        return _decide(ended, ended.at_s + (_UNWINDING_STRONG_S if older else _SETTLE_S), now_s)
    if unwinding is not None:
        return _decide(unwinding, first_final_s + _UNWINDING_S, now_s)
    if now_s < first_final_s + _SETTLE_WEAK_S:
        return Verdict(None, first_final_s + _SETTLE_WEAK_S)
    absent = _absent(state)
    # A rank that aborted says no word; its peers' complaints may be heard before its end is.
    first = min(finals, key=lambda one: (state.ranks[one.rank].failure is not None, one.at_s))
    return Verdict(first.rank if absent is None else absent, now_s)


def missing(state: GangState, meets_in: str, patience_s: float, now_s: float) -> Missing | None:
    """Return who has not come to where others have waited for all too long; None while it is too early.

    A rank that has come and gone on was met by all: then nobody else can be missing.
    """
    waiting = [rank for rank in state.ranks if rank.waiting_in.startswith(f"{meets_in} #")]
    since_s = min((rank.waiting_since_s for rank in waiting), default=now_s)
    if now_s - since_s < patience_s + _SEEN_WAITING_S:
        return None
    absent = tuple(rank.rank for rank in state.ranks if rank not in waiting)
    return Missing(absent, tuple(rank.rank for rank in waiting)) if absent else None


def _earliest(found: Iterable[Evidence]) -> Evidence | None:
    return min(found, key=lambda one: one.at_s, default=None)


def _decide(best: Evidence, wait_until_s: float, now_s: float) -> Verdict:
    return Verdict(best.rank if now_s >= wait_until_s else None, wait_until_s)


def _absent(state: GangState) -> int | None:
    """Return the rank that the complaining ones waited for: stopped, or not in the collective."""
    alive = [rank for rank in state.ranks if evidence(rank) is None and not rank.is_over]
    stopped = next((rank.rank for rank in alive if rank.process_state == "T"), None)
    if stopped is not None:
        return stopped
    outside = [rank.rank for rank in alive if not rank.waiting_in]
    return outside[0] if len(outside) == 1 and len(state.ranks) > len(alive) else None
