"""Determines which rank failed first, which need not be the first to report.

When a rank fails, its peers soon fail too: a collective breaks or times out. Three facts separate the
culprit from its victims: the kind of failure, its time (a rank may spend seconds in a ``finally`` while its
peers already report broken connections), and the activity of the others.

Strong evidence is a failure that no peer can cause: the user's own exception, a fatal signal, an exit
without a result. Weak evidence is a failure that the end of a peer would cause: a closed connection, a
collective that timed out. The earliest strong evidence wins; without any, a rank that was stopped or
missing from the collective takes precedence over the earliest report. A connection error that a library of
collectives did not raise may be the user's own, and comes before those that it did.

The errors of a library that are weak evidence are ``victims`` of its rendezvous, those of torch in
``driver/rendezvous/torch.py``.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hydrogen_magic import plugins
from hydrogen_magic.core.events import GRADIENTS, ErrorReport, Frame
from hydrogen_magic.driver.rendezvous import VictimErrors
from hydrogen_magic.driver.state.gang_state import GangState, RankState

_SETTLE_S = 0.15
"""Delay after strong evidence: older evidence of other ranks may be on its way."""
_SETTLE_WEAK_S = 1.0
"""Delay after weak evidence alone: long enough to notice a rank in its ``finally`` (0.15 s)."""
_UNWINDING_S = 30.0
"""How long a rank may clean up after its own exception while its peers only report consequences: it may
write a checkpoint there."""
_UNWINDING_STRONG_S = 5.0
"""The same when another rank failed on its own meanwhile: the older exception may be handled."""

_SEEN_WAITING_S = 1.5
"""A waiting rank is noticed after a second: one that has just entered is not late."""

_CONNECTION_TYPES = frozenset(
    ["ConnectionResetError", "BrokenPipeError", "ConnectionAbortedError", "ConnectionRefusedError"]
)
"""They may as well come from a connection of the user's that has nothing to do with other ranks."""
_BACKWARD = ("/torch/_tensor.py", "/torch/autograd/__init__.py")
"""Parts of file names. DDP reduces gradients in C++, below these."""
JOINING = "init_process_group"
"""A rank may leave it and finish while others are still connecting to it."""
DIFFERENT_TENSORS = "do shapes and types agree on all ranks?"
"""About a collective that some ranks have left while others wait in it."""
_PAIRWISE = re.compile(r"send|recv")


@dataclass(frozen=True)
class Evidence:
    """Evidence against one rank."""

    rank: int
    at_s: float
    strong: bool
    of_library: bool
    """A library of collectives has reported it, so that others are involved."""
    final: bool
    """False while its exception is still unwinding."""


@dataclass(frozen=True)
class Verdict:
    """The result: a culprit, or that it is too early."""

    culprit: int | None
    wait_until_s: float
    """When to evaluate again; unused if there is a culprit."""


@dataclass(frozen=True)
class PartialCollective:
    """A collective in which some ranks wait alone."""

    collective: str
    """``all_reduce``, or ``collective`` if its name is unknown."""
    outside: tuple[int, ...]
    """Ranks that are not in it: they never entered it, or have left it."""
    waiting: tuple[int, ...]


def is_victim_error(error: ErrorReport | None) -> bool:
    """True for an error (or one it was raised from) that the end of a peer would cause."""
    return any(
        _type(one) in _CONNECTION_TYPES or _is_library_error(one) for one in _with_causes(error)
    )


def _with_causes(error: ErrorReport | None) -> Iterator[ErrorReport]:
    while error is not None:
        yield error
        error = error.cause


def _type(error: ErrorReport) -> str:
    return error.type.rpartition(".")[2]


def _is_of_library(error: ErrorReport) -> bool:
    return any(map(_is_library_error, _with_causes(error)))


def _is_library_error(error: ErrorReport) -> bool:
    """True for what a library of collectives raises when other ranks do not take part.

    A rank may use others than that of its gang's rendezvous.
    """
    return any(_is_one_of(error, library.victims) for library in plugins.every_rendezvous())


