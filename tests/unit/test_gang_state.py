"""The fold and the verdict: what a gang's state is, and who is to blame, from events alone."""

from __future__ import annotations

import math
import random
import re

import pytest

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.frozen_values import replaced
from hydrogen_magic.driver.state.culprit import (
    PartialCollective,
    is_victim_error,
    late_to_join,
    may_debug,
    missed_collective,
    never_entered,
    verdict,
    waits_for_good,
)
from hydrogen_magic.driver.state.gang_state import GangState, fold, replay
from hydrogen_magic.driver.state.stragglers import stragglers
from hydrogen_magic.views.text_table import warnings
from tests.gang_events import running

GLOO_CLOSED = ev.ErrorReport(
    "RuntimeError", "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
)
GLOO_TIMEOUT = ev.ErrorReport(
    "RuntimeError", "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 10000ms for recv"
)
GLOO_OF_JAX = ev.ErrorReport(
    "ValueError",
    "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed "
    "by peer [127.0.0.1]:1",
)
RESET_IN_TENSORFLOW = ev.ErrorReport(
    "tensorflow.python.framework.errors_impl.UnavailableError",
    "{{function_node __wrapped__CollectiveReduceV2_device_/job:worker/replica:0/task:1/device:CPU:0}} "
    "Collective ops is aborted by: recvmsg:Connection reset by peer",
)
USERS_OWN = ev.ErrorReport("ValueError", "bad batch 17")


def blamed(
    *events: ev.Event, np: int = 2, now_s: float = math.inf, rendezvous: str = "torch"
) -> int | None:
    """Return the culprit in a gang that has failed; None while it is too early to say."""
    found = verdict(replay([*running(np, rendezvous=rendezvous), *events]), now_s)
    assert found is not None
    return found.culprit


def test_exit_zero_without_a_result_has_failed_too() -> None:
    exited = ev.RankExited(1.0, 1, 0)
    assert replay([*running(2), exited]).ranks[1].phase == "failed"
    assert blamed(exited) == 1


def test_a_new_attempt_forgets_the_old_one() -> None:
    state = replay([*running(2), ev.RankFailed(1.0, 1, USERS_OWN, "running")])
    state = fold(state, ev.AttemptFailed(2.0, ev.ErrorReport("ChildProcessError", "it died")))
    assert state.fault is not None and verdict(state, math.inf) is not None
    state = fold(state, ev.AttemptStarted(2.0, 1))
    assert state.attempt == 1 and state.ranks[1].failure is None and state.fault is None
    assert verdict(state, math.inf) is None


def test_a_rank_that_asks_the_user_is_neither_missing_nor_a_straggler() -> None:
    waits = [ev.CollectiveWait(2.0, rank, "init", 0, 1.0) for rank in (0, 1, 2)]
    events = [*running(4), *waits, ev.InputRequested(1.5, 3, 1, "(Pdb) ")]
    asking = replay(events)
    assert late_to_join(asking, "init", 10.0, 99.0) is None
    assert stragglers(asking, 99.0) == {}
    assert next(w.text for w in warnings(asking, 99.0)) == "rank 3 is waiting for input"
    answered = replay([*events, ev.InputAnswered(3.0, 3, 1)])
    found = late_to_join(answered, "init", 10.0, 99.0)
    assert found is not None and found.outside == (3,)
    assert stragglers(answered, 99.0) == {3: "3 ranks wait for it in init"}
    pair = replay([*running(2), ev.CollectiveWait(2.0, 0, "barrier", 7, 1.0)])
    assert stragglers(pair, 99.0) == {1: "1 rank waits for it in barrier #7"}


