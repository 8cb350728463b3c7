"""Classes of ``compat``: options beyond those of their originals, their names in messages, and GPUs."""

from __future__ import annotations

import pickle
import types
from typing import Any

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

from hydrogen_magic.compat import HorovodRunner, TorchDistributor, gangs
from hydrogen_magic.compat.keras.torch_exchange import TorchExchange
from hydrogen_magic.core import events as ev
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver import attending, launcher
from hydrogen_magic.errors import HydrogenError, PlacementError, RankFailedError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[JobSpec]:
    """What gangs are asked for; none is planned or started."""
    specs: list[JobSpec] = []

    def launch(captured: Any, spec: JobSpec, **options: Any) -> Any:
        specs.append(spec)
        return types.SimpleNamespace(result=None)

    monkeypatch.setattr(launcher, "plan", lambda spec: types.SimpleNamespace(uses_gpu=False))
    monkeypatch.setattr(launcher, "launch_captured", launch)
    monkeypatch.setattr(attending, "attend", lambda gang, quiet: None)
    return specs


def test_options_win_over_the_notebooks_settings(
    asked: list[JobSpec], notebook_shell: InteractiveShell
) -> None:
    for setting in ("np = 7", "retries = 2", "pack = True", "timeout = 9", "grace = 1"):
        notebook_shell.run_line_magic("config", f"Distributed.{setting}")
    options: dict[str, Any] = {
        "env": {"A": "1"}, "retries": np.int64(0), "timeout": 5, "start_timeout": 6, "pack": False,
    }  # fmt: skip
    HorovodRunner(2).run(print)
    TorchDistributor(4, use_gpu=False).run(print)
    HorovodRunner(np=-3, **options).run(print)
    TorchDistributor(4, use_gpu=False, **options).run(print)
    configured: dict[str, Any] = {"retries": 2, "pack": True, "timeout_s": 9.0, "grace_s": 1.0}
    given: dict[str, Any] = {"env": (("A", "1"),), "retries": 0, "timeout_s": 5, "pack": False}
    given |= {"start_timeout_s": 6, "grace_s": 1.0}
    assert asked == [
        JobSpec(2, "spark", "horovod", **configured),
        JobSpec(4, "local", "torch", gpu=False, **configured),
        JobSpec(3, "local", "horovod", **given),
        JobSpec(4, "local", "torch", gpu=False, **given),
    ]


def test_impossible_options_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="retries should be at least 0"):
        HorovodRunner(2, retries=-1)
    with pytest.raises(TypeError, match=r"env\['A'\] should be a str"):
        TorchDistributor(2, use_gpu=False, env={"A": 1})  # type: ignore[dict-item]


NO_SESSION = "`--on spark` needs a Spark session, but there is none: create one first"
TOO_MANY = "np 8, the cluster has 4 slots: use `--np 4`, or wait for executors with `--wait 10m`"
NO_GPU = "`--np 2 --gpu` needs 2 GPUs, this machine has 1: use `--np 1` or drop `--gpu`"

HOROVOD, TORCH = HorovodRunner(-2), TorchDistributor(2, use_gpu=False)


@pytest.mark.parametrize(
    ("runner", "text", "names"),
    [
        (
            HOROVOD,
            NO_SESSION,
            "\nhere `--on spark` is a positive `np` (a negative one runs on this machine)",
        ),
        (
            HOROVOD,
            TOO_MANY,
            "\nhere `--np` is the absolute value of `np`, `--wait` is an option of `%%distributed`",
        ),
        (
            TORCH,
            NO_SESSION,
            "\nhere `--on spark` is `local_mode=False` (`local_mode=True` runs on this machine)",
        ),
        (
            TORCH,
            NO_GPU,
            "\nhere `--np` is `num_processes`, `--gpu` is `use_gpu=True` (the default)",
        ),
        (TORCH, "`x` cannot be sent", ""),
        (TORCH, "torchrun --nproc-per-node 2 --packages a --gpus all --wait-for b", ""),
    ],
)
def test_errors_name_the_arguments_of_the_class(
    runner: Any, text: str, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does the report of the error."""

    def fail(*args: Any, **options: Any) -> None:
        raise PlacementError(text)

    monkeypatch.setattr(gangs, "call", fail)
    with pytest.raises(HydrogenError) as caught:
        runner.run(print)
    assert str(caught.value) == text + names == caught.value.report.partition(": ")[2]


def test_a_failure_reaches_another_process() -> None:
    """A pool of processes that each launch gangs sends errors by pickle."""
    error = RankFailedError("rank 1 failed", rank=1, report="rank 1 failed\n  a line", gang="g1")
    same = pickle.loads(pickle.dumps(error))
    assert (str(same), same.rank, same.report, same.gang) == (
        "rank 1 failed",
        1,
        error.report,
        "g1",
    )


def test_a_failed_ranks_own_text_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RankFailedError("rank 0 failed: ValueError: use --np 4", rank=0)

    monkeypatch.setattr(gangs, "call", fail)
    with pytest.raises(RankFailedError, match="use --np 4"):
        HorovodRunner(-2).run(print)


def test_a_view_that_shows_the_drivers_log_alone_has_as_many_events_as_the_gang() -> None:
    """Views count the events, of which thousands may come between two looks."""
    found: list[ev.Event] = []
    gang: Any = types.SimpleNamespace(events=lambda start=0: found[start:], id="cafe")
    shown = gangs._DriverLog(gang)
    for n_more in (3, 5000, 2):
        start = len(found)
        for n in range(start, start + n_more):
            stream = ev.DRIVER if n % 2 else "stdout"
            found.append(ev.Output(float(n), 0, stream, f"line {n}\n"))
        new = shown.events(start)
        assert [event.at_s for event in new] == [event.at_s for event in found[start:]]
        kept = [event.text for event in new if isinstance(event, ev.Output) and event.text]
        assert kept == [f"line {n}\n" for n in range(start, start + n_more) if n % 2]
    assert len(shown.events()) == 5005 and shown.id == "cafe"


def test_ranks_of_keras_share_gpus_if_there_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        TorchExchange().init()
    assert [device.index for device in used] == [0, 1, 0, 1]
