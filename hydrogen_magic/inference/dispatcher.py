"""The kernel's end of every rank's channel: chunks of the frame go out on demand, predictions come in.

A thread beside the gang. Each rank has a Unix socket for words and two memory files for tables in each
direction (:mod:`~hydrogen_magic.node.prediction.shared_buffers`). A rank is given a chunk when
one of its two has come back, so a slow rank gets fewer. What a failed attempt had in hand is done by
the next one.

What a rank hangs with (:mod:`~hydrogen_magic.inference.speculation`) is given to one that has nothing else to
do as well: the first answer counts. A rank that still hangs when all rows are done is ended.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hydrogen_magic.core import events as ev
from hydrogen_magic.errors import InferError
from hydrogen_magic.inference import speculation
from hydrogen_magic.inference.chunk_queue import ChunkQueue
from hydrogen_magic.inference.rank_channel import Channel
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.node.prediction.shared_buffers import IN_HAND
from hydrogen_magic.transport import framing

__all__ = ["Feeder"]

_TELL_S = 0.2
"""How often the view is told: it draws no more often."""
_JOIN_S = 20.0
"""How long the end of an attempt may take here: one read of the frame, one write of its result."""
_LAST_WORD_S = 2.0
"""How long a rank may go on with what others have done, once that was the last: it may have a word to
say yet, and be kept for the next run."""
_BAR = -1
"""Number of the bar that counts a rank's rows; its own begin at 0."""
_MOST_TOLD = 3
"""Failed batches that are told one by one."""

_Ready = Sequence[tuple[selectors.SelectorKey, int]]
"""What a selector returns."""


