"""The model and the rows of ``infer.py``, for every peer the same; and the bare processes, run as a script.

    python benchmarks/_infer_model.py ROWS SHARE

A bare process holds its share of the rows as one array. For each line on its standard input it runs the
model over them, and answers with a line.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Predict = Callable[[Any], dict[str, Any]]
COLUMNS = 16
NAMES = [f"x{n}" for n in range(COLUMNS)]
BATCH = 4096


def rows(n_rows: int, seed: int = 0) -> Any:
    """Return ``n_rows`` x 16 float32."""
    return np.random.default_rng(seed).random((n_rows, COLUMNS), dtype=np.float32)


def model() -> Any:
    """Return a perceptron of 62,145 parameters, the same in every process."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 224), nn.ReLU(), nn.Linear(224, 1)]
    return nn.Sequential(*layers).eval()


def scores(net: Any, values: Any) -> Any:
    """Return what ``net`` makes of an array."""
    import torch

    with torch.inference_mode():
        return net(torch.from_numpy(values))[:, 0].numpy()


def clipped(values: Any) -> Any:
    """Do in Python what NumPy would do at once: work that holds the GIL."""
    return np.array(
        [[min(max(x, 0.1), 0.9) for x in row] for row in values.tolist()], dtype=np.float32
    )


def predictor(holds_gil: bool = False) -> Predict:
    """Set up, and return what is called with every batch, a pandas DataFrame."""
    net = model()

    def predict(batch: Any) -> dict[str, Any]:
        values = batch.to_numpy()
        return {"score": scores(net, clipped(values) if holds_gil else values)}

    return predict


@functools.cache
def _kept_predictor() -> Predict:
    return predictor()


def predict_kept(batch: Any) -> dict[str, Any]:
    """A ``predict`` of which only the name is sent: each process sets up once."""
    return _kept_predictor()(batch)


def mean_predictor() -> Predict:
    """Return a ``predict`` that costs little more than to read its batch, of any number of columns."""
    return lambda batch: {"score": batch.to_numpy().mean(axis=1)}


def timed_predictor(set_up: Callable[[], Predict]) -> Predict:
    """Return the ``predict`` of ``set_up`` with one more column: when the batch ended."""
    predict = set_up()
    return lambda batch: {**predict(batch), "ended_s": np.full(len(batch), time.monotonic())}


def bare(n_rows: int, share: int) -> None:
    """Be a bare process; see the top of this file."""
    import torch

    torch.set_num_threads(1)
    net, values = model(), rows(n_rows, share)
    out: Any = np.zeros(n_rows, np.float32)
    print("ready", flush=True)
    for _ in sys.stdin:
        for start in range(0, n_rows, BATCH):
            out[start : start + BATCH] = scores(net, values[start : start + BATCH])
        print(float(out.sum()), flush=True)


if __name__ == "__main__":
    bare(int(sys.argv[1]), int(sys.argv[2]))
