"""How busy the ranks' GPUs are, and what the ranks hold of their memory, by the driver (NVML).

Asked by a thread, because a driver may take its time; a health report says what was found last.
Where NVML or its Python module is absent nothing is found, and nothing is said about it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydrogen_magic.core import processes

__all__ = ["RankGpus", "GpuUse"]


@dataclass(frozen=True)
class GpuUse:
    """Of one rank's GPU; None where the driver does not tell."""

    percent: float | None = None
    memory_bytes: int | None = None
    """Held by the rank and its children."""


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

    def look(self, pids: Mapping[int, int]) -> None:
        """Have the thread look again; ``pids``: those of the ranks that are alive."""
        if not self._gpus:
            return
        self._pids = dict(pids)
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpus", daemon=True)
            self._thread.start()

    def use_of(self, rank: int) -> GpuUse:
        """Return what was found last."""
        return self._found.get(rank, _NOTHING)

    def close(self) -> None:
        """Have the thread end once the driver has answered; nobody waits for that."""
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
            return  # no driver, or one that is not well: its GPU cannot be told about
        while not self._closing:
            self._wake.clear()
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
        return None  # a slice of a GPU (MIG) has no such counter


def _memory(nvml: Any, handle: Any, pids: set[int]) -> int | None:
    """Return what these processes hold; None when the driver knows none of them.

    In a container it may name processes by the pids that they have outside.
    """
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return None
    held = [one.usedGpuMemory for one in running if one.pid in pids and one.usedGpuMemory]
    return sum(held) if held else None
