"""GPU utilization and GPU memory of the ranks, as reported by the driver (NVML).

A thread asks the driver, which may be slow; a health report has the latest values. Without NVML or
its Python module there are no values, and no message.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydrogen_magic.core import processes


@dataclass(frozen=True)
class GpuUse:
    """Values of one rank's GPU; None if the driver does not report them."""

    percent: float | None = None
    memory_bytes: int | None = None
    """Memory of the rank and its children."""


_NOTHING = GpuUse()


class RankGpus:
    """The GPUs of the ranks of one group: rank -> index or UUID, None without one."""

    def __init__(self, gpus: Mapping[int, str | None]) -> None:
        self._gpus = {rank: gpu for rank, gpu in gpus.items() if gpu is not None}
        self._found: dict[int, GpuUse] = {}
        self._pids: dict[int, int] = {}
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def poll(self, pids: Mapping[int, int]) -> None:
        """Make the thread query again; ``pids``: those of the ranks that are alive."""
        if not self._gpus:
            return
        self._pids = dict(pids)
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpus", daemon=True)
            self._thread.start()

    def use_of(self, rank: int) -> GpuUse:
        """Return the latest values."""
        return self._found.get(rank, _NOTHING)

    def close(self) -> None:
        """End the thread after the driver has answered, without waiting for it."""
        self._closing = True
        self._wake.set()

    def _run(self) -> None:
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return  # no driver, or a faulty one: there are no values of its GPU
        while True:
            self._wake.clear()
            if self._closing:  # looked at after `clear`, which may undo the wake-up of `close`
                break
            for rank, gpu in self._gpus.items():
                if rank in self._pids:
                    self._found[rank] = _ask(pynvml, gpu, processes.family(self._pids[rank]))
            self._wake.wait()
        pynvml.nvmlShutdown()


def _ask(nvml: Any, gpu: str, pids: set[int]) -> GpuUse:
    try:
        handle = (
            nvml.nvmlDeviceGetHandleByIndex(int(gpu))
            if gpu.isdigit()
            else nvml.nvmlDeviceGetHandleByUUID(gpu)
        )
    except nvml.NVMLError:
        return _NOTHING
    return GpuUse(_percent(nvml, handle), _memory(nvml, handle, pids))


def _percent(nvml: Any, handle: Any) -> float | None:
    try:
        return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except nvml.NVMLError:
        return None  # a slice of a GPU (MIG) does not have this counter


def _memory(nvml: Any, handle: Any, pids: set[int]) -> int | None:
    """Return the memory that these processes hold; None if the driver knows none of them.

    In a container, the driver may know processes by their pids outside of it.
    """
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return None
    held = [one.usedGpuMemory for one in running if one.pid in pids and one.usedGpuMemory]
    return sum(held) if held else None
