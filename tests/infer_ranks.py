"""Cells of ``%%infer`` as functions: each sets a rank up, and returns its ``predict``. Imports little."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Predict = Callable[[Any], Any]


def doubles() -> Predict:
    return lambda batch: {"y": batch["x"] * 2}


def never_without_rows() -> Predict:
    return lambda batch: {"y": [batch["x"].iloc[0]] * len(batch)}


def keeps(kind: str) -> Predict:
    """Sum up all batches that it was ever given, for each one anew."""
    import numpy
    import pyarrow

    kept: list[Any] = []

    def predict(batch: Any) -> Any:
        kept.append(batch)
        total = sum(int(numpy.asarray(each["x"]).sum()) for each in kept)
        return {"so_far": [total] * len(batch["x"])}

    forms = {"arrow": pyarrow.Table, "arrays": dict[str, numpy.ndarray]}
    if kind in forms:
        predict.__annotations__["batch"] = forms[kind]
    return predict


def who() -> Predict:
    """Say which rank it was, and how many threads it may use."""
    rank, threads = int(os.environ["RANK"]), int(os.environ.get("OMP_NUM_THREADS", "0"))
    return lambda batch: {"rank": [rank] * len(batch), "threads": [threads] * len(batch)}


def zeros() -> Predict:
    import numpy

    return lambda batch: {"y": numpy.zeros(len(batch))}


def slow_on(slow_rank: int, seconds: float, others_s: float = 0.0) -> Predict:
    """Take ``seconds`` for a batch on one rank, and ``others_s`` on the others."""
    rank = int(os.environ["RANK"])

    def predict(batch: Any) -> Any:
        time.sleep(seconds if rank == slow_rank else others_s)
        return {"rank": [rank] * len(batch)}

    return predict


def slow_nulls() -> Predict:
    def predict(batch: Any) -> Any:
        time.sleep(0.2)
        return {"y": [None] * len(batch)}

    return predict


def waits_with_a_timeout(seconds: float) -> Predict:
    """Be set up by a library that gives every new socket a timeout; rank 0 makes the others wait."""
    socket.setdefaulttimeout(seconds)
    return slow_on(0, 20 * seconds)


def fails_at(bad: int) -> Predict:
    def predict(batch: Any) -> Any:
        if (batch["x"] == bad).any():
            raise ValueError(f"cannot do {bad}")
        return {"y": batch["x"] * 2}

    return predict


def always_fails() -> Predict:
    def predict(batch: Any) -> Any:
        raise ValueError("never")

    return predict


def killed_once_at(bad: int, marker: str) -> Predict:
    """End this process the first time that the row comes."""

    def predict(batch: Any) -> Any:
        if (batch["x"] == bad).any() and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"y": batch["x"] * 2}

    return predict


def sleeps() -> Predict:
    print("set up", flush=True)

    def predict(batch: Any) -> Any:
        print("began", flush=True)
        time.sleep(1000)

    return predict


def counted(log: str, reads: str = "", offset: int = 0) -> Predict:
    """Leave a line for every set-up."""
    with open(log, "a") as file:
        file.write("set up\n")
    if reads:
        offset = int(Path(reads).read_text())
    pid = os.getpid()
    return lambda batch: {"y": batch["x"] + offset, "pid": [pid] * len(batch)}


def offset_by_arrow(path: str) -> Predict:
    """Read a file by C++, which Python does not notice."""
    import pyarrow

    with pyarrow.OSFile(path) as file:
        offset = int(file.read())
    return lambda batch: {"y": batch["x"] + offset}


def grows(width: int) -> Predict:
    return lambda batch: {"wide": [[float(x)] * width for x in batch["x"]]}


def very_wide(width: int) -> Predict:
    """Return columns of long names."""
    return lambda batch: {f"{'column':_<250}{n}": batch["x"] + n for n in range(width)}


def waits_for(
    marker: str, stopped: int = 1, from_row: int = 2_000, seconds: float = 0.001
) -> Predict:
    """One rank stops itself (SIGSTOP) with a batch in hand that begins at ``from_row`` or later.

    When it is woken up, it is faster than the others.
    """
    rank = int(os.environ["RANK"])

    def predict(batch: Any) -> Any:
        is_woken = rank == stopped and Path(marker).exists()
        if not is_woken:
            time.sleep(seconds)
            if rank == stopped and batch["x"].iloc[0] >= from_row:
                _stop_itself(marker)
        n_rows = len(batch)
        return {"rank": [rank] * n_rows, "is_woken": [is_woken] * n_rows, "y": batch["x"] * 2}

    return predict


def _stop_itself(marker: str) -> None:
    Path(marker).write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def stops_in_set_up(marker: str) -> Predict:
    if os.environ["RANK"] == "1":
        _stop_itself(marker)
    return doubles()


def nothing() -> None:
    """No ``predict`` at all."""


def logged(log: str, seconds: float, reads: str = "") -> Predict:
    """Leave a line for every batch."""
    if reads:
        Path(reads).read_text()
        Path(log).read_text()  # which predict writes

    def predict(batch: Any) -> Any:
        time.sleep(seconds)
        with open(log, "a") as file:
            file.write(f"{batch['x'].iloc[0]}\n")
        return {"y": batch["x"] * 2, "t": [f"row {x}" for x in batch["x"]]}

    return predict


def drifts(log: str) -> Predict:
    """Return numbers of no common type for the first and the last rows; log the first row of each batch."""
    import numpy

    def predict(batch: Any) -> Any:
        with open(log, "a") as file:
            file.write(f"{batch['x'].iloc[0]}\n")
        rows = batch["x"].to_numpy()
        is_late = rows[0] >= 10_000
        return {"y": -rows if is_late else rows.astype(numpy.uint64) + numpy.uint64(2**63)}

    return predict


def sums_rows() -> Predict:
    return lambda batch: {"sum": batch.to_numpy().sum(axis=1, dtype="float64")}
