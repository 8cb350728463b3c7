"""The ranks' logged values as a table."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from hydrogen_magic.core import events as ev

if TYPE_CHECKING:
    import pandas as pd

_KEYS = ["attempt", "rank", "step"]
_FIXED = {"attempt": "int64", "rank": "int64", "step": "int64", "time_s": "float64"}


def frame(events: Iterable[ev.Event]) -> pd.DataFrame:
    """Return one row per attempt, rank and step, sorted by them.

    Columns: ``attempt``, ``rank``, ``step``, ``time_s`` (seconds since the launch, of the step's last
    call), then the metrics in the order of their first appearance; NaN for steps without a value. If a step
    logged a metric twice, the later value is kept. A metric named like one of the four gets the suffix
    ``_``, more than once if there is such a metric.
    """
    import numpy as np
    import pandas as pd

    columns = _columns(events)
    arrays = {
        name: np.array(column, dtype=_FIXED.get(name, "float64"))
        for name, column in columns.items()
    }
    table: pd.DataFrame = pd.DataFrame(arrays)
    if table.duplicated(_KEYS).any():
        rows = table.groupby(_KEYS).ngroup().to_numpy()
        for name, column in columns.items():  # not by last(), which skips a value that is NaN
            has_value = [value is not None for value in column]
            empty = 0 if name in _FIXED else math.nan
            merged = np.full(rows.max() + 1, empty, arrays[name].dtype)
            merged[rows[has_value]] = arrays[name][has_value]
            arrays[name] = merged
        table = pd.DataFrame(arrays)
    ordered: pd.DataFrame = table.sort_values(_KEYS, kind="stable", ignore_index=True)
    return ordered


def _columns(events: Iterable[ev.Event]) -> dict[str, list[float | None]]:
    """Return all points by column. In lists: one frame per event would take seconds per hour of
    training.
    """
    fixed: dict[str, list[float | None]] = {name: [] for name in _FIXED}
    metrics: dict[str, list[float | None]] = {}
    attempt = 0
    for event in events:
        if isinstance(event, ev.AttemptStarted):
            attempt = event.attempt
        elif isinstance(event, ev.Metrics):
            before, added = len(fixed["step"]), len(event.steps)
            fixed["attempt"] += [attempt] * added
            fixed["rank"] += [event.rank] * added
            fixed["step"] += event.steps
            fixed["time_s"] += event.times_s
            for name, values in event.values.items():
                column = metrics.setdefault(name, [])
                column += [None] * (before - len(column))
                column += values
    n_points = len(fixed["step"])
    for column in metrics.values():
        column += [None] * (n_points - len(column))
    return {**fixed, **{_column_of(name, metrics): column for name, column in metrics.items()}}


def _column_of(metric: str, metrics: Collection[str]) -> str:
    name = metric
    while name in _FIXED or (name != metric and name in metrics):
        name += "_"
    return name
