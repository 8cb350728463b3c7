"""What a rank reports of training libraries by itself: the real ones, tiny models, no network.

They are slow to import, so one process, which is a rank, imports them all; the tests read its reports.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import hydrogen_magic as hm
from hydrogen_magic.core import events as ev
from tests import library_ranks
from tests.observed import Curves, Ended, curves, start

LIBRARIES = (
    "accelerate",
    "keras",
    "lightning",
    "pytorch_lightning",
    "tensorboard",
    "tensorboardX",
    "transformers",
)
MISSING = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
TIMEOUT_S = 250.0

pytestmark = pytest.mark.timeout(TIMEOUT_S + 50)


@dataclasses.dataclass(frozen=True)
class Reported:
    """What one library printed, and what the rank reported of it."""

    printed: str
    events: list[ev.Event]

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def curves(self) -> Curves:
        return curves(self.events)

    @property
    def steps(self) -> dict[str, list[int]]:
        """The steps of each metric, in their order."""
        return {name: sorted(points) for name, points in self.curves.items()}

    @property
    def warnings(self) -> list[str]:
        return [notice.text for notice in self.of(ev.Notice) if notice.level == "warning"]

    def bars(self, title: str = "") -> list[tuple[float, float | None]]:
        """How far the bars with such a title came in the end, and out of how much."""
        last = {bar.bar: bar for bar in self.of(ev.Progress)}
        assert all(bar.closed for bar in last.values())
        return [(b.n, b.total) for _, b in sorted(last.items()) if b.desc.startswith(title)]


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Reported]:
    """The reports of every library, by its name; they all ran in one process."""
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}")
    file = tmp_path_factory.mktemp("libraries") / "events.json"
    code = "".join(f"{code}\nend({name!r})\n" for name, code in CODE.items())
    ended = Ended(start(BEGIN + END + code, file, KERAS_BACKEND="torch"), file, TIMEOUT_S)
    assert not set("━\x1b\r") & set(ended.stderr)
    printed = iter(ended.stdout.split("the end of one\n"))
    events, sections = list[ev.Event](), {}
    for event in ended.events:
        events.append(event)
        if isinstance(event, ev.Notice) and event.text in CODE:
            sections[event.text] = Reported(next(printed), events)
            events = []
    return sections


BEGIN = f"""
for unused in ("datasets", "pandas", "sklearn"):
    sys.modules[unused] = None  # Transformers does without them, and imports them for seconds
import torch, tqdm.auto
import torch.distributed as dist
assert dist.all_reduce.__wrapped__, "observers attach in the middle of torch's import"
assert not set({LIBRARIES!r}) & set(sys.modules), "observers import no library"
assert not sent, sent
"""
END = """
import tempfile, warnings
warnings.simplefilter("ignore")
def end(library):
    print("the end of one")
    rank.post(ev.Notice(0.0, "info", library))
"""

# ── SummaryWriter ────────────────────────────────────────────────────────────────────────────────

WRITERS = """
import numpy as np
import tensorboardX
from torch.utils import tensorboard
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

class Mine(tensorboard.SummaryWriter):
    pass

for kind, name in ((Mine, "torch"), (tensorboardX.SummaryWriter, "x")):
    root = tempfile.mkdtemp()
    train, val = kind(f"{root}/train"), kind(f"{root}/val")
    for step in range(3):
        train.add_scalar(f"{name}/loss", torch.tensor(1.0 * step, requires_grad=True), step)
        val.add_scalar(f"{name}/loss", np.float32(10 + step), global_step=np.int64(step))
        train.add_scalars(f"{name}/both", {"a": step, "b": -step}, step)
        train.add_scalar(tag=f"{name}/uncounted", scalar_value=step)
    train.add_hparams({"lr": 0.1}, {"hparam/result": 1.0})
    train.add_text(f"{name}/text", "no number", 0)
    try:
        train.add_scalar(f"{name}/bad", "no number", 0)
    except (TypeError, ValueError):
        print("refused as ever")
    train.close(), val.close()
    files = EventAccumulator(f"{root}/train").Reload()
    assert [event.value for event in files.Scalars(f"{name}/loss")] == [0.0, 1.0, 2.0]
