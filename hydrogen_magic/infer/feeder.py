"""The kernel's end of every rank's channel: chunks of the frame go out on demand, predictions come in.

A thread beside the gang. Each rank has a Unix socket for words and two memory files for tables in each
direction (:mod:`~hydrogen_magic.predict.slots`). A rank is given a chunk when one of its two has come
back, so a slow rank gets fewer. What a failed attempt had in hand is done by the next one.
"""

from __future__ import annotations

import base64
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from hydrogen_magic import events as ev
from hydrogen_magic import frames
from hydrogen_magic.errors import InferError
from hydrogen_magic.infer.work import Chunk, Work
from hydrogen_magic.predict.options import InferOptions
from hydrogen_magic.predict.slots import IN_HAND, SlotReader, SlotWriter

__all__ = ["Feeder"]

_TELL_S = 0.2
"""How often the view is told: it draws no more often."""
_JOIN_S = 20.0
"""How long the end of an attempt may take here: one read of the frame, one write of its result."""
_BAR = -1
"""Number of the bar that counts a rank's rows; its own begin at 0."""
_MOST_TOLD = 3
"""Failed batches that are told one by one."""


@dataclass(eq=False)
class _Channel:
    """One rank's."""

    rank: int
    sock: socket.socket
    heard: frames.FrameReader
    chunks: SlotWriter = field(default_factory=SlotWriter)
    outputs: SlotReader = field(default_factory=SlotReader)
    in_hand: deque[Chunk] = field(default_factory=deque)
    """What the rank has to answer, in this order."""
    rows: int = 0
    """Done so far."""
    is_ready: bool = False
    """Its set-up is done, and it has not gone."""
    knows_columns: bool = False

    def tell(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a few bytes: they fit into the socket, since little is ever on its way."""
        try:
            frames.send(self.sock, message, fds)
        except (BrokenPipeError, ConnectionResetError):
            self.is_ready = False  # it has gone; its end is reported by its agent

    def hand_out(self, chunk: Chunk) -> None:
        place, fds = self.chunks.write(chunk.table)
        self.in_hand.append(chunk)
        with ExitStack() as stack:
            for fd in fds:
                stack.callback(os.close, fd)
            self.tell(
                {"do": "predict", "chunk": chunk.number, "row": chunk.first_row, **place}, fds
            )

    def shut(self) -> None:
        """Let the rank see that nothing more comes."""
        with suppress(OSError):  # it has gone
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.chunks.close()
        self.outputs.close()
        self.heard.close()
        self.sock.close()


class Feeder:
    """Feeds the ranks of one gang; see :class:`hydrogen_magic.placements.Feed`.

    ``source`` and ``result`` are of :mod:`hydrogen_magic.infer.frames`; ``key`` says which set-up
    this one may be run by. After the gang has ended well, :attr:`value` is the frame with its
    predictions.
    """

    def __init__(
        self, source: Any, result: Any, options: InferOptions, n_ranks: int, key: str = ""
    ) -> None:
        self.key = key
        self.options: Mapping[str, Any] = asdict(options)
        self.value: Any = None
        self._on_error = options.on_error
        self._work = Work(source, result, options, n_ranks)
        self._error: Exception | None = None
        self._emit: Callable[[ev.Event], None] = lambda event: None
        self._stop: Callable[[], None] = lambda: None
        self._now_s: Callable[[], float] = lambda: 0.0
        self._channels: list[_Channel] = []
        self._thread: threading.Thread | None = None
        self._over: socket.socket | None = None
        """Closed when the attempt is over."""
        self._tell_at = 0.0
        self._began_s: float | None = None
        """When the first rows went out, on the gang's clock."""

    def attach(
        self,
        emit: Callable[[ev.Event], None],
        stop: Callable[[], None],
        now_s: Callable[[], float],
    ) -> None:
        """Say who is told of progress, how the ranks are stopped, and what time it is."""
        self._emit, self._stop, self._now_s = emit, stop, now_s

    # ── an attempt ──

    def open(self, n_ranks: int) -> list[int]:
        """Begin to serve; return the descriptors of the ranks' ends, the caller's to close."""
        theirs = []
        for rank in range(n_ranks):
            ours, other = socket.socketpair()
            self._channels.append(_Channel(rank, ours, frames.FrameReader(ours)))
            theirs.append(other.detach())
        self._over, over = socket.socketpair()
        self._thread = threading.Thread(
            target=self._run, args=(over,), name="hydrogen_magic feeder", daemon=True
        )
        self._thread.start()
        return theirs

    def close(self) -> None:
        """The attempt is over. Raises what went wrong on this side, if anything did."""
        if self._over is not None and self._thread is not None:
            self._over.close()
            self._thread.join(_JOIN_S)
            if self._thread.is_alive():
                raise InferError(f"the frame was still being read after {_JOIN_S:.0f} s")
        self._over = self._thread = None
        for channel in self._channels:
            for chunk in channel.in_hand:
                self._work.give_back(chunk)
            channel.close()
        self._channels.clear()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """The gang has ended without a result: let go of what there is of it."""
        if self.value is None and self._thread is None:
            self._work.abandon()

    # ── the thread ──

    def _run(self, over: socket.socket) -> None:
        try:
            with over, selectors.DefaultSelector() as selector:
                selector.register(over, selectors.EVENT_READ)
                for channel in self._channels:
                    selector.register(channel.sock, selectors.EVENT_READ, channel)
                self._serve(selector)
        except Exception as error:  # of whatever the frame is read from, or its result written to
            self._error = error
            self._stop()
            for channel in self._channels:  # a rank inside this very process is not stopped
                channel.shut()

    def _serve(self, selector: selectors.BaseSelector) -> None:
        while not self._work.is_done:
            for key, _ in selector.select(_TELL_S):
                if key.data is None:
                    return
                if not self._hear(key.data):
                    selector.unregister(key.fileobj)
            self._tell()
        self.value = self._work.finish()
        self._tell_end()
        for channel in self._channels:
            channel.tell({"do": "end"})

    # ── what a rank says ──

    def _hear(self, channel: _Channel) -> bool:
        """Take what has come, and give what is asked for; False when the rank has gone."""
        is_there = channel.heard.feed()
        for message, fds in channel.heard.messages():
            if "chunk" in message:
                self._take(channel, message, fds)
            else:
                channel.is_ready = True
        channel.is_ready = channel.is_ready and is_there
        self._fill()
        return is_there

    def _take(self, channel: _Channel, message: dict[str, Any], fds: Sequence[int]) -> None:
        """Take a chunk's predictions."""
        columns = channel.outputs.read(message, fds) if "slot" in message else None
        chunk = channel.in_hand.popleft()
        n_rows = chunk.n_rows if columns is None else columns.num_rows
        if (message["chunk"], n_rows) != (chunk.number, chunk.n_rows):
            raise InferError(
                f"rank {channel.rank} answered chunk {message['chunk']} with {n_rows} rows, where"
                f" chunk {chunk.number} with {chunk.n_rows} was expected: did something in its"
                " process write to a descriptor that is not its own?"
            )
        channel.rows += n_rows
        self._work.answer(chunk, columns, message["failures"])

    def _fill(self) -> None:
        """Give every rank that waits what it may have, each the first before any gets a second."""
        if self._work.schema is not None:
            for channel in self._channels:
                self._tell_columns(channel)
        for most in range(1, IN_HAND + 1):
            for channel in self._channels:
                if channel.is_ready and len(channel.in_hand) < most:
                    chunk = self._work.next()
                    if chunk is not None:
                        channel.hand_out(chunk)

    def _tell_columns(self, channel: _Channel) -> None:
        if channel.is_ready and not channel.knows_columns:
            channel.knows_columns = True
            schema = base64.b64encode(self._work.schema.serialize()).decode()
            channel.tell({"do": "adopt", "schema": schema})

    # ── the view ──

    def _tell(self, is_last: bool = False) -> None:
        """Tell how far all are, and how many rows each rank has done."""
        if time.monotonic() < self._tell_at and not is_last:
            return
        self._tell_at = time.monotonic() + _TELL_S
        now_s, work = self._now_s(), self._work
        if self._began_s is None:
            if not work.in_flight:
                return
            self._began_s = now_s
        failed = sum(map(_n_rows, work.failures))
        self._emit(
            ev.RowsDone(now_s, self._began_s, work.rows, work.n_rows, work.in_flight, failed)
        )
        for channel in self._channels:
            if channel.rows:
                self._emit(
                    ev.Progress(now_s, channel.rank, _BAR, "", channel.rows, None, "rows", is_last)
                )

    def _tell_end(self) -> None:
        self._tell(is_last=True)
        failures = self._work.failures
        if failures:
            self._emit(ev.Notice(self._now_s(), "warning", _failures_text(failures)))


def _failures_text(failures: Sequence[Mapping[str, Any]]) -> str:
    """Return what a person is told of rows without predictions; see ``predictor.RowFailure``."""
    n_rows = sum(map(_n_rows, failures))
    told = [
        f"{_rows_text(f)}: {f['reason']}"
        for f in sorted(failures, key=lambda f: int(f["first_row"]))[:_MOST_TOLD]
    ]
    more = [f"and {len(failures) - _MOST_TOLD} more places"] if len(failures) > _MOST_TOLD else []
    rows = "1 row" if n_rows == 1 else f"{n_rows} rows"
    return f"{rows} failed and got no prediction: {'; '.join([*told, *more])}"


def _n_rows(failure: Mapping[str, Any]) -> int:
    return int(failure["last_row"] - failure["first_row"] + 1)


def _rows_text(failure: Mapping[str, Any]) -> str:
    first, last = failure["first_row"], failure["last_row"]
    return f"row {first}" if first == last else f"rows {first} to {last}"
