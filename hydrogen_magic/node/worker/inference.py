"""A rank of ``%%infer`` after its cell has run: predictions for chunks, until there are no more.

This is the main thread's loop, so that a stop interrupts ``predict`` at any point. The next chunk has
already arrived when a chunk is done. The remaining work between two chunks takes a few hundredths of a
small model's time, so it needs no thread.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hydrogen_magic.node.worker import file_tracking
from hydrogen_magic.transport import framing

if TYPE_CHECKING:
    from hydrogen_magic.node.worker.namespace import LoadedClosure

__all__ = ["SetUp", "serve", "set_up"]


@dataclass(frozen=True)
class SetUp:
    """The result of running the cell."""

    loaded: LoadedClosure
    predict: Any
    files: dict[str, int]
    """Files that the cell read, with their modification times in ns."""

    @property
    def can_stay(self) -> bool:
        """Whether a later gang can reuse this process as its rank.

        Not if a process group binds it to the other ranks of this gang, nor if it reads so many files that
        not all of them can be tracked.
        """
        dist = sys.modules.get("torch.distributed")
        is_bound = dist is not None and dist.is_available() and dist.is_initialized()
        return not is_bound and len(self.files) <= file_tracking.MOST


def set_up(loaded: LoadedClosure) -> SetUp:
    """Run the cell. Raises its exceptions."""
    with file_tracking.noted() as files:
        value = loaded.run()
    # Existing objects are permanent: scanning them for garbage again and again takes a fifth of the
    # time of a predict that makes a list of every row.
    gc.freeze()
    return SetUp(loaded, loaded.predict(value), files)


def serve(
    channel_fd: int, predict: Any, options: Mapping[str, Any], *, own_process: bool = True
) -> bool:
    """Answer chunks over the socket ``channel_fd`` (:mod:`hydrogen_magic.inference.dispatcher`), then close
    it.

    ``predict``: the object of that name in the cell, None without one. ``own_process``: this is a rank's
    process, which ends with an error; otherwise the error's traceback outlives this call, and must not hold
    shared memory. Return True when all chunks are done, False if the other end closed the channel before.
    Raises InferError, and exceptions of ``predict``.
    """
    with socket.socket(fileno=channel_fd) as sock:
        return _Serving(sock, predict, options, own_process).run()


class _Serving:
    def __init__(
        self, sock: socket.socket, predict: Any, options: Mapping[str, Any], own_process: bool
    ) -> None:
        from hydrogen_magic.node.prediction.options import InferOptions
        from hydrogen_magic.node.prediction.predictor import Predictor
        from hydrogen_magic.node.prediction.shared_buffers import SlotReader, SlotWriter

        columns = options["columns"]
        given = {**options, "columns": None if columns is None else tuple(columns)}
        self._predictor = Predictor(predict, InferOptions(**given))
        self._sock = sock
        self._chunks = SlotReader()
        self._chunk = self._chunks.view if own_process else self._chunks.read
        self._outputs = SlotWriter()

    def run(self) -> bool:
        heard = framing.FrameReader(self._sock)  # with descriptors that were not taken
        with (
            closing(self._predictor), closing(self._chunks), closing(self._outputs),
            closing(heard),
        ):  # fmt: skip
            self._say({"did": "set up"})
            while (received := framing.receive(heard)) is not None:
                message, fds = received
                if message["do"] == "end":
                    self._say({"did": "leave"})
                    return True
                if message["do"] == "adopt":
                    self._adopt(*fds)
                else:
                    self._predict(message, fds)
        return False

    def _adopt(self, fd: int) -> None:
        import pyarrow as pa

        with open(fd, "rb") as file:
            file.seek(0)  # the other end closed the channel after writing it
            self._predictor.adopt(pa.ipc.read_schema(pa.py_buffer(file.read())))

    def _predict(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        output = self._predictor.run(self._chunk(message, fds), int(message["row"]))
        answer = {
            "did": "predict", "chunk": message["chunk"],
            "failures": [asdict(failure) for failure in output.failures],
        }  # fmt: skip
        if self._predictor.schema is None:  # every batch failed
            self._say(answer)
            return
        place, new_fds = self._outputs.write(output.columns)
        try:
            self._say({**answer, **place}, new_fds)
        finally:
            for fd in new_fds:
                os.close(fd)

    def _say(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        try:
            framing.send(self._sock, message, fds)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the next read finds the end of the stream, too
