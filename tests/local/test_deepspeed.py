"""DeepSpeed: ``DeepspeedTorchDistributor``, and models that DeepSpeed has trained."""

from __future__ import annotations

import base64
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import hydrogen_magic as hm
from hydrogen_magic.compat import DeepspeedTorchDistributor
from hydrogen_magic.errors import ResultError
from tests import distributor_ranks
from tests.documented import covers
from tests.result_checks import run_cell

pytestmark = pytest.mark.usefixtures("warm_agents")

CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
}
SCRIPT = """
import json, os, pathlib, sys
name = "of rank " + os.environ["RANK"]
(pathlib.Path(__file__).parent / name).write_text(json.dumps(sys.argv[1:]))
"""
LIKE_ZERO_1 = """%%distributed --np 2 --quiet --out net
import sys, types
import torch.distributed as dist
dist.init_process_group()
net = torch.nn.Linear(2, 1)
sys.modules["deepspeed"] = types.ModuleType("deepspeed")
first, second = net.parameters()
first._dp_group, first.param_idx_in_group, second.of_user = dist.group.WORLD, 0, "kept"

def after(module, args, output, group=dist.group.WORLD): ...
after.__module__ = "deepspeed.runtime.engine"
net.register_forward_hook(after)
None
"""
TRAIN = """%%%%distributed --np 2 --quiet --out net,losses
import deepspeed
config = {**CONFIG, "zero_optimization": {"stage": %d, "stage3_param_persistence_threshold": 0}}
groups = [{"params": [each]} for each in net.parameters()]
engine, *_ = deepspeed.initialize(model=net, model_parameters=groups, config=config)
x = torch.randn(16, 8, generator=torch.Generator().manual_seed(hm.rank()))
losses = []
for _ in range(100):
    loss = (engine(x) - x.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
net = engine.module
"""
PARTS = """
moments, refused = engine.optimizer.state_dict(), ""
try:
    hm.checkpoint.save({"optimizer": moments})
except TypeError as error:
    refused = str(error)
"""
GATHER = """
with deepspeed.zero.GatheredParameters([*net.parameters()]):
    state = {name: p.detach().cpu().clone() for name, p in net.named_parameters()}
"""
WEIGHTS = """
state, refused = net.state_dict(), ""
try:
    hm.checkpoint.save({"model": state})
except TypeError as error:
    refused = str(error)
"""
FUNCTION = """
def train(config):
    import deepspeed
    deepspeed.init_distributed()
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config=config, dist_init_required=False
    )
    return engine.zero_optimization_stage(), engine.world_size

found = DeepspeedTorchDistributor(numGpus=2, useGpu=False).run(
    train, {**CONFIG, "zero_optimization": {"stage": 2}}
)
"""


@covers(
    """
    `deepspeedConfig=deepspeed_config`, a dict
    `deepspeedConfig="/path/to/config.json"`
    no `deepspeedConfig`
    `dist.run("train.py", "--lr=1e-3")`
    """
)
@pytest.mark.parametrize("config", [CONFIG, "path", None], ids=["dict", "path", "none"])
def test_a_script_gets_the_configuration(config: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    DeepspeedTorchDistributor(2, useGpu=False, deepspeedConfig=config).run(str(script), "--lr", 0.1)
    for rank in range(2):
        arguments = json.loads((tmp_path / f"of rank {rank}").read_text())
        assert arguments[:3] == ["--lr", "0.1", "--deepspeed"]
        if config is None:
            assert arguments[3:] == []
            continue
        option, value = arguments[3:]
        assert option == "--deepspeed_config"
        assert value == config or json.loads(base64.urlsafe_b64decode(value)) == config


@covers("""`dist.run(fine_tune_llama2, epochs=1, max_steps=1)`""")
def test_a_function_gets_its_arguments() -> None:
    config = {"fp16": {"enabled": True}}
    dist = DeepspeedTorchDistributor(numGpus=2, useGpu=False, deepspeedConfig=config)
    value = dist.run(distributor_ranks.train, 1e-3, epochs=1, max_steps=1)
    assert value[:3] == (1e-3, (), {"epochs": 1, "max_steps": 1})


def test_messages_name_its_own_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="here `use_gpu` is `useGpu`"):
        DeepspeedTorchDistributor(numGpus=2)


