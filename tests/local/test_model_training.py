"""What a rank of ``TorchEstimator`` runs, on rows that need no Spark."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pandas as pd
import pytest
import torch

import hydrogen_magic as hm
from hydrogen_magic.errors import InferError
from hydrogen_magic.node.worker.model_training import TrainingTask, train_on_rank
from tests import estimator_ranks
from tests.gangs import ended


def task(rows: Any, **changes: Any) -> TrainingTask:
    given = {
        "train": lambda model, data: None,
        "model": torch.nn.Linear(2, 1),
        "parameters": {},
        "rows": rows,
        "validation": None,
        "features": ("a", "b"),
        "label": "label",
        "batch_size": 4,
        "shuffle": True,
        "seed": 0,
        "predict": None,
    }
    return TrainingTask(**{**given, **changes})


@pytest.fixture
def rows() -> Any:
    frame = pd.DataFrame({"a": range(10), "b": [0.5] * 10, "label": range(10)})
    with hm.dataset(frame) as handle:
        yield handle


def test_a_column_that_the_frame_has_is_refused_before_the_training(rows: Any) -> None:
    def trains(model: Any, data: Any) -> None:
        pytest.fail("it has trained")

    for taken, predict, message in (
        ("Prediction", None, "'Prediction': drop it, or choose another name with predictionCol"),
        (
            "score",
            lambda model, x: {"score": x[:, 0]},
            "'score': drop it, or give it another name in",
        ),
    ):
        given = {"train": trains, "predict": predict, "taken": ("a", "b", "label", taken)}
        with pytest.raises(ValueError, match=message):
            train_on_rank(task(rows, **given))
    assert train_on_rank(task(rows, taken=("Prediction",), is_case_sensitive=True)) is not None


def test_a_type_that_the_model_cannot_declare_is_refused_before_the_training(rows: Any) -> None:
    def trains(model: Any, data: Any) -> None:
        pytest.fail("it has trained")

    wait = dt.timedelta(seconds=1)
    for predict, column in (
        (lambda model, x: [wait] * len(x), ""),
        (lambda model, x: {"times": [{"wait": wait}] * len(x)}, "> in column 'times'"),
    ):
        with pytest.raises(InferError, match=rf"duration\[us\]{column}, which TorchModel does not"):
            train_on_rank(task(rows, train=trains, predict=predict))


def test_epochs_have_orders_of_their_own(rows: Any) -> None:
    """As in a plain process, which is the only rank."""
    orders = []

    def train(model: Any, data: Any) -> None:
        assert model.training and data.n_rows == 10 and len(data) == len(data.validation) == 3
        orders.extend(
            [label.tolist() for _, label in each] for each in (data, data, data.validation)
        )
        for features, label in data:
            assert features.dtype == torch.float32 and label.dtype == torch.int64
            assert features[:, 0].tolist() == label.tolist()

    trained = train_on_rank(task(rows, train=train, validation=rows))
    assert trained is not None and not trained.model.weight.is_cuda
    first, second, validation = ([x for batch in order for x in batch] for order in orders)
    assert sorted(first) == sorted(second) == validation == list(range(10))
    assert first != second != validation


def test_a_predicted_column_with_the_name_of_a_feature(rows: Any) -> None:
    chosen = task(rows, predict=lambda model, features: {"a": features[:, 0] + 1})
    with pytest.raises(InferError, match=r"'a' that differs from the frame's: do not change that"):
        train_on_rank(chosen)


def test_rows_that_a_rank_does_not_see(rows: Any) -> None:
    chosen = task(rows)
    rows.delete()
    with pytest.raises(FileNotFoundError, match=r"set TorchEstimator\(dataPath=…\) with a folder"):
        train_on_rank(chosen)


@pytest.mark.exhaustive
def test_a_model_that_is_sharded_over_the_ranks_comes_back_whole(rows: Any) -> None:
    model = torch.nn.Linear(2, 4)
    chosen = task(rows, train=estimator_ranks.train_sharded, model=model)
    found = ended(hm.launch(train_on_rank, chosen, np=2, gpu=False)).result.model
    for before, after in zip(model.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(after, before + 45.0)