class Feeder:
    """Feeds the ranks of one gang; see :class:`hydrogen_magic.driver.placements.WorkFeed`.

    ``source`` and ``result`` are of :mod:`hydrogen_magic.inference.sources`; ``key`` says which set-up
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
        self._work = ChunkQueue(source, result, options, n_ranks)
        self._error: Exception | None = None
        self._emit: Callable[[ev.Event], None] = lambda event: None
        self._stop: Callable[[], None] = lambda: None
        self._now_s: Callable[[], float] = lambda: 0.0
        self._dismiss: Callable[[int], None] = lambda rank: None
        self._patience = speculation.SilenceLimit()
        self._channels: list[Channel] = []
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
        dismiss: Callable[[int], None],
    ) -> None:
        """Say who is told of progress, how the ranks are stopped or one ended, and what time it is."""
        self._emit, self._stop, self._now_s, self._dismiss = emit, stop, now_s, dismiss

    # ── an attempt ──

    def open(self, n_ranks: int) -> list[int]:
        """Begin to serve; return the descriptors of the ranks' ends, the caller's to close."""
        theirs = []
        for rank in range(n_ranks):
            ours, other = socket.socketpair()
            self._channels.append(Channel(rank, ours, framing.FrameReader(ours)))
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
        except (
            BaseException
        ) as error:  # of whatever the frame is read from, or its result written to
            # Polars' panics are no Exception, and nobody hears of a thread's SystemExit.
            said = f"the frame or its result broke off: {type(error).__name__}: {error}"
            self._error = error if isinstance(error, Exception) else InferError(said)
            self._stop()
            for channel in self._channels:  # a rank inside this very process is not stopped
                channel.shut()

    def _serve(self, selector: selectors.BaseSelector) -> None:
        self._tell()  # from the beginning it is seen what kind of run this is
        while not self._work.is_done:
            ready = selector.select(_TELL_S)
            if not self._listen(selector, ready):
                return
            if not ready:  # else somebody who looks silent may have been heard by nobody yet
                self._relieve()
            self._tell()
        if self.value is None:  # else this attempt follows one that failed after its last row
            self.value = self._work.finish()
        self._tell_end()
        for channel in self._channels:
            channel.tell({"do": "end"})
        self._wait_then_cancel(selector)

    def _listen(self, selector: selectors.BaseSelector, ready: _Ready) -> bool:
        """Hear those who have something to say; False when the attempt is over."""
        for key, _ in ready:
            if key.data is None:
                return False
            if not self._hear(key.data):
                selector.unregister(key.fileobj)
        return True

    def _wait_then_cancel(self, selector: selectors.BaseSelector) -> None:
        """Wait until every rank has left, and have those ended that do not."""
        end_s = time.monotonic()
        while staying := [channel for channel in self._channels if channel.is_there]:
            for channel in staying:
                if time.monotonic() > self._leaves_by_s(channel, end_s):
                    channel.is_there = False
                    self._warn(f"rank {channel.rank} was ended: {self._why_ended(channel)}")
                    self._dismiss(channel.rank)
            if not self._listen(selector, selector.select(_TELL_S)):
                return

    def _why_ended(self, channel: Channel) -> str:
        if channel.in_hand and not self._is_late(channel):
            return f"it was still at {channel.in_hand[0].rows_text}, which others have done"
        return "all rows are done, and it hung"

    def _leaves_by_s(self, channel: Channel, end_s: float) -> float:
        if channel.is_ready:
            return end_s + (_LAST_WORD_S if channel.in_hand else speculation.FLOOR_S)
        return max(end_s + _LAST_WORD_S, channel.since_s + self._patience.set_up_s())

    # ── what a rank hangs with ──

    def _relieve(self) -> None:
        """Give ranks that have nothing to do what others hang with."""
        idle = [channel for channel in self._channels if channel.is_ready and not channel.in_hand]
        late = [channel for channel in self._channels if self._is_late(channel)] if idle else []
        held = sorted({chunk.number: chunk for each in late for chunk in each.in_hand}.values())
        for chunk in held:
            holders = [channel for channel in self._channels if chunk in channel.in_hand]
            again = self._work.second(chunk) if all(each in late for each in holders) else None
            if again is not None and idle:
                idle.pop(0).hand_out(again)
                self._tell_late(holders)

    def _is_late(self, channel: Channel) -> bool:
        if not channel.in_hand:
            return False
        limit_s = self._patience.chunk_s(channel.in_hand[0].n_rows)
        return time.monotonic() > channel.since_s + limit_s

    def _tell_late(self, holders: Sequence[Channel]) -> None:
        for channel in holders:
            if not channel.is_told_late:
                channel.is_told_late = True
                self._warn(
                    f"rank {channel.rank} has been at {channel.in_hand[0].rows_text} for"
                    f" {time.monotonic() - channel.since_s:.0f} s: what it has in hand is given to"
                    " another rank as well"
                )

    def _warn(self, text: str) -> None:
        self._emit(ev.Notice(self._now_s(), "warning", text))

    # ── what a rank says ──

    def _hear(self, channel: Channel) -> bool:
        """Take what has come, and give what is asked for; False when the rank has gone."""
        is_there = channel.heard.feed()
        for message, fds in channel.heard.messages():
            if "chunk" in message:
                self._take(channel, message, fds)
            elif message["did"] == "leave":
                channel.is_ready = channel.is_there = False
            else:
                self._patience.set_up(time.monotonic() - channel.since_s)
                channel.is_ready = True
        channel.is_there = channel.is_there and is_there
        channel.is_ready = channel.is_ready and is_there
        self._fill()
        return is_there

    def _take(self, channel: Channel, message: dict[str, Any], fds: Sequence[int]) -> None:
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
        began_s, channel.since_s, channel.is_told_late = channel.since_s, time.monotonic(), False
        self._patience.took(channel.since_s - began_s, n_rows)
        if self._work.answer(chunk, columns, message["failures"]):
            channel.rows += n_rows

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

    def _tell_columns(self, channel: Channel) -> None:
        if channel.is_ready and not channel.knows_columns:
            channel.knows_columns = True
            channel.tell_columns(self._work.schema)

    # ── the view ──

    def _tell(self, is_last: bool = False) -> None:
        """Tell how far all are, and how many rows each rank has done."""
        if time.monotonic() < self._tell_at and not is_last:
            return
        self._tell_at = time.monotonic() + _TELL_S
        now_s, work = self._now_s(), self._work
        if self._began_s is None and work.in_flight:
            self._began_s = now_s
        began_s = now_s if self._began_s is None else self._began_s
        failed = work.n_failed_rows
        self._emit(ev.RowsDone(now_s, began_s, work.rows, work.n_rows, work.in_flight, failed))
        for channel in self._channels:
            # From its first rows on: that is what its rate counts.
            if channel.rows or channel.in_hand:
                self._emit(
                    ev.Progress(now_s, channel.rank, _BAR, "", channel.rows, None, "rows", is_last)
                )

    def _tell_end(self) -> None:
        self._tell(is_last=True)
        if self._work.failures:
            self._warn(_failures_text(self._work))


def _failures_text(work: ChunkQueue) -> str:
    """Return what a person is told of rows without predictions; see ``predictor.RowFailure``."""
    told = [f"{_rows_text(f)}: {f['reason']}" for f in work.failures[:_MOST_TOLD]]
    n_more = work.n_failed_places - len(told)
    more = [f"and {n_more:,} more places"] if n_more else []
    rows = "1 row" if work.n_failed_rows == 1 else f"{work.n_failed_rows} rows"
    return f"{rows} failed and got no prediction: {'; '.join([*told, *more])}"


def _rows_text(failure: Mapping[str, Any]) -> str:
    first, last = failure["first_row"], failure["last_row"]
    return f"row {first}" if first == last else f"rows {first} to {last}"
