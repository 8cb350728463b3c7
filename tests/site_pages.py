"""What each page of the documentation needs to run its code, see :mod:`tests.site_code`.

Sizes are small, and ranks do without torch where the page lets them.
"""

from __future__ import annotations

import pytest

from tests.site_code import Page

exhaustive, horovod, jax = pytest.mark.exhaustive, pytest.mark.horovod, pytest.mark.jax
deepspeed, tensorflow = pytest.mark.deepspeed, pytest.mark.tensorflow

HM = "import hydrogen_magic as hm\n"
TORCH = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
import hydrogen_magic as hm
"""
"""What notebooks import at their top."""
SCRIPTS = """
from pathlib import Path
script = "import sys; assert sys.argv[1:] == ['--epochs', '3']"
Path("package").mkdir()
for name in ("train.py", "package/__init__.py", "package/train.py"):
    Path(name).write_text(script)
"""
SHARED_MODEL = TORCH + "model = nn.Linear(1, 1)\n"

LOCAL = [
    Page("README.md"),
    Page(
        "CONTRIBUTING.md",
        not_run={
            "page            kernel": "a drawing",
        },
    ),
    Page("docs/install.md"),
    Page(
        "docs/tutorial/own-data.md",
        set_up="""
import numpy as np, pandas as pd
numbers = np.random.default_rng(0).random((64, 2))
houses = pd.DataFrame({"rooms": numbers[:, 0], "area": numbers[:, 1], "price": numbers.sum(1)})
houses.to_csv("houses.csv")
import os
os.mkdir("data")
houses.to_parquet("data/houses.parquet")
""",
    ),
    # ── how-to ───────────────────────────────────────────────────────────────────────────────────
    Page(
        "docs/how-to/cannot-be-sent.md",
        set_up="import threading\nlock = threading.Lock()",
        shown_by={"CaptureError": "%%distributed --np 2\nwith lock:\n    pass"},
    ),
    Page(
        "docs/how-to/compare-runs.md",
        set_up=HM + "lr = 0.01\ndef train(width, lr):\n    hm.log(loss=width * lr)",
        before={"%gang compare": '%%distributed --np 2 --name "wide, lr 0.1"\ntrain(256, 10 * lr)'},
        then='assert {"wide, lr 0.01", "wide, lr 0.1"} <= set(runs["name"])',
    ),
    Page(
        "docs/how-to/cuda-already-initialized.md",
        set_up=TORCH,
        not_run={".cuda()": "needs a GPU; tests/local/test_gpu.py uses CUDA in the kernel"},
    ),
    Page(
        "docs/how-to/firewalls.md",
        not_run={
            "spark.driver.host": "names another machine; tests/spark/test_spark_hosts.py has such sessions"
        },
    ),
    Page(
        "docs/how-to/first-collective-hangs.md",
        set_up=TORCH,
        shown_by={
            "waits in init_process_group": """
%%distributed --np 2
import time
if hm.rank() == 1:
    time.sleep(20)
dist.init_process_group()
""",
            "never entered the barrier": """
%%distributed --np 2
dist.init_process_group()
if hm.rank() == 0:
    dist.barrier()
""",
        },
        slow=["waits in init_process_group"],
    ),
    Page(
        "docs/how-to/get-the-model-back.md",
        set_up=SHARED_MODEL,
        changes={"...": "model.bias.data.fill_(2.0)\nhistory = [1]"},
        then="assert (model.bias.item(), history) == (2.0, [1])",
    ),
    Page("docs/how-to/keep-secrets.md", set_up="token = 'hf_correct_horse'"),
    Page(
        "docs/how-to/local-modules.md",
        set_up="open('my_model.py', 'w').write('class Net: ...')",
    ),
    Page(
        "docs/how-to/log-metrics.md",
        set_up=HM
        + """
loss = 0.5
class scheduler:
    def get_last_lr():
        return [0.1]
