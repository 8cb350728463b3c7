"""Params of ``TorchEstimator``, the features of its model, and the rows that its trainings share."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import torch
from IPython.core.events import EventManager, available_events

import hydrogen_magic as hm
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver import launcher
from hydrogen_magic.errors import GangStoppedError, HydrogenError, InferError, PlacementError
from hydrogen_magic.node.dataset_handle import DatasetHandle
from hydrogen_magic.node.prediction.ddl import parse_schema
from hydrogen_magic.node.prediction.torch_model import FeatureColumns, ModelPredict
from hydrogen_magic.spark import TorchEstimator, rows
from hydrogen_magic.spark import estimator as estimator_of_spark
from hydrogen_magic.spark.persistence import unpickled
from hydrogen_magic.spark.rows import RowSpec, SharedRows, TrainingRows
from hydrogen_magic.spark.trainings import Trainings

MODEL = torch.nn.Linear(2, 1)


def train(model: Any, data: Any, epochs: int, lr: float, momentum: float = 0.5) -> None: ...


def train_with_any(model: Any, data: Any, **options: Any) -> None: ...


# ── Params ───────────────────────────────────────────────────────────────────────────────────────


def arguments(estimator: TorchEstimator) -> dict[str, Any]:
    return estimator._arguments(estimator.getOrDefault("train"))


def test_parameters_of_train_are_params() -> None:
    estimator = TorchEstimator(train=train, lr=0.1, epochs=3)
    assert arguments(estimator) == {"epochs": 3, "lr": 0.1}
    changed = estimator.copy({estimator.lr: 0.2, estimator.momentum: 0.9, estimator.epochs: 1})
    assert arguments(changed) == {"epochs": 1, "lr": 0.2, "momentum": 0.9}
    assert arguments(estimator) == {"epochs": 3, "lr": 0.1}, "the original stays"
    assert arguments(TorchEstimator(train=train_with_any, width=8)) == {"width": 8}
    assert arguments(TorchEstimator(train=lambda model, data, epochs: None)) == {"epochs": 1}
    ten = TorchEstimator(train=lambda model, data, epochs=10: None)
    assert arguments(ten) == {} and arguments(ten.setParams(epochs=2)) == {"epochs": 2}
    sizes = TorchEstimator(train=lambda model, data, seed=7, np=1: None, np=3)
    assert arguments(sizes) == {"seed": 0, "np": 3}, "as the gang has"


def test_train_may_take_the_model_and_data_among_others() -> None:
    """As the function of a decorator does."""

    def decorated(*args: Any, lr: float = 0.1) -> None: ...

    def partly(model: Any, *args: Any, lr: float = 0.1, **options: Any) -> None: ...

    for each in (decorated, partly):
        assert arguments(TorchEstimator(train=each)) == {}
        assert arguments(TorchEstimator(train=each, lr=0.2)) == {"lr": 0.2}
    assert arguments(TorchEstimator(train=lambda *args: None)) == {}


def test_environment_variables_are_neither_explained_nor_saved() -> None:
    options = {"env": {"HF_TOKEN": "hf_secret"}, "retries": 1}
    estimator = TorchEstimator(train=train, options=options)
    assert "current: {'retries': 1}" in estimator.explainParams()
    saved = estimator.write()._instance
    assert saved.uid == estimator.uid and saved.getOrDefault("options") == {"retries": 1}
    assert estimator.getOrDefault("options") == options


def test_types_of_predictions_are_valid_in_the_schema_of_the_model() -> None:
    box = pa.struct({"top left": pa.list_(pa.decimal128(20, 2)), "a`b": pa.timestamp("us", "UTC")})
    schema = pa.schema({"": pa.int64(), "is_new": pa.bool_(), "box": box})
    types = estimator_of_spark._types_of(schema.serialize().to_pybytes())
    assert (types[""], types["is_new"]) == ("double", "boolean")
    assert parse_schema(f"box {types['box']}").field("box").type == box


def test_none_is_the_default_of_a_param() -> None:
    given: dict[str, Any] = dict.fromkeys(["model", "train", "options", "validation", "np", "gpu"])
    estimator = TorchEstimator(**given)
    assert estimator.getOrDefault("np") == 2 and not estimator.isDefined("train")
    assert "options: further options" in estimator.explainParams()
    assert estimator.write()._instance is estimator
    assert estimator.setParams(np=3, gpu=True).setParams(np=None, gpu=None).getOrDefault("np") == 2
    assert not estimator.isSet("gpu")
    of_grid = estimator.copy({estimator.options: None})
    assert of_grid.write()._instance.getOrDefault("options") == {}
    assert arguments(TorchEstimator(train=train, epochs=None, lr=None)) == {"epochs": 1, "lr": None}


REFUSED: dict[str, tuple[Mapping[str, Any], str]] = {
    "rank count": ({"np": 0}, r"np should be 1 or more ranks, got 0$"),
    "fraction": ({"validation": 1.5}, r"validation should be a fraction between 0 and 1, or the"),
    "type": ({"epochs": "3"}, r"epochs should be 1 or more epochs, got str$"),
    "class": ({"model": torch.nn.Linear}, r"model should be an instance of .*, got class Linear$"),
    "columns": ({"featuresCols": ["a", "a"]}, r"featuresCols should be a list of different names"),
    "option": ({"options": {"gpus": 2}}, r"options should be a dict of options .*\(env, retries"),
    "unknown": ({"train": train, "ir": 0.1}, r"has a parameter 'ir'; .*did you mean lr\?"),
    "no train": ({"lr": 0.1}, r"neither TorchEstimator nor train has a parameter 'lr'"),
    "no data": ({"train": lambda model: None}, r"train\(model\) cannot be called with a model and"),
    "attribute": ({"train": lambda model, data, fit: None}, r"parameter 'fit', which is an attrib"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_values_are_named(case: str) -> None:
    given, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=message):
        TorchEstimator(**given)


def test_what_train_needs_is_checked_before_rows_are_written() -> None:
    for given, message in (
        ({"train": train}, "TorchEstimator has no model: set TorchEstimator(model=…)"),
        ({"model": MODEL, "train": train}, "train has a parameter 'lr' without a value"),
        (
            {"model": MODEL, "train": lambda model, data: None, "epochs": 2},
            "epochs=2 has no effect, since train has no parameter 'epochs'",
        ),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            TorchEstimator(**given)._fit(None)
    estimator = TorchEstimator(model=MODEL, train=train_with_any)
    grid = [{}, {estimator.train: lambda model, data, depth: None}]
    with pytest.raises(ValueError, match="parameter 'depth' without a value: give it a default"):
        estimator.fitMultiple(None, grid)


def test_the_gang_is_planned_with_all_options(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[JobSpec] = []

    def refuse(spec: JobSpec) -> None:
        planned.append(spec)
        raise PlacementError("no room")

    monkeypatch.setattr(launcher, "plan", refuse)
    options: dict[str, Any] = {"wait": 600.0, "pack": True, "env": {"A": "1"}, "quiet": True}
    estimator = TorchEstimator(
        model=MODEL, train=train_with_any, np=3, on="spark", gpu=False, options=options
    )
    with pytest.raises(PlacementError, match="no room"):
        estimator._fit(None)
    with pytest.raises(PlacementError, match="no room"):
        hm.run(len, "", np=3, on="spark", gpu=False, **options)
    (spec, same) = planned
    assert spec == same and (spec.wait_s, spec.pack, spec.env) == (600.0, True, (("A", "1"),))


# ── trainings ────────────────────────────────────────────────────────────────────────────────────


class Running:
    """A gang that runs until it is stopped."""

    is_stopped = False

    def wait(self, timeout: float) -> bool:
        return self.is_stopped

    def stop(self) -> None:
        self.is_stopped = True


def test_a_failure_ends_the_other_trainings() -> None:
    """Also one whose gang is launched meanwhile."""
    gangs = [Running(), Running()]

    def fit(number: int, launched: Any) -> str:
        launched(gangs[number])
        if number == 0:
            with pytest.raises(ValueError, match="on purpose"):
                next(trainings)
        raise ValueError("on purpose")

    trainings = Trainings(fit, 3)
    with pytest.raises(ValueError, match="on purpose"):
        next(trainings)
    assert all(gang.is_stopped for gang in gangs)
    with pytest.raises(GangStoppedError, match="another training of the same call has failed"):
        next(trainings)
    with pytest.raises(StopIteration):
        next(trainings)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError(), None])
def test_trainings_end_with_an_interrupted_cell(
    error: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell: Any = SimpleNamespace()
    shell.events = EventManager(shell, available_events)
    monkeypatch.setattr("hydrogen_magic.spark.trainings.shell_here", lambda: shell)
    gang: Any = Running()

    def fit(number: int, launched: Any) -> None:
        launched(gang)
        shell.events.trigger("post_run_cell", SimpleNamespace(error_in_exec=error))

    next(Trainings(fit, 2))
    assert gang.is_stopped == isinstance(error, KeyboardInterrupt)
    assert shell.events.callbacks["post_run_cell"] == []


def test_a_search_holds_no_model_of_a_training_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While its cell still runs."""
    shell: Any = SimpleNamespace()
    shell.events = EventManager(shell, available_events)
    monkeypatch.setattr("hydrogen_magic.spark.trainings.shell_here", lambda: shell)
    ended = []

    def fit(number: int, launched: Any) -> None:
        gang: Any = Running()
        launched(gang)
        ended.append(weakref.ref(gang))

    trainings = Trainings(fit, 2)
    next(trainings)
    assert shell.events.callbacks["post_run_cell"]
    next(trainings)
    assert not shell.events.callbacks["post_run_cell"]
    gc.collect()
    assert [gang() for gang in ended] == [None, None]


