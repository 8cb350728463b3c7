"""What a page makes of the kernel's messages, in Python: the rules of ``protocol.ts`` and no more."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Any

from hydrogen_magic.views.widget.page_updates import PageMessage

Bucket = tuple[float, float, float, float]
"""Count, mean, minimum, maximum."""


@dataclass
class MirroredCurve:
    width: int = 1
    series: dict[int, dict[float, Bucket]] = field(default_factory=dict)
    bad_steps: dict[int, int] = field(default_factory=dict)

    def apply(self, delta: dict[str, Any], buffer: bytes) -> None:
        if delta.get("replaces"):
            self.series, self.bad_steps, self.width = {}, {}, delta["width"]
        ratio = delta["width"] // self.width
        assert ratio >= 1 and ratio * self.width == delta["width"]
        if ratio > 1:
            self.series = {r: _coarser(known, ratio) for r, known in self.series.items()}
        self.width = delta["width"]
        at = 0
        for one in delta["series"]:
            n, rank = one["n"], one["rank"]
            keys, counts, means, mins, maxs = columns(buffer[at : at + 40 * n], n, "ddddd")
            at += 40 * n
            fresh = zip(counts, means, mins, maxs, strict=True)
            self.series.setdefault(rank, {}).update(zip(keys, fresh, strict=True))
            if "bad_step" in one:
                self.bad_steps[rank] = one["bad_step"]
        assert at == len(buffer)


def columns(buffer: bytes, n: int, letters: str) -> list[tuple[Any, ...]]:
    """Return columns of ``n`` numbers each, of the types that ``struct`` has these letters for."""
    found, at = [], 0
    for letter in letters:
        found.append(struct.unpack_from(f"<{n}{letter}", buffer, at))
        at += n * struct.calcsize(letter)
    assert at == len(buffer)
    return found


def _coarser(known: dict[float, Bucket], ratio: int) -> dict[float, Bucket]:
    merged: dict[float, Bucket] = {}
    for key, (count, mean, least, most) in sorted(known.items()):
        before = merged.get(key // ratio, (0.0, 0.0, float("inf"), float("-inf")))
        total = before[0] + count
        middle = (before[0] * before[1] + count * mean) / total
        merged[key // ratio] = (total, middle, min(before[2], least), max(before[3], most))
    return merged


class Mirror:
    """One page."""

    def __init__(self, client: str = "") -> None:
        self.client = client
        self.seq: int | None = None
        self.parts_left = 0
        self.n_bytes = 0
        self._forget()

    def _forget(self) -> None:
        self.gang: dict[str, Any] = {}
        self.ranks: dict[int, dict[str, Any]] = {}
        self.summary: dict[str, Any] = {}
        self.summary_columns: list[tuple[Any, ...]] = []
        self.curves: dict[str, MirroredCurve] = {}
        self.names: list[str] = []
        self.spans: dict[tuple[int, str], list[tuple[Any, ...]]] = {}
        self.spans_since_s = 0.0
        self.skipped: dict[tuple[int, str], int] = {}
        self.lines: list[list[Any]] = []
        self.n_lines_before = 0
        self.stacks: dict[str, Any] | None = None
        self.report: dict[str, Any] | None = None

    def apply(self, message: PageMessage) -> None:
        # What ipykernel does with it: no NaN, no half surrogates.
        text = json.dumps(message.content, ensure_ascii=False, allow_nan=False).encode()
        self.n_bytes += len(text) + sum(map(len, message.buffers))
        delta = json.loads(text)
        assert delta["kind"] == "delta"
        if delta.get("to", self.client) != self.client:
            return
        is_full, is_part = delta.get("full", False), "parts_left" in delta
        if is_part and not is_full:
            assert delta["parts_left"] == self.parts_left - 1, "a part was lost"
        elif self.seq is not None and not is_full:
            assert delta["seq"] == self.seq + 1 and not self.parts_left, "a message was lost"
        self.seq = delta["seq"]
        self.parts_left = delta.get("parts_left", 0)
        if is_full:
            self._forget()
        if delta.get("restarted"):
            self.stacks = None
        self._take(delta, message.buffers)

    def _take(self, delta: dict[str, Any], buffers: list[bytes]) -> None:
        self.gang = delta.get("gang", self.gang)
        self.ranks.update((row["rank"], row) for row in delta.get("ranks", []))
        if "summary" in delta:
            self.summary = {k: v for k, v in delta["summary"].items() if k != "at"}
            n = self.gang["np"]
            self.summary_columns = columns(buffers[delta["summary"]["at"]], n, "BBB")
        for part in delta.get("curves", []):
            curve = self.curves.setdefault(part["metric"], MirroredCurve())
            curve.apply(part, buffers[part["at"]])
        self.names += delta.get("names", [])
        self.spans_since_s = max(self.spans_since_s, delta.get("spans_since_s", 0.0))
        for part in delta.get("spans", []):
            key = (part["rank"], part["track"])
            found = columns(buffers[part["at"]], part["n"], "dfHB")
            self.spans.setdefault(key, []).extend(zip(*found, strict=True))
            self.skipped[key] = part["skipped"]
        self.lines += delta.get("lines", [])
        self.n_lines_before += delta.get("lines_skipped", 0)
        self.stacks = delta.get("stacks", self.stacks)
        self.report = delta.get("report", self.report)
