"""The cells that are run for the pictures."""

from __future__ import annotations

from tests.kernels import LOAD

__all__ = ["ANIMATED", "FAILING", "FRAME", "INFER", "LOAD", "SETUP", "TRAINING", "WARM"]

SETUP = """import time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
import hydrogen_magic as hm

x = torch.randn(2048, 64)
dataset = TensorDataset(x, (x @ torch.randn(64, 10)).argmax(1))
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
"""

WARM = """%%distributed --np 4 --quiet
used = dist, DistributedDataParallel, DataLoader, cross_entropy, hm, model"""
"""Imports what later gangs use, so that these start at once."""

ANIMATED = """%%distributed --np 4 --out model
dist.init_process_group()
ddp = DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
loader = DataLoader(hm.shard(dataset), batch_size=32, shuffle=True)
for epoch in hm.track(range(8), desc="epoch"):
    for images, labels in loader:
        scores = ddp(images)
        loss = cross_entropy(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        hm.log(loss=loss, accuracy=(scores.argmax(1) == labels).float().mean())
        time.sleep(0.03 + 0.03 * (hm.rank() == 2))    # rank 2 is slow"""
"""The training of the README."""

TRAINING = ANIMATED.replace("--out model", "--timeline").replace("range(8)", "range(16)")
"""As in the README, with a timeline, and long enough for a picture half-way."""

_CHECK = """    for images, labels in loader:
        if hm.rank() == 1 and epoch == 3:
            raise ValueError("epoch 3 has a label outside 0-9")
"""
FAILING = (
    ANIMATED.replace(" --out model", "").replace("    for images, labels in loader:\n", _CHECK)
    + """
    print(f"epoch {epoch}: loss {loss.item():.3f}")"""
)

FRAME = """import numpy as np
import pandas as pd

pixels = pd.DataFrame(np.random.default_rng(0).random((5_000_000, 16), dtype=np.float32))
pixels.iloc[[1000, 3000]] = -1
model = nn.Sequential(nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 10))"""

INFER = """%%infer pixels --np 4 --out scored --on-error collect
model.eval()

def predict(batch: torch.Tensor):
    if batch.min() < 0:
        raise ValueError("a pixel is darker than black")
    if hm.rank() == 2:
        time.sleep(0.08)  # this rank is slow
    return {"digit": model(batch).argmax(dim=1)}"""
