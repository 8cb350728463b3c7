"""Reads a rank's stdout and stderr from their pipes, and masks secrets: for its log and the live view."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable

from hydrogen_magic.core import display_marks
from hydrogen_magic.core import events as ev
from hydrogen_magic.core.masking import Mask, MaskedStream
from hydrogen_magic.node.agent.attempt_reporter import AttemptReporter
from hydrogen_magic.node.agent.display_order import DisplayOrder
from hydrogen_magic.node.agent.output_limits import CHUNK, LivePart, LiveText, RankLog, TokenBucket
from hydrogen_magic.node.agent.pooled_worker import PooledWorker

DRAIN_CHUNKS = 32
"""A pipe holds at most 1 MB; more than twice that comes from a process that still writes."""


class _Stream:
    """A pipe of the rank."""

    def __init__(self, fd: int, mask: Mask) -> None:
        self.fd = fd
        self.masked = MaskedStream(mask)
        self.live = LiveText()
        self.part: LivePart | None = None
        """Taken from ``live``, not emitted yet."""


def emit_new(outputs: Iterable[RankOutput], limit: TokenBucket) -> None:
    """Emit new output of a gang's ranks within the limit.

    The stream that was served longest ago comes first, or one that never pauses would take all.
    """
    outputs = list(outputs)
    streams = [stream for output in outputs for stream in output.streams.values()]
    for stream in sorted(streams, key=lambda stream: stream.live.turn):
        stream.part = stream.live.take(limit)
    for output in outputs:
        output.emit_taken()


class RankOutput:
    """Reads ``stdout`` and ``stderr`` of a rank and removes secrets."""

    def __init__(
        self, rank: int, worker: PooledWorker, log: RankLog, reporter: AttemptReporter
    ) -> None:
        self._rank = rank
        self._log = log
        self._reporter = reporter
        self.streams = {
            "stdout": _Stream(worker.stdout, reporter.mask),
            "stderr": _Stream(worker.stderr, reporter.mask),
        }
        self._order = DisplayOrder(reporter.emit)
        loop = asyncio.get_running_loop()
        for stream in self.streams.values():
            loop.add_reader(stream.fd, self._read, stream)

    def add_display(self, display: ev.Display) -> None:
        """Emit a display of the rank with its next output, at its place there."""
        self._order.add_display(display)

    def write_log(self, data: bytes) -> None:
        """Append ``data`` to the log only."""
        problem = self._log.write(data)
        if problem:
            self._reporter.notice("warning", f"rank {self._rank}: {problem}")

    def emit_taken(self) -> None:
        """Emit what was taken within the limit."""
        for name, stream in self.streams.items():
            self._emit(name, stream.part)
            stream.part = None
        self._order.emit_ready()

    def read_available(self) -> None:
        """Read the current contents of the pipes, not until their end: a grandchild may hold them open."""
        for stream in self.streams.values():
            for _ in range(DRAIN_CHUNKS):
                if not self._read(stream):
                    break

    def emit_printed(self) -> None:
        """Emit everything that the rank has printed, above the limit too."""
        self.read_available()
        for name, stream in self.streams.items():
            self._emit(name, stream.live.rest())
        self._order.emit_ready()

    def emit_rest(self) -> None:
        """Emit what is left, whatever the limit."""
        for name, stream in self.streams.items():
            self._take(stream, stream.masked.rest())
            self._emit(name, stream.live.rest())
        self._order.emit_ready(is_final=True)

    def close(self) -> None:
        """Stop reading, and close the log; the pipes stay open."""
        for stream in self.streams.values():
            asyncio.get_running_loop().remove_reader(stream.fd)
        self._log.close()

    def _read(self, stream: _Stream) -> bool:
        try:
            data = os.read(stream.fd, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(stream.fd)
            return False
        self._take(stream, stream.masked.feed(data))
        return True

    def _take(self, stream: _Stream, data: bytes) -> None:
        if data:
            self.write_log(display_marks.without(data))
            stream.live.feed(data)

    def _emit(self, name: str, part: LivePart | None) -> None:
        if part is not None:
            is_logged, now_s = not self._log.is_cut, self._reporter.now_s()
            self._order.add_output(ev.Output(now_s, self._rank, name, *part, is_logged))
