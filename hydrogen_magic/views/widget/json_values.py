"""Values for all front ends: JSON without NaN, text without control characters, columns as bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from hydrogen_magic.core.units import clipped
from hydrogen_magic.driver.state.failure_report import stack_lines
from hydrogen_magic.driver.state.output_lines import clean_name
from hydrogen_magic.driver.state.span_tracks import SpanTrack
from hydrogen_magic.views.curves import CurveChange
from hydrogen_magic.views.point_buckets import Buckets

_LONGEST_STACKS = 64_000
"""Characters of the stacks of one rank."""
_THREAD_ADDRESS = re.compile(r"^((?:Current t|T)hread) 0x[0-9a-f]+")


def plain(text: str, longest: int) -> str:
    """Return one line of at most ``longest`` characters that is safe to show."""
    # Cut before cleaning: a rank may send text of any length.
    return clipped(clean_name(text[: 4 * longest]), longest)


def figure(value: float) -> float | str:
    """Return a number with six significant digits, or the name of a value that JSON lacks."""
    found = float(value)
    return rounded(found) if math.isfinite(found) else str(found)


def finite(value: float | None) -> float | None:
    """Return a number that JSON can represent; None for all others."""
    found = math.nan if value is None else float(value)
    return rounded(found) if math.isfinite(found) else None


def rounded(value: float) -> float:
    """Return ``value`` with six significant digits; whole numbers are unchanged."""
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.6g}")


def stack_text(stacks: str, cells: Mapping[str, str]) -> str:
    """Return stacks of threads, with the notebook's labels for its cells, without the threads' addresses.

    Ranks on different hosts have different addresses, which would keep equal stacks apart.
    """
    lines = stack_lines(stacks[:_LONGEST_STACKS], cells)
    return "\n".join(_THREAD_ADDRESS.sub(r"\1", line) for line in lines)


def curve_part(change: CurveChange, buffers: list[bytes]) -> dict[str, Any]:
    """Return a ``CurveDelta``; its columns are appended to ``buffers``."""
    series = []
    for rank, buckets in change.series.items():
        bad = {"bad_step": change.bad_steps[rank]} if rank in change.bad_steps else {}
        series.append({"rank": rank, "n": len(buckets), **bad})
    buffers.append(b"".join(map(packed_buckets, change.series.values())))
    head: dict[str, Any] = {"metric": change.metric, "width": change.width}
    if change.replaces:
        head["replaces"] = True
    if change.tip is not None:
        tip = change.tip
        head["tip"] = {"step": tip.step, "mean": figure(tip.mean), "end": tip.end}
    return {**head, "series": series, "at": len(buffers) - 1}


def packed_buckets(buckets: Buckets) -> bytes:
    """Return 40 bytes per bucket: key, count, mean, min and max as Float64, by column."""
    columns = (buckets.keys, buckets.counts, buckets.means, buckets.mins, buckets.maxs)
    return b"".join(_bytes(column, "<f8") for column in columns)


def span_part(rank: int, track: str, spans: SpanTrack, buffers: list[bytes]) -> dict[str, Any]:
    """Return a ``SpanDelta``; its columns, 15 bytes per span, are appended to ``buffers``."""
    columns = (
        (spans.starts_s, "<f8"),
        (spans.durations_s, "<f4"),
        (spans.names, "<u2"),
        (spans.depths, "u1"),
    )
    buffers.append(b"".join(_bytes(column, dtype) for column, dtype in columns))
    head = {"rank": rank, "track": track, "n": len(spans)}
    return {**head, "skipped": spans.skipped, "at": len(buffers) - 1}


def _bytes(column: Any, dtype: str) -> bytes:
    return bytes(np.asarray(column, dtype=dtype).tobytes())