@pytest.mark.spark
@pytest.mark.parametrize("name", ["__init__", "run"])
def test_signatures_are_the_originals(name: str) -> None:
    from pyspark.ml.deepspeed import deepspeed_distributor

    original = getattr(deepspeed_distributor.DeepspeedTorchDistributor, name)
    ours, theirs = (
        [
            (each.name, each.kind, each.default)
            for each in inspect.signature(one).parameters.values()
        ]
        for one in (getattr(DeepspeedTorchDistributor, name), original)
    )
    assert ours[: len(theirs)] == theirs


def test_a_model_comes_home_without_the_additions_of_deepspeed(
    notebook_shell: InteractiveShell,
) -> None:
    run_cell(notebook_shell, "import torch")
    run_cell(notebook_shell, LIKE_ZERO_1)
    net = notebook_shell.user_ns["net"]
    weight, bias = net.parameters()
    assert (vars(weight), vars(bias)) == ({}, {"of_user": "kept"})
    assert not net._forward_hooks and weight.requires_grad
    with pytest.raises(ResultError, match="stage 3 has partitioned this parameter"):
        run_cell(notebook_shell, LIKE_ZERO_1.replace("param_idx_in_group", "ds_id"))


@covers(
    """
    `deepspeed.init_distributed()`, `torch.cuda.set_device(local_rank)`
    `deepspeed.initialize(model=…, config=…, dist_init_required=False)`
    `%pip install deepspeed`
    """
)
@pytest.mark.exhaustive
@pytest.mark.deepspeed
@pytest.mark.timeout(600)  # an operator is compiled
def test_models_are_trained_with_zero(notebook_shell: InteractiveShell) -> None:
    """With stages 2 and 3; the scripts below have stage 1."""
    prepare = "import os, torch, hydrogen_magic as hm\nnet = torch.nn.Linear(8, 1)"
    notebook_shell.push({"CONFIG": CONFIG, "DeepspeedTorchDistributor": DeepspeedTorchDistributor})
    run_cell(notebook_shell, prepare)
    of_two = (TRAIN % 2).replace("--out net", "--out moments,refused,net") + PARTS
    with pytest.raises(ResultError, match=r"`moments\[.*ZeRO divides .*save_checkpoint\(folder\)"):
        run_cell(notebook_shell, of_two)
    losses, net, refused = (notebook_shell.user_ns[name] for name in ("losses", "net", "refused"))
    assert losses[-1] < 0.2 * losses[0] and not vars(net.weight)
    assert "cannot be saved: DeepSpeed's ZeRO divides the optimizer's state" in refused
    run_cell(notebook_shell, prepare)
    run_cell(notebook_shell, (TRAIN % 3).replace("--out net", "--out state") + GATHER)
    assert [rank.steps for rank in [*hm.gangs().values()][-1].ranks] == [100, 100]
    shapes = {name: tuple(value.shape) for name, value in notebook_shell.user_ns["state"].items()}
    assert shapes == {"weight": (1, 8), "bias": (1,)}
    run_cell(notebook_shell, prepare)
    with pytest.raises(
        ResultError, match=r"`state\['weight'\]` .* it is empty, .*GatheredParameters"
    ):
        run_cell(notebook_shell, (TRAIN % 3).replace("--out net", "--out state,refused") + WEIGHTS)
    assert re.match(r"`state\['model'\]\[.* it is empty", notebook_shell.user_ns["refused"])
    run_cell(notebook_shell, prepare + FUNCTION)
    assert notebook_shell.user_ns["found"] == (2, 2)


ARGUMENTS = """
import argparse, json, os, pathlib
import deepspeed, torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1, help="set by DeepSpeed's launcher")
parser.add_argument("--epochs", type=int, default=1)
args = deepspeed.add_config_arguments(parser).parse_args()
net = torch.nn.Linear(8, 1)
engine, *_ = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters())
x = torch.randn(16, 8, generator=torch.Generator().manual_seed(engine.global_rank))
losses = []
for _ in range(args.epochs):
    loss = (engine(x) - x.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
weight = net.weight.flatten().tolist()
found = [args.deepspeed, engine.world_size, engine.zero_optimization_stage(), losses, weight]
(pathlib.Path(__file__).parent / f"of rank {engine.global_rank}").write_text(json.dumps(found))
"""


