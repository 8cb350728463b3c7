"""Horovod in gangs: its torch surface, what is seen of it, who may write to what its ranks meet at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hydrogen_magic as hm
from hydrogen_magic.core import events as ev
from hydrogen_magic.driver.gang import Gang
from tests import horovod_ranks as on_ranks
from tests.gangs import ended, failure_of

needs_horovod = [pytest.mark.horovod, pytest.mark.usefixtures("warm_agents")]


def launch(function: object, *arguments: object, **options: object) -> Gang:
    return hm.launch(function, *arguments, rendezvous="horovod", **options)  # type: ignore[arg-type]


class TestSurface:
    """What a cell may call."""

    pytestmark = needs_horovod

    def test_collectives_of_all_ranks_and_of_process_sets(self) -> None:
        np = 4
        gang = ended(launch(on_ranks.collectives_after_subsets, np=np))
        total = float(sum(range(np)))
        assert [of_sets for of_sets, _ in gang.results] == [
            (0, [2.0], [0, 2]),
            (0, [4.0], [0, 2]),
            (1, [2.0], [0, 2]),
            (1, [4.0], [0, 2]),
        ]
        assert not [e for e in gang.events() if isinstance(e, ev.Notice)]
        for rank, (_, of_rank) in enumerate(gang.results):
            assert of_rank["sum"] == of_rank["fp16"] == of_rank["async"] == [total] * 2
            assert of_rank["average"] == [total / np] * 2
            assert of_rank["max"] == of_rank["broadcast"] == [np - 1.0] * 2
            assert of_rank["grouped"] == [[total] * 2, [total + np] * 2]
            assert of_rank["uneven"] == [float(r) for r in range(np) for _ in range(r + 1)]
            assert of_rank["objects"] == [{"rank": r} for r in range(np)]
            assert of_rank["object"] == "of rank 1"
            start = rank * (rank + 1) // 2
            sent = [100.0 * r + start + i for r in range(np) for i in range(rank + 1)]
            assert of_rank["alltoall"] == (sent, [rank + 1] * np)
            assert of_rank["reducescatter"] == [[np * (np + 1) / 2] * 3]

    def test_init_after_shutdown_and_join(self) -> None:
        found = ended(launch(on_ranks.init_and_join, np=2)).results
        assert [of_rank["join"] for of_rank in found] == [
            (1, [2.0, 2.0]),
            (1, [2.0, 2.0, 1.0]),
        ]
        assert [of_rank["init"] for of_rank in found] == [[2.0] * 3] * 2

    def test_distributed_optimizer(self) -> None:
        chosen = [
            {},
            {"backward_passes_per_step": 2},
            {"fp16": True},
            {"num_groups": 2},
        ]
        gang = ended(launch(on_ranks.train_by_each, chosen, np=2))
        for rank, trainings in enumerate(gang.results):
            for options, found in zip(chosen, trainings, strict=True):
                assert found["spread"] < 1e-6 and found["moved"], options
                assert (found["rank"], found["device"]) == (rank, "cpu")
        # Steps of optimizers one after another: the first of one may end the last of the one before.
        assert all(13 <= rank.steps <= 16 for rank in gang.ranks), "a step is one step"

    def test_a_timeline_may_begin_while_it_is_shut_down(self, tmp_path: Path) -> None:
        gang = ended(launch(on_ranks.begin_while_it_ends, str(tmp_path), 15, np=2))
        written, nothing = gang.results
        assert nothing == [b""] * 15, "the coordinator writes"
        assert all(any(e["ph"] == "E" for e in json.loads(raw)) for raw in written)


class TestElastic:
    """A state is committed, the gang fails, and the next attempt goes on from the commit."""

    pytestmark = needs_horovod

    def test_goes_on_from_the_last_commit(self) -> None:
        gang = ended(launch(on_ranks.elastic, 6, "SIGKILL", 1, np=2, retries=1))
        assert gang.snapshot().attempt == 1
        undisturbed = ended(launch(on_ranks.elastic, 6, "SIGKILL", 2, np=2))
        for found, wanted in zip(gang.results, undisturbed.results, strict=True):
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
        failed = [str(e.error) for e in gang.events() if isinstance(e, ev.RankFailed)]
        is_seen = any("ValueError" in error and "bad batch 17" in error for error in failed)
        assert is_seen == (fails_in < 3), "elastic.run catches no failure"
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


class TestSeen:
    """What the person in front sees of it."""

    pytestmark = needs_horovod

    def test_ranks_that_join_without_one_that_has_ended_are_released(self) -> None:
        never = "rank 0 never entered the hvd.init its peers were waiting in"
        error = failure_of(launch(on_ranks.join_without_first, np=2))
        assert str(error) == f"{never} (rank 0 had already finished)"

    def test_where_ranks_wait(self) -> None:
        gang = launch(on_ranks.wait_for_each_other, 3.0, np=2)
        gang.record()
        events = [e for e in ended(gang).events() if getattr(e, "rank", None) == 0]
        waits = [e.name for e in events if isinstance(e, ev.CollectiveWait) and e.name]
        assert waits[:2] == ["hvd.init", "hvd.synchronize"]
        # On a busy machine ranks may wait there for a second, too.
        assert waits[2:] in ([], ["hvd.allgather_object"])
        spans = [e for e in events if isinstance(e, ev.Spans) and e.track == ev.COLLECTIVES]
        names = [name for event in spans for name in event.names]
        assert names == ["hvd.init", "hvd.synchronize", "hvd.allgather_object"], "outermost alone"

    def test_ranks_that_horovod_leaves_alone_are_warned_of(self) -> None:
        alone = ended(hm.launch(on_ranks.init_only, np=2))
        assert alone.results == [1, 1]
        warned = [e.text for e in alone.events() if isinstance(e, ev.Notice)]
        assert len(warned) == 1 and "launch the gang with `--with horovod`" in warned[0]

    def test_torchs_process_group_says_why_it_cannot_be(self) -> None:
        gang = ended(launch(on_ranks.join_torchs_group, np=2))
        with pytest.raises(hm.errors.RankFailedError, match="launched `--with horovod`"):
            gang.raise_for_state()
