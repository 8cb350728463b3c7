"""Which hosts ranks are packed onto or spread over, and when Spark chooses instead."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver.placements.remote.rank_assignment import expected, unassigned
from hydrogen_magic.driver.placements.spark import host_choice, hosts, placement
from hydrogen_magic.driver.placements.spark import spark_session as sessions
from hydrogen_magic.driver.placements.spark.capacity_check import ClusterCapacity
from hydrogen_magic.driver.placements.spark.host_choice import HostChoice, choose, packed, spread
from hydrogen_magic.driver.placements.spark.spark_session import Session
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.views.tables import plan_table

SLOTS = {"a": 2, "b": 4, "c": 3, "d": 2}
NO_GPUS = ClusterCapacity(None, False, None)


def session_of(
    conf: Mapping[str, str] = {}, version: str = "", *, is_connect: bool = False
) -> Session:
    spark: Any = SimpleNamespace(conf=conf, version=version)
    return Session(spark, is_connect, "app", "spark://there:7077")


@pytest.mark.parametrize(
    ("np", "few", "many"),
    [
        (1, {"a": 1}, {"b": 1}),
        (2, {"a": 2}, {"b": 1, "c": 1}),
        (3, {"c": 3}, {"b": 1, "c": 1, "a": 1}),
        (5, {"b": 4, "a": 1}, {"b": 2, "c": 1, "a": 1, "d": 1}),
        (11, SLOTS, SLOTS),
    ],
)
def test_fewest_and_most_hosts(np: int, few: dict[str, int], many: dict[str, int]) -> None:
    assert packed(np, SLOTS) == few
    assert spread(np, SLOTS) == many


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    spec: JobSpec,
    slots: dict[str, tuple[int, int]],
    *,
    gpus: bool = False,
    is_connect: bool = False,
    avoided: tuple[str, ...] = (),
    **settings: str,
) -> HostChoice | None:
    """Return the choice on a cluster with so many slots of each host, free ones and all."""
    monkeypatch.setattr(host_choice, "slots_by_host", lambda session, capacity: slots)
    conf = {name.replace("__", "."): value for name, value in settings.items()}
    session = session_of(conf, is_connect=is_connect)
    return choose(session, ClusterCapacity(None, gpus, None), spec, avoided)


TWO = {"a": (1, 4), "b": (2, 2)}


def test_hosts_are_chosen_by_free_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    few = chosen(monkeypatch, JobSpec(np=2, pack=True), TWO)
    why = "of the cluster's 2 hosts, by their free slots"
    assert few == HostChoice(("b", "b"), f"`--pack`: Spark is asked for 1 {why}")
    many = chosen(monkeypatch, JobSpec(np=2, pack=False), TWO)
    assert many == HostChoice(("b", "a"), f"`--spread`: Spark is asked for 2 {why}")
    queued = chosen(monkeypatch, JobSpec(np=4, pack=True), TWO)
    assert queued is not None and queued.hosts == ("a",) * 4
    assert queued.note.endswith("by all their slots, since too few are free")


def test_ranks_with_gpus_are_packed_unless_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, JobSpec(np=2), TWO) is None
    packs = chosen(monkeypatch, JobSpec(np=2), TWO, gpus=True)
    assert packs is not None and packs.hosts == ("b", "b")
    assert packs.note.startswith("ranks with GPUs are packed: Spark is asked for 1 of")
    spreads = chosen(monkeypatch, JobSpec(np=2, pack=False), TWO, gpus=True)
    assert spreads is not None and spreads.hosts == ("b", "a")


def test_there_is_no_choice_of_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, JobSpec(np=2, pack=True), {"a": (4, 4)}) is None
    assert chosen(monkeypatch, JobSpec(np=9, pack=True), TWO) is None, "executors are starting"


def test_hosts_that_are_unknown_are_reported_if_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    few = chosen(monkeypatch, JobSpec(np=2, pack=True), {})
    assert few is not None and few.hosts == ()
    assert few.note.startswith("`--pack` has no effect while the hosts")
    assert chosen(monkeypatch, JobSpec(np=2), {}, gpus=True) is None
    session = session_of(version="4.0.0")
    cluster = session, NO_GPUS
    monkeypatch.setattr(placement._cluster, "look", lambda spec: cluster)
    plan = placement.SparkPlacement().plan(JobSpec(np=2, pack=True))
    assert (plan.hosts_note, plan.slots[1].host) == (few.note, session.where)


def test_a_lost_host_is_avoided_if_there_is_room_on_others(monkeypatch: pytest.MonkeyPatch) -> None:
    three = {**TWO, "c": (4, 4)}
    for pack, wanted in ((None, ("b", "a")), (True, ("b", "b")), (False, ("b", "a"))):
        found = chosen(monkeypatch, JobSpec(np=2, pack=pack), three, avoided=("c",))
        assert found is not None and found.hosts == wanted
        assert "of the cluster's 3 hosts" in found.note and "without c, which" in found.note
    one = chosen(monkeypatch, JobSpec(np=2), TWO, avoided=("b",))
    assert one is not None and one.hosts == ("a", "a")
    assert chosen(monkeypatch, JobSpec(np=7), three, avoided=("c",)) is None
    assert chosen(monkeypatch, JobSpec(np=2), three, avoided=("c",), is_connect=True) is None


@pytest.mark.parametrize(("since_s", "usable"), [(10.0, 10), (50.0, 6), (200.0, 10)])
def test_slots_of_a_host_that_is_cut_off_count_once_spark_must_have_noticed(
    monkeypatch: pytest.MonkeyPatch, since_s: float, usable: int
) -> None:
    slots = {**TWO, "c": (4, 4)}
    monkeypatch.setattr(hosts, "slots_by_host", lambda session, capacity: slots)
    monkeypatch.setattr(hosts, "slots_now", lambda session, capacity: 10)
    session = session_of()
    provider = hosts.SparkHosts(session, NO_GPUS)
    provider.lost_hosts = {"c": time.monotonic() - since_s}
    assert provider._usable_slots(session, NO_GPUS) == usable


@pytest.mark.parametrize("wait_s", [None, 3600.0])
def test_a_retry_is_refused_when_no_executor_replaces_the_lost_one(
    monkeypatch: pytest.MonkeyPatch, wait_s: float | None
) -> None:
    """Not before Spark must have noticed the loss, and with ``--wait`` at its end."""
    now_s = 0.0

    def capacity(session: Session, spec: JobSpec) -> ClusterCapacity:
        if spec.wait_s is None:
            raise PlacementError("no more executors are expected")
        return NO_GPUS

    def emit(event: object) -> None:
        nonlocal now_s
        now_s += 60.0

    async def called(function: Any, *args: Any) -> Any:
        return function(*args)

    monkeypatch.setattr(asyncio, "to_thread", called)
    monkeypatch.setattr(hosts, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(hosts, "_ROOM_S", 0.0)
    monkeypatch.setattr(hosts, "capacity", capacity)
    monkeypatch.setattr(hosts, "slots_now", lambda session, capacity: 1)
    monkeypatch.setattr(hosts, "waits_for", lambda session, tag: "1 executor")
    provider = hosts.SparkHosts(session_of(), ClusterCapacity(2, False, None))
    job = SimpleNamespace(spec=JobSpec(np=2, retries=1, wait_s=wait_s), now_s=lambda: now_s)
    attempt, sink = SimpleNamespace(number=1, job=job), SimpleNamespace(emit=emit)
    said = "no more executors are expected" if wait_s is None else "did not fit within 3600 s"
    with pytest.raises(PlacementError, match=said):
        asyncio.run(asyncio.wait_for(provider.acquire(attempt, sink), 5.0))  # type: ignore[arg-type]
    assert now_s == (240.0 if wait_s is None else 3660.0)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"is_connect": True}, "`--spread` is not possible: Spark Connect has no way to choose"),
        (
            {"spark__locality__wait__legacyResetOnTaskLaunch": "true"},
            "legacyResetOnTaskLaunch=true Spark aborts",
        ),
    ],
)
def test_hosts_that_spark_cannot_be_given_are_refused_only_if_requested(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], why: str
) -> None:
    with pytest.raises(PlacementError, match=why):
        chosen(monkeypatch, JobSpec(np=2, pack=False), TWO, **settings)
    assert chosen(monkeypatch, JobSpec(np=2), TWO, gpus=True, **settings) is None


def test_threads_that_plan_at_once_get_their_own_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here another plan comes in between at each look at the clock."""
    cluster, is_nested = placement._Cluster(), False

    def clock() -> float:
        nonlocal is_nested
        if not is_nested:
            is_nested = True
            assert cluster.look(JobSpec(np=2))[1].slots == 2
            is_nested = False
        return 1.0

    found = SimpleNamespace(spark=object())
    monkeypatch.setattr(sessions, "find", lambda: found)
    monkeypatch.setattr(placement, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(
        placement.capacity_check,
        "capacity",
        lambda session, spec: ClusterCapacity(spec.np, False, None),
    )
    for _ in range(3):
        assert cluster.look(JobSpec(np=3))[1].slots == 3


def test_a_dry_run_shows_the_hosts_and_the_reason() -> None:
    plan = expected(unassigned(JobSpec(np=2), "spark://there:7077"), ("a", "b"), "the reason")
    rows = [f"{rank}     {host}     ?           CPU" for rank, host in enumerate("ab")]
    assert plan_table(plan)[1:4] == [*rows, "the reason"]
