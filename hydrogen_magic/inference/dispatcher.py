"""Sends chunks to the ranks on demand and collects their predictions, in a thread of the kernel.

Each rank has a Unix socket for messages and two shared buffers for tables in each direction
(:mod:`~hydrogen_magic.node.prediction.shared_buffers`); on another machine, its agent has the other ends
(:mod:`~hydrogen_magic.transport.forwarded_channel`). It gets a chunk when one of its two has been answered,
so a slow rank gets fewer. Chunks of a failed attempt are predicted by the next one. Answers are kept on disk
until the run has succeeded (:mod:`~hydrogen_magic.inference.kept_parts`).

If a rank hangs (:mod:`~hydrogen_magic.inference.speculation`), its chunks are also sent to an idle rank,
and the first answer counts. A rank that still hangs after the last row is cancelled.
"""

from __future__ import annotations

import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from hydrogen_magic.core import events as ev
from hydrogen_magic.core.units import counted
from hydrogen_magic.driver.interrupts import interrupts_raise
from hydrogen_magic.errors import InferError
from hydrogen_magic.inference import sources, speculation
from hydrogen_magic.inference.chunk_queue import Chunk, ChunkQueue, RowLimit
from hydrogen_magic.inference.kept_parts import KeptParts
from hydrogen_magic.inference.rank_channel import RankChannel
from hydrogen_magic.node.prediction.arrow_types import size_bytes
from hydrogen_magic.node.prediction.options import InferOptions
from hydrogen_magic.node.prediction.row_labels import failures_text, rows_text, widened_text
from hydrogen_magic.node.prediction.shared_buffers import MAX_IN_FLIGHT
from hydrogen_magic.transport import framing

_REPORT_S = 0.2
"""Interval of progress events; views are not drawn more often."""
_RESUME_S = 0.1
"""How long kept answers are read before ranks get chunks again."""
_JOIN_S = 20.0
"""Timeout for the end of an attempt: one read of the data, one write of the result."""
_FINISH_S = 60.0
"""The same after the last row, when all parts of the result are joined."""
_LEAVE_S = 2.0
"""How long a rank may go on after the last row: it may print, and be retained for the next run."""
_FAST_BYTES_S = 500e6
"""Answers of a rank that predicts more bytes of rows per second are not kept: their checksum takes as long as
predicting them again.
"""
_MAX_GAPS = 3
"""Missing parts of a frame that a message lists."""
_ROWS_BAR = -1
"""Number of the progress bar of a rank's rows; those of the cell are 0 and more."""


