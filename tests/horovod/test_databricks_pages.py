"""What Databricks' pages on HorovodRunner and TorchDistributor show, on small data, here and on executors.

The text is that of a notebook's cells: names that the pages leave to the reader are defined first, and
``sparkdl`` is this package.
"""

from __future__ import annotations

import importlib
import json
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import hydrogen_magic as hm
from hydrogen_magic.compat import TorchDistributor, install_sparkdl
from hydrogen_magic.node.worker import sparkdl
from tests import library_ranks
from tests.documented import Case, cases, covers, covers_in_both_places

pytestmark = [pytest.mark.horovod, pytest.mark.usefixtures("warm_agents")]

Cells = Callable[..., dict[str, Any]]

TORCH_DISTRIBUTOR = "from hydrogen_magic.compat import TorchDistributor"
"""In the place of ``from pyspark.ml.torch.distributor import TorchDistributor``."""

DATA = """
    import os, time
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    import torch.optim as optim
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    points = torch.randn(64, 8)
    dataset = TensorDataset(points, (points.sum(dim=1) > 0).long())

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 2)

        def forward(self, x):
            return F.log_softmax(self.fc(x), dim=1)

    batch_size = 16
    num_epochs = 2
    momentum = 0.5
    log_interval = 1
"""

# ── HorovodRunner ────────────────────────────────────────────────────────────────────────────────

HOROVOD = """
    def train_one_epoch(model, device, data_loader, optimizer, epoch):
        model.train()
        for batch_idx, (data, target) in enumerate(data_loader):
            data, target = data.to(device), target.to(device)
            optimizer.zero_grad()
            output = model(data)
            loss = F.nll_loss(output, target)
            loss.backward()
            optimizer.step()
            if batch_idx % log_interval == 0:
                print('Train Epoch: {} [{}/{}]\\tLoss: {:.6f}'.format(
                    epoch, batch_idx * len(data), len(data_loader) * len(data), loss.item()))

    LOG_DIR = os.path.join(PYTORCH_DIR, str(time.time()), 'MNISTDemo')
    os.makedirs(LOG_DIR)

    def save_checkpoint(log_dir, model, optimizer, epoch):
        filepath = log_dir + '/checkpoint-{epoch}.pth.tar'.format(epoch=epoch)
        state = {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}
        torch.save(state, filepath)

    def load_checkpoint(log_dir, epoch=num_epochs):
        filepath = log_dir + '/checkpoint-{epoch}.pth.tar'.format(epoch=epoch)
        return torch.load(filepath)

    import horovod.torch as hvd
    from sparkdl import HorovodRunner

    import shutil
    shutil.rmtree(PYTORCH_DIR + '/earlier', ignore_errors=True)
    hvd_log_dir = os.path.join(LOG_DIR, 'hvd')
    os.makedirs(hvd_log_dir)

    def train_hvd(learning_rate):
        os.environ["OMPI_MCA_btl_tcp_if_include"] = "eth0"
        hvd.init()
        device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
        if device.type == 'cuda':
            torch.cuda.set_device(hvd.local_rank())

        from torch.utils.data.distributed import DistributedSampler
        train_sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
        train_loader = DataLoader(dataset, batch_size=batch_size, sampler=train_sampler)

        model = Net().to(device)
        optimizer = optim.SGD(model.parameters(), lr=learning_rate * hvd.size(), momentum=momentum)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)

        for epoch in range(1, num_epochs + 1):
            train_one_epoch(model, device, train_loader, optimizer, epoch)
            if hvd.rank() == 0:
                save_checkpoint(hvd_log_dir, model, optimizer, epoch)

    hr = HorovodRunner(np=np, driver_log_verbosity='all')
    hr.run(train_hvd, learning_rate=0.001)
    model = Net()
    model.load_state_dict(load_checkpoint(hvd_log_dir)['model'])
"""