@pytest.mark.exhaustive
@pytest.mark.deepspeed
@pytest.mark.timeout(600)  # an operator is compiled
@pytest.mark.parametrize("launcher", ["magic", "distributor"])
def test_a_script_passes_its_arguments_to_deepspeed(
    launcher: str, notebook_shell: InteractiveShell, tmp_path: Path
) -> None:
    """With a file as configuration by the magic, with a dict by the class."""
    script, config = tmp_path / "train.py", {**CONFIG, "zero_optimization": {"stage": 1}}
    script.write_text(ARGUMENTS)
    if launcher == "magic":
        (tmp_path / "config.json").write_text(json.dumps(config))
        words = f"{script} --epochs 50 --deepspeed --deepspeed_config {tmp_path}/config.json"
        notebook_shell.run_line_magic("distributed", f"--np 2 --quiet {words}")
    else:
        dist = DeepspeedTorchDistributor(2, useGpu=False, deepspeedConfig=config)
        dist.run(str(script), "--epochs", 50)
    first, second = (json.loads((tmp_path / f"of rank {rank}").read_text()) for rank in range(2))
    assert first[:3] == second[:3] == [True, 2, 1]
    assert first[3][-1] < 0.5 * first[3][0] and first[3] != second[3]
    assert first[4] == second[4], "gradients are averaged"


TRAINER = """
import os, torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

def fine_tune(*, epochs=3, max_steps=200):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=64, intermediate_size=8, num_labels=2, **sizes)
    data = [{"input_ids": torch.arange(6) + i, "labels": i % 2} for i in range(32)]
    training_args = TrainingArguments(
        FOLDER, per_device_train_batch_size=4, num_train_epochs=epochs, max_steps=max_steps,
        deepspeed=deepspeed_config, save_strategy="no", report_to=[], use_cpu=True,
    )
    trainer = Trainer(BertForSequenceClassification(config), training_args, train_dataset=data)
    trainer.train()
    return trainer.state.global_step, trainer.deepspeed.world_size

dist = DeepspeedTorchDistributor(numGpus=2, useGpu=False, deepspeedConfig=deepspeed_config)
found = dist.run(fine_tune, epochs=1, max_steps=1)
"""
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    "zero_force_ds_cpu_optimizer": False,
}


@covers(
    """
    `TrainingArguments(deepspeed=deepspeed_config)` with `"auto"` values
    `from pyspark.ml.deepspeed.deepspeed_distributor import DeepspeedTorchDistributor`
    """
)
@pytest.mark.exhaustive
@pytest.mark.deepspeed
@pytest.mark.timeout(600)  # an operator is compiled
def test_transformers_train_by_deepspeed(notebook_shell: InteractiveShell, tmp_path: Path) -> None:
    names = {"FOLDER": str(tmp_path), "deepspeed_config": AUTO}
    notebook_shell.push({**names, "DeepspeedTorchDistributor": DeepspeedTorchDistributor})
    run_cell(notebook_shell, TRAINER)
    assert notebook_shell.user_ns["found"] == (1, 2)


@covers(
    """
    `DeepspeedTorchDistributor(numGpus=4, nnodes=2, localMode=False, useGpu=True)`
    `deepspeed.spark.distributor.ignoreSsl`
    """
)
@pytest.mark.exhaustive
@pytest.mark.spark
def test_ranks_of_nodes_on_executors(spark: Any, tmp_path: Path) -> None:
    """A configuration file of this machine is sent with the script's arguments."""
    script, config = tmp_path / "train.py", tmp_path / "config.json"
    script.write_text(SCRIPT)
    config.write_text(json.dumps(CONFIG))
    nodes = DeepspeedTorchDistributor(1, 2, localMode=False, deepspeedConfig=str(config))
    spark.conf.set("spark.ssl.enabled", "true")
    try:
        with pytest.raises(RuntimeError, match=r"deepspeed\.spark\.distributor\.ignoreSsl"):
            nodes.run(str(script))
        spark.conf.set("deepspeed.spark.distributor.ignoreSsl", "true")
        nodes.run(str(script))
    finally:
        spark.conf.unset("spark.ssl.enabled")
        spark.conf.unset("deepspeed.spark.distributor.ignoreSsl")
    for rank in range(2):
        *_, value = json.loads((tmp_path / f"of rank {rank}").read_text())
        assert json.loads(base64.urlsafe_b64decode(value)) == CONFIG
