"""What a rank of ``%%infer`` does once its cell has run: predictions for chunks, until there are no more.

The main thread's loop, so that a stop interrupts ``predict`` wherever it is. A chunk is there already
when the one before is done; what is left to do with it then takes a few hundredths of a small model's
time over it, so no thread does that ahead.
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
    """What is there once the cell has run."""

    loaded: LoadedClosure
    predict: Any
    files: dict[str, int]
    """What the cell read, with the files' times in ns."""

    @property
    def can_stay(self) -> bool:
        """Whether another gang's rank may be this process.

        Not when it is bound to the ranks of this one by a process group, nor when it reads so many
        files that not all of them could be watched.
        """
        dist = sys.modules.get("torch.distributed")
        is_bound = dist is not None and dist.is_available() and dist.is_initialized()
        return not is_bound and len(self.files) <= file_tracking.MOST


def set_up(loaded: LoadedClosure) -> SetUp:
    """Run the cell. Raises what that raises."""
    with file_tracking.noted() as files:
        value = loaded.run()
    # What is there now stays: looked through again and again for what is not used any more, it takes a
    # fifth of the time of a predict that makes a list of every row.
    gc.freeze()
    return SetUp(loaded, loaded.predict(value), files)


def serve(
    channel_fd: int, predict: Any, options: Mapping[str, Any], *, own_process: bool = True
) -> bool:
    """Answer chunks over the socket ``channel_fd`` (:mod:`hydrogen_magic.inference.dispatcher`), close it.

    ``predict``: what the cell defined by that name, None where it did not. ``own_process``: this is a
    rank's process, which ends with an error; where it goes on, the error's traceback does with it, and
    should not hold memory that is shared. Return True when all was
    done, False when the other end went away before. Raises InferError, and what ``predict`` raises.
    """
    with socket.socket(fileno=channel_fd) as sock:
        return _Serving(sock, predict, options, own_process).run()


class _Serving:
    def __init__(
        self, sock: socket.socket, predict: Any, options: Mapping[str, Any], own_process: bool
    ) -> None:
        from hydrogen_magic.node.prediction.options import InferOptions
        from hydrogen_magic.node.prediction.predictor import Predictor
        from hydrogen_magic.node.prediction.shared_buffers import BufferReader, BufferWriter

        columns = options["columns"]
        given = {**options, "columns": None if columns is None else tuple(columns)}
        self._predictor = Predictor(predict, InferOptions(**given))
        self._sock = sock
        self._chunks = BufferReader()
        self._chunk = self._chunks.view if own_process else self._chunks.read
        self._outputs = BufferWriter()

    def run(self) -> bool:
        heard = framing.FrameReader(self._sock)  # with descriptors of what nobody took
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
            file.seek(0)  # whoever wrote it left it at the end
            self._predictor.adopt(pa.ipc.read_schema(pa.py_buffer(file.read())))

    def _predict(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        output = self._predictor.run(self._chunk(message, fds), int(message["row"]))
        answer = {
            "did": "predict", "chunk": message["chunk"],
            "failures": [asdict(failure) for failure in output.failures],
        }  # fmt: skip
        if self._predictor.schema is None:  # every batch failed, and none ever went well
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
            pass  # the next read finds the end, too