TIMELINE = """
    timeline_dir = PYTORCH_DIR + "/horovod-timeline/%s" % time.time()
    os.makedirs(timeline_dir)
    os.environ['HOROVOD_TIMELINE'] = timeline_dir + "/horovod_timeline.json"

    from sparkdl.horovod import log_to_driver
    from sparkdl.horovod.tensorflow.keras import LogCallback

    def run_training_horovod(params):
        import horovod.torch as hvd
        from sparkdl.horovod import log_to_driver as say
        hvd.init()
        say("rank {} with {}".format(hvd.rank(), sorted(params)))
        callback = LogCallback(per_batch_log=True)
        callback.on_epoch_begin(0)
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum)
        hvd.shutdown()
        return total.item()

    hr = HorovodRunner(np=np, driver_log_verbosity='log_callback_only')
    total = hr.run(run_training_horovod, params={'epochs': 1, 'batch_size': 16})
"""


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cells]:
    """Runs cells in one notebook; returns its names."""
    main = types.ModuleType("__main__")
    vars(main).update(PYTORCH_DIR=str(tmp_path))
    monkeypatch.setitem(sys.modules, "__main__", main)
    for name in ("HOROVOD_TIMELINE", sparkdl.VARIABLE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    before = list(sys.meta_path)
    install_sparkdl()

    def run(*sources: str, **names: Any) -> dict[str, Any]:
        vars(main).update(names)
        for source in sources:
            exec(textwrap.dedent(source), vars(main))
        return vars(main)

    yield run
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.partition(".")[0] == "sparkdl"]:
        del sys.modules[name]


KERAS = """
    def get_dataset(num_classes, rank=0, size=1):
        from {package}keras import utils
        x_train = np.random.default_rng(0).random((64, 28, 28))
        y_train = np.arange(64) % num_classes
        x_train = x_train[rank::size]
        y_train = y_train[rank::size]
        x_train = x_train.reshape(x_train.shape[0], 28, 28, 1).astype('float32')
        y_train = utils.to_categorical(y_train, num_classes)
        return (x_train, y_train), (x_train, y_train)

    def get_model(num_classes):
        from {package}keras import layers, models
        model = models.Sequential()
        model.add(layers.Conv2D(2, kernel_size=(3, 3), activation='relu', input_shape=(28, 28, 1)))
        model.add(layers.MaxPooling2D(pool_size=(2, 2)))
        model.add(layers.Dropout(0.25))
        model.add(layers.Flatten())
        model.add(layers.Dense(num_classes, activation='softmax'))
        return model

    batch_size = 16
    epochs = 1
    num_classes = 10
    checkpoint_dir = os.path.join(PYTORCH_DIR, 'train')
    os.makedirs(checkpoint_dir)

    def train_hvd(checkpoint_path, learning_rate=1.0):
        {imports}
        import hydrogen_magic.compat.keras as hvd
        hvd.init()
        (x_train, y_train), (x_test, y_test) = get_dataset(num_classes, hvd.rank(), hvd.size())
        model = get_model(num_classes)
        optimizer = keras.optimizers.Adadelta(learning_rate=learning_rate * hvd.size())
        optimizer = hvd.DistributedOptimizer(optimizer)
        model.compile(optimizer=optimizer, loss='categorical_crossentropy', metrics=['accuracy'])
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ]
        if hvd.rank() == 0:
            save = keras.callbacks.ModelCheckpoint(checkpoint_path, save_weights_only=True)
            callbacks.append(save)
        history = model.fit(x_train, y_train, batch_size=batch_size, callbacks=callbacks,
            epochs=epochs, verbose=2, validation_data=(x_test, y_test))
        return history.history['val_loss'], model.get_weights()

    from sparkdl import HorovodRunner
    checkpoint_path = checkpoint_dir + '/checkpoint-{{epoch}}.weights.h5'
    hr = HorovodRunner(np=np_ranks, driver_log_verbosity='all')
    losses, weights = hr.run(train_hvd, checkpoint_path=checkpoint_path, learning_rate=0.1)

    {imports}
    hvd_model = get_model(num_classes)
    hvd_model.compile(optimizer=keras.optimizers.Adadelta(learning_rate=0.1),
        loss='categorical_crossentropy', metrics=['accuracy'])
    hvd_model.load_weights(f"{{checkpoint_dir}}/checkpoint-{{epochs}}.weights.h5")
    _, (x_test, y_test) = get_dataset(num_classes)
    loss, accuracy = hvd_model.evaluate(x_test, y_test, batch_size=128)
    preds = np.rint(hvd_model.predict(x_test[0:9]))
"""
"""The notebook on TensorFlow and Keras, with the lines that the page on HorovodRunner gives."""
KERAS_ALONE = KERAS.format(package="", imports="import keras")
TENSORFLOW = KERAS.format(
    package="tensorflow.", imports="import tensorflow as tf; from tensorflow import keras"
)