# ── features ─────────────────────────────────────────────────────────────────────────────────────


class WithDict(torch.nn.Module):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return batch["a"] + batch["v"].sum(1)


class WithArguments(torch.nn.Module):
    def forward(self, a: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return a + v.sum(1)


def batch() -> dict[str, Any]:
    return {
        "a": torch.tensor([1, 2]),
        "v": torch.tensor([[3.0, 4.0], [5.0, 6.0]]),
        "image": torch.zeros(2, 4, 4),
    }


def test_features_are_what_forward_takes() -> None:
    together = FeatureColumns(torch.nn.Linear(3, 1).double(), ["v", "a"]).of(batch())
    assert together.dtype == torch.float64 and together.tolist() == [[3, 4, 1], [5, 6, 2]]
    assert FeatureColumns(torch.nn.Conv1d(4, 1, 1), ["image"]).of(batch()).shape == (2, 4, 4)
    indices = FeatureColumns(torch.nn.Embedding(3, 2), ["a"]).of(batch())
    assert indices.dtype == torch.int64 and indices.tolist() == [[1], [2]]
    for model in (WithDict(), WithArguments()):
        columns = FeatureColumns(model, ["a", "v"])
        features = columns.of(batch())
        assert list(features) == ["a", "v"] and columns.call(model, features).tolist() == [8, 13]
    with pytest.raises(Exception, match=r"a \(\), image \(4, 4\) cannot be put side by side"):
        FeatureColumns(MODEL, ["a", "image"]).of(batch())


@pytest.mark.parametrize("model", [MODEL, WithDict()])
def test_columns_that_are_no_tensor_are_named(model: torch.nn.Module) -> None:
    ragged = {**batch(), "v": [torch.ones(1), torch.ones(2)]}
    with pytest.raises(InferError, match="arrays of column 'v' differ in length"):
        FeatureColumns(model, ["a", "v"]).of(ragged)
    empty = {**batch(), "v": torch.zeros(2, 0)}
    with pytest.raises(InferError, match="column 'v' has no number in a batch"):
        FeatureColumns(model, ["a", "v"]).of(empty)
    without_rows = {"a": torch.zeros(0), "v": torch.zeros(0, 2)}
    FeatureColumns(model, ["a", "v"]).of(without_rows)


def test_a_model_predicts_in_eval_mode() -> None:
    model = torch.nn.Sequential(torch.nn.Dropout(1.0), torch.nn.Flatten(0))
    table = pa.table({"a": [1, 2], "other": ["x", "y"]})
    found = ModelPredict(model, ["a"], "p", None)(table)
    assert found["p"].tolist() == [1, 2] and not model.training
    both = ModelPredict(model, ["a"], "p", lambda model, features: {"x": features, "y": 1})(table)
    assert list(both) == ["x", "y"]
    assert ModelPredict(model, ["a"], "p", lambda model, features: None)(table) is None


def test_models_of_doubles_get_all_digits() -> None:
    model = torch.nn.Linear(2, 1, bias=False).double()
    model.weight.data = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    table = pa.table({"n": [2**24 + 1, 2**53 - 1], "x": pa.array([0.1, 0.2], pa.float32())})
    assert ModelPredict(model, ["n", "x"], "p", None)(table)["p"].tolist() == [
        [2**24 + 1],
        [2**53 - 1],
    ]
    columns = FeatureColumns(model, ["n"])
    assert columns.label(torch.tensor(0.1, dtype=torch.float64)).item() == 0.1
    rounded = FeatureColumns(MODEL, ["n"]).label(torch.tensor(0.1, dtype=torch.float64))
    assert rounded.dtype == torch.float32


def test_nulls_among_integers_are_refused_where_a_model_predicts() -> None:
    with pytest.raises(
        ValueError, match=r"^column 'a' is int64 and has nulls, .* in the DataFrame$"
    ):
        ModelPredict(MODEL, ["a"], "p", None)(pa.table({"a": [1, None]}))


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labels of the rows that are written and not yet deleted."""
    left: list[str] = []

    def write(frame: Any, spec: RowSpec) -> TrainingRows:
        left.append(spec.label)
        if spec.label == "fails":
            raise RuntimeError
        return TrainingRows(DatasetHandle("", 1, 1, (), _remove=lambda: left.remove(spec.label)))

    monkeypatch.setattr(rows, "_write", write)
    return left


def spec(label: str) -> RowSpec:
    return RowSpec(("a",), label, None, True, 0, None)


def test_rows_that_cannot_be_deleted_cost_no_model() -> None:
    deleted: list[str] = []

    def refuse() -> None:
        raise PermissionError("AccessDenied")

    training = DatasetHandle("s3://bucket/rows", 1, 1, (), _remove=refuse)
    validation = DatasetHandle("", 1, 1, (), _remove=lambda: deleted.append("validation"))
    with pytest.warns(UserWarning, match="rows in s3://bucket/rows could not be deleted: Perm"):
        TrainingRows(training, validation).delete()
    assert deleted == ["validation"]


def test_trainings_share_rows_and_the_last_one_deletes_them(written: list[str]) -> None:
    shared = SharedRows(None, [spec("x"), spec("x"), spec("y")])
    with shared.of(spec("x")) as first:
        pass
    with shared.of(spec("y")), shared.of(spec("x")) as second:
        assert second is first and written == ["x", "y"]
    assert written == []


def test_rows_are_deleted_when_a_training_has_failed(written: list[str]) -> None:
    """As soon as no other training uses them."""
    shared = SharedRows(None, [spec("x"), spec("x"), spec("x"), spec("y")])

    def fit(number: int, launched: Any) -> None:
        with shared.of(spec("x")):
            if number == 0:
                with shared.of(spec("y")):
                    pass
                with pytest.raises(RuntimeError):
                    next(trainings)
                assert written == ["x"]
            raise RuntimeError

    trainings = Trainings(fit, 3, shared.cancel)
    with pytest.raises(RuntimeError):
        next(trainings)
    assert written == []


def test_nothing_is_written_after_a_failure(written: list[str]) -> None:
    """Nor is a gang launched with what was written meanwhile."""
    shared = SharedRows(None, [spec("fails"), spec("fails")])
    for error in (RuntimeError, GangStoppedError):
        with pytest.raises(error), shared.of(spec("fails")):
            pass
    assert written == ["fails"]


def test_a_training_that_is_cancelled_while_rows_are_written_does_not_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deleted = []

    def write(frame: Any, spec: RowSpec) -> TrainingRows:
        shared.cancel()
        return TrainingRows(DatasetHandle("", 1, 1, (), _remove=lambda: deleted.append(spec)))

    monkeypatch.setattr(rows, "_write", write)
    shared = SharedRows(None, [spec("x"), spec("x")])
    with pytest.raises(GangStoppedError), shared.of(spec("x")):
        pytest.fail("the training has begun")
    assert deleted == [spec("x")]


def test_rows_of_trainings_that_never_begin_are_deleted(written: list[str]) -> None:
    gc.freeze()  # the collection below looks at what is made here
    shared = SharedRows(None, [spec("x"), spec("x")])
    with pytest.raises(RuntimeError), shared.of(spec("x")):
        raise RuntimeError
    assert written == ["x"]
    del shared
    gc.collect()
    assert written == []


def test_a_model_of_another_version_says_so() -> None:
    for name in ("hydrogen_magic.gone", "hydrogen_magic.errors"):
        with pytest.raises(HydrogenError, match=r"^/saved was .* another version"):
            unpickled(f"c{name}\nrestore\n.".encode(), "/saved")
    with pytest.raises(ImportError):
        unpickled(b"cmine\nNet\n.", "/saved")
