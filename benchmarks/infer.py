"""Inference over a frame: rows per second, the whole call counted, set-up done before.

    python benchmarks/infer.py --rounds 5
    python benchmarks/infer.py --only bare %%infer pandas        # without Spark
    python benchmarks/infer.py --only lazy                       # actions on lazy Spark frames alone

Two million rows of 16 float32 and a small perceptron, in turn: two bare processes that only run the
model over arrays in memory, ``%%infer`` with two ranks, one process of pandas with two torch threads,
joblib, and Spark's own ways on ``local[2]``. Then fewer rows and a ``predict`` that holds the GIL. Then
frames of 3,000 float32 columns and a ``predict`` that only reads them: the way of the rows is the work.
Last, actions on a lazy Spark frame, of which only some need predictions, beside ``predict_batch_udf``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _common import Peer, chosen, lacks, machine, parse_arguments, print_table, round_robin, timed
from _infer_model import BATCH, NAMES, mean_predictor, predictor, rows
from _infer_spark import BY_HAND
from _infer_spark import OURS as ON_SPARK

N_PROCESSES = 2
BARE = "bare, 2 processes"
PRODUCT = "%%infer, 2 ranks"
PANDAS = "pandas, 1 process"
GOAL = 0.85
"""Of the bare processes' rows per second."""
GIL_GOAL = 1.8
"""Times one process, where ``predict`` holds the GIL."""
FIRST_BATCH_GOAL_S = 0.3
JOBLIB = "joblib, 2 processes"
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
    from hydrogen_magic.inference.local import infer as start
    from hydrogen_magic.node.prediction.options import InferOptions

    captured = capture.capture_call(function, args, {})
    chosen_options = InferOptions(batch_size=BATCH, **options)
    run = start(df, captured, JobSpec(np=N_PROCESSES), chosen_options, title="benchmark")
    assert len(run.result) == len(df)
    return run


def pandas_process(df: Any, predict: Callable[[Any], Any], threads: int) -> None:
    """Do the same in this process."""
    import numpy as np
    import torch

    torch.set_num_threads(threads)
    scored = np.zeros(len(df), np.float32)
    for start in range(0, len(df), BATCH):
        scored[start : start + BATCH] = predict(df.iloc[start : start + BATCH])["score"]
    result = df.assign(score=scored)
    assert len(result) == len(df)


def by_joblib(df: Any, predict: Callable[[Any], Any]) -> None:
    """Do the same in the processes of joblib, which stay from one call to the next."""
    import numpy as np
    from joblib import Parallel, delayed

    parts = [df.iloc[start : start + BATCH] for start in range(0, len(df), BATCH)]
    found = Parallel(n_jobs=N_PROCESSES)(delayed(predict)(part) for part in parts)
    result = df.assign(score=np.concatenate([part["score"] for part in found]))
    assert len(result) == len(df)


def first_batch_s(run: Any) -> float:
    """Return when ranks that were kept began to predict: as good as their first batch."""
    from hydrogen_magic.core import events as ev

    begun = [e for e in run.gang.events() if isinstance(e, ev.RankPhase) and e.phase == "running"]
    return max(event.at_s for event in begun)


# ── the tables ───────────────────────────────────────────────────────────────────────────────────


def measure(n_rows: int, rounds: int, only: list[str], with_spark: bool) -> None:
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
            Peer(JOBLIB, lambda: timed(lambda: by_joblib(df, predict)), lacks("joblib")),
        ]
        if with_spark:
            from _infer_spark import peers as spark_peers

            peers += spark_peers(df, stack)
        peers = chosen(peers, only)
        for peer in peers:
            if not peer.missing:
                peer.measure()
        round_robin(peers, rounds)
    print_table(f"{n_rows:,} rows, the model alone", peers, BARE)
    print_rates(peers, n_rows)
    print_first_and_memory(df)


def print_rates(peers: list[Peer], n_rows: int) -> None:
    by_name = {peer.name: peer for peer in peers if peer.seconds}
    for peer in by_name.values():
        print(f"  {peer.name:34} {n_rows / peer.median_s / 1e3:8.0f} thousand rows/s")
    if {BARE, PRODUCT} <= by_name.keys():
        pairs = zip(by_name[BARE].seconds, by_name[PRODUCT].seconds, strict=True)
        shares = sorted(bare_s / ours_s for bare_s, ours_s in pairs)
        print(
            f"{PRODUCT}: {shares[len(shares) // 2]:.2f} of the bare processes' rate (goal {GOAL})"
        )
    if {ON_SPARK, BY_HAND} <= by_name.keys():
        pairs = zip(by_name[BY_HAND].seconds, by_name[ON_SPARK].seconds, strict=True)
        ratios = sorted(by_hand_s / ours_s for by_hand_s, ours_s in pairs)
        print(f"{ON_SPARK}: {ratios[len(ratios) // 2]:.2f} times {BY_HAND} (goal 1.0)")