def _is_one_of(error: ErrorReport, victims: VictimErrors) -> bool:
    name = _type(error)
    if name in victims.message_types:
        return _any_of(*victims.messages).search(error.message) is not None
    return name in victims.types or (
        name in _CONNECTION_TYPES and any(map(_is_in_library, error.frames))
    )


@functools.cache
def _any_of(*patterns: str) -> re.Pattern[str]:
    """Return a pattern that finds any of ``patterns``, and nothing if there are none."""
    return re.compile("|".join(patterns) or "(?!)")


# ── collectives ──────────────────────────────────────────────────────────────────────────────────


def collective_of(rank: RankState) -> str:
    """Return the collective in which a rank waits or failed, without its number; "" if unknown."""
    if rank.waiting_in:
        return rank.waiting_in.partition(" #")[0].removesuffix(" (async)")
    for error in _with_causes(rank.failure.error if rank.failure is not None else None):
        for frame in error.frames:
            is_known = is_collective(frame.function) or _PAIRWISE.search(frame.function)
            if is_known and _is_in_library(frame):
                return frame.function
            if frame.file.endswith(_BACKWARD):
                return GRADIENTS
    return ""


def _is_in_library(frame: Frame) -> bool:
    libraries = plugins.every_rendezvous()
    return any(part in frame.file for library in libraries for part in library.victims.files)


def is_collective(function: str) -> bool:
    """Return whether all ranks have to take part in ``function``."""
    libraries = plugins.every_rendezvous()
    return any(_any_of(*library.collectives).search(function) for library in libraries)


def missed_collective(state: GangState) -> PartialCollective | None:
    """Return which ranks never entered the collective in which the others waited; None if unknown.

    Ranks whose cell has ended take precedence over those that still compute: one of the latter may have
    just entered and not have been noticed yet.
    """
    if (found := _absent_for_good(state)) is not None:
        return found
    finished = [rank for rank in state.ranks if rank.has_run and rank.failure is None]
    failed = [rank for rank in state.ranks if evidence(rank) is not None]
    # Of a library that ends waiting ranks; elsewhere, and if all respond, such a rank failed on its own.
    has_ended = plugins.aborts(state.rendezvous) and bool(finished or _stopped(state))
    waiting = [rank for rank in state.ranks if _was_waiting(rank) or (has_ended and _aborted(rank))]
    if not all(rank in waiting for rank in failed):
        return None  # one of them failed for another reason
    waiting = [rank for rank in waiting if rank not in finished]
    name = next(filter(None, map(collective_of, waiting)), "collective")
    absent = [one for one in finished or _outside(state) if not _has_left(one, name, waiting)]
    if not waiting or not absent or (_PAIRWISE.search(name) and len(state.ranks) > 2):
        return None
    return PartialCollective(name, _numbers(absent), _numbers(waiting))


def left_collective(state: GangState) -> PartialCollective | None:
    """Return which ranks have ended after a collective in which others wait; None without such ranks."""
    finished = [rank for rank in state.ranks if rank.has_run and rank.failure is None]
    waiting = [rank for rank in state.ranks if _was_waiting(rank) and rank not in finished]
    name = next(filter(None, map(collective_of, waiting)), "")
    left = [rank for rank in finished if _has_left(rank, name, waiting)]
    return PartialCollective(name, _numbers(left), _numbers(waiting)) if left else None


def _has_left(rank: RankState, name: str, waiting: Iterable[RankState]) -> bool:
    """Whether a rank that has ended had entered the collective of the waiting ones, as their code counts."""
    number = max((one.n_collectives for one in waiting), default=0)
    is_counted = is_collective(name) and name not in (GRADIENTS, JOINING)
    return rank.has_run and is_counted and 0 < number <= rank.n_collectives


def _absent_for_good(state: GangState) -> PartialCollective | None:
    return never_entered(state) or never_joined(state)