def test_who_has_not_come_is_missing_and_who_has_just_come_is_not() -> None:
    """A rank that waits says so after a second: until then it may be there."""
    waits = [ev.CollectiveWait(1.5, rank, "hvd.init", 0, 0.5) for rank in (0, 2)]
    state = replay([*running(4), *waits])
    assert late_to_join(state, "hvd.init", 10.0, 11.9) is None
    late = PartialCollective("hvd.init", outside=(1, 3), waiting=(0, 2))
    assert late_to_join(state, "hvd.init", 10.0, 12.1) == late
    assert late_to_join(state, "hvd.barrier", 10.0, 12.1) is None, "they wait somewhere else"
    others = [ev.CollectiveWait(12.0, rank, "hvd.init", 0, 10.9) for rank in (1, 3)]
    assert late_to_join(replay([*running(4), *waits, *others]), "hvd.init", 10.0, 99.0) is None
    gone_on = [ev.CollectiveWait(12.0, rank, "", 0, 0.5) for rank in (0, 2)]
    assert late_to_join(replay([*running(4), *waits, *gone_on]), "hvd.init", 10.0, 99.0) is None


def test_a_rank_of_a_session_that_ended_its_cell_is_missing_in_a_collective() -> None:
    """What it reported while it was stuck is not its final number."""
    inside = [ev.CollectivesEntered(2.0, rank, 3) for rank in (0, 2)]
    over = [ev.CollectivesEntered(1.0, 1, 2), ev.RankResult(3.0, 1, 0)]
    assert never_entered(replay([*running(3), *inside, *over])) is None
    same = ev.CollectivesEntered(3.0, 1, 3, is_final=True)
    assert waits_for_good(replay([*running(3), *inside, *over, same])) is None
    fewer = ev.CollectivesEntered(3.0, 1, 2, is_final=True)
    waits = ev.CollectiveWait(2.0, 2, "barrier", 4, 1.0)
    state = replay([*running(3), *inside, waits, *over, fewer])
    assert never_entered(state) == PartialCollective("barrier", outside=(1,), waiting=(0, 2))
    assert waits_for_good(state) == 0
    left_out = replay([*running(3), *inside, ev.RankPhase(1.0, 1, "idle")])
    assert never_entered(left_out) == PartialCollective("collective", outside=(1,), waiting=(0, 2))


def test_a_rank_that_ended_its_cell_joins_no_more() -> None:
    """Unless those that wait join a group of some ranks: that does not count."""
    waits = ev.CollectiveWait(2.0, 0, "init_process_group", 0, 1.0, n_joins=1)
    assert waits_for_good(replay([*running(2), waits])) is None
    over, exited = ev.RankResult(3.0, 1, 0), ev.RankExited(3.5, 1, 0)
    assert waits_for_good(replay([*running(2), waits, over])) is None, "a thread may join"
    state = replay([*running(2), waits, over, exited])
    assert missed_collective(state) == PartialCollective("init_process_group", (1,), (0,))
    assert waits_for_good(state) == 0
    joined = ev.CollectiveWait(2.5, 1, "", 0, 2.5, n_joins=1)
    assert waits_for_good(replay([*running(2), waits, joined, over, exited])) is None
    left_out = replay([*running(2), waits, ev.RankPhase(1.0, 1, "idle")])
    assert waits_for_good(left_out) == 0
    apart = replay([*running(2), replaced(waits, n_joins=0), over, exited])
    assert waits_for_good(apart) is None
    text = "rank 0 waits in init_process_group for 11 s; rank 1 has already finished"
    assert next(w.text for w in warnings(apart, 12.0)) == text


def test_step_rate_is_over_a_window() -> None:
    events = [*running(1), *(ev.Steps(float(at), 0, 10 * at) for at in range(1, 30))]
    [rank] = replay(events).ranks
    assert rank.steps_per_s(29.0) == pytest.approx(10.0)
    assert rank.steps_per_s(84.0) == pytest.approx(51 / 60), "no step for 55 s"
    ended = replay([*events, ev.GangEnded(84.0, "STOPPED", "")])
    assert ended.ranks[0].steps_per_s(84.0) is None


def test_steps_longer_than_the_window_have_a_rate() -> None:
    events = [*running(1), *(ev.Steps(20.0 * count, 0, count) for count in range(1, 4))]
    [rank] = replay(events).ranks
    assert rank.steps_per_s(60.0) == rank.steps_per_s(79.0) == pytest.approx(1 / 20)
    assert rank.steps_per_s(140.0) == pytest.approx(2 / 100)


