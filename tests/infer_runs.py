"""Runs of ``%%infer`` for tests, without a notebook: their frame, their beginning and their end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from hydrogen_magic import capture
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.inference.gang import infer
from hydrogen_magic.inference.run import InferenceRun
from hydrogen_magic.node.prediction.options import InferOptions
from tests import gangs


def frame(n_rows: int = 10_000) -> pd.DataFrame:
    return pd.DataFrame({"x": range(n_rows)})


def begin(
    frame: Any,
    function: Callable[..., Any],
    *args: Any,
    np: int = 2,
    retries: int = 0,
    timeout: float | None = None,
    **options: Any,
) -> InferenceRun:
    """Begin a run whose ranks are set up by ``function``."""
    captured = capture.capture_call(function, args, {})
    options = {"batch_size": 100, **options}
    spec = JobSpec(np=np, retries=retries, timeout_s=timeout)
    return infer(frame, captured, spec, InferOptions(**options), title="test")


def ended(run: InferenceRun, within_s: float = gangs.PATIENCE_S) -> InferenceRun:
    """Wait for the end of a run as :func:`tests.gangs.ended` does."""
    gangs.ended(run.gang, within_s)
    return run