def never_joined(state: GangState) -> PartialCollective | None:
    """Return which ranks have ended their cell, or are left out of it, without joining those that wait."""
    # A rank without a session exits when its threads have ended: one of them may join after the cell.
    has_ended = operator.attrgetter("has_run" if state.session else "is_over")
    over = [rank for rank in state.ranks if rank.is_left_out or has_ended(rank)]
    fewest = min((rank.n_joins for rank in over), default=math.inf)
    joining = (rank for rank in state.ranks if rank.waiting_in and rank.n_joins > fewest)
    waiting = [r for r in joining if not (r.is_over or r.has_run) and evidence(r) is None]
    if not waiting:
        return None
    absent = [rank for rank in over if rank.n_joins < waiting[0].n_joins]
    return PartialCollective(collective_of(waiting[0]), _numbers(absent), _numbers(waiting))


def never_entered(state: GangState) -> PartialCollective | None:
    """Return which ranks of a session have ended their cell, or are left out of it, without a collective
    in which others are.
    """
    over = [r for r in state.ranks if r.is_left_out or (r.has_run and r.has_entered_all)]
    if not over:
        return None
    fewest, numbers = min(rank.n_entered for rank in over), {*_numbers(over)}
    inside = [r for r in _alive(state) if r.n_entered > fewest and r.rank not in numbers]
    if not inside:
        return None
    absent = [rank for rank in over if rank.n_entered < inside[0].n_entered]
    name = next(filter(None, map(collective_of, inside)), "collective")
    return PartialCollective(name, _numbers(absent), _numbers(inside))


def _was_waiting(rank: RankState) -> bool:
    if rank.failure is not None:
        return _is_of_library(rank.failure.error)
    # Of torch's libraries, only NCCL ends a waiting rank by this signal.
    return bool(rank.waiting_in) or (_aborted(rank) and rank.device.startswith("cuda"))


def _aborted(rank: RankState) -> bool:
    return rank.exited is not None and rank.exited.signal_name == "SIGABRT"


def _outside(state: GangState) -> list[RankState]:
    """Return the living ranks outside of collectives; only the stopped ones, if there are any."""
    return _stopped(state) or [rank for rank in _alive(state) if not rank.waiting_in]


def _stopped(state: GangState) -> list[RankState]:
    return [rank for rank in _alive(state) if rank.process_state == "T"]


def _alive(state: GangState) -> list[RankState]:
    return [rank for rank in state.ranks if evidence(rank) is None and not rank.is_over]


def _numbers(ranks: Iterable[RankState]) -> tuple[int, ...]:
    return tuple(rank.rank for rank in ranks)


# ── the verdict ──────────────────────────────────────────────────────────────────────────────────


def evidence(rank: RankState) -> Evidence | None:
    """Return the evidence against ``rank``, None if there is none."""
    if rank.failure is not None:
        error, is_final = rank.failure.error, not rank.failure.in_flight
        strong, of_library = not is_victim_error(error), _is_of_library(error)
        return Evidence(rank.rank, rank.failure.at_s, strong, of_library, is_final)
    ended = rank.exited
    if ended is None or ended.asked or (ended.exit_code == 0 and rank.result_bytes is not None):
        return None
    # NCCL's watchdog aborts the ranks that wait for a dead peer.
    strong = ended.signal_name != "SIGABRT"
    return Evidence(rank.rank, ended.at_s, strong, of_library=False, final=True)


def failed_independently(rank: RankState) -> bool:
    """Return whether a rank failed in a way that no peer explains."""
    found = evidence(rank)
    return found is not None and found.strong


def is_victim(rank: RankState, culprit: int | None) -> bool:
    """Return whether a failed rank ended in a way that the loss of a peer causes."""
    return rank.rank != culprit and not failed_independently(rank)


def shown_phase(rank: RankState, culprit: int | None) -> str:
    """Return the phase for display: a failed victim's is ``stopped``, since it needs no attention."""
    return "stopped" if rank.phase == "failed" and is_victim(rank, culprit) else rank.phase