def test_what_is_no_activity() -> None:
    """A hanging rank of ``%%infer``, whose unchanged bar is reported again and again."""

    def reports(*, closed: bool = False) -> list[ev.Event]:
        bars = [(float(at), 0, 0, "", 500.0, None, "rows", closed) for at in range(1, 100)]
        return [*running(1), *(ev.Progress(*bar) for bar in bars)]

    [silent] = warnings(replay(reports()), 99.0)
    assert silent.text.startswith("rank 0: no progress for 1:38")
    assert warnings(replay(reports(closed=True)), 99.0) == [], "it waits for rows"
    waits = [ev.CollectiveWait(6.0, 0, "barrier", 3, 5.0), ev.CollectiveWait(99.0, 0, "", 3, 5.0)]
    assert warnings(replay([*running(1), *waits]), 100.0) == [], "it has just left a collective"


@pytest.mark.parametrize("culprit", range(4))
@pytest.mark.parametrize("clean_up_s", [0.0, 0.3, 3.0])
def test_the_culprit_is_found_though_victims_complain_first(
    culprit: int, clean_up_s: float
) -> None:
    """Victims die at once; the guilty rank's own report comes only after its ``finally``."""
    victims = [rank for rank in range(4) if rank != culprit]
    flying = [ev.RankFailed(1.0, culprit, USERS_OWN, "running", in_flight=True)]
    complaints = [ev.RankFailed(1.02, rank, GLOO_CLOSED, "running") for rank in victims]
    final = [ev.RankFailed(1.0 + clean_up_s, culprit, USERS_OWN, "running")]
    if clean_up_s:
        early = blamed(*complaints, *flying, np=4, now_s=1.3)
        assert early is None, "its clean-up is not over"
    events = [*complaints, *(flying if clean_up_s else []), *final]
    assert blamed(*events, np=4, now_s=1.0 + clean_up_s + 0.2) == culprit


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("heard_first", [0, 1])
def test_of_ranks_that_fail_on_their_own_the_first_is_to_blame(
    first: int, heard_first: int
) -> None:
    """In any order of their numbers, of their reports and of their exits."""
    own = [ev.RankFailed(1.0, first, USERS_OWN, "running")]
    own.append(ev.RankFailed(1.05, 1 - first, USERS_OWN, "running"))
    exits = [ev.RankExited(1.06, 1 - first, 1, ""), ev.RankExited(1.1, first, 1, "")]
    assert blamed(*(own if heard_first == first else reversed(own)), *exits) == first


def test_an_older_exception_that_is_still_unwinding_is_waited_for() -> None:
    flying = ev.RankFailed(1.0, 0, USERS_OWN, "running", in_flight=True)
    own = ev.RankFailed(1.5, 1, ev.ErrorReport("KeyError", "'x'"), "running")
    assert blamed(flying, own, now_s=3.0) is None
    landed = ev.RankFailed(3.0, 0, USERS_OWN, "running")
    assert blamed(flying, own, landed, now_s=3.2) == 0


def test_of_several_ranks_that_fail_the_culprit_is_debugged() -> None:
    def asks(rank: int, error: ev.ErrorReport, at_s: float = 1.0) -> ev.DebuggerRequested:
        return ev.DebuggerRequested(at_s, rank, 1, error)

    def debugged(now_s: float, *events: ev.Event) -> list[int]:
        state = replay([*running(2), *events])
        return [rank.rank for rank in state.ranks if may_debug(state, rank, now_s)]

    victim, first = asks(0, GLOO_CLOSED), asks(1, GLOO_CLOSED, 0.9)
    assert debugged(1.1, asks(0, USERS_OWN), asks(1, USERS_OWN)) == [0, 1]
    assert debugged(1e9, victim, asks(1, USERS_OWN, 5.0)) == [1]
    assert (debugged(1.1, victim), debugged(3.0, victim)) == ([], [0])
    assert debugged(3.0, victim, first) == [1]
    flying = ev.RankFailed(0.9, 1, USERS_OWN, "running", in_flight=True)
    assert (debugged(9.0, victim, flying), debugged(60.0, victim, flying)) == ([], [0])
    assert debugged(1e9, victim, ev.RankExited(0.9, 1, None, "SIGKILL")) == []


