"""What a rank reports of W&B, MLflow and PyTorch-Ignite by itself: the real ones, which write as ever.

``make test-all`` installs them. CLU needs TensorFlow: test_tensorflow.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from hydrogen_magic.core import events as ev
from tests import observed

pytestmark = pytest.mark.exhaustive  # these libraries are large; test_observe.py has rich and tqdm


def reported(library: str, code: str, tmp_path: Path, **env: str) -> observed.Ended:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    ended = observed.run(code, tmp_path, **env)
    assert ended.of(ev.Notice) == [], "no observer failed"
    return ended


WANDB = """
import tempfile
import wandb
os.environ.update(WANDB_MODE="offline", WANDB_DIR=tempfile.mkdtemp())
with wandb.init(settings=wandb.Settings(console="off", silent=True)) as run:
    for step in range(2):
        run.log({"first": step}, commit=False)
        wandb.log({"loss": 0.5 * step, "inner": {"a": 1, "b": {"c": 2}}, "note": "no number"})
    run.log({"loss": 5.0}, step=10)
    run.log({"histogram": wandb.Histogram([1, 2]), "next": 1})
    run.log({"last": 1})
    print(run.step, run.summary["loss"])
"""


def test_wandb_logs_over_its_own_steps(tmp_path: Path) -> None:
    ended = reported("wandb", WANDB, tmp_path)
    assert ended.curves == {
        "first": {0: 0.0, 1: 1.0},
        "loss": {0: 0.0, 1: 0.5, 10: 5.0},
        "inner.a": {0: 1.0, 1: 1.0},
        "inner.b.c": {0: 2.0, 1: 2.0},
        "next": {10: 1.0},
        "last": {11: 1.0},
    }
    assert ended.stdout == "12 5\n"


OF_TRANSFORMERS = """
import tempfile
import torch
from transformers import Trainer, TrainingArguments
os.environ.update(WANDB_MODE="offline", WANDB_DIR=tempfile.mkdtemp(), WANDB_SILENT="true")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x):
        return {"loss": self.layer(x).pow(2).mean()}

