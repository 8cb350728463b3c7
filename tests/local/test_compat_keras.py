"""``hydrogen_magic.compat.keras``: Keras on many ranks learns what it learns in one process from all rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import hydrogen_magic as hm
from hydrogen_magic.compat import HorovodRunner
from hydrogen_magic.compat.keras.callbacks import LearningRateScheduleCallback
from hydrogen_magic.compat.keras.jax_exchange import JaxExchange
from hydrogen_magic.core import events as ev
from hydrogen_magic.driver import known_gangs
from tests.gangs import PATIENCE_S, ended
from tests.keras_ranks import BATCH, EPOCHS, MOMENTUM, RATE, train, train_after_joining

pytestmark = pytest.mark.usefixtures("warm_agents")

IMPORTING_S = 4 * PATIENCE_S
"""For ranks that import Keras on a machine that is busy with other tests."""
N_RANKS, N_STEPS = 2, 4
X = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
Y = X @ np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)
WARMING = [
    *(RATE * (step / N_STEPS / 2 + 1) / 2 for step in range(1, 2 * N_STEPS + 1)),
    *[RATE] * N_STEPS,
]
"""The rate of each step with a warmup of two epochs."""


def in_one_process(
    begin: Any, rates: list[float], is_corrected: bool
) -> tuple[Any, Any, list[float]]:
    """Train on the batches of all ranks together, a learning rate for each step.

    ``is_corrected``: momentum is scaled as in the paper, so that what was gathered follows the rate.
    """
    kernel, bias = begin
    moments, losses, before = [0.0, 0.0], [], RATE
    size = BATCH * N_RANKS
    starts = [*range(0, len(X), size)] * EPOCHS
    for start, rate in zip(starts, rates, strict=True):
        rows = slice(start, start + size)
        error = X[rows] @ kernel + bias - Y[rows]
        losses.append(float((error**2).mean()))
        gradients = 2 * X[rows].T @ error / size, 2 * error.mean(0)
        momentum, before = MOMENTUM * (rate / before if is_corrected else 1), rate
        moments = [momentum * m - rate * g for m, g in zip(moments, gradients, strict=True)]
        kernel, bias = kernel + moments[0], bias + moments[1]
    return kernel, bias, losses


def check(results: list[Any], rates: list[float], *, is_corrected: bool = True) -> None:
    (begin, weights, state, history), (_, *others) = results
    for mine, theirs in zip((*weights, *state), (*others[0], *others[1]), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    kernel, bias, losses = in_one_process(begin, rates, is_corrected)
    np.testing.assert_allclose(weights[0], kernel, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(weights[1], bias, rtol=1e-4, atol=1e-6)
    of_epochs = np.reshape(losses, (EPOCHS, -1)).mean(1)
    np.testing.assert_allclose(history["loss"], of_epochs, rtol=1e-4)
    np.testing.assert_allclose(others[2]["loss"], of_epochs, rtol=1e-4)


def check_that_torch_averages_gradients() -> None:
    """Every rank ends with the weights and the optimizer's state of training in one process."""
    gang = ended(hm.launch(train, X, Y, np=N_RANKS, warmup_epochs=2), IMPORTING_S)
    gang.raise_for_state()
    begin, other_begin = (result[0][0] for result in gang.results)
    assert not np.allclose(begin, other_begin), "the second rank has begun elsewhere"
    check(gang.results, WARMING)
    rates = gang.results[1][3]["lr"]
    np.testing.assert_allclose(rates, WARMING[N_STEPS - 1 :: N_STEPS], rtol=1e-6)
    notices = [event.text for event in gang.events() if isinstance(event, ev.Notice)]
    assert notices == [], "such as that every rank trains a model of its own"


def test_a_number_decays_the_rate_from_start_epoch_on() -> None:
    """As in Horovod."""
    schedule = LearningRateScheduleCallback(0.1, 0.5, start_epoch=3)
    assert [schedule.multiplier(epoch) for epoch in (3, 4, 5)] == [1.0, 0.5, 0.25]


def averaged() -> dict[str, Any]:
    import keras
    import torch

    from hydrogen_magic.compat import keras as hvd

    hvd.init()
    of_classes = torch.tensor([[1.0, 2.0]]) * hvd.rank()
    logs = {"loss": 3.0 + hvd.rank(), "f1_score": of_classes, "accuracy": keras.ops.ones(())}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    return logs


@pytest.mark.exhaustive
def test_metrics_of_many_values_are_averaged() -> None:
    """Such as those of ``keras.metrics.F1Score``, one for each class."""
    environment = {"KERAS_BACKEND": "torch"}
    gang = ended(hm.launch(averaged, np=N_RANKS, env=environment), IMPORTING_S)
    gang.raise_for_state()
    for logs in gang.results:
        assert logs.pop("f1_score").tolist() == [[0.5, 1.0]]
        assert logs == {"loss": 3.5, "accuracy": 1.0}


@pytest.mark.exhaustive
def test_without_a_gang_there_is_one_rank() -> None:
    program = (
        "from tests.local.test_compat_keras import X, Y\nfrom tests.keras_ranks import train\n"
        "print(*train(X, Y, warmup_epochs=2)[3]['loss'])"
    )
    environ = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    environ["PYTHONPATH"] = os.getcwd()
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=240)
    assert done.returncode == 0, done.stderr
    first, *_, last = map(float, done.stdout.splitlines()[-1].split())
    assert last < first / 2


@pytest.mark.exhaustive
@pytest.mark.jax
@pytest.mark.parametrize("function", [train, train_after_joining])
def test_gradients_are_averaged_by_jax(function: Any) -> None:
    """Ranks begin with equal weights, and every step is one of all ranks together."""
    schedule = {"warmup_epochs": 2, "momentum_correction": False}
    gang = ended(
        hm.launch(function, X, Y, "jax", np=N_RANKS, rendezvous="jax", **schedule), IMPORTING_S
    )
    gang.raise_for_state()
    check(gang.results, WARMING, is_corrected=False)


@pytest.mark.exhaustive
def test_ranks_that_have_not_joined_by_jax_do_not_train_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keras forgets its distribution by ``keras.utils.clear_session()``, too."""
    monkeypatch.setenv("KERAS_BACKEND", "torch")  # nothing of JAX is needed to see it
    JaxExchange().average_gradients([])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"have not joined, .* call init\(\) of hydrogen_magic"):
        JaxExchange().average_gradients([])


@pytest.mark.exhaustive
@pytest.mark.horovod
def test_horovod_runners_example_trains_with_averaged_gradients() -> None:
    HorovodRunner(np=-N_RANKS).run(train, x=X, y=Y)
    check(list(known_gangs.gangs().values())[-1].results, [RATE] * EPOCHS * N_STEPS)


def test_models_of_the_notebook_travel_both_ways_and_torch_averages_gradients() -> None:
    """In a process of its own, whose agent imports Keras once for all of its ranks."""
    environ = {**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.keras_notebook"], capture_output=True, text=True, env=environ
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == dict.fromkeys(found, True)