""",
        changes={"hm.log(loss=loss": "%%distributed --np 2\nhm.log(loss=loss"},
        slow=[".plot()"],  # imports matplotlib
    ),
    Page(
        "docs/how-to/look-at-an-old-gang.md",
        set_up="%%distributed --np 2\nprint('hello')\n# %%\n" + HM + "id = list(hm.gangs())[-1]",
        changes={"50b3": "{id}"},
        then="import json\nassert json.load(open('trace.json'))",
    ),
    Page(
        "docs/how-to/out-of-memory.md",
        set_up=HM + "import os",
        shown_by={
            "was killed by SIGKILL": "%%distributed --np 2\nif hm.rank() == 1:\n    os.kill(os.getpid(), 9)"
        },
    ),
    Page("docs/how-to/prepare-executors.md"),
    Page("docs/how-to/read-the-output.md", set_up=HM + "epoch = 1"),
    Page(
        "docs/how-to/restart-the-kernel.md",
        changes={"...": "model = 2"},
        then="assert gang.result is None and model == 2",
    ),
    Page(
        "docs/how-to/resume-after-failure.md",
        set_up=SHARED_MODEL
        + """
def train_one_epoch():
    if hm.rank() == 1 and epoch == 3 and not os.path.exists("failed"):
        open("failed", "w").close()
        raise ValueError
""",
        then="import os\nassert os.path.exists('failed')",
    ),
    Page("docs/how-to/run-a-script.md", set_up=SCRIPTS),
    Page("docs/how-to/run-in-ci.md"),
    Page("docs/how-to/save-as-a-script.md", set_up=TORCH),
    Page(
        "docs/how-to/share-the-data.md",
        set_up=TORCH
        + """
import pandas as pd
dataset = TensorDataset(torch.ones(64, 1))
df = pd.DataFrame({"x": [[1.0]] * 64, "y": [1.0] * 64})
model = nn.Linear(1, 1)
def loss_of(found, expected):
    return nn.functional.mse_loss(found.flatten(), expected)
""",
        changes={
            "loader =": "%%distributed --np 2\nloader =",
            "for batch": "%%distributed --np 2\nfor batch",
        },
    ),
    Page(
        "docs/how-to/stop-early.md",
        set_up=TORCH
        + """
from torch.utils.data import Subset
x = torch.rand(97, 2)
train_set, valid_set = TensorDataset(x[:64], x[:64].sum(1)), TensorDataset(x[64:], x[64:].sum(1))
model, loss_of = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)), nn.MSELoss(reduction="none")
""",
        then="""
found = loss_of(model(x[64:]), x[64:].sum(1)).mean().item()
assert abs(found - min(history)) < 1e-6 and hm.world_size() == 1
""",
    ),
    Page(
        "docs/how-to/track-runs.md",
        set_up="""
import mlflow, os
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
mlflow.set_tracking_uri(f"file://{os.getcwd()}/mlruns")
mlflow.set_experiment("of this page")  # not that of an earlier test
lr = 0.01
def train(width, lr):
    pass
""",
        then="""
import hydrogen_magic as hm
gangs = hm.gangs().values()
assert all(gang.wait_for_tracker(60) for gang in gangs)
runs = mlflow.search_runs(output_format="list")
assert len(runs) == 1, [note.text for gang in gangs for note in gang.snapshot().notices]
run = runs[0]
assert (run.info.run_name, run.data.params) == ("wide, lr 0.01", {"lr": "0.01"})
""",
        needs=["mlflow"],
        marks=[exhaustive],
    ),
    Page(
        "docs/how-to/trainers.md",
        set_up=TORCH
        + """
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
module, datamodule = BoringModel(), BoringDataModule()
data = [{"x": torch.ones(1)}] * 16
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
    def forward(self, x):
        return {"loss": self.layer(x).sum()}
model = Model()
""",
        marks=[exhaustive],  # ranks import these libraries, which takes seconds
    ),
    Page("docs/how-to/use-the-notebook-meanwhile.md", set_up=HM, then="assert gang.wait(0)"),
    # ── guides ───────────────────────────────────────────────────────────────────────────────────
    Page(
        "docs/guides/cells.md",
        set_up=TORCH + SCRIPTS,
        shown_by={
            "line 2: model(x).mean()": """