"""


def test_writers_make_curves_and_go_on_writing(reported: Mapping[str, Reported]) -> None:
    writers = reported["tensorboard"]
    expected: Curves = {}
    for name in ("torch", "x"):
        expected |= {
            f"{name}/loss": {0: 0.0, 1: 1.0, 2: 2.0},
            f"val/{name}/loss": {0: 10.0, 1: 11.0, 2: 12.0},
            f"{name}/both/a": {0: 0.0, 1: 1.0, 2: 2.0},
            f"{name}/both/b": {0: 0.0, 1: -1.0, 2: -2.0},
            f"{name}/uncounted": {0: 0.0, 1: 1.0, 2: 2.0},
        }
    assert (writers.curves, writers.printed) == (expected, "refused as ever\n" * 2)
    assert writers.warnings == []


# ── Accelerate ───────────────────────────────────────────────────────────────────────────────────

ACCELERATE = """
from accelerate import Accelerator

plain = Accelerator(cpu=True)
for step in range(3):
    plain.log({"loss": torch.tensor(1.0 * step), "note": "no number", "grid": [1, 2]}, step=step)
    plain.log({"uncounted": step})
tracked = Accelerator(cpu=True, log_with="tensorboard", project_dir=tempfile.mkdtemp())
tracked.init_trackers("project")
tracked.log({"accuracy": 0.5, "by_class": {"cat": 1, "dog": 0}}, step=7)
tracked.get_tracker("tensorboard", unwrap=True).add_scalar("direct", 1.0, 7)
tracked.end_training()
plain.log(None)
assert plain.log({"after": 1.0}, 8) is None
"""


def test_accelerate_needs_no_tracker_and_is_seen_once(reported: Mapping[str, Reported]) -> None:
    assert reported["accelerate"].curves == {
        "loss": {0: 0.0, 1: 1.0, 2: 2.0},
        "uncounted": {0: 0.0, 1: 1.0, 2: 2.0},
        "accuracy": {7: 0.5},
        "by_class/cat": {7: 1.0},
        "by_class/dog": {7: 0.0},
        "direct": {7: 1.0},
    }
    # Of log(None), which Accelerate without trackers takes.
    [warning] = reported["accelerate"].warnings
    assert "accelerate runs, but cannot be observed (AttributeError" in warning


# ── Lightning ────────────────────────────────────────────────────────────────────────────────────

LIGHTNING = """
import pickle
import lightning.pytorch, pytorch_lightning
from torch.utils.data import DataLoader, TensorDataset

class Steps:
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.save_hyperparameters()

    def training_step(self, batch, index):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        if index % 2 == 0:
            self.log("even", float(index))
        if self.logger:
            self.logger.experiment.add_scalar("mine", index, self.global_step)
        for logger in self.loggers:
            logger.log_metrics({"direct": index, "two": {"a": index}}, self.global_step)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.layer(batch[0]).mean())

    def test_step(self, batch, index):
        self.log("test_loss", 1.0)

    def predict_step(self, batch, index):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

L = lightning.pytorch
class Model(Steps, L.LightningModule):
    pass
data = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=4)
options = dict(
    accelerator="cpu", max_epochs=2, enable_model_summary=False, enable_checkpointing=False,
    log_every_n_steps=2, default_root_dir=tempfile.mkdtemp(),
)
kinds = L.loggers.TensorBoardLogger, L.loggers.CSVLogger
added = dict(
    logger=[kind(tempfile.mkdtemp()) for kind in kinds], callbacks=L.callbacks.LearningRateMonitor()
)
model, trainer = Model(), L.Trainer(**options, **added)  # whose default bar is rich
trainer.fit(model, data, data)
trainer.test(model, data, verbose=False)
trainer.predict(model, data)
[ours] = [c for c in trainer.callbacks if type(c).__name__ == "HydrogenCallback"]
assert type(pickle.loads(pickle.dumps(ours))) is type(ours)
"""

LIGHTNING_AGAIN = """
L = pytorch_lightning
class Model(Steps, L.LightningModule):
    pass
