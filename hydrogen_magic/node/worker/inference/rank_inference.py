"""A rank of ``%%infer`` after its cell has run: it predicts chunks until there are no more.

The loop runs in the main thread, so that a stop interrupts ``predict``. The next chunk has already arrived
when one is done; decoding it takes a few percent of the time of a small model, so no other thread does it.
"""

from __future__ import annotations

import pickle
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from hydrogen_magic.node.worker.inference import file_tracking
from hydrogen_magic.transport import framing

if TYPE_CHECKING:
    from hydrogen_magic.node.worker.namespace import LoadedClosure


@dataclass(frozen=True)
class SetUp:
    """The state after the cell has run."""

    loaded: LoadedClosure
    predict: Any
    files: dict[str, int]
    """Files that the cell has read, with their modification times in ns."""

    @property
    def can_stay(self) -> bool:
        """Whether a later gang may use this process as a rank.

        Not if it is in a process group of this gang, nor if it has read too many files to watch, nor if
        a seed is to repeat the random numbers of its cell and of ``predict``.
        """
        dist = sys.modules.get("torch.distributed")
        is_bound = dist is not None and dist.is_available() and dist.is_initialized()
        is_fixed = not self.loaded.is_seeded and len(self.files) <= file_tracking.MOST
        return is_fixed and not is_bound


def set_up(loaded: LoadedClosure) -> SetUp:
    """Run the cell. Raises its errors."""
    with file_tracking.noted(loaded.texts()) as files:
        value = loaded.run()
    return SetUp(loaded, loaded.predict(value), files)


def serve(
    channel_fd: int, predict: Any, options: Mapping[str, Any], *, files: Iterable[str] = ()
) -> bool:
    """Answer the chunks of the socket ``channel_fd`` (:mod:`hydrogen_magic.inference.dispatcher`).

    ``predict``: the cell's ``predict``, None if it does not define one. ``files``: what the cell has read.
    Return True if all rows are done, False if the other end was closed before. Raises InferError, and
    the errors of ``predict``.
    """
    with framing.inherited(channel_fd) as sock:
        return _ChunkServer(sock, predict, options).run(files)


class _ChunkServer:
    def __init__(self, sock: socket.socket, predict: Any, options: Mapping[str, Any]) -> None:
        from hydrogen_magic.node.prediction.options import InferOptions
        from hydrogen_magic.node.prediction.predictor import Predictor
        from hydrogen_magic.node.prediction.shared_buffers import BufferReader, BufferWriter

        # A message has lists for tuples.
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in options.items()
        }
        self._predictor = Predictor(predict, InferOptions(**given))
        self._sock = sock
        self._chunks = BufferReader()
        self._outputs = BufferWriter()
        self._written: set[str] = set()
        """Files read in the set-up that the other end knows to be written by the run."""

    def run(self, files: Iterable[str]) -> bool:
        import pyarrow as pa

        reader = framing.FrameReader(self._sock)
        with ExitStack() as stack:
            for part in (self._predictor, self._chunks, self._outputs, reader):
                stack.callback(part.close)
            self._written |= file_tracking.written()
            read = file_tracking.of_data(file for file in files if file not in self._written)
            self._send({"did": "set up", "files": read})
            while (received := framing.receive(reader)) is not None:
                message, fds = received
                if message["do"] == "end":
                    self._send({"did": "leave"})
                    return True
                if message["do"] == "adopt":
                    schema = pa.ipc.read_schema(pa.py_buffer(_content(*fds)))
                    self._predictor.adopt(schema)
                elif message["do"] == "lay out":
                    self._chunks.layout = pickle.loads(_content(*fds))
                else:
                    self._predict(message, fds)
        return False

    def _predict(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        rows = self._chunks.view(message, fds)
        output = self._predictor.run(rows, int(message["row"]))
        answer: dict[str, Any] = {
            "did": "predict",
            "chunk": message["chunk"],
            "failures": [asdict(failure) for failure in output.failures],
            "written": sorted(file_tracking.written() - self._written),
        }
        self._written.update(answer["written"])
        if self._predictor.schema is None:  # every batch so far has failed
            self._send(answer)
            return
        place, new_fds = self._outputs.write(output.columns)
        try:
            self._send({**answer, **place}, new_fds)
        finally:
            framing.close_all(new_fds)

    def _send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the next read returns the end
            framing.send(self._sock, message, fds)


def _content(fd: int) -> bytes:
    with open(fd, "rb") as file:
        file.seek(0)  # the writer left it at the end
        return file.read()
