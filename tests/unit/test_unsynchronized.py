"""A rank that steps its optimizer and exchanges nothing is reported once, and no other."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace

import pytest

from hydrogen_magic.node.worker.reporting import unsynchronized
from hydrogen_magic.node.worker.reporting.unsynchronized import ExchangeCounter


class Group:
    """A process group that counts."""

    def __init__(self) -> None:
        self.count = 0

    def _get_sequence_number_for_group(self) -> int:
        if self.count < 0:
            raise RuntimeError("this backend does not count")
        return self.count


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    """The one group of a rank of four."""
    group = Group()
    c10d = SimpleNamespace(_world=SimpleNamespace(pg_map={group: None}))
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", c10d)  # type: ignore[arg-type]
    monkeypatch.setenv("WORLD_SIZE", "4")
    return group


def test_ten_steps_without_a_collective_are_reported_once(group: Group) -> None:
    counter = ExchangeCounter(0)
    found = [bool(counter.warning(steps, is_over=False)) for steps in (0, 1, 9, 10, 11)]
    assert found == [False, False, False, True, False]
    assert ExchangeCounter(1).warning(10, is_over=True) == ""
    text = ExchangeCounter(0).warning(1, is_over=True)
    assert text.startswith("1 optimizer step without any collective: each of the 4 ranks")


def test_steps_between_collectives_are_not_reported(group: Group) -> None:
    counter = ExchangeCounter(0)
    group.count = 3  # parameters were broadcast
    assert not counter.warning(50, is_over=False)
    assert not counter.warning(149, is_over=False)
    text = counter.warning(150, is_over=False)
    assert text.startswith("100 optimizer steps without any collective")
    averaging = ExchangeCounter(0)
    assert not averaging.warning(50, is_over=False)
    group.count += 1
    assert not averaging.warning(500, is_over=True)


BYPASSED, NOT_SYNCED = unsynchronized._BYPASSED, unsynchronized._NOT_SYNCED


@pytest.mark.parametrize(
    ("remedy", "exchanged_at", "steps", "alone"),
    [
        (BYPASSED, (), 32, 31),
        (BYPASSED, (), 5, 4),
        (BYPASSED, (), 2, 0),
        (BYPASSED, (), 1, 0),
        (BYPASSED, range(2, 40), 40, 0),  # the model is called as it should be
        (BYPASSED, range(2, 3), 40, 0),
        (NOT_SYNCED, (), 32, 31),
        (NOT_SYNCED, (), 150, 100),
        (NOT_SYNCED, range(32, 97, 32), 96, 0),  # local SGD
        ("", (), 90, 0),  # post-local SGD, by a hook, or no DDP
        ("", (), 150, 100),
    ],
)
def test_a_model_of_ddp_that_is_not_called_is_reported(
    group: Group,
    remedy: str,
    exchanged_at: Sequence[int],
    steps: int,
    alone: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DDP has broadcast the parameters: there were collectives before the first step."""
    monkeypatch.setattr(unsynchronized, "_remedy_of_ddp", lambda optimizer: remedy)
    counter = ExchangeCounter(0)
    group.count = 3
    found = []
    for step in range(1, steps + 1):
        group.count += step in exchanged_at
        counter.note_step(group)
        found.append(counter.warning(step, is_over=False))
    found.append(counter.warning(steps, is_over=True))
    assert not counter.warning(steps, is_over=True)
    said = [text for text in found if text]
    assert [int(text.split()[0]) for text in said] == [alone] * (alone > 0)
    assert all(text.endswith(remedy) for text in said)


def test_what_a_destroyed_group_exchanged_counts(group: Group) -> None:
    counter = ExchangeCounter(0)
    group.count = 8
    counter.keep_counts()
    sys.modules["torch.distributed.distributed_c10d"]._world.pg_map.clear()
    assert not counter.warning(4, is_over=True)


def test_backends_that_do_not_count_and_calls_of_horovod(group: Group) -> None:
    group.count = -1
    assert not ExchangeCounter(0).warning(50, is_over=True)
    group.count = 0
    horovods = ExchangeCounter(0)
    horovods.add_call()
    assert not horovods.warning(50, is_over=True)


@pytest.mark.parametrize(
    ("is_compiled", "backend", "steps_of_torch", "remedy"),
    [
        (True, "torch", 0, "compile the model with hvd.DistributedOptimizer(optimizer)"),
        (True, "torch", 1, "as the gang's rendezvous says"),  # another model is trained
        (True, "tensorflow", 0, "as the gang's rendezvous says"),
        (False, "torch", 0, "as the gang's rendezvous says"),
    ],
)
def test_a_model_that_keras_trains_is_to_be_compiled_with_another_optimizer(
    is_compiled: bool,
    backend: str,
    steps_of_torch: int,
    remedy: str,
    group: Group,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keras = ModuleType("keras")
    keras.Model = type("Model", (), {"compiled": is_compiled})  # type: ignore[attr-defined]
    keras.config = SimpleNamespace(backend=lambda: backend)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "keras", keras)
    model, counter = keras.Model(), ExchangeCounter(0)
    model.fitted = []  # the garbage collector has objects that refer to others only
    counter.join_advice = "as the gang's rendezvous says"
    for _ in range(steps_of_torch):
        counter.note_step(group)
    assert counter.warning(10, is_over=False).endswith(remedy)


def test_one_rank_trains_alone_by_right(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not ExchangeCounter(0).warning(50, is_over=True)