def test_victims_alone_wait_for_somebody_to_blame() -> None:
    failed = ev.RankFailed(1.0, 0, GLOO_CLOSED, "running")
    assert (blamed(failed, now_s=1.5), blamed(failed, now_s=2.1)) == (None, 1)


def test_a_rank_that_aborted_is_to_blame_though_its_end_is_heard_of_later() -> None:
    aborted = ev.RankExited(1.002, 1, None, "SIGABRT")
    for error in (GLOO_CLOSED, ev.ErrorReport("ConnectionResetError", "reset by peer")):
        assert blamed(ev.RankFailed(1.0, 0, error, "running"), aborted) == 1


def test_a_connection_error_outside_of_collectives_comes_before_those_inside() -> None:
    """A store that is down: as a cause of the user's error, and older than an abort that it causes."""
    refused = ev.ErrorReport("ConnectionRefusedError", "[Errno 111] Connection refused")
    own = ev.ErrorReport("requests.exceptions.ConnectionError", "no store", cause=refused)
    complaint = ev.RankFailed(1.0, 0, GLOO_CLOSED, "running")
    failed = ev.RankFailed(1.1, 1, own, "running")
    unwinding = replaced(failed, in_flight=True)
    assert blamed(complaint, unwinding, now_s=9.0) is None, "it cleans up"
    assert blamed(complaint, unwinding) == blamed(complaint, failed) == 1
    assert blamed(failed, ev.RankExited(1.5, 0, None, "SIGABRT")) == 1
    assert blamed(complaint, replaced(unwinding, at_s=1.2), now_s=2.1) == 0, "a consequence"


def test_a_stopped_rank_is_to_blame_for_others_timeouts() -> None:
    stopped = ev.RankHealth(5.0, 2, 1, 0.0, "T")
    failed = [ev.RankFailed(10.0, rank, GLOO_TIMEOUT, "running") for rank in (0, 1)]
    assert blamed(stopped, *failed, np=3) == 2


def test_jax_aborts_the_peers_of_a_rank_that_is_stopped_or_has_finished() -> None:
    aborted = [ev.RankExited(10.0, rank, None, "SIGABRT") for rank in (0, 1)]
    stopped = ev.RankHealth(5.0, 2, 1, 0.0, "T")
    assert blamed(stopped, *aborted, np=3, rendezvous="jax") == 2
    finished = replay([*running(2, rendezvous="jax"), ev.RankResult(5.0, 1, 10), *aborted])
    missed = missed_collective(finished)
    assert missed is not None and (missed.outside, missed.waiting) == ((1,), (0,))


def test_a_rank_that_aborts_in_jax_is_to_blame_while_another_one_computes() -> None:
    aborted = ev.RankExited(1.0, 1, None, "SIGABRT")
    broken = ev.RankFailed(1.1, 0, GLOO_OF_JAX, "running")
    state = replay([*running(3, rendezvous="jax"), aborted, broken])
    assert missed_collective(state) is None
    assert blamed(aborted, broken, np=3, rendezvous="jax") == 1


def test_an_exception_that_is_handled_is_no_failure() -> None:
    flying = ev.RankFailed(1.0, 0, USERS_OWN, "running", in_flight=True)
    assert verdict(replay([*running(2), flying]), math.inf) is None
    own = ev.RankFailed(60.0, 1, ev.ErrorReport("KeyError", "'x'"), "running")
    assert blamed(flying, own) == 1, "rank 0 handles its exception and goes on"


@pytest.mark.parametrize(
    "goes_on", [ev.ExceptionHandled(2.0, 0), ev.RankPhase(2.0, 0, "finishing")]
)
def test_an_exception_that_was_handled_explains_no_connection_error(goes_on: ev.Event) -> None:
    flying = ev.RankFailed(1.0, 0, USERS_OWN, "running", in_flight=True)
    closed = ev.RankFailed(60.0, 1, ev.ErrorReport("ConnectionResetError", "closed"), "running")
    assert blamed(flying, goes_on, closed, now_s=62.0) == 1
    state = replay([*running(2), closed, ev.ExceptionHandled(61.0, 1)])
    assert state.ranks[1].failure == closed, "its end was reported meanwhile"


