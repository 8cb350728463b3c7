"""A timeline as Horovod 0.28.1 writes it (``timeline.cc``), without Horovod."""

from __future__ import annotations

from collections.abc import Sequence

ORIGIN_US = 1_700_000_000_000_000


class Written:
    """What its writer puts into the file, event by event; the bracket that ends it is not in ``data``."""

    def __init__(self) -> None:
        self._data = bytearray(
            b'[\n{"name": "process_name", "ph": "M", "pid": 0, "args": '
            b'{"start_time_since_epoch_in_micros":%d}},\n'
            b'{"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},\n'
            % ORIGIN_US
        )
        self._tensors: dict[str, int] = {}
        self._is_new = True

    @property
    def data(self) -> bytes:
        return bytes(self._data)

    def event(self, phase: str, name: str, ts_us: int, tensor: str, args: str = "") -> None:
        text = "" if self._is_new else ","
        self._is_new = False
        if tensor not in self._tensors:
            pid = self._tensors[tensor] = len(self._tensors) + 1
            text += (
                f'{{"name": "process_name", "ph": "M", "pid": {pid}, "args": {{"name": "{tensor}"}}}},\n'
                f'{{"name": "process_sort_index", "ph": "M", "pid": {pid}, '
                f'"args": {{"sort_index": {pid}}}}},\n'
            )
        text += f'{{"ph": "{phase}"'
        text += f', "name": "{name}"' if phase != "E" else ""
        text += f', "ts": {ts_us}, "pid": {self._tensors[tensor]}'
        text += ', "dur": 0' if phase == "X" else ""
        text += f', "args": {{{args}}}' if args else ""
        self._data += text.encode() + b"}"

    def marker(self, ts_us: int) -> None:
        self._data += b',{"ph": "i", "name": "CYCLE_START", "ts": %d, "s": "g"}' % ts_us

    def step(
        self, at_us: int, tensors: Sequence[str], ready: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Negotiate and reduce: 1 ms from the first tensor to the last, 2 ms of reduction.

        ``ready``: rank, and how long after the step's beginning it is ready (microseconds); none where
        the response is cached.
        """
        end_us = at_us + max([1000, *(after_us for _, after_us in ready)])
        for number, tensor in enumerate(tensors):
            self.event("B", "NEGOTIATE_ALLREDUCE", at_us + number, tensor)
            for rank, after_us in ready:
                self.event("X", str(rank), at_us + after_us, tensor)
        for tensor in tensors:
            self.event("E", "", end_us, tensor)
        for tensor in tensors:
            self.event("B", "ALLREDUCE", end_us, tensor)
        for part, name in enumerate(("MEMCPY_IN_FUSION_BUFFER", "GLOO_ALLREDUCE")):
            for tensor in tensors:
                self.event("B", name, end_us + 1000 * part, tensor)
            for tensor in tensors:
                self.event("E", "", end_us + 1000 * (part + 1), tensor)
        for tensor in tensors:
            self.event("E", "", end_us + 2000, tensor, '"dtype": "float32", "shape": "[10, 2]"')
