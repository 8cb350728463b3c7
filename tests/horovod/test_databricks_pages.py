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

import pytest

from hydrogen_magic.compat import install_sparkdl
from hydrogen_magic.node.worker import sparkdl

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

    hvd_log_dir = os.path.join(LOG_DIR, 'hvd')
    os.makedirs(hvd_log_dir)

    def train_hvd(learning_rate):
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
        total = hvd.allreduce(torch.ones(1), op=hvd.Sum)
        hvd.shutdown()
        return total.item()

    hr = HorovodRunner(np=np)
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


def run_horovods(cells: Cells, np: int, capsys: pytest.CaptureFixture[str]) -> None:
    names = cells(DATA, HOROVOD, TIMELINE, np=np)
    shown = capsys.readouterr().out
    assert "[1] Train Epoch: 2 [16/32]" in shown
    assert "[1] rank 1 with ['batch_size', 'epochs']" in shown
    assert names["total"] == 2.0
    (timeline,) = Path(names["timeline_dir"]).iterdir()
    assert any(event.get("ph") == "X" for event in json.loads(timeline.read_bytes()))


def test_horovod_runner_here(cells: Cells, capsys: pytest.CaptureFixture[str]) -> None:
    """``np=-2``: the pages develop on the driver."""
    run_horovods(cells, -2, capsys)


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_horovod_runner_on_executors(cells: Cells, capsys: pytest.CaptureFixture[str]) -> None:
    run_horovods(cells, 2, capsys)


def test_sparkdl_is_found_where_notebooks_look(cells: Cells) -> None:
    from hydrogen_magic import compat

    for module, name in [
        ("sparkdl", "HorovodRunner"),
        ("sparkdl.horovod.runner_base", "HorovodRunner"),
        ("sparkdl.horovod", "log_to_driver"),
        ("sparkdl.horovod.tensorflow.keras", "LogCallback"),
    ]:
        assert getattr(importlib.import_module(module), name) is getattr(compat, name)
    with pytest.raises(ImportError):
        importlib.import_module("sparkdl.xgboost")


# ── TorchDistributor ─────────────────────────────────────────────────────────────────────────────

FUNCTION = """
    import time

    def createModel():
        return Net()

    def train(learning_rate, use_gpu):
        import torch
        import torch.distributed as dist
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


def run_torchs(cells: Cells, local_mode: bool, capsys: pytest.CaptureFixture[str]) -> None:
    names = cells(TORCH_DISTRIBUTOR, DATA, FUNCTION, FILE, local_mode=local_mode)
    assert names["output"] == (2, 2)
    assert "[1] rank 1 trains with 0.001 16" in capsys.readouterr().out


def test_torch_distributor_here(cells: Cells, capsys: pytest.CaptureFixture[str]) -> None:
    run_torchs(cells, True, capsys)


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_torch_distributor_on_executors(cells: Cells, capsys: pytest.CaptureFixture[str]) -> None:
    run_torchs(cells, False, capsys)