class Dispatcher:
    """The work feed of one gang; see :class:`hydrogen_magic.driver.placements.WorkFeed`.

    ``source`` and ``result`` are those of :mod:`hydrogen_magic.inference.sources`; ``key`` identifies
    the set-up that ranks must have; ``kept`` keeps answers; ``is_here``: the ranks are on this machine. After
    success, :attr:`value` is the frame with its predictions.
    """

    def __init__(
        self,
        source: Any,
        result: Any,
        options: InferOptions,
        n_ranks: int,
        key: str = "",
        kept: KeptParts | None = None,
        *,
        is_here: bool = True,
    ) -> None:
        self.key = key
        self.options: Mapping[str, Any] = asdict(options)
        self.value: Any = None
        self._source = source
        self._result = result
        self._kept = kept
        self._is_here = is_here
        """Files that the ranks read are those of this machine."""
        self._queue = ChunkQueue(source, result, options, n_ranks, kept)
        self._error: Exception | None = None
        self._emit: Callable[[ev.Event], None] = lambda event: None
        self._stop: Callable[[], None] = lambda: None
        self._now_s: Callable[[], float] = lambda: 0.0
        self._cancel_rank: Callable[[int], None] = lambda rank: None
        self._silence = speculation.SilenceLimit()
        self._channels: list[RankChannel] = []
        self._thread: threading.Thread | None = None
        self._ending = threading.Lock()
        self._is_closing = self._is_thread_over = self._has_ended_late = False
        """The attempt is over; so is the thread; it has ended only after the gang."""
        self._outcome: str | None = None
        """Final state of the gang, once it has ended."""
        self._are_rows_wanted = False
        self._closing: socket.socket | None = None
        """Closed at the end of the attempt."""
        self._report_at = 0.0
        self._began_s: float | None = None
        """When the first rows were sent, by the gang's clock."""

    def attach(
        self,
        emit: Callable[[ev.Event], None],
        stop: Callable[[], None],
        now_s: Callable[[], float],
        cancel_rank: Callable[[int], None],
        record: Path,
    ) -> None:
        """Set how to report progress, stop all ranks, read the gang's clock and cancel one rank.

        ``record``: the directory of the gang's run log.
        """
        self._emit, self._stop, self._now_s, self._cancel_rank = emit, stop, now_s, cancel_rank
        if self._kept is None:
            return
        try:
            self._kept.open(record)
        except (OSError, ValueError) as error:
            self._keep_nothing(error)
        if text := self._kept.start_text():
            self._notice("info", text)

    # ── an attempt ──

    def open(self, n_ranks: int) -> list[int]:
        """Start the thread; return the descriptors of the ranks' ends, which the caller closes."""
        descriptors = []
        for rank in range(n_ranks):
            own, other = framing.pair()
            limit = RowLimit(int(self.options["batch_size"]))
            self._channels.append(RankChannel(rank, own, framing.FrameReader(own), limit))
            descriptors.append(other.detach())
        self._is_closing = self._is_thread_over = False
        self._closing, closed = framing.pair()
        self._thread = threading.Thread(
            target=self._run, args=(closed,), name="hydrogen_magic dispatcher", daemon=True
        )
        self._thread.start()
        return descriptors

    def close(self) -> None:
        """End the attempt. Raises the error of the thread, if any.

        Waits until the thread has read what it is reading, or has joined all rows.
        """
        if self._closing is not None and self._thread is not None:
            self._is_closing = True
            self._closing.close()
            self._thread.join(_JOIN_S)
            if self._thread.is_alive() and not self._queue.is_done:
                raise InferError(f"reading the input did not end within {_JOIN_S:.0f} s")
            self._thread.join(_FINISH_S)
            if self._thread.is_alive():
                raise InferError(f"writing the result did not end within {_FINISH_S:.0f} s")
        self._disconnect()
        if self._error is not None:
            raise self._error

    def _disconnect(self) -> None:
        """The thread has ended: take back what the ranks have not answered."""
        for channel in self._channels:
            for chunk in channel.in_flight:
                self._queue.give_back(chunk)
            channel.close()
        self._channels.clear()
        self._closing = self._thread = None  # last: another thread may wait for that

    def require_end(self) -> None:
        """Raise InferError if the ranks have left rows undone: their channels were closed."""
        if self.value is None:
            raise InferError("the ranks ended before all rows were predicted")

    def end(self, outcome: str, stop_reason: str = "user") -> None:
        """Release the data of a gang that has ended, except the finished rows of one that the user stopped.

        ``outcome``: its final state.
        """
        with self._ending:
            self._outcome = outcome
            self._are_rows_wanted = (outcome, stop_reason) == ("STOPPED", "user")
            is_reading = self._thread is not None and not self._is_thread_over
        if self._thread is not None and not is_reading:  # it has ended since `close` gave it up
            self._disconnect()
        is_stopped = outcome == "STOPPED" and self.value is None
        texts = self._texts_of_stop() if is_stopped and not is_reading else []
        if self._kept is not None and outcome == "SUCCEEDED":
            self._kept.succeed()
        elif self._kept is not None and self._are_rows_wanted and not is_stopped:
            self._kept.delete()  # all rows were finished before the stop
        elif self._kept is not None:
            self._kept.close()
            texts.append(self._kept.text())
        if any(texts):
            self._notice("warning", "; ".join(filter(None, texts)))
        if not is_reading:  # else the thread does it: what it reads from takes long to answer
            self._release()

    def use(self) -> Any:
        """Return :attr:`value`, which the notebook uses now."""
        if self._kept is not None:
            self._kept.delete()
        return self.value

    def _release(self) -> None:
        """Close what the gang has read from, and delete an unfinished result that is not wanted."""
        if self.value is None and not self._are_rows_wanted:
            self._queue.abandon()
        sources.close(self._source)

    def _texts_of_stop(self) -> list[str]:
        """Put the rows that wait for the type of a column; return why that failed, and what is missing."""
        texts = []
        try:
            self._queue.settle()
        except (InferError, OSError) as error:  # the result may be files
            texts.append(f"some finished rows cannot be returned: {error}")
        return [*texts, self._missing_text()]

    def finished(self) -> Any:
        """Return the frame with the finished rows of a gang that was stopped, None if there are none.

        Waits for what is being read, unless the user interrupts that.
        """
        thread = self._thread
        if thread is not None:
            with interrupts_raise():
                thread.join()
        if self._has_ended_late:  # the gang's view has ended
            self._has_ended_late = False
            print("; ".join(self._texts_of_stop()), file=sys.stderr)
        if self.value is None and self._thread is None:
            if self._result.done:
                self.value = self._result.finished()
            self._queue.abandon()
        return self.value

    def _missing_text(self) -> str:
        """Return which rows of the frame are not finished."""
        done, n_rows = self._result.done, self._queue.n_rows
        ends = [0, *(end for _, end in done)]
        starts = [*(start for start, _ in done), n_rows]
        gaps = [(a, b) for a, b in zip(ends, starts, strict=True) if b is None or a < b]
        shown = [
            f"rows from {a} on" if b is None else rows_text(a, b - 1) for a, b in gaps[:_MAX_GAPS]
        ]
        if rest := len(gaps) - len(shown):
            shown.append(counted(rest, "more part"))
        n_done = sum(end - start for start, end in done)
        rows = (
            counted(n_done, "row") if n_rows is None else f"{n_done:,} of {counted(n_rows, 'row')}"
        )
        missing = f"; missing: {', '.join(shown)}" if gaps else ""
        return f"stopped: {rows} finished{missing}"

    # ── the thread ──

    def _run(self, closed: socket.socket) -> None:
        try:
            with closed, selectors.DefaultSelector() as selector:
                selector.register(closed, selectors.EVENT_READ)
                for channel in self._channels:
                    selector.register(channel.sock, selectors.EVENT_READ, channel)
                self._serve(selector)
        except BaseException as error:  # also Polars' panics, which are no Exception
            text = (
                f"reading the input or writing the result failed: {type(error).__name__}: {error}"
            )
            self._error = error if isinstance(error, Exception) else InferError(text)
            self._stop()
            for channel in self._channels:  # a rank inside the kernel is not stopped
                channel.shut_down()
        finally:
            with self._ending:
                self._is_thread_over = True
                is_late = self._outcome is not None
            if is_late:
                self._has_ended_late = True
                self._disconnect()
                self._release()

    def _serve(self, selector: selectors.BaseSelector) -> None:
        self._report()  # shows at once that rows are predicted
        while not self._queue.is_done:
            ready = selector.select(0.0 if self._queue.can_resume else _REPORT_S)
            if not self._receive(selector, ready):
                return
            self._resume()
            if not ready:  # otherwise a rank may only seem silent
                self._reassign_late_chunks()
            self._report()
        if self.value is None:  # not None if a former attempt failed after its last row
            self.value = self._queue.finish()
        self._report_end()
        for channel in self._channels:
            channel.send({"do": "end"})
        self._wait_then_cancel(selector)

    def _receive(
        self,
        selector: selectors.BaseSelector,
        ready: Sequence[tuple[selectors.SelectorKey, int]],
    ) -> bool:
        """Handle all messages; return False at the end of the attempt."""
        for key, _ in ready:
            if key.data is None or self._is_closing:
                return False
            if not self._receive_from(key.data):
                selector.unregister(key.fileobj)
        return True

    def _wait_then_cancel(self, selector: selectors.BaseSelector) -> None:
        """Wait until every rank has left, and cancel those that do not."""
        end_s = time.monotonic()
        while remaining := [channel for channel in self._channels if channel.is_connected]:
            for channel in remaining:
                if time.monotonic() > self._leaves_by_s(channel, end_s):
                    channel.is_connected = False
                    self._warn(f"rank {channel.rank} was cancelled: {self._cancel_reason(channel)}")
                    self._cancel_rank(channel.rank)
            if not self._receive(selector, selector.select(_REPORT_S)):
                return

    def _cancel_reason(self, channel: RankChannel) -> str:
        if channel.in_flight and not self._is_late(channel):
            return (
                f"it still predicted {channel.in_flight[0].rows_text}, which other ranks have done"
            )
        return "it did not end after all rows were done"

    def _leaves_by_s(self, channel: RankChannel, end_s: float) -> float:
        if channel.is_ready:
            return end_s + (_LEAVE_S if channel.in_flight else speculation.FLOOR_S)
        return max(end_s + _LEAVE_S, channel.since_s + self._silence.set_up_s())

    def _resume(self) -> None:
        """Take kept answers of an earlier run, for a short time."""
        end_s = time.monotonic() + _RESUME_S
        if self._queue.can_resume:
            while self._queue.can_resume and time.monotonic() < end_s:
                self._queue.resume()
            self._send_chunks()

    def _keep(
        self, chunk: Chunk, data: Any, failures: Sequence[Mapping[str, Any]], seconds: float
    ) -> None:
        """Keep an answer on disk; if that fails, the run goes on without it.

        ``seconds``: how long it took.
        """
        is_fast = size_bytes(chunk.table) > _FAST_BYTES_S * seconds
        if self._kept is None or data is None or is_fast:
            return
        try:
            self._kept.add(chunk.first_row, chunk.table, data, failures)
        except OSError as error:
            self._keep_nothing(error)

    def _keep_nothing(self, error: Exception) -> None:
        assert self._kept is not None
        self._kept.give_up()
        lost = "finished rows are not kept, so --resume is not possible"
        if self._kept.text():  # those of an earlier run are
            lost = "no more finished rows are kept"
        self._notice("warning", f"{lost}: {error}")

    # ── chunks of ranks that hang ──

    def _reassign_late_chunks(self) -> None:
        """Send chunks that are only with late ranks to idle ranks as well."""
        idle = [channel for channel in self._channels if channel.is_ready and not channel.in_flight]
        late = [channel for channel in self._channels if self._is_late(channel)] if idle else []
        chunks = {chunk.number: chunk for channel in late for chunk in channel.in_flight}
        for chunk in sorted(chunks.values()):
            holders = [channel for channel in self._channels if chunk in channel.in_flight]
            again = self._queue.second(chunk) if all(each in late for each in holders) else None
            if again is not None and idle:
                idle.pop(0).send_chunk(again)
                self._warn_late(holders)

    def _is_late(self, channel: RankChannel) -> bool:
        if not channel.in_flight:
            return False
        limit_s = self._silence.chunk_s(channel.in_flight[0].n_rows)
        return time.monotonic() > channel.since_s + limit_s

    def _warn_late(self, holders: Sequence[RankChannel]) -> None:
        for channel in holders:
            if not channel.is_reported_late:
                channel.is_reported_late = True
                self._warn(
                    f"rank {channel.rank} has not answered {channel.in_flight[0].rows_text} for"
                    f" {time.monotonic() - channel.since_s:.0f} s: another rank predicts them as well"
                )

    def _warn(self, text: str) -> None:
        self._notice("warning", text)

    def _notice(self, level: str, text: str) -> None:
        self._emit(ev.Notice(self._now_s(), level, text))

    # ── messages of a rank ──

    def _receive_from(self, channel: RankChannel) -> bool:
        """Handle the messages of a rank and send new chunks; return False if the rank has left."""
        is_open = channel.reader.feed()
        for message, fds in channel.reader.messages():
            if self._kept is not None and self._is_here:
                self._kept.note_files(message.get("files", ()), message.get("written", ()))
            if "chunk" in message:
                self._answer(channel, message, fds)
            elif message["did"] == "leave":
                channel.is_ready = channel.is_connected = False
            else:
                self._silence.set_up(time.monotonic() - channel.since_s)
                channel.is_ready = True
        channel.is_connected = channel.is_connected and is_open
        channel.is_ready = channel.is_ready and is_open
        self._send_chunks()
        return is_open

    def _answer(self, channel: RankChannel, message: dict[str, Any], fds: Sequence[int]) -> None:
        data = channel.outputs.copied(message, fds) if "buffer" in message else None
        columns = None if data is None else pa.ipc.open_stream(data).read_all()
        chunk = channel.in_flight.popleft()
        n_rows = chunk.n_rows if columns is None else columns.num_rows
        if (message["chunk"], n_rows) != (chunk.number, chunk.n_rows):
            raise InferError(
                f"rank {channel.rank} answered chunk {message['chunk']} with {counted(n_rows, 'row')} instead"
                f" of chunk {chunk.number} with {chunk.n_rows}: did code in its process write to a file"
                " descriptor that it does not own?"
            )
        began_s, channel.since_s = channel.since_s, time.monotonic()
        channel.is_reported_late = False
        seconds = channel.since_s - began_s
        channel.limit.took(seconds, n_rows)
        self._silence.took(seconds, n_rows)
        if self._queue.answer(chunk, columns, message["failures"]):
            channel.rows += n_rows
            self._keep(chunk, data, message["failures"], seconds)

    def _send_chunks(self) -> None:
        """Send chunks to all ranks that wait; each gets its first before any gets a second."""
        ready = [channel for channel in self._channels if channel.is_ready]
        for channel in ready:
            if channel.known_columns is not self._queue.schema:
                channel.known_columns = self._queue.schema
                channel.send_columns(self._queue.schema)
        for n_chunks in range(MAX_IN_FLIGHT):
            for channel in ready:
                has_room = channel.is_ready and len(channel.in_flight) <= n_chunks
                if has_room and not self._is_closing:
                    chunk = self._queue.next(channel.limit.rows)
                    if chunk is not None:
                        channel.send_chunk(chunk)
                        if not channel.rows:
                            self._report_rows(channel)  # its rate counts from here

    # ── progress ──

    def _report(self, is_last: bool = False) -> None:
        """Report the progress of all rows and of each rank."""
        if time.monotonic() < self._report_at and not is_last:
            return
        self._report_at = time.monotonic() + _REPORT_S
        now_s, queue = self._now_s(), self._queue
        if self._began_s is None and queue.in_flight:
            self._began_s = now_s
        began_s = now_s if self._began_s is None else self._began_s
        failed = queue.n_failed_rows
        counts = queue.rows, queue.n_rows, queue.in_flight, failed
        self._emit(ev.RowsDone(now_s, began_s, *counts, resumed=queue.n_resumed_rows))
        for channel in self._channels:
            if channel.rows or channel.in_flight:
                self._report_rows(channel, is_last)

    def _report_rows(self, channel: RankChannel, is_last: bool = False) -> None:
        # A closed bar: the rank waits for rows, and not the other way round.
        bar = _ROWS_BAR, "", channel.rows, None, "rows", is_last or not channel.in_flight
        self._emit(ev.Progress(self._now_s(), channel.rank, *bar))

    def _report_end(self) -> None:
        self._report(is_last=True)
        reasons = [
            f"{rows_text(failure['first_row'], failure['last_row'])}: {failure['reason']}"
            for failure in self._queue.failures
        ]
        if reasons:
            n_rows, n_failures = self._queue.n_failed_rows, self._queue.n_failures
            self._warn(failures_text(n_rows, reasons, n_failures))
        for name, (first, final) in self._queue.widened.items():
            self._warn(widened_text(name, first, final))