x, model = torch.ones(512), nn.Linear(1, 1)
# %%
%%distributed --np 2 --cpu --dry-run
model(x).mean()
""",
            "ZeroDivisionError": """
batch_sizes = [2, 0]


def mean_of(values, count):
    return sum(values) / count
# %%
%%distributed --np 2
dist.init_process_group()
total = torch.tensor([mean_of([1, 2, 3], batch_sizes[hm.rank()])])
dist.all_reduce(total)
# %%
%gang show
""",
        },
        slow=["plt.plot"],  # ranks import matplotlib
    ),
    Page("docs/guides/checkpoints.md", set_up=SHARED_MODEL + "def train(model):\n    pass"),
    Page(
        "docs/guides/data.md",
        set_up=TORCH
        + """
import pandas as pd
df = pd.DataFrame({"pixels": [[1.0, 2.0]] * 512, "label": [1.0] * 512})
dataset = TensorDataset(torch.ones(64, 1))
images, labels = torch.ones(64, 2), torch.ones(64)
model = nn.Linear(2, 1)
def loss_of(found, expected):
    return nn.functional.mse_loss(found.flatten(), expected)
def train_step(model, batch):
    loss_of(model(batch["pixels"]), batch["label"]).backward()
for folder in ("lake/train", "lake/train/year=2026"):
    os.makedirs(folder)
pd.DataFrame({"price": [1.0] * 64}).to_parquet("lake/train/year=2026/part.parquet")
""",
        changes={
            '"s3://lake': '"lake',
            '"s3a://lake': '"lake',
            'spark.table("digits")': "df",
            "batch_size=256": "batch_size=2",
        },
        slow=[
            "hm.checkpoint.load()"
        ],  # ranks import pandas; tests/local/test_dataset.py fails and continues
    ),
    Page(
        "docs/guides/deepspeed.md",
        changes={'{"lr": 1e-3}': '{"lr": 1e-3, "torch_adam": True}'},
        not_run={
            "GatheredParameters": "the end of another cell; tests/local/test_deepspeed.py has it"
        },
        marks=[exhaustive, deepspeed],
    ),
    Page(
        "docs/guides/jax.md",
        then="assert np.allclose(params['w'], [1, -2, 3, 0.5], atol=0.01)",
        marks=[exhaustive, jax],  # ranks import JAX, which takes seconds
    ),
    Page(
        "docs/guides/keras.md",
        set_up=HM,
        then="""
gang = list(hm.gangs().values())[-1]
for mine, theirs in zip(*gang.results, strict=True):
    np.testing.assert_array_equal(mine, theirs)
""",
        marks=[exhaustive],  # ranks import Keras, which takes seconds
    ),
    Page(
        "docs/guides/outlive.md",
        set_up=HM
        + """
class model:
    def state_dict():
        return {}
    def load_state_dict(state):
        assert state == {}
def train(model):
    pass
""",
        changes={"3f2a": "{id}", "range(state[": "range(89 + state["},
        before={"gang = %gang": "id = list(hm.gangs())[-1]"},
        not_run={
            "is still running": "by another kernel; tests/local/test_outlive.py",
            ".remote(": "needs Spark Connect; tests/spark/test_spark_outlive.py",
            "--on spark": "needs Spark Connect; tests/spark/test_spark_outlive.py",
        },
        then="assert gang.result is None",
    ),
    Page(
        "docs/guides/results.md",
        changes={"...": "model, history = 1, [2]"},
        then="assert (model, history) == (1, [2])",
    ),
    Page(
        "docs/guides/session-names.md",
        set_up=TORCH
        + """
def Net():
    return nn.Linear(1, 1)
def train(model):
    with torch.no_grad():
        model.weight.fill_(5)
def evaluate(model):
    assert model.weight.item() == 5