arguments = TrainingArguments(
    tempfile.mkdtemp(), max_steps=2, logging_steps=1, report_to=["wandb"], save_strategy="no",
    use_cpu=True,
)
Trainer(Model(), arguments, train_dataset=[{"x": torch.ones(2)}] * 8).train()
import wandb
print("train/loss" in wandb.run.summary.keys())
wandb.finish()
"""


def test_what_a_trainer_passes_on_is_shown_once(tmp_path: Path) -> None:
    ended = reported("wandb", OF_TRANSFORMERS, tmp_path)
    assert set(ended.curves) == {"loss", "grad_norm", "learning_rate"}
    assert "True\n" in ended.stdout


OF_KERAS = """
import tempfile
os.environ.update(WANDB_MODE="offline", WANDB_DIR=tempfile.mkdtemp())
import keras
import numpy as np
import wandb
from wandb.integration.keras import WandbMetricsLogger
x = np.ones((8, 4), "float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
with wandb.init(settings=wandb.Settings(console="off", silent=True)) as run:
    model.fit(x, x[:, :1], batch_size=4, callbacks=[WandbMetricsLogger(log_freq=1)])
    print(sorted(name for name in run.summary.keys() if "loss" in name))
"""


@pytest.mark.tensorflow  # W&B's callbacks for Keras import it
def test_what_keras_passes_on_is_shown_once(tmp_path: Path) -> None:
    ended = reported("wandb", OF_KERAS, tmp_path)
    assert set(ended.curves) == {"loss"}
    assert ended.stdout == "['batch/loss', 'epoch/loss']\n"


MLFLOW = """
import tempfile
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
import mlflow
mlflow.set_tracking_uri("file://" + tempfile.mkdtemp())
mlflow.set_experiment("mine")
with mlflow.start_run() as run:
    for step in range(2):
        mlflow.log_metric("loss", 0.5 * step, step=7 + step)
        mlflow.log_metrics(metrics={"a": step, "b": -step}, step=step)
        mlflow.log_metric("uncounted", step)
history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
print([(point.step, point.value) for point in history])
"""


@pytest.mark.parametrize("before", ["", "import mlflow"])
def test_mlflow_logs_over_given_steps(before: str, tmp_path: Path) -> None:
    ended = reported("mlflow", MLFLOW, tmp_path, IMPORTED_BEFORE=before)
    assert ended.curves == {
        "loss": {7: 0.0, 8: 0.5},
        "a": {0: 0.0, 1: 1.0},
        "b": {0: 0.0, 1: -1.0},
        "uncounted": {0: 0.0, 1: 1.0},
    }
    assert ended.stdout == "[(7, 0.0), (8, 0.5)]\n"


MLFLOW_OF_KERAS = """
import tempfile
os.environ.update(MLFLOW_ALLOW_FILE_STORE="true", KERAS_BACKEND="torch")
import keras
import mlflow
import numpy as np
from mlflow.keras import MlflowCallback
mlflow.set_tracking_uri("file://" + tempfile.mkdtemp())
mlflow.set_experiment("mine")
x = np.ones((8, 4), "float32")
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
with mlflow.start_run() as run:
    callback = MlflowCallback(log_every_epoch=True)
    model.fit(x, x[:, :1], batch_size=4, epochs=2, validation_split=0.5, callbacks=[callback])
    mlflow.log_metric("mine", 1.0, step=3)
print(sorted(mlflow.get_run(run.info.run_id).data.metrics))
"""


def test_what_keras_passes_on_to_mlflow_is_shown_once(tmp_path: Path) -> None:
    ended = reported("mlflow", MLFLOW_OF_KERAS, tmp_path)
    assert {name: list(steps) for name, steps in ended.curves.items()} == {
        "loss": [0, 1],
        "val_loss": [0, 1],
        "mine": [3],
    }
    assert ended.stdout == "['loss', 'mine', 'val_loss', 'validation_loss']\n"


IGNITE = """
import tempfile
import torch
from ignite.engine import Engine, Events
from ignite.handlers import ProgressBar, TensorboardLogger
from ignite.metrics import Average, RunningAverage
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

def engine(**metrics):
    made = Engine(lambda engine, batch: float(batch))
    for name, metric in metrics.items():
        metric.attach(made, name)
    return made

trainer = engine(mean=Average(), running=RunningAverage(output_transform=lambda x: x))
evaluator = Engine(lambda engine, batch: (batch, torch.ones(1)))
Average(output_transform=lambda output: output[0]).attach(evaluator, "mean")

@trainer.on(Events.EPOCH_COMPLETED)
def evaluate(engine):
    evaluator.run([engine.state.epoch] * 2)

def n_handlers():
    return sum(map(len, trainer._event_handlers.values()))

before = n_handlers()
trainer.run([1, 2, 3], max_epochs=2)
assert n_handlers() == before, "none is left"

folder = tempfile.mkdtemp()
logged = engine(mean=Average())
ProgressBar().attach(logged)
with TensorboardLogger(log_dir=folder) as logger:
    logger.attach_output_handler(
        logged, Events.EPOCH_COMPLETED, "logged", metric_names="all", output_transform=lambda x: x
    )
    logged.run([1, 2, 3])
[written] = EventAccumulator(folder).Reload().Scalars("logged/mean")
print(written.step, written.value)
"""


def test_ignite_has_metrics_and_progress_of_each_engine(tmp_path: Path) -> None:
    """An engine with a logger or a bar of its own is shown by that, once."""
    ended = reported("ignite", IGNITE, tmp_path)
    assert set(ended.curves) == {
        "output",
        "mean",
        "running",
        "engine2/mean",
        "logged/mean",
        "logged/output",
    }
    assert ended.curves["output"] == dict(zip(range(1, 7), [1.0, 2.0, 3.0] * 2, strict=True))
    assert ended.curves["mean"] == {3: 2.0, 6: 2.0}
    assert ended.curves["engine2/mean"] == {3: 1.0, 6: 2.0}
    assert list(ended.curves["running"]) == [*range(1, 7)]
    assert ended.curves["logged/mean"] == {1: 2.0}
    assert ended.stdout == "1 2.0\n"
    assert ended.bars == [
        ("Epoch 2/2", 3, 3, True),
        ("Evaluation", 2, 2, True),
        ("Evaluation", 2, 2, True),
        ("Iteration", 3, 3, True),
    ]


OTHER_IGNITE = """
from ignite.engine import Engine
engine = Engine(lambda engine, batch: batch)
engine.add_event_handler = None  # as if it were another version
assert engine.run([1, 2]).output == 2
"""


def test_an_engine_that_cannot_be_observed_runs(tmp_path: Path) -> None:
    pytest.importorskip("ignite", reason="ignite is not installed")
    warnings = [notice.text for notice in observed.run(OTHER_IGNITE, tmp_path).of(ev.Notice)]
    assert "ignite runs, but cannot be observed (TypeError" in warnings[0]
