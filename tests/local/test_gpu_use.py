"""The use of ranks' GPUs that the driver reports, with a stand-in for NVML's module."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hydrogen_magic as hm
from hydrogen_magic.core import events as ev
from hydrogen_magic.driver import session
from hydrogen_magic.driver.placements import devices
from hydrogen_magic.node.agent import command_line, gpus
from hydrogen_magic.notebook import doctor
from tests import made_up_gpus, plain_ranks
from tests.gangs import PATIENCE_S, ended, until, wait_until

PID = 1 << 30
"""Higher than any pid: a process of its own, without children."""

STAND_IN = """
from types import SimpleNamespace
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetUtilizationRates(handle): return SimpleNamespace(gpu=40 + handle)
def nvmlDeviceGetComputeRunningProcesses(handle):
    import os
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [SimpleNamespace(pid=pid, usedGpuMemory=1 << 20) for pid in pids]
"""


class NVMLError(Exception):
    pass


def refuse(*args: Any) -> Any:
    raise NVMLError("Not Supported")


def stand_in(**functions: Callable[..., Any]) -> types.ModuleType:
    module = types.ModuleType("pynvml")
    usual: dict[str, Any] = {
        "NVMLError": NVMLError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: f"index {index}",
        "nvmlDeviceGetHandleByUUID": lambda uuid: f"uuid {uuid}",
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=37),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [
            SimpleNamespace(pid=PID, usedGpuMemory=5 << 30),
            SimpleNamespace(pid=PID + 1, usedGpuMemory=9 << 30),
        ],
    }
    vars(module).update({**usual, **functions})
    return module


def found(gpu: str | None, module: types.ModuleType | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what is found of one rank's GPU once the thread has looked and ended."""
    monkeypatch.setitem(sys.modules, "pynvml", module)  # None: it cannot be imported
    watched = gpus.RankGpus({3: gpu})
    watched.poll({3: PID})
    thread = watched._thread
    wait_until(lambda: 3 in watched._found or thread is None or not thread.is_alive())
    watched.close()
    if thread is not None:
        thread.join(PATIENCE_S)
    return watched.use_of(3)


@pytest.mark.parametrize("gpu", ["0", "GPU-8a3f"])
def test_use_of_the_ranks_own(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(gpu, stand_in(), monkeypatch) == gpus.GpuUse(37.0, 5 << 30)


def test_what_the_driver_does_not_report_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = gpus.GpuUse()
    assert found("0", None, monkeypatch) == nothing
    assert found("0", stand_in(nvmlInit=refuse), monkeypatch) == nothing
    assert found("MIG-1", stand_in(nvmlDeviceGetHandleByUUID=refuse), monkeypatch) == nothing
    no_rate = stand_in(nvmlDeviceGetUtilizationRates=refuse)
    assert found("0", no_rate, monkeypatch) == gpus.GpuUse(None, 5 << 30)
    others = stand_in(
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [
            SimpleNamespace(pid=PID, usedGpuMemory=None)
        ]
    )
    assert found("0", others, monkeypatch) == gpus.GpuUse(37.0, None)
    assert found(None, stand_in(), monkeypatch) == nothing


def test_gangs_at_the_same_time_use_free_gpus_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session holds its GPU between its cells; the GPU of a gang that has ended is free at once."""
    made_up_gpus.report(2, tmp_path, monkeypatch)
    over = tmp_path / "over"
    over.touch()
    here = str(over)
    assert hm.run(plain_ranks.visible_gpus, here, np=1, session="lab", quiet=True) == "0"
    over.unlink()
    waiting = hm.launch(plain_ranks.visible_gpus, here, np=1)
    third = hm.launch(plain_ranks.visible_gpus, here, np=2)
    (held,) = session.sessions()
    held.end()
    fourth = hm.launch(plain_ranks.visible_gpus, here, np=1)
    over.touch()
    assert [gang.result for gang in (waiting, third, fourth)] == ["1", "0,1", "0"]
    assert hm.run(plain_ranks.visible_gpus, here, np=1, quiet=True) == "0"


def test_the_doctor_says_why_gpus_are_not_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up_gpus.report(2, tmp_path, monkeypatch)
    assert doctor.gpus().found == "0, GPU-00000000-aaaa; 1, GPU-10000000-aaaa"
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\necho 'Driver/library version mismatch'; exit 18"
    )
    assert doctor.gpus().is_well
    (tmp_path / "nvidia1").touch()
    monkeypatch.setattr(devices, "_DEVICE_FOLDER", tmp_path)
    diagnosis = doctor.gpus()
    assert not diagnosis.is_well and "(Driver/library version mismatch)" in diagnosis.found


@pytest.mark.usefixtures("cold")
def test_health_of_a_rank_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """End to end: an agent that imports the stand-in, ranks whose GPUs are made up."""
    (tmp_path / "pynvml.py").write_text(STAND_IN)
    made_up_gpus.report(2, tmp_path, monkeypatch)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    monkeypatch.setattr(command_line, "_CODE", code + command_line._CODE)
    over = tmp_path / "over"
    gang = hm.launch(plain_ranks.wait_for, str(over), np=2, gpu=True)
    until(gang, lambda: gang.ranks and all(rank.gpu_percent is not None for rank in gang.ranks))
    over.touch()
    ended(gang)
    assert [rank.gpu_percent for rank in gang.ranks] == [40.0, 41.0]
    assert all((rank.gpu_memory_bytes or 0) >= 1 << 20 for rank in gang.ranks)
    health = [e for e in gang.events() if isinstance(e, ev.RankHealth)]
    assert [ev.decode(json.loads(json.dumps(ev.encode(e)))) for e in health] == health