def two_ranks(on_executors: bool) -> int:
    """Return ``np``; a negative number of ranks is on the driver, where the pages develop."""
    return 2 if on_executors else -2


@covers("""`HorovodRunner(np=2)`""")
@covers("""`HorovodRunner(np=-2)`""")
@covers_in_both_places(
    """
    `from sparkdl import HorovodRunner`
    `driver_log_verbosity="all"`
    `driver_log_verbosity="log_callback_only"`
    `hr.run(main, **kwargs)` and its value
    `from sparkdl.horovod import log_to_driver`
    `from sparkdl.horovod.tensorflow.keras import LogCallback`
    imports inside the method and in each function that it calls
    `os.environ["HOROVOD_TIMELINE"] = "/dbfs/…/horovod_timeline.json"`
    the timeline in `chrome://tracing`
    `torch.cuda.set_device(hvd.local_rank())`
    `config.gpu_options.visible_device_list = str(hvd.local_rank())`
    `DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())`
    `lr=learning_rate * hvd.size()`
    `hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())`
    `hvd.broadcast_parameters(model.state_dict(), root_rank=0)`
    `hvd.BroadcastGlobalVariablesHook(0)`, `hvd.broadcast_global_variables`
    `if hvd.rank() == 0: torch.save(state, filepath)`
    `dbutils.fs.rm(path, recurse=True)`
    `/dbfs/ml/…` for checkpoints
    `os.environ["OMPI_MCA_btl_tcp_if_include"] = "eth0"`
    """
)
def test_the_pytorch_notebook(
    on_executors: bool, cells: Cells, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the exhaustive tests, those of test_horovod_runner use executors."""
    names = cells(DATA, HOROVOD, TIMELINE, np=two_ranks(on_executors))
    shown = capsys.readouterr().out
    assert "[1] Train Epoch: 2 [16/32]" in shown
    assert "[1] rank 1 with ['batch_size', 'epochs']" in shown
    assert names["total"] == 2.0
    (timeline,) = Path(names["timeline_dir"]).iterdir()
    assert any(event.get("ph") == "X" for event in json.loads(timeline.read_bytes()))


def run_keras(cells: Cells, on_executors: bool, text: str, patch: pytest.MonkeyPatch) -> None:
    """``KERAS_BACKEND`` of the notebook is forwarded."""
    patch.setenv("KERAS_BACKEND", "torch")
    names = cells("import os\nimport numpy as np", text, np_ranks=two_ranks(on_executors))
    assert names["losses"][-1] == pytest.approx(names["loss"], rel=1e-4)
    assert names["preds"].shape == (9, 10)
    for kept, loaded in zip(names["weights"], names["hvd_model"].get_weights(), strict=True):
        assert (kept == loaded).all()


@covers_in_both_places(
    """
    `import horovod.tensorflow.keras as hvd`
    `tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], 'GPU')`
    `models.Sequential()`, `layers.Conv2D(32, kernel_size=(3, 3), activation='relu', input_shape=(28, 28, 1))`
    `keras.utils.to_categorical(y_train, num_classes)`
    `keras.optimizers.Adadelta(lr=learning_rate)`
    `hvd.DistributedOptimizer(optimizer)` of Keras
    `hvd.callbacks.BroadcastGlobalVariablesCallback(0)`
    `hvd.callbacks.MetricAverageCallback()`
    `model.compile(…, experimental_run_tf_function=False)`
    `keras.callbacks.ModelCheckpoint('checkpoint-{epoch}.ckpt', save_weights_only=True)`
    `model.load_weights(tf.train.latest_checkpoint(folder))`
    `model.fit(…, validation_data=(x_test, y_test), callbacks=callbacks, verbose=2)`
    `model.evaluate(x_test, y_test)`, `model.predict(x_test[0:9])`
    """
)
@pytest.mark.exhaustive  # ranks import Keras, which takes seconds
def test_the_keras_notebook(
    on_executors: bool, cells: Cells, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_keras(cells, on_executors, KERAS_ALONE, monkeypatch)


@covers("""`from tensorflow import keras`, `from tensorflow.keras import layers, models`""")
@pytest.mark.exhaustive
@pytest.mark.tensorflow
@pytest.mark.spark
@pytest.mark.xdist_group("spark")
def test_the_keras_notebook_with_tensorflow(cells: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    """On executors alone: two minutes of a processor."""
    run_keras(cells, True, TENSORFLOW, monkeypatch)


FIRST = """
    import horovod.torch as hvd
    from sparkdl import HorovodRunner

    hr = HorovodRunner(np=np)
    def train():
        import tensorflow as tf
        hvd.init()
        return float(tf.reduce_sum(tf.ones(hvd.size())))
    value = hr.run(train)
"""
"""The page's first example, with a value."""


@covers("""`def train(): import tensorflow as tf; hvd.init()`""")
@pytest.mark.exhaustive
@pytest.mark.tensorflow
def test_tensorflow_in_a_function(cells: Cells) -> None:
    assert cells(FIRST, np=two_ranks(on_executors=False))["value"] == 2.0


@covers("""`import horovod.spark`, `horovod.spark.run(train, num_proc=2)`""")
@pytest.mark.exhaustive
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_the_example_of_horovod_spark(cells: Cells) -> None:
    """``horovod.spark`` runs on executors alone."""
    text = """
        import hydrogen_magic as hm
        def train():
            import horovod.torch as hvd
            hvd.init()
            return hvd.size()
        value = hm.run(train, np=2, on="spark", rendezvous="horovod")
    """
    assert cells(text)["value"] == 2


def test_sparkdl_is_found_where_notebooks_look(cells: Cells) -> None:
    from hydrogen_magic import compat

    for module, name in [
        ("sparkdl", "HorovodRunner"),
        ("sparkdl.horovod.runner_base", "HorovodRunner"),
        ("sparkdl.horovod", "log_to_driver"),
        ("sparkdl.horovod.tensorflow.keras", "LogCallback"),
    ]:
        assert getattr(importlib.import_module(module), name) is getattr(compat, name)


REFUSED = cases(
    """
`from sparkdl.xgboost import XgboostClassifier`
    from sparkdl.xgboost import XgboostClassifier  # use SparkXGBClassifier
`from sparkdl.estimators.horovod_estimator.estimator import HorovodEstimator`
    from sparkdl.estimators.horovod_estimator.estimator import HorovodEstimator  # TorchEstimator
`HorovodRunner(np=0)`
    from sparkdl import HorovodRunner; HorovodRunner(np=0)  # Give the number of ranks
"""
)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_lines_that_are_refused(cells: Cells, case: Case) -> None:
    """With the comment in the message: what to write instead."""
    line, _, instead = case.code.strip().partition("  # ")
    with pytest.raises((ImportError, ValueError), match=instead):
        cells(line)


# ── TorchDistributor ─────────────────────────────────────────────────────────────────────────────

FUNCTION = """
    import time

    def createModel():
        return Net()

    def train(learning_rate, use_gpu):
        import torch
        import torch.distributed as dist
        os.environ["NCCL_P2P_DISABLE"] = "1"
        os.environ["NCCL_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        from torch.nn.parallel import DistributedDataParallel as DDP
        from torch.utils.data import DistributedSampler, DataLoader

        backend = "nccl" if use_gpu else "gloo"
        dist.init_process_group(backend)
        device = int(os.environ["LOCAL_RANK"]) if use_gpu else "cpu"
        model = DDP(createModel().to(device))
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, sampler=sampler, batch_size=batch_size)

        optimizer = optim.SGD(model.parameters(), lr=learning_rate)
        for data, target in loader:
            optimizer.zero_grad()
            F.nll_loss(model(data), target).backward()
            optimizer.step()
        output = len(loader), dist.get_world_size()
        dist.destroy_process_group()
        return output

    distributor = TorchDistributor(num_processes=2, local_mode=local_mode, use_gpu=False)
    output = distributor.run(train, 1e-3, False)
"""

FILE = """
    train_file = PYTORCH_DIR + "/train.py"
    with open(train_file, "w") as file:
        file.write('''
    import argparse
    import torch.distributed as dist

    parser = argparse.ArgumentParser()
    parser.add_argument("--learning_rate", type=float)
    parser.add_argument("--batch_size", type=int)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    print("rank", dist.get_rank(), "trains with", args.learning_rate, args.batch_size)
    dist.barrier()
    dist.destroy_process_group()
    '''.replace("\\n    ", "\\n"))
    args = ["--learning_rate=0.001", "--batch_size=16"]
    distributor.run(train_file, *args)
"""


@covers("""`TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)`""")
@covers_in_both_places(
    """
    `from pyspark.ml.torch.distributor import TorchDistributor`
    `distributor.run(train, 1e-3, True)`
    `distributor.run("/path/to/train.py", "--learning_rate=0.001", "--batch_size=16")`
    `import torch` and other imports inside `train`
    `device_id = int(os.environ["LOCAL_RANK"])`
    `backend = "nccl" if use_gpu else "gloo"`, `dist.init_process_group(backend)`
    `import torch.nn.parallel.DistributedDataParallel as DDP`
    `DistributedSampler(dataset)`, `DataLoader(dataset, sampler=sampler)`
    `dist.cleanup()`, `torch.destroy_process_group()`
    `os.environ["NCCL_P2P_DISABLE"] = "1"` in the function
    `os.environ["NCCL_SOCKET_IFNAME"] = "eth0"` in the function
    `os.environ["GLOO_SOCKET_IFNAME"] = "eth0"` in the function
    """,
    executors=(),
)
def test_a_function_and_a_file(
    on_executors: bool, cells: Cells, capsys: pytest.CaptureFixture[str]
) -> None:
    names = cells(TORCH_DISTRIBUTOR, DATA, FUNCTION, FILE, local_mode=not on_executors)
    assert names["output"] == (2, 2)
    assert "[1] rank 1 trains with 0.001 16" in capsys.readouterr().out


OPTIONS = """
    import os

    def train_func(epochs, batch_size):
        return epochs, batch_size

    distributor = TorchDistributor(2, local_mode=local_mode, use_gpu=False)
    given = distributor.run(train_func, epochs=1, batch_size=512)

    db_token, db_host = "dapi-0123456789abcdef", "https://example.org"

    def train():
        os.environ["DATABRICKS_TOKEN"] = db_token
        os.environ['DATABRICKS_HOST'] = db_host
        print("with", db_token)
        return os.environ["DATABRICKS_HOST"]

    env = {"DATABRICKS_TOKEN": db_token}
    host = TorchDistributor(2, local_mode=local_mode, use_gpu=False, env=env).run(train)
"""


@covers_in_both_places(
    """
    `distributor.run(train_func, epochs=1, batch_size=512)`
    `os.environ["DATABRICKS_TOKEN"] = db_token` in the function
    """
)
@covers("""`os.environ['DATABRICKS_HOST'] = db_host` in the training function""")
def test_options_and_credentials(on_executors: bool, cells: Cells) -> None:
    names = cells(TORCH_DISTRIBUTOR, OPTIONS, local_mode=not on_executors)
    assert names["given"] == (1, 512)
    assert names["host"] == names["db_host"]
    gang = list(hm.gangs().values())[-1]
    assert gang.logs[0] == "with ***\n"


FRAME = """
    rows = hm.dataset(df)

    def train():
        return sum(len(batch["x"]) for batch in hm.shard(rows, batch_size=16))

    n_rows = TorchDistributor(2, local_mode=local_mode, use_gpu=False).run(train)
    rows.delete()
"""


@covers_in_both_places("""`distributor._train_on_dataframe(train, df)`""")
@pytest.mark.exhaustive
def test_a_data_frame(on_executors: bool, cells: Cells, request: pytest.FixtureRequest) -> None:
    """Spark's on executors. Here there may be no session, and pandas' frame takes its place."""
    if on_executors:
        df = request.getfixturevalue("spark").range(64).withColumnRenamed("id", "x")
    else:
        df = pd.DataFrame({"x": range(64)})
    names = cells(TORCH_DISTRIBUTOR, FRAME, df=df, hm=hm, local_mode=not on_executors)
    assert names["n_rows"] == 32


@covers_in_both_places(
    """
    `Trainer` of Hugging Face in the function
    `Trainer(accelerator="gpu", devices=num_proc, num_nodes=1, strategy="ddp")` of Lightning
    `Trainer(accelerator="gpu", devices=1, num_nodes=num_proc, strategy="ddp")` of Lightning
    """
)
@pytest.mark.exhaustive  # ranks import these libraries, which takes seconds
def test_trainers(on_executors: bool, tmp_path: Path) -> None:
    """Lightning's has as many devices as there are ranks on this one host."""
    pytest.importorskip("lightning")
    pytest.importorskip("transformers")
    distributor = TorchDistributor(num_processes=2, local_mode=not on_executors, use_gpu=False)
    assert distributor.run(library_ranks.train, str(tmp_path)) == (4, 4)
