"""Inference over a frame: rows per second, the whole call counted, set-up done before.

    python benchmarks/infer.py --rounds 5
    python benchmarks/infer.py --only bare %%infer pandas        # without Spark
    python benchmarks/infer.py --only lazy                       # actions on lazy Spark frames alone
    python benchmarks/infer.py --only wide                       # wide frames alone, without Spark

Two million rows of 16 float32 and a small perceptron, in turn: two bare processes that only run the
model over arrays in memory, ``%%infer`` with two ranks, one process of pandas with two torch threads,
joblib, and Spark's own ways on ``local[2]``. Then fewer rows and a ``predict`` that holds the GIL. Then
frames of 3,000 float32 columns and a ``predict`` that only reads them: transferring the rows is the work.
"First batch" is the time from the call to the end of the first batch, with ranks that are set up. Last,
actions on a lazy Spark frame, of which only some need predictions, beside ``predict_batch_udf``.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from _common import Peer, chosen_peers, lacks, lacks_spark, peer_table, round_robin, timed, warm_up
from _infer_model import (
    BATCH,
    NAMES,
    Predict,
    mean_predictor,
    predict_kept,
    predictor,
    rows,
    timed_predictor,
)
from _results import Run, Table, parse_arguments, report

N_PROCESSES = 2
BARE = "bare, 2 processes"
PRODUCT = "%%infer, 2 ranks"
PANDAS = "pandas, 1 process"
GOAL = 0.85
"""Of the rows per second of bare processes."""
GIL_GOAL = 1.8
"""Times one process, where ``predict`` holds the GIL."""
FIRST_BATCH_GOAL_S = 0.3
JOBLIB = "joblib, 2 processes"
SWITCHES = ("lazy", "wide")
"""Words of ``--only`` that run some tables alone."""
SHORT_S = 1.0
MORE_ROUNDS = 5
"""Of actions that take a tenth of a second, which vary by half of it."""
WIDE_COLUMNS = 3_000
WIDE_GOAL_GB_S = 2.0
WIDE_OVERHEAD_GOAL_S = 0.1


class Bare:
    """Processes with their share of the rows in memory and the model ready."""

    def __init__(self, n_rows: int) -> None:
        script = str(Path(__file__).with_name("_infer_model.py"))
        self._processes = [
            subprocess.Popen(
                [sys.executable, script, str(n_rows // N_PROCESSES), str(share)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for share in range(N_PROCESSES)
        ]  # fmt: skip
        self._answers()

    def _answers(self) -> None:
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.readline()

    def run(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        self._answers()

    def close(self) -> None:
        for process in self._processes:
            process.communicate(timeout=10)


def frame(n_rows: int) -> Any:
    """Return the rows as pandas has them after it read them: one column after another."""
    import pandas as pd

    return pd.DataFrame(dict(zip(NAMES, rows(n_rows).T.copy(), strict=True)))


def infer(df: Any, function: Callable[..., Any] = predictor, *args: Any, **options: Any) -> Any:
    """Run ``%%infer`` without its magic; return the run."""
    from hydrogen_magic import capture
    from hydrogen_magic.core.job import JobSpec
    from hydrogen_magic.inference.gang import infer as start
    from hydrogen_magic.node.prediction.options import InferOptions

    captured = capture.capture_call(function, args, {})
    chosen_options = InferOptions(batch_size=BATCH, **options)
    run = start(df, captured, JobSpec(np=N_PROCESSES), chosen_options, title="benchmark")
    assert len(run.result) == len(df)
    return run


def pandas_process(df: Any, predict: Predict, threads: int) -> None:
    """Do the same in this process."""
    import numpy as np
    import torch

    torch.set_num_threads(threads)
    scored: Any = np.zeros(len(df), np.float32)
    for start in range(0, len(df), BATCH):
        scored[start : start + BATCH] = predict(df.iloc[start : start + BATCH])["score"]
    result = df.assign(score=scored)
    assert len(result) == len(df)


def by_joblib(df: Any, predict: Predict) -> None:
    """Do the same in the processes of joblib, which stay from one call to the next."""
    import numpy as np
    from joblib import Parallel, delayed

    parts = [df.iloc[start : start + BATCH] for start in range(0, len(df), BATCH)]
    found = Parallel(n_jobs=N_PROCESSES)(delayed(predict)(part) for part in parts)
    result = df.assign(score=np.concatenate([part["score"] for part in found]))
    assert len(result) == len(df)


def first_batch_s(df: Any, set_up: Callable[[], Predict]) -> float:
    """Return the seconds from the call to the end of the first batch; all processes share the clock."""
    began_s = time.monotonic()
    scored = infer(df, timed_predictor, set_up, only=True).result
    return float(scored["ended_s"].min()) - began_s


# ── the tables ───────────────────────────────────────────────────────────────────────────────────


def measured(peers: list[Peer], rounds: int) -> list[Peer]:
    """Measure in rounds, after a first time that sets up."""
    warm_up(peers)
    round_robin(peers, rounds)
    return peers


def measure(run: Run, n_rows: int, with_spark: bool) -> None:
    """The model alone is the work."""
    df = frame(n_rows)
    predict = predictor()
    with ExitStack() as stack:
        bare = Bare(n_rows)
        stack.callback(bare.close)
        peers = [
            Peer(BARE, lambda: timed(bare.run)),
            Peer(PRODUCT, lambda: timed(lambda: infer(df))),
            Peer(PANDAS, lambda: timed(lambda: pandas_process(df, predict, 2))),
            Peer(JOBLIB, lambda: timed(lambda: by_joblib(df, predict_kept)), lacks("joblib")),
        ]
        if with_spark:
            from _infer_spark import peers as spark_peers

            peers += spark_peers(df, stack)
        peers = measured(chosen_peers(peers, peer_words(run)), run.rounds)
    rates = {peer.name: n_rows / peer.median_s / 1e3 for peer in peers if peer.seconds}
    title = f"{n_rows:,} rows, the model alone (goal: {GOAL} of the rows/s of bare processes)"
    report(run, peer_table("infer", title, peers, BARE, {"thousand rows/s": rates}))
    report(run, first_and_memory(df))


def first_and_memory(df: Any) -> Table:
    from tests.memory import Memory

    infer(df)
    with Memory() as memory:
        infer(df)
    more_mb = (memory.peak - memory.before - len(df) * 4) / 1e6
    first_batch_s(df, predictor)
    first_s = first_batch_s(df, predictor)
    rows: list[list[Any]] = [
        ["call to the end of the first batch", "s", first_s, FIRST_BATCH_GOAL_S],
        ["peak memory above that before it, without the result", "MB", more_mb, None],
    ]
    columns = {"": "", "unit": "", "measured": "", "goal": ""}
    return Table("infer_first", f"{len(df):,} rows, the second run of a cell", columns, rows)


def measure_gil(run: Run, n_rows: int) -> None:
    """Per-row Python before the model."""
    df = frame(n_rows)
    predict = predictor(holds_gil=True)
    peers = [
        Peer(PRODUCT, lambda: timed(lambda: infer(df, predictor, True))),
        Peer(PANDAS, lambda: timed(lambda: pandas_process(df, predict, 2))),
    ]
    measured(peers, run.rounds)
    title = f"{n_rows:,} rows, predict holds the GIL (goal: {GIL_GOAL} times one process)"
    report(run, peer_table("infer_gil", title, peers, PRODUCT))


def measure_wide(run: Run, name: str, n_rows: int, with_spark: bool) -> float | None:
    """Report on wide frames; return the median time of ``%%infer``."""
    import numpy as np
    import pandas as pd

    values = np.random.default_rng(0).random((n_rows, WIDE_COLUMNS), dtype=np.float32)
    df = pd.DataFrame(values, columns=[f"x{n}" for n in range(WIDE_COLUMNS)])
    predict = mean_predictor()
    begun: list[float] = []

    def by_infer() -> None:
        begun.append(first_batch_s(df, mean_predictor))

    product = Peer(PRODUCT, lambda: timed(by_infer))
    with ExitStack() as stack:
        peers = [
            product,
            Peer(PANDAS, lambda: timed(lambda: pandas_process(df, predict, 2))),
            Peer(JOBLIB, lambda: timed(lambda: by_joblib(df, predict)), lacks("joblib")),
        ]
        if with_spark:
            from _infer_spark import wide_peer

            peers.append(wide_peer(df, stack))
        peers = measured(chosen_peers(peers, peer_words(run)), run.rounds)
    first = {PRODUCT: statistics.median(begun[1:])} if product.seconds else {}
    title = f"{n_rows:,} rows of {WIDE_COLUMNS:,} float32, transfer of the rows"
    report(run, peer_table(name, title, peers, PANDAS, {"first batch, s": first}))
    return product.median_s if product.seconds else None


def measure_wide_frames(run: Run, n_rows: int, with_spark: bool) -> None:
    few = n_rows // 20
    few_s = measure_wide(run, "infer_wide_few", few, with_spark)  # Spark takes minutes for more
    many_s = measure_wide(run, "infer_wide_many", n_rows, False)
    if few_s is None or many_s is None or many_s <= few_s:  # not chosen, or only noise
        return
    rate = (n_rows - few) * WIDE_COLUMNS * 4 / (many_s - few_s) / 1e9
    rows: list[list[Any]] = [
        ["more rows", "GB/s", rate, WIDE_GOAL_GB_S],
        ["first chunk in the kernel", "s", first_chunk_s(), WIDE_OVERHEAD_GOAL_S],
    ]
    columns = {"": "", "unit": "", "measured": "", "goal": ""}
    report(run, Table("infer_rate", f"%%infer, {WIDE_COLUMNS:,} columns", columns, rows))


def first_chunk_s() -> float:
    import numpy as np
    import pandas as pd

    from hydrogen_magic.inference import sources

    df = pd.DataFrame(np.zeros((BATCH, WIDE_COLUMNS), np.float32))
    return timed(lambda: next(iter(sources.source(df).chunks(BATCH))))


def measure_lazy(run: Run, n_rows: int) -> None:
    """Report the time of each action, as a ratio to ``predict_batch_udf``."""
    from _infer_spark import BATCH_UDF, lazy_peers

    with ExitStack() as stack:
        found = lazy_peers(frame(n_rows), stack)
        for number, (action, peers) in enumerate(found.items()):
            first_s = timed(partial(warm_up, peers)) / len(peers)
            round_robin(peers, run.rounds if first_s > SHORT_S else MORE_ROUNDS * run.rounds)
            title = f"{n_rows:,} rows, lazy: {action}"
            report(run, peer_table(f"infer_lazy_{number}", title, peers, BATCH_UDF))


def peer_words(run: Run) -> list[str]:
    """Return the words of ``--only`` that choose peers; the others are :data:`SWITCHES`."""
    return [word for word in run.only if word not in SWITCHES]


def main() -> None:
    packages = ("torch", "pandas", "pyarrow", "pyspark", "joblib")
    run = parse_arguments(__doc__.splitlines()[0], rounds=5, quick_rounds=2, packages=packages)
    n_rows = 400_000 if run.quick else 2_000_000
    print(f"inference: {run.machine}", flush=True)
    is_whole = not run.only or bool(peer_words(run))
    with_spark = not run.only or any("spark" in word.lower() for word in run.only)
    if is_whole:
        measure(run, n_rows, with_spark)
        measure_gil(run, n_rows // 5)
    if is_whole or "wide" in run.only:
        measure_wide_frames(run, n_rows // 20, with_spark)
    if not run.only or "lazy" in run.only:
        missing = lacks_spark()
        print(missing) if missing else measure_lazy(run, n_rows)


if __name__ == "__main__":
    main()