def failed_ranks(state: GangState) -> list[RankState]:
    """Return the ranks that failed on their own, the culprit first."""
    failed = [rank for rank in state.ranks if shown_phase(rank, state.culprit) == "failed"]
    return sorted(failed, key=lambda rank: rank.rank != state.culprit)


def verdict(state: GangState, now_s: float) -> Verdict | None:
    """Return the culprit, or until when to wait, or None if nothing has failed.

    An exception that is still unwinding is not a failure by itself (the rank may handle it), but it is
    older evidence than the reports of its peers.
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
    # One that began after a report, by more than their delays differ, is a consequence of that failure.
    latest_s = first_final_s + _SETTLE_S
    candidates = (
        one
        for one in found
        if one.final or one.strong or (not one.of_library and one.at_s <= latest_s)
    )
    first = min(candidates, key=lambda one: (not one.strong, one.of_library, _began_s(state, one)))
    if not first.final:
        return _decide(first, first_final_s + _UNWINDING_S, now_s)
    if now_s < first_final_s + _SETTLE_WEAK_S:
        return Verdict(None, first_final_s + _SETTLE_WEAK_S)
    absent = _sole_absent(state)
    return Verdict(first.rank if absent is None else absent, now_s)


def _began_s(state: GangState, one: Evidence) -> float:
    """Return when a rank failed: one that aborted sends no report, and peers may report before its end."""
    return one.at_s - (_SETTLE_S if state.ranks[one.rank].failure is None else 0.0)


def waits_for_good(state: GangState) -> int | None:
    """Return the culprit if some ranks wait for others that have ended their cell, else None.

    No rank has failed then: the first of those that wait is named.
    """
    found = _absent_for_good(state)
    return None if found is None else found.waiting[0]


def may_debug(state: GangState, rank: RankState, now_s: float) -> bool:
    """Return whether a rank that asks for the debugger may have it: not if another one is the culprit.

    Without any strong evidence, the rank that asked first gets it.
    """
    request = rank.debugger_request
    if request is None or not is_victim_error(request.error):
        return request is not None
    others = [other for other in state.ranks if other.rank != rank.rank]
    asking = [other.debugger_request for other in others if other.debugger_request is not None]
    if any(not is_victim_error(other.error) or other.at_s < request.at_s for other in asking):
        return False
    strong = [found for other in others if (found := evidence(other)) and found.strong]
    if any(found.final for found in strong):
        return False
    return now_s > request.at_s + (_UNWINDING_S if strong else _SETTLE_WEAK_S)


def late_to_join(
    state: GangState, init_collective: str, join_timeout_s: float, now_s: float
) -> PartialCollective | None:
    """Return ranks that have not entered a collective where others wait for too long; None if too early.

    If a rank has entered and left, all ranks were there: then no other can be late.
    """
    waiting = [rank for rank in state.ranks if rank.waiting_in == init_collective]
    since_s = min((rank.waiting_since_s for rank in waiting), default=now_s)
    if now_s - since_s < join_timeout_s + _SEEN_WAITING_S:
        return None
    if any(rank.input_request or rank.debugger_request for rank in state.ranks):
        return None  # the user is debugging
    absent = _numbers(rank for rank in state.ranks if rank not in waiting)
    return PartialCollective(init_collective, absent, _numbers(waiting)) if absent else None


def _earliest(found: Iterable[Evidence]) -> Evidence | None:
    return min(found, key=lambda one: one.at_s, default=None)


def _decide(best: Evidence, wait_until_s: float, now_s: float) -> Verdict:
    return Verdict(best.rank if now_s >= wait_until_s else None, wait_until_s)


def _sole_absent(state: GangState) -> int | None:
    """Return the single living rank for which the reporting ones waited."""
    found = missed_collective(state)
    if found is None or len(found.outside) > 1:
        return None
    rank = state.ranks[found.outside[0]]
    return None if rank.has_run else rank.rank