options |= dict(max_epochs=-1, max_steps=3, logger=False)
again = L.Trainer(callbacks=L.callbacks.TQDMProgressBar(), **options)
again.fit(Model(), data)
silent = L.Trainer(enable_progress_bar=False, **options)
silent.test(Model(), data, verbose=False)
assert L.Trainer(barebones=True, max_epochs=1).callbacks == []
"""


def test_lightning_logs_once_with_a_logger_of_its_own(reported: Mapping[str, Reported]) -> None:
    seen = reported["lightning"].curves
    assert reported["lightning"].steps == {
        "loss_step": list(range(8)),  # each step's, though loggers get every second
        "loss_epoch": [3, 7],
        "even": [0, 2, 4, 6],
        "val_loss": [3, 7],
        "test_loss": [8],
        "mine": list(range(8)),  # what the user's own code writes, at the user's steps
        "direct": list(range(8)),  # passed to each of two loggers
        "two/a": list(range(8)),
        "lr-SGD": [0, 1, 3, 4, 5, 7],
    }
    assert seen["loss_epoch"][3] == pytest.approx(sum(seen["loss_step"][i] for i in range(4)) / 4)
    assert seen["even"] == {0: 0.0, 2: 2.0, 4: 0.0, 6: 2.0}


def test_a_rich_bar_is_shown_and_not_drawn(reported: Mapping[str, Reported]) -> None:
    lightning = reported["lightning"]
    assert lightning.printed == ""
    assert lightning.bars("Epoch 1/1") == [(4.0, 4.0)]
    assert lightning.bars("Sanity check") == [(2.0, 2.0)]
    assert lightning.bars("Validation") == [(4.0, 4.0)] * 2
    assert lightning.bars("Test") == lightning.bars("Predict") == [(4.0, 4.0)]
    assert (lightning.warnings, lightning.of(ev.Steps)[-1].count) == ([], 8)


def test_pytorch_lightning_and_its_tqdm_bar(reported: Mapping[str, Reported]) -> None:
    again = reported["pytorch_lightning"]
    assert again.steps == {
        "loss_step": [0, 1, 2],
        "even": [0, 2],
        "loss_epoch": [2],
        "test_loss": [0],
    }
    assert again.bars() == [(3.0, 3.0)]  # tqdm's own, and no other
    assert "loss_step=" in again.of(ev.Progress)[-1].desc
    assert (again.printed, again.warnings) == ("", [])


# ── Transformers ─────────────────────────────────────────────────────────────────────────────────

TRANSFORMERS = """
import pickle
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

config = BertConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                    intermediate_size=8, num_labels=2)
data = [{"input_ids": torch.arange(6) + i, "labels": i % 2} for i in range(16)]
arguments = TrainingArguments(
    tempfile.mkdtemp(), num_train_epochs=2, per_device_train_batch_size=4, logging_steps=2,
    per_device_eval_batch_size=4, eval_strategy="epoch", save_strategy="no", use_cpu=True,
    report_to=["tensorboard"],
)
trainer = Trainer(
    BertForSequenceClassification(config), arguments, train_dataset=data, eval_dataset=data
)
trainer.callback_handler = pickle.loads(pickle.dumps(trainer)).callback_handler
trainer.train()
trainer.log({"mine": 1.0, "text": "no number"})
trainer.predict(data)
"""


def test_transformers_logs_once(reported: Mapping[str, Reported]) -> None:
    transformers = reported["transformers"]
    assert transformers.steps == {
        "loss": [2, 4, 6, 8],
        "grad_norm": [2, 4, 6, 8],
        "learning_rate": [2, 4, 6, 8],
        "eval_loss": [4, 8],
        "mine": [8],
    }
    assert transformers.bars() == [
        (8.0, 8.0),
        (4.0, 4.0),
        (4.0, 4.0),
        (4.0, 4.0),
    ]  # tqdm's, no more
    assert transformers.warnings == []


# ── Keras ────────────────────────────────────────────────────────────────────────────────────────

KERAS = """
import pickle
import numpy as np
import keras

