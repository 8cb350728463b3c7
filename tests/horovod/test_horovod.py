"""Horovod in gangs: its torch surface, what is seen of it, who may write to what its ranks meet at."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import hydrogen_magic as hm
from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.gang import Gang
from tests import horovod_ranks as on_ranks
from tests.gangs import ended

needs_horovod = [pytest.mark.horovod, pytest.mark.usefixtures("warm_agents")]


def launch(function: object, *arguments: object, **options: object) -> Gang:
    return hm.launch(function, *arguments, rendezvous="horovod", **options)  # type: ignore[arg-type]


class TestSurface:
    """What a cell may call."""

    pytestmark = needs_horovod

    @pytest.mark.parametrize("np", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
    def test_collectives(self, np: int) -> None:
        found = ended(launch(on_ranks.collectives, np=np)).results
        total = float(sum(range(np)))
        for rank, of_rank in enumerate(found):
            assert of_rank["sum"] == of_rank["fp16"] == of_rank["async"] == [total] * 2
            assert of_rank["average"] == [total / np] * 2
            assert of_rank["max"] == of_rank["broadcast"] == [np - 1.0] * 2
            assert of_rank["adasum"] == pytest.approx([1.0, 1.0]), "equal gradients count once"
            parallel, apart = of_rank["adasum of others"]
            assert parallel[0] == pytest.approx(_adasum([r + 1.0 for r in range(np)]))
            assert apart == pytest.approx([1.0] * np), "orthogonal ones add up"
            assert of_rank["grouped"] == [[total] * 2, [total + np] * 2]
            assert of_rank["uneven"] == [float(r) for r in range(np) for _ in range(r + 1)]
            assert of_rank["objects"] == [{"rank": r} for r in range(np)]
            assert of_rank["object"] == "of rank 1"
            start = rank * (rank + 1) // 2
            sent = [100.0 * r + start + i for r in range(np) for i in range(rank + 1)]
            assert of_rank["alltoall"] == (sent, [rank + 1] * np)
            assert of_rank["reducescatter"] == [[np * (np + 1) / 2] * 3]

    def test_process_sets(self) -> None:
        found = ended(launch(on_ranks.subsets, np=4)).results
        assert found == [
            (0, [2.0], [0, 2]),
            (0, [4.0], [0, 2]),
            (1, [2.0], [0, 2]),
            (1, [4.0], [0, 2]),
        ]

    def test_join(self) -> None:
        found = ended(launch(on_ranks.join_early, np=2)).results
        assert found == [(1, [2.0, 2.0]), (1, [2.0, 2.0, 1.0])]

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"backward_passes_per_step": 2},
            *(
                pytest.param(options, marks=pytest.mark.exhaustive)
                for options in ({"fp16": True}, {"num_groups": 2}, {"op": "Adasum"})
            ),
        ],
        ids=lambda options: next(iter(options), "plain"),
    )
    def test_distributed_optimizer(self, options: dict[str, object]) -> None:
        gang = ended(launch(on_ranks.train, options, np=2))
        for rank, found in enumerate(gang.results):
            assert found["spread"] < 1e-6 and found["moved"]
            assert (found["rank"], found["device"]) == (rank, "cpu")
        assert [rank.steps for rank in gang.ranks] == [4, 4], "a step is one step"

    def test_adasum_in_place(self) -> None:
        found = ended(launch(on_ranks.adasum_in_place, np=2)).results
        assert found == [pytest.approx([1.0, 2.0])] * 2

    def test_init_after_shutdown(self) -> None:
        assert ended(launch(on_ranks.init_twice, np=2)).results == [[2.0] * 3] * 2

    def test_a_timeline_may_begin_while_it_is_shut_down(self, tmp_path: Path) -> None:
        gang = ended(launch(on_ranks.begin_while_it_ends, str(tmp_path), 15, np=2))
        written, nothing = gang.results
        assert nothing == [b""] * 15, "the coordinator writes"
        assert all(any(e["ph"] == "E" for e in json.loads(raw)) for raw in written)


def _adasum(values: list[float]) -> float:
    """Return what parallel vectors of these lengths make: of two, half their sum."""
    while len(values) > 1:
        values = [(a + b) / 2 for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


@cache
def _without_failure() -> list[Any]:
    """Return what :func:`tests.horovod_ranks.elastic` returns when no rank fails."""
    return ended(launch(on_ranks.elastic, 6, "raise", 2, np=2)).results


class TestElastic:
    """A state is committed, the gang fails, and the next attempt goes on from the commit."""

    pytestmark = needs_horovod

    @pytest.mark.parametrize(
        ("ends", "rank"),
        [("SIGKILL", 1), pytest.param("raise", 0, marks=pytest.mark.exhaustive)],
    )
    def test_goes_on_from_the_last_commit(self, ends: str, rank: int) -> None:
        gang = ended(launch(on_ranks.elastic, 6, ends, rank, np=2, retries=1))
        assert gang.snapshot().attempt == 1
        for found, wanted in zip(gang.results, _without_failure(), strict=True):
            assert found["begun_at"] == 4
            assert found["seen"] == [0, 1, 2, 3, 4, 5] and found["sampled"] == 24
            assert found["spread"] == 0 and found["own"] == {"mine": "too"}
            assert found["weight"] == pytest.approx(wanted["weight"])
            assert found["momentum"] == pytest.approx(wanted["momentum"])

    @pytest.mark.parametrize(
        ("fails_in", "began"),
        [
            (1, [3, 2, 3]),
            *(
                pytest.param(*case, marks=pytest.mark.exhaustive)
                for case in [(0, [2, 0, 3]), (2, [3, 3, 5]), (9, [0, 0, 3])]
            ),
        ],
    )
    def test_calls_one_after_another_have_their_own_commits(
        self, fails_in: int, began: list[int]
    ) -> None:
        gang = ended(launch(on_ranks.folds, fails_in, np=2, retries=1))
        wanted = list(zip(began, [103.0, 203.0, 206.0], strict=True))
        assert gang.results == [wanted, wanted]

    def test_a_function_may_be_decorated_in_the_notebook(self) -> None:
        """Where ``hvd.elastic.run`` is upstream's, and its state in memory only."""
        import horovod.torch as hvd

        training = hvd.elastic.run(on_ranks.count_up)
        gang = ended(launch(on_ranks.with_state, training, np=2, retries=1))
        (begun_at, counted), other = gang.results
        assert other == (begun_at, counted) and counted == 5
        assert begun_at in (2, 3), "rank 0 may have gone on while rank 1 failed"

    def test_a_failure_is_not_caught_by_it(self) -> None:
        gang = ended(launch(on_ranks.elastic, 6, "raise", 1, np=2))
        with pytest.raises(hm.errors.RankFailedError, match="rank 1 failed: ValueError: bad batch"):
            gang.raise_for_state()