def test_errors_raised_from_a_victims_error_are_victims() -> None:
    wrapped = ev.ErrorReport("TrainingError", "step failed", cause=GLOO_CLOSED)
    assert is_victim_error(wrapped) and is_victim_error(GLOO_OF_JAX)
    assert is_victim_error(RESET_IN_TENSORFLOW)
    assert is_victim_error(ev.ErrorReport("RuntimeError", "Wait timeout")), "of torch's FileStore"
    assert not is_victim_error(ev.ErrorReport("RuntimeError", "mat1 and mat2 shapes"))
    assert is_victim_error(ev.ErrorReport("torch.distributed.DistBackendError", "NCCL error"))


def test_the_fold_takes_any_order_of_events() -> None:
    """Two agents' events interleave freely: nothing may raise, whatever comes first."""
    events = [*running(3), ev.RankExited(1.0, 2, None, "SIGKILL"), ev.Steps(1.0, 7, 1)]
    events += [ev.RankResult(1.0, 0, 1), ev.Progress(1.0, 1, 0, "x", 1.0, None)]
    for seed in range(20):
        shuffled = events[1:]
        random.Random(seed).shuffle(shuffled)
        state: GangState = replay([events[0], *shuffled])
        assert len(state.ranks) == 3 and state.now_s == 1.0


@pytest.mark.parametrize("length", [300, 301, 330, 340, 400, 100_000])
def test_a_message_loses_its_middle_only_if_that_makes_it_shorter(length: int) -> None:
    text = "".join(chr(97 + n % 26) for n in range(length))
    shown = ev.without_middle(text, 300)
    assert shown == text or len(shown) < length
    assert len(shown) < 350
    assert shown[:200] == text[:200] and shown[-50:] == text[-50:]


def test_a_message_is_cut_between_words() -> None:
    words = " ".join(f"word{n}" for n in range(1000))
    head, lost, tail = re.split(
        r" … \((.*) characters left out\) … ", ev.without_middle(words, 300)
    )
    assert set(f"{head} {tail}".split()) <= set(words.split())
    assert len(head) + int(lost.replace(",", "")) + len(tail) == len(words)


def test_what_a_message_has_lost_is_counted_once() -> None:
    """A rank cuts it for its way, and a headline cuts it again."""
    cut = ev.without_middle("x" * 1_000_000, 40_000)
    assert "(960,000 characters left out)" in cut
    assert "(999,700 characters left out)" in ev.without_middle(cut, 300)
    odd = f"{'x' * 200} … (, characters left out) … {'x' * 200} … ({'9' * 5000} characters left out) … x"
    assert "characters left out" in ev.without_middle(odd, 100)


def test_each_metric_is_of_the_first_rank_that_logged_it() -> None:
    logged = [
        ev.Metrics(1.0, 2, (5,), (1.0,), {"loss": (9.0,), "val_loss": (0.2,)}),
        ev.Metrics(1.0, 1, (5,), (1.0,), {"loss": (0.5,)}),
    ]
    state = replay([*running(3), *logged])
    assert list(state.last_metrics.items()) == [("loss", 0.5), ("val_loss", 0.2)]
    older = ev.GangEnded(2.0, "SUCCEEDED", "", metrics={"loss": 0.5})
    assert fold(state, older).last_metrics == {"loss": 0.5}


def test_the_first_rank_whose_points_are_dropped_is_named_once() -> None:
    def dropped(rank: int, n: int) -> ev.Metrics:
        return ev.Metrics(1.0, rank, (5,), (1.0,), {"loss": (0.5,)}, n)

    few = replay([*running(2), dropped(0, 99)])
    assert few.notices == () and few.ranks[0].n_points == 100
    many = fold(fold(fold(few, dropped(1, 4000)), dropped(0, 1)), dropped(1, 4000))
    (notice,) = many.notices
    assert notice.level == "warning" and notice.text.startswith("rank 1 logs faster than")