""",
        shown_by={
            "the notebook assigned it": """
%%distributed --np 2 --session
train(model)
# %%
model = Net()
# %%
%%distributed --session
evaluate(model)
""",
            "it shares objects with": """
%%distributed --np 2 --session
train(model)
# %%
opt = torch.optim.SGD(model.parameters(), lr=0.1)
# %%
%%distributed --session
opt
""",
        },
        before={
            "the notebook assigned it": "model = Net()",
            "model = Net()    ": "%gang end",
            "it shares objects with": "%gang end\n# %%\nmodel = Net()",
        },
        then="%gang end",
    ),
    # ── internals and reference ──────────────────────────────────────────────────────────────────
    Page("docs/internals/how-it-works.md", not_run={"notebook kernel": "a drawing"}),
    Page(
        "docs/internals/plug-ins.md",
        not_run={
            "hydrogen_magic.placements": "metadata; tests/local/test_plugins.py has such plug-ins",
            "hydrogen_magic.observers": "metadata; tests/local/test_plugins.py has such plug-ins",
        },
    ),
    Page(
        "docs/reference/distributed.md", not_run={"%%distributed [options]": "the syntax of a line"}
    ),
    Page("docs/reference/infer.md", not_run={"%%infer DF [options]": "the syntax of a line"}),
    # ── coming from other launchers ──────────────────────────────────────────────────────────────
    Page(
        "docs/migrating/deepspeed-torch-distributor.md",
        set_up="""open("train.py", "w").write("import sys; assert '--lr=1e-3' in sys.argv")""",
        changes={"numGpus=4, nnodes=2, localMode=False": "numGpus=1, nnodes=2, useGpu=False"},
    ),
    Page(
        "docs/migrating/mirrored-strategy-runner.md",
        set_up=HM,
        then="""
kernel, bias = weights
assert (kernel.shape, bias.shape) == ((4, 1), (1,))
for other_kernel, other_bias in list(hm.gangs().values())[-1].results:
    assert (kernel == other_kernel).all() and (bias == other_bias).all()
""",
        marks=[exhaustive, tensorflow],  # ranks import TensorFlow, which takes seconds
    ),
    Page(
        "docs/migrating/petastorm.md",
        set_up=HM + "import numpy as np, os, pandas as pd\n"
        "df = pd.DataFrame({'features': list(np.ones((300, 4), np.float32))})",
        before={"rows.delete()": "assert os.path.exists(rows.path)"},
        then="assert not os.path.exists(rows.path)",
    ),
    Page(
        "docs/migrating/torch-distributor.md",
        set_up="""
open("train.py", "w").write("import sys; assert '--lr=1e-3' in sys.argv")
def train(rate):
    return rate
""",
        changes={
            "num_processes=4, local_mode=False, use_gpu=True": "num_processes=2, use_gpu=False"
        },
        then="assert model == 1e-3",
    ),
    # ── pages whose ranks have another environment ───────────────────────────────────────────────────
    # Last: each has the agent start another forkserver, which the next page would have import torch again.
    Page(
        "docs/guides/horovod.md",
        set_up=SHARED_MODEL + "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
        marks=[horovod],
    ),
    Page(
        "docs/migrating/horovod-runner.md",
        set_up="""
def train_hvd(learning_rate):
    return learning_rate
num_classes, batch_size, epochs, checkpoint_dir = 2, 8, 2, "."
def get_dataset(num_classes, rank, size):
    import keras, numpy as np
    x = np.random.default_rng(0).random((32, 4)).astype(np.float32)[rank::size]
    y = keras.utils.to_categorical(np.arange(32) % num_classes, num_classes)[rank::size]
    return (x, y), (x, y)
def get_model(num_classes):
    import keras
    layers = [keras.Input((4,)), keras.layers.Dense(num_classes, activation="softmax")]
    return keras.Sequential(layers)