class TestSeen:
    """What the person in front sees of it."""

    pytestmark = needs_horovod

    def test_where_ranks_wait(self) -> None:
        gang = launch(on_ranks.wait_for_each_other, 1.6, np=2)
        gang.record()
        events = [e for e in ended(gang).events() if getattr(e, "rank", None) == 0]
        waits = [e.name for e in events if isinstance(e, ev.CollectiveWait) and e.name]
        assert waits == ["hvd.init", "hvd.synchronize"]
        spans = [e for e in events if isinstance(e, ev.Spans) and e.track == ev.COLLECTIVES]
        names = [name for event in spans for name in event.names]
        assert names == ["hvd.init", "hvd.synchronize", "hvd.allgather_object"], "outermost alone"

    def test_ranks_that_horovod_leaves_alone_are_warned_of(self) -> None:
        alone = ended(hm.launch(on_ranks.init_only, np=2))
        together = ended(launch(on_ranks.init_only, np=2))
        assert (alone.results, together.results) == ([1, 1], [2, 2])
        warned = [e.text for e in alone.events() if isinstance(e, ev.Notice)]
        assert len(warned) == 1 and "launch the gang with `--with horovod`" in warned[0]
        assert not [e for e in together.events() if isinstance(e, ev.Notice)]

    def test_torchs_process_group_says_why_it_cannot_be(self) -> None:
        gang = ended(launch(on_ranks.join_torchs_group, np=2))
        with pytest.raises(hm.errors.RankFailedError, match="launched `--with horovod`"):
            gang.raise_for_state()

    @pytest.mark.exhaustive  # the contract has one that does not join
    def test_a_rank_that_is_stopped_before_they_meet_is_said_to_be(self) -> None:
        gang = ended(launch(on_ranks.stop_before_init, np=2, start_timeout=10))
        with pytest.raises(hm.errors.RankFailedError, match=r"rank 1 did not enter .*SIGSTOP"):
            gang.raise_for_state()