without_model = keras.callbacks.CallbackList()  # for a loop of the user
without_model.on_train_begin()
without_model.on_epoch_begin(0)
without_model.on_train_batch_end(0)
without_model.on_epoch_end(0)
without_model.on_train_end()
assert len(pickle.loads(pickle.dumps(without_model)).callbacks) == 1

x = np.ones((32, 4), "float32")
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=["mae"])
model.fit(x, x[:, :1], batch_size=8, epochs=2, validation_data=(x, x[:, :1]))
slower = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
model.fit(x, x[:, :1], batch_size=8, callbacks=[slower])
model.evaluate(x, x[:, :1], batch_size=8)
model.predict(x, batch_size=8)
print("asked for")
model.fit(x, x[:, :1], batch_size=8, verbose=2)
model.evaluate(x, x[:, :1], batch_size=8, verbose=1, callbacks=[])
print("silent")
model.fit(x, x[:, :1], batch_size=8, verbose=0)
"""


def test_keras_counts_steps_over_epochs_and_fits(reported: Mapping[str, Reported]) -> None:
    assert reported["keras"].steps == {
        "loss": list(range(20)),
        "mae": list(range(20)),
        "val_loss": [3, 7],
        "val_mae": [3, 7],
        "learning_rate": [11],
        "test_loss": [12, 16],
        "test_mae": [12, 16],
    }
    counts = [event.count for event in reported["keras"].of(ev.Steps)]
    before = [event.count for event in reported["transformers"].of(ev.Steps)]
    assert counts[-1] - before[-1] == 19  # the first of another optimizer ends no step
    assert reported["keras"].warnings == []


def test_keras_prints_what_was_asked_for_only(reported: Mapping[str, Reported]) -> None:
    keras = reported["keras"]
    unasked, asked = keras.printed.split("asked for\n")
    fitted, silent = asked.split("silent\n")
    assert (unasked, silent) == ("", "")
    assert "4/4 - " in fitted.splitlines()[0]
    assert "━" in fitted
    assert keras.bars("Epoch 2/2") == [(4.0, 4.0)]
    assert keras.bars("Epoch 1/1") == [(4.0, 4.0)] * 2
    assert keras.bars("Validation") == [(4.0, None)] * 2
    assert keras.bars("Evaluate") == [(4.0, 4.0)] * 2
    assert keras.bars("Predict") == [(4.0, 4.0)]


CODE = {
    "tensorboard": WRITERS,
    "accelerate": ACCELERATE,
    "lightning": LIGHTNING,
    "pytorch_lightning": LIGHTNING_AGAIN,
    "transformers": TRANSFORMERS,
    "keras": KERAS,
}
"""What the one process runs, in this order."""


# ── a gang ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.exhaustive
def test_every_rank_of_a_gang_reports_its_own(tmp_path: Path) -> None:
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}")
    gang = hm.launch(library_ranks.train, str(tmp_path), np=2)
    assert gang.results == [(4, 4)] * 2
    for rank in range(2):
        mine = gang.metrics[gang.metrics["rank"] == rank]
        assert sorted(mine["step"][mine["lightning_loss"].notna()]) == [0, 1, 2, 3]
        assert sorted(mine["step"][mine["loss"].notna()]) == [1, 2, 3, 4]
        bars = [e for e in gang.events() if isinstance(e, ev.Progress) and e.rank == rank]
        assert [(bar.n, bar.total) for bar in bars if bar.closed] == [(4.0, 4.0)] * 2
    assert [
        e.text for e in gang.events() if isinstance(e, ev.Notice) and e.level == "warning"
    ] == []