def print_first_and_memory(df: Any) -> None:
    from tests.memory import Memory

    with Memory() as memory:
        run = infer(df)
        result_bytes = len(df) * 4
    first_s = first_batch_s(run)
    more = (memory.peak - memory.before - result_bytes) / 1e6
    print(f"kept set-up: first batch after {first_s:.2f} s (goal {FIRST_BATCH_GOAL_S})")
    print(f"peak memory above frame, models and result: {more:.0f} MB (PSS of the whole tree)")


def measure_gil(n_rows: int, rounds: int) -> None:
    """Per-row Python before the model."""
    df = frame(n_rows)
    predict = predictor(holds_gil=True)
    peers = [
        Peer(PRODUCT, lambda: timed(lambda: infer(df, predictor, True))),
        Peer(PANDAS, lambda: timed(lambda: pandas_process(df, predict, 2))),
    ]
    for peer in peers:
        peer.measure()
    round_robin(peers, rounds)
    print_table(f"{n_rows:,} rows, predict holds the GIL", peers, PANDAS)
    ratio = peers[1].median_s / peers[0].median_s
    print(f"{ratio:.2f} times one process (goal {GIL_GOAL})")


def measure_wide(n_rows: int, rounds: int, only: list[str], with_spark: bool) -> float:
    """Print the table for wide frames; return the median time of ``%%infer``."""
    import numpy as np
    import pandas as pd

    values = np.random.default_rng(0).random((n_rows, WIDE_COLUMNS), dtype=np.float32)
    df = pd.DataFrame(values, columns=[f"x{n}" for n in range(WIDE_COLUMNS)])
    predict = mean_predictor()
    product = Peer(PRODUCT, lambda: timed(lambda: infer(df, mean_predictor, only=True)))
    with ExitStack() as stack:
        peers = [
            product,
            Peer(PANDAS, lambda: timed(lambda: pandas_process(df, predict, 2))),
            Peer(JOBLIB, lambda: timed(lambda: by_joblib(df, predict)), lacks("joblib")),
        ]
        if with_spark:
            from _infer_spark import wide_peer

            peers.append(wide_peer(df, stack))
        peers = chosen(peers, only)
        for peer in peers:
            if not peer.missing:
                peer.measure()
        round_robin(peers, rounds)
    print_table(f"{n_rows:,} rows of {WIDE_COLUMNS:,} float32, the way of the rows", peers, PANDAS)
    return product.median_s if product.seconds else float("nan")


def measure_wide_frames(n_rows: int, rounds: int, only: list[str], with_spark: bool) -> None:
    from hydrogen_magic.inference import sources

    few = n_rows // 20
    few_s = measure_wide(few, rounds, only, with_spark)  # Spark takes minutes for more
    many_s = measure_wide(n_rows, rounds, only, False)
    rate = (n_rows - few) * WIDE_COLUMNS * 4 / (many_s - few_s) / 1e9
    print(f"%%infer moves {rate:.1f} GB/s of a wide frame (goal {WIDE_GOAL_GB_S})")
    import numpy as np
    import pandas as pd

    df = pd.DataFrame(np.zeros((BATCH, WIDE_COLUMNS), np.float32))
    seconds = timed(lambda: next(iter(sources.source(df).chunks(BATCH))))
    print(f"the kernel's first chunk takes {seconds:.3f} s (goal {WIDE_OVERHEAD_GOAL_S})")


def measure_lazy(n_rows: int, rounds: int) -> None:
    """Print the time of each action, as a ratio to ``predict_batch_udf``."""
    from _infer_spark import BATCH_UDF, lazy_peers

    with ExitStack() as stack:
        found = lazy_peers(frame(n_rows), stack)
        for action, peers in found.items():
            first_s = max(peer.measure() for peer in peers)
            round_robin(peers, rounds if first_s > SHORT_S else MORE_ROUNDS * rounds)
            print_table(f"{n_rows:,} rows, lazy: {action}", peers, BATCH_UDF)
            ours, theirs = (peer.median_s for peer in peers)
            print(f"{action}: {ours / theirs:.2f} of the time of {BATCH_UDF} (goal 1.0)")


def main() -> None:
    arguments = parse_arguments(__doc__.splitlines()[0], rounds=5, quick_rounds=2)
    n_rows = 400_000 if arguments.quick else 2_000_000
    print(f"inference: {machine()}", flush=True)
    wants_spark = not arguments.only or any("spark" in word.lower() for word in arguments.only)
    if list(arguments.only) != ["lazy"]:
        measure(n_rows, arguments.rounds, arguments.only, wants_spark)
        measure_gil(n_rows // 5, arguments.rounds)
        measure_wide_frames(n_rows // 20, arguments.rounds, arguments.only, wants_spark)
    if not arguments.only or "lazy" in arguments.only:
        missing = lacks("pyspark") or ("" if shutil.which("java") else "no Java runtime")
        print(missing) if missing else measure_lazy(n_rows, arguments.rounds)


if __name__ == "__main__":
    started = time.monotonic()
    main()
    print(f"took {time.monotonic() - started:.0f} s", file=sys.stderr)
