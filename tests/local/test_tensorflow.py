"""TensorFlow on ranks: the guide's cell, the rank's GPU, the addresses of all ranks."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

from hydrogen_magic import plugins
from hydrogen_magic.core import events as ev
from hydrogen_magic.core.job import JobSpec, Plan, Slot
from hydrogen_magic.driver import known_gangs
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.frameworks.tensorflow.node import observe
from tests import observed
from tests.local.test_observe_libraries import KERAS
from tests.site_code import ROOT, blocks

PAGE = "docs/guides/tensorflow.md"
BATCH, EPOCHS = 16, 3


def trained_in_numpy(x: Any, y: Any, weights: Any, bias: Any) -> Any:
    """Train the guide's model on whole batches, in one process; return the losses too."""
    losses = []
    for start in [*range(0, len(x), BATCH)] * EPOCHS:
        rows = slice(start, start + BATCH)
        error = x[rows] @ weights + bias - y[rows]
        losses.append(float((error**2).sum() / BATCH))
        weights = weights - 0.1 * 2 * x[rows].T @ error / BATCH
        bias = bias - 0.1 * 2 * error.sum(0) / BATCH
    return weights, bias, losses


@pytest.mark.exhaustive  # ranks import TensorFlow, which takes seconds
@pytest.mark.tensorflow
@pytest.mark.usefixtures("warm_agents")
def test_the_guides_cell_learns_what_one_process_learns(notebook_shell: InteractiveShell) -> None:
    """Each rank has its part of every batch, and gradients are summed."""
    (cell,) = (block.text for block in blocks(ROOT / PAGE) if block.language == "python")
    cell = cell.replace(
        "keras.layers.Dense(1)", "keras.layers.Dense(1, kernel_initializer='zeros')"
    )
    cell = cell.replace("model.get_weights()", "strategy.num_replicas_in_sync, model.get_weights()")
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    y = x @ np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32) + 1
    names = {"X": x, "Y": y, "BATCH": BATCH, "EPOCHS": EPOCHS}
    notebook_shell.push(names)
    notebook_shell.run_cell("import hydrogen_magic as hm").raise_error()
    done = notebook_shell.run_cell(cell)
    done.raise_error()
    n_replicas, (weights, bias) = done.result
    assert n_replicas == 2
    expected = trained_in_numpy(x, y, np.zeros((4, 1)), np.zeros(1))
    np.testing.assert_allclose(weights, expected[0], rtol=1e-4)
    np.testing.assert_allclose(bias, expected[1], rtol=1e-4)
    gang = list(known_gangs.gangs().values())[-1]
    np.testing.assert_allclose(gang.metrics.query("rank == 0")["loss"], expected[2], rtol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.tensorflow
@pytest.mark.usefixtures("warm_agents")
def test_functions_that_were_called_travel_and_are_no_conflict(
    notebook_shell: InteractiveShell,
) -> None:
    def run(cell: str) -> Any:
        done = notebook_shell.run_cell(textwrap.dedent(cell))
        done.raise_error()
        return done.result

    run("""
        import tensorflow as tf
        weight = tf.Variable(2.0)
        @tf.function(input_signature=[tf.TensorSpec([], tf.float32)])
        def step(x):
            "Doc."
            return x * weight
        assert float(step(1.0)) == 2
    """)
    cell = (
        "%%distributed --np 1 --with tensorflow --session --quiet\nfloat(step(3.0)), step.__doc__"
    )
    assert run(cell) == (6.0, "Doc.")
    assert float(run("step(4.0)")) == 8
    assert run(cell) == (6.0, "Doc.")
    run("@tf.function\ndef step(x):\n    'New.'\n    return 2 * x * weight")
    assert run(cell) == (12.0, "New.")
    notebook_shell.run_line_magic("gang", "end")


def plan(ports: tuple[int, ...]) -> Plan:
    hosts = (("10.0.0.1", 0, 0), ("10.0.0.1", 1, 0), ("fd00::2", 0, 1))
    slots = (
        Slot(rank, local, node, 3, 2 - node, 2, address, f"GPU-{rank}", address, "eth0", port)
        for rank, ((address, local, node), port) in enumerate(zip(hosts, ports, strict=True))
    )
    return Plan(tuple(slots))


def environments(ports: tuple[int, ...]) -> Any:
    where: Any = {"spec": JobSpec(np=3, rendezvous="tensorflow"), "gang": "a1b2", "attempt": 0}
    return (
        plugins.rendezvous("tensorflow").prepare(plan(ports), "10.0.0.1", 9, **where).environments
    )


def test_ranks_know_the_addresses_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    found = environments((1234, 1235, 4567))
    configs = [json.loads(rank["TF_CONFIG"]) for rank in found]
    workers = ["10.0.0.1:1234", "10.0.0.1:1235", "[fd00::2]:4567"]
    assert [config["cluster"] for config in configs] == [{"worker": workers}] * 3
    assert [config["task"] for config in configs] == [
        {"type": "worker", "index": rank} for rank in range(3)
    ]
    assert {rank["TF_GRPC_REUSE_PORT"] for rank in found} == {"true"}
    assert {rank["NCCL_SOCKET_IFNAME"] for rank in found} == {"eth0"}
    assert {rank["TF_FORCE_GPU_ALLOW_GROWTH"] for rank in found} == {"false"}, "the user's own"
    assert {rank["TF_CPP_MIN_LOG_LEVEL"] for rank in found} == {"1"}


def test_a_placement_without_ports_is_refused() -> None:
    with pytest.raises(PlacementError, match="`--on local` does not provide"):
        environments((0, 0, 0))


class FakeConfig:
    """``tf.config`` of a host with GPUs."""

    def __init__(self, n_gpus: int) -> None:
        self.gpus = [f"gpu {number}" for number in range(n_gpus)]
        self.visible: Any = None

    def list_physical_devices(self, kind: str) -> list[str]:
        return self.gpus if kind == "GPU" else []

    def set_visible_devices(self, devices: str, kind: str) -> None:
        self.visible = (devices, kind)


@pytest.mark.parametrize(
    ("n_gpus", "environment", "visible"),
    [
        (2, {"TF_CONFIG": "{}", "LOCAL_RANK": "1"}, ("gpu 1", "GPU")),
        (1, {"TF_CONFIG": "{}", "LOCAL_RANK": "1"}, None),
        (2, {"LOCAL_RANK": "1"}, None),  # another rendezvous
    ],
)
def test_each_rank_uses_its_own_gpu(
    n_gpus: int, environment: dict[str, str], visible: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = FakeConfig(n_gpus)
    library: Any = SimpleNamespace(config=config)
    observe.attach(library)
    assert config.visible == visible


SUMMARIES = """
import os, tempfile
import numpy as np
import tensorflow as tf
folder = tempfile.mkdtemp()
train, test = (tf.summary.create_file_writer(f"{folder}/{name}") for name in ("train", "test"))
tf.summary.scalar("unwritten", 1.0, 0)
for step in range(3):
    with train.as_default():
        tf.summary.scalar("loss", tf.constant(0.5) * step, step)
        with tf.name_scope("model"):
            tf.summary.scalar("norm", 2.0, tf.Variable(step, dtype=tf.int64))
    with test.as_default(step):
        tf.summary.scalar("loss", data=np.float32(step))
x = np.zeros((8, 4), "float32")
model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
model.compile("sgd", "mse")
board = tf.keras.callbacks.TensorBoard(f"{folder}/keras", update_freq=1)
model.fit(x, x[:, :1], batch_size=4, epochs=1, validation_split=0.5, callbacks=[board])
print(sorted(name for name in os.listdir(folder)), len(os.listdir(f"{folder}/train")))
"""


@pytest.mark.exhaustive  # it imports TensorFlow, which takes seconds
@pytest.mark.tensorflow
def test_summaries_become_curves_and_those_of_keras_once(tmp_path: Path) -> None:
    """``tf.keras`` is Keras 3, whose own observer has its logs and its progress."""
    done = observed.run(SUMMARIES, tmp_path)
    assert "['keras', 'test', 'train'] 1" in done.stdout
    assert not done.of(ev.Notice), "each observer works"
    curves: dict[str, list[tuple[int, float | None]]] = {}
    for event in done.of(ev.Metrics):
        for name, values in event.values.items():
            points = zip(event.steps, values, strict=True)
            curves.setdefault(name, []).extend(point for point in points if point[1] is not None)
    assert set(curves) == {"loss", "model/norm", "test/loss", "val_loss"}
    assert curves["model/norm"] == [(0, 2.0), (1, 2.0), (2, 2.0)]
    assert curves["test/loss"] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert curves["loss"][:3] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert ("Epoch 1/1", 1.0, 1.0, True) in done.bars


@pytest.mark.exhaustive  # it imports TensorFlow, which takes seconds
@pytest.mark.tensorflow
def test_keras_2_is_observed_as_keras_3(tmp_path: Path) -> None:
    code = KERAS.replace("import keras", "import tf_keras as keras")
    done = observed.run(code, tmp_path)
    assert {name: sorted(points) for name, points in done.curves.items()} == {
        "loss": list(range(20)),
        "mae": list(range(20)),
        "val_loss": [3, 7],
        "val_mae": [3, 7],
        "lr": [11],
        "test_loss": [12, 16],
        "test_mae": [12, 16],
    }
    unasked, asked = done.stdout.split("asked for\n")
    assert unasked == "" and asked.startswith("4/4 - ") and "[====" in asked
    assert asked.endswith("silent\n")
    assert ("Epoch 2/2", 4.0, 4.0, True) in done.bars
    assert not done.of(ev.Notice)


CLU = """
import os, tempfile
from clu import metric_writers
from flax.metrics.tensorboard import SummaryWriter
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

class Nested(metric_writers.MultiWriter):
    pass

folder = tempfile.mkdtemp()
writers = {
    "default": metric_writers.create_default_writer(f"{folder}/default"),
    "logging": metric_writers.create_default_writer(just_logging=True),
    "plain": metric_writers.SummaryWriter(f"{folder}/plain"),
    "nested": Nested([metric_writers.MultiWriter([metric_writers.LoggingWriter()])]),
}
for name, writer in writers.items():
    for step in range(3):
        writer.write_scalars(step, {f"{name}/loss": 0.5 * step})
        metric_writers.write_values(writer, step, {f"{name}/accuracy": step})
        writer.write_texts(step, {"text": "no number"})
    writer.close()
flax = SummaryWriter(f"{folder}/flax")
flax.scalar("flax/loss", 1.0, 7)
flax.close()
files = EventAccumulator(f"{folder}/default").Reload()
print(sorted(files.Tags()["tensors"]))
"""


@pytest.mark.exhaustive  # it imports TensorFlow, which CLU and this part of Flax need
@pytest.mark.tensorflow
def test_metric_writers_of_jax_programs_become_curves(tmp_path: Path) -> None:
    """Those of CLU are seen once, whether or not they write summaries, in threads or not."""
    pytest.importorskip("clu", reason="clu is not installed")
    done = observed.run(CLU, tmp_path)
    assert not done.of(ev.Notice), "each observer works"
    expected = {"flax/loss": {7: 1.0}}
    for name in ("default", "logging", "plain", "nested"):
        expected[f"{name}/loss"] = {0: 0.0, 1: 0.5, 2: 1.0}
        expected[f"{name}/accuracy"] = {0: 0.0, 1: 1.0, 2: 2.0}
    assert done.curves == expected
    assert done.stdout == "['default/accuracy', 'default/loss', 'text']\n"