""",
        changes={"np=2": "np=-2"},
        then="assert model == 0.001 or model.count_params() == 10",
        slow=["KERAS_BACKEND"],  # ranks import Keras, which takes seconds
        marks=[horovod],
    ),
    Page(
        "docs/how-to/environment-variables.md",
        set_up="def train():\n    import os\n    assert os.environ['OMP_NUM_THREADS'] == '4'",
    ),
    Page(
        "docs/how-to/sweep.md",
        set_up=HM
        + """
def train(lr, width):
    hm.log(loss=lr * width, accuracy=1 - lr)
    return lr * width
""",
        changes={
            "--np 2": "--np 1 --out model",
            "loss = train": "model = loss = train",
            "lr=0.1,0.01,0.001": "lr=0.1,0.001",
        },
        then="""
assert sweep.best("loss")["params"] == {"lr": 0.001, "width": 64}
assert len(sweep.gangs) == 4 and sweep.results[0]["out"]["model"] == 6.4
""",
    ),
]
"""Pages that run on this machine alone."""

SPARK = [
    Page(
        "docs/how-to/more-ranks-than-slots.md",
        shown_by={"np 8": "%%distributed --np 8 --on spark\n1"},
    ),
    Page(
        "docs/guides/estimator.md",
        set_up="import os\npath = os.path.abspath('saved')",
        then="""
for model in (fitted, again, best):
    assert accuracy(model.transform(df)) > 0.9
""",
        marks=[exhaustive],
    ),
    Page(
        "docs/guides/inference.md",
        set_up="""
import pandas as pd
df = pd.DataFrame({"id": range(8), "a": range(8), "b": range(8)})
def model(batch):
    return batch["a"] + 0.5 * batch["b"]
def load_model():
    return model
""",
        changes={
            "def predict(batch):\n    batch[": "%%infer df --np 2\ndef predict(batch):\n    batch["
        },
        before={
            "hm.udf": """
frame, df = df, spark.createDataFrame(df)
df.createOrReplaceTempView("rows")
""",
        },
        then="""
assert sorted(row.score for row in scored.collect()) == list(model(frame))
assert sorted(row.score for row in _.collect()) == list(model(frame))
""",
    ),
    Page(
        "docs/guides/sessions.md",
        set_up=TORCH
        + """
batches = [torch.ones(4, 1)] * 4
def Net():
    return nn.Linear(1, 1)
def loss_of(model, batch):
    return model(batch).square().mean()
""",
        before={"--on spark": "%gang end"},
        then="%gang end",
    ),
    Page(
        "docs/guides/spark.md",
        set_up="master = spark.sparkContext.master",
        changes={'"spark://…"': "master"},
    ),
    Page(
        "docs/migrating/horovod-estimator.md",
        then="""
errors = [abs(row.prediction - row.label) for row in scored.collect()]
assert sum(errors) / len(errors) < 0.4
""",
        marks=[exhaustive, horovod],
    ),
    Page(
        "docs/migrating/pandas-udf.md",
        set_up=HM
        + """
df = spark.createDataFrame([(n, 1.0 * n, 0.5) for n in range(5)], "id long, a double, b double")
model = lambda a, b: a + b
load_model = lambda: model
""",
        then="""
for each in (df.mapInPandas(predict_rows, "id long, score double"), scored, scored_too):
    assert [row.score for row in each.collect()] == [n + 0.5 for n in range(5)]
""",
        marks=[exhaustive],
    ),
    Page(
        "docs/migrating/settings.md",
        changes={
            "local_mode=False, use_gpu": "use_gpu",
            "local_mode=True, use_gpu": "use_gpu",
            "use_gpu=False": "use_gpu=False, local_mode=False",
        },
        then="""
assert found == ("1", os.getcwd() + "/shared/hf") and pid != os.getpid()
assert (seen, first, second) == ([0, 1, 2], 0, 2)
""",
    ),
]
"""Pages that run on a Spark cluster."""

ELSEWHERE = {"docs/guides/tensorflow.md": "tests/local/test_tensorflow.py"}
"""Page -> the module that runs its blocks."""
