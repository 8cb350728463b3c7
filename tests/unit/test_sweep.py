"""Sweeps: combinations, the queue and the results, with gangs that run nothing."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hydrogen_magic.capture import capture_call, params
from hydrogen_magic.core.job import JobSpec, Plan
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.placements import devices, local
from hydrogen_magic.driver.placements.local import LocalPlacement
from hydrogen_magic.driver.sweep import Sweep, SweepRun, attend
from hydrogen_magic.driver.sweep_values import combinations, folders_of, label_of, params_of
from hydrogen_magic.errors import (
    GangStoppedError,
    HydrogenError,
    OptionValueError,
    PlacementError,
    RankFailedError,
    SweepError,
)

# ── values ───────────────────────────────────────────────────────────────────────────────────────


def test_all_combinations_of_expressions_text_and_objects() -> None:
    namespace = {"lr": 1, "optimizer": "adam", "base": 2, "layer": None, "Small": dict}
    options = [("lr", "0.1, base / 4"), ("optimizer", "sgd, adam"), ("layer", "Small, *[[8, 8]]")]
    found = combinations(options, namespace)
    assert [list(each.values()) for each in found] == [
        list(values) for values in itertools.product([0.1, 0.5], ["sgd", "adam"], [dict, [8, 8]])
    ]
    assert label_of(found[-1]) == "lr=0.5 optimizer=adam layer=[8, 8]"
    assert params_of(found[0]) == {"lr": 0.1, "optimizer": "sgd", "layer": "dict"}
    assert "__builtins__" not in namespace


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("f'a{lr}','b'", ["a1", "b"]),
        ("('a','b')", [("a", "b")]),
        (r"r'a\b'", [r"a\b"]),
        ("str(lr), 'b'", ["1", "b"]),
        ("don't,stop", ["don't", "stop"]),
        ("it's,Ann's", ["it's", "Ann's"]),
        ("a(b,c", ["a(b", "c"]),
        ("str(lr)", ["str(lr)"]),
    ],
)
def test_values_with_quotation_marks_are_python(text: str, values: list[object]) -> None:
    found = combinations([("text", text)], {"text": "adam", "lr": 1})
    assert [each["text"] for each in found] == values


def test_scalars_of_numpy_are_listed_as_numbers() -> None:
    (value,) = combinations([("lr", "*np.array([0.5])")], {"np": np})
    assert type(value["lr"]) is np.float64
    assert (label_of(value), params_of(value)) == ("lr=0.5", {"lr": 0.5})
    assert type(params_of(value)["lr"]) is float


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lr=sgd", "two kinds of quotation marks"),
        ("lr=*[]", "no value"),
        ("lr=1]", "Syntax"),
        ("optimizer=sgd,'adam'", "'sgd' is not defined.*two kinds of quotation marks"),
        ("optimizer=,", "has no value"),
        ("optimizer= , ", "has no value"),
        ("optimizer=*[]", "has no value"),
    ],
)
def test_values_that_are_none(text: str, said: str) -> None:
    name, _, values = text.partition("=")
    with pytest.raises(OptionValueError, match=f"--sweep {name}=.*{said}"):
        combinations([(name, values)], {"optimizer": "adam"})


def test_a_second_name_needs_an_option_of_its_own() -> None:
    said = "takes one name: write --sweep lr=1,2 --sweep width=3 --sweep depth=4$"
    with pytest.raises(OptionValueError, match=said):
        combinations([("lr", "1,2 width=3 depth=4")], {})
    with pytest.raises(OptionValueError, match="two kinds of quotation marks"):
        combinations([("lr", "f(1, a=2) width=3")], {})


def test_secrets_are_in_no_name_and_no_list() -> None:
    values = {"api_token": "correct-horse", "note": "x\ny" * 100}
    assert "correct-horse" not in label_of(values) + str(params_of(values))
    secrets = {
        "password": 123456,
        "pin_token": 123456,
        "openaiKey": "sk",
        "key": dict,
        "api_keys": "a",
        "MYTOKENVALUE": "a",
        "monkey_key": "a",
    }
    assert params_of(secrets) == {}
    assert len(params_of(values)["note"]) == 40 and "\n" not in label_of(values)  # type: ignore[arg-type]


def test_names_that_only_resemble_secrets_tell_runs_apart() -> None:
    values = {"tokenizer": "bpe", "token_dim": 64, "use_key": True, "keypoints": "all"}
    assert label_of(values) == "tokenizer=bpe token_dim=64 use_key=True keypoints=all"
    assert params_of(values) == params.among(values) == values


def _folders(*swept: dict[str, Any]) -> list[str]:
    return folders_of((values, capture_call(print, (), values).digest_of) for values in swept)


class Layer:
    def __init__(self, width: int) -> None:
        self.width = width


def test_each_combination_has_a_folder_with_a_stable_name() -> None:
    first, second = _folders({"lr": 0.1, "layers": [8, 8]}, {"lr": -1e-5, "name": "3b"})
    assert first.startswith("lr=0.1,layers=_8,_8_-") and second == "lr=-1e-05,name=3b"
    assert len({*_folders({"layer": Layer(1)}, {"layer": Layer(1)})}) == 2, "equal values"
    assert _folders({"names": {"a", "b"}})[0].startswith("names=set-"), "in any order"
    texts = ["a b", "a  b", "a_b", "x" * 300 + "y", "x" * 300 + "z", "ж" * 200, "../a", "1", 1]
    names = _folders(*({"text": text} for text in [*texts, "nan", float("nan"), "[8]", [8]]))
    assert len({*names}) == len(names)
    assert all(len(name.encode()) < 255 and "/" not in name for name in names)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("api_token", ("correct-horse", "other")),
        ("layer", (Layer(1), Layer(2))),
        ("act", (lambda x: x, lambda x: -x)),
        ("kind", (type("Net", (), {"depth": 1}), type("Net", (), {"depth": 2}))),
        ("weights", (np.arange(5000), np.where(np.arange(5000) == 2500, -1, np.arange(5000)))),
        ("delay", ("at 0x1f", "at 0x2f")),
    ],
)
def test_a_value_has_its_folder_whatever_the_other_values_are(
    name: str, values: tuple[Any, Any]
) -> None:
    one, other = values
    first, second = _folders({name: one}, {name: other})
    assert first != second and _folders({name: other}, {name: one}) == [second, first]
    assert "horse" not in first


# ── the queue ────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Fake:
    """A gang that ends when the test says so."""

    label: str
    state: str = "RUNNING"
    id: str = "3f2a"
    metrics: Mapping[str, float] = field(default_factory=dict)
    result: Any = None
    error: BaseException | None = None
    stops: list[bool] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def end(self, error: BaseException | None = None) -> None:
        self.error, self.state = error, "FAILED" if error else "SUCCEEDED"
        self.over.set()

    def wait(self, timeout: float | None = None) -> bool:
        return self.over.is_set()

    def raise_for_state(self) -> None:
        if self.error is not None:
            raise self.error

    def stop_for(self, reason: str, kill: bool = False) -> None:
        self.stops.append(kill)
        if not self.over.is_set():
            self.end(GangStoppedError("stopped by you"))
            self.state = "STOPPED"

    @property
    def received(self) -> Any:
        return SimpleNamespace(of=lambda rank: SimpleNamespace(errors={}))

    @property
    def out(self) -> Mapping[str, Any]:
        return {"model": self.label}

    def snapshot(self) -> Any:
        return SimpleNamespace(
            state=self.state, last_metrics=self.metrics, length_s=lambda now: 1.0
        )


class Gangs:
    """The gangs of a sweep over ``lr`` = 1, 2, …, as they are launched."""

    def __init__(self, n: int, n_at_once: int) -> None:
        self.launched: list[Fake] = []
        launches = {lr: lambda lr=lr: self._launch(lr) for lr in range(1, n + 1)}
        runs = [SweepRun({"lr": lr}, launch) for lr, launch in launches.items()]
        self.sweep = Sweep(runs, n_at_once)

    def _launch(self, lr: int) -> Gang:
        if lr == 13:
            raise PlacementError("the cluster is gone")
        self.launched.append(Fake(f"lr={lr}"))
        return cast(Gang, self.launched[-1])

    def advance(self) -> list[str]:
        """Return the labels of what has been launched so far."""
        self.sweep.advance()
        return [gang.label for gang in self.launched]


def test_as_many_at_once_as_fit() -> None:
    gangs = Gangs(4, n_at_once=2)
    assert gangs.advance() == ["lr=1", "lr=2"]
    assert gangs.sweep.progress == "2 running, 2 queued"
    gangs.launched[1].end()
    assert gangs.advance() == ["lr=1", "lr=2", "lr=3"]
    gangs.launched[0].end()
    gangs.launched[2].end()
    gangs.advance()
    gangs.launched[3].end()
    assert not gangs.sweep.advance()
    gangs.sweep.stop()  # too late
    gangs.sweep.raise_for_state()
    assert repr(gangs.sweep).startswith("<Sweep of 4 runs: 4 succeeded;")


def test_failures_leave_the_others_alone_and_are_named_at_the_end() -> None:
    gangs = Gangs(13, n_at_once=13)
    gangs.advance()
    for gang in gangs.launched:
        gang.end()
    same = "rank 1 failed: ValueError: bad"
    for place in (0, 4):
        gangs.launched[place].end(RankFailedError(same, rank=1, report=f"{same}\n  the line"))
    assert not gangs.sweep.advance()
    said = "3 of 13 runs of the sweep failed: lr=1: rank 1"
    with pytest.raises(SweepError, match=said) as raised:
        gangs.sweep.raise_for_state()
    assert raised.value.report.count("the line") == 1, "once for both"
    assert "lr=1 (3f2a), lr=5 (3f2a)" in raised.value.report
    assert "the cluster is gone" in raised.value.report
    results = gangs.sweep.results
    assert (results[0]["error"], results[0]["out"], results[12]["gang"]) == (same, {}, None)
    assert results[1]["out"] == {"model": "lr=2"} and results[1]["params"] == {"lr": 2}


def test_a_stop_ends_what_runs_and_the_queue() -> None:
    gangs = Gangs(3, n_at_once=1)
    gangs.advance()
    gangs.launched[0].end()
    gangs.advance()
    assert not gangs.sweep.is_stopping
    gangs.sweep.stop()
    assert gangs.sweep.is_stopping and gangs.launched[1].stops == [False]
    assert not gangs.sweep.advance() and len(gangs.launched) == 2
    gangs.sweep.stop(kill=True)
    assert gangs.sweep.progress == "1 succeeded, 2 stopped"
    with pytest.raises(GangStoppedError, match=r"1 succeeded, 2 stopped; .*last_sweep\(\)"):
        gangs.sweep.raise_for_state()


def test_a_stop_reaches_the_gang_that_is_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    gangs = Gangs(1, n_at_once=1)
    launch = gangs._launch

    def stop_and_launch(lr: int) -> Gang:
        gangs.sweep.stop(kill=True)
        return launch(lr)

    monkeypatch.setattr(gangs, "_launch", stop_and_launch)
    gangs.advance()
    assert gangs.launched[0].stops == [True]


def test_a_fault_in_a_launch_is_not_hidden() -> None:
    def fail() -> Gang:
        raise OSError("no memory file")

    sweep = Sweep([SweepRun({"lr": 1}, fail)], 1)
    with pytest.raises(OSError, match="no memory file"):
        sweep.advance()
    assert not sweep.advance(), "it counts as ended"


class View:
    """A view of a sweep that counts its calls."""

    def __init__(self) -> None:
        self.n_updates = 0
        self.is_closed = False

    def update(self, sweep: Sweep) -> None:
        self.n_updates += 1
        if self.n_updates == 3:
            raise RuntimeError("the view failed")

    def close(self, sweep: Sweep) -> None:
        self.is_closed = True
        raise RuntimeError("nor can it be closed")


@pytest.mark.parametrize(("fails_at", "n_launched"), [(2, 1), (None, 2)])
def test_no_run_goes_on_or_starts_after_a_fault(
    monkeypatch: pytest.MonkeyPatch, fails_at: int | None, n_launched: int
) -> None:
    """Neither of a launch nor of the view, and whatever fails in the endings."""
    gangs = Gangs(5, n_at_once=2)
    launch, attempted, finished = gangs._launch, [], []

    def launch_or_fail(lr: int) -> Gang:
        attempted.append(lr)
        if lr == fails_at:
            raise OSError("no space left")
        return launch(lr)

    monkeypatch.setattr(gangs, "_launch", launch_or_fail)
    monkeypatch.setattr(gangs.sweep, "finish_tracking", lambda: finished.append(True))
    view = View()
    with pytest.raises(RuntimeError, match="nor can it be closed") as raised:
        attend(gangs.sweep, cast(Any, view))
    cause = OSError if fails_at else RuntimeError
    assert isinstance(raised.value.__context__, cause)
    assert attempted == [1, 2] and len(gangs.launched) == n_launched
    assert all(gang.stops == [False] for gang in gangs.launched)
    assert view.is_closed and finished == [True] and not gangs.sweep.has_more


def test_the_best_run_by_a_metric_or_a_key_of_the_result() -> None:
    gangs = Gangs(4, n_at_once=4)
    gangs.advance()
    for place, gang in enumerate(gangs.launched):
        gang.metrics = {"loss": (0.3, float("nan"), 0.1, 0.0)[place]}
        gang.result = {"score": place}
        gang.end(HydrogenError("x") if place == 3 else None)
    assert gangs.sweep.best("loss")["params"] == {"lr": 3}
    assert gangs.sweep.best("score", largest=True)["params"] == {"lr": 3}
    with pytest.raises(KeyError, match="known: score, loss"):
        gangs.sweep.best("accuracy")
    table = gangs.sweep.table
    assert list(table) == ["gang", "state", "duration_s", "params.lr", "metrics.loss", "result"]
    assert list(table["params.lr"]) == [1, 2, 3, 4]


# ── shares of a machine ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("np", "gpu", "most", "parts"),
    [(2, None, 9, ["01", "23"]), (1, True, 3, ["0", "1", "2"]), (5, True, 9, ["01234"])],
)
def test_gangs_beside_each_other_have_gpus_of_their_own(
    monkeypatch: pytest.MonkeyPatch, np: int, gpu: bool | None, most: int, parts: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    installed = tuple((str(gpu), f"GPU-{gpu}") for gpu in range(5))
    monkeypatch.setattr(devices, "_installed_gpus", lambda path: installed)
    placement, spec = LocalPlacement(), JobSpec(np=np, gpu=gpu)
    plans: list[Plan] = []
    for _ in range(placement.n_at_once(spec, most)):
        plans.append(placement.plan_beside(spec, lambda: _gpus(plans)))
    assert [[slot.gpu for slot in plan.slots] for plan in plans] == [list(part) for part in parts]


def test_a_gpu_is_in_use_under_each_of_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another notebook may have set CUDA_VISIBLE_DEVICES to UUIDs, and this one to indices."""
    monkeypatch.setattr(devices, "_installed_gpus", lambda path: (("0", "GPU-aa"), ("1", "GPU-bb")))
    placement, spec = LocalPlacement(), JobSpec(np=1)
    for visible, in_use in (("GPU-aa,GPU-bb", "0"), ("0,1", "GPU-aa"), ("GPU-a,1", "0")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        (slot,) = placement.plan_beside(spec, lambda in_use=in_use: [in_use]).slots
        assert slot.gpu == visible.split(",")[1]


def _gpus(plans: list[Plan]) -> list[str]:
    return [slot.gpu for plan in plans for slot in plan.slots if slot.gpu is not None]


def test_ranks_share_the_gpus_that_env_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_installed_gpus", lambda path: (("0", "GPU-0"), ("1", "GPU-1")))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    placement, spec = LocalPlacement(), JobSpec(np=3)
    with_env = replace(spec, env=(("CUDA_VISIBLE_DEVICES", "1,0"),))
    for plan in (placement.plan(with_env), placement.plan_beside(with_env, list)):
        assert [slot.gpu for slot in plan.slots] == ["1", "0", "1"] and plan.notes == ()
        first = plan.slots[0]
        assert devices.environment(plan, first) == {"CUDA_VISIBLE_DEVICES": "1,0"}
        names = [devices.device_name(plan, slot) for slot in plan.slots]
        assert names == ["cuda:0", "cuda:1", "cuda:0"]
    for plan in (placement.plan(spec), placement.plan_beside(spec, list)):
        assert not plan.uses_gpu and "all ranks use the CPU" in plan.notes[0]


def test_gpus_that_cannot_be_listed_are_used_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(devices, "_DEVICE_FOLDER", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plan, spec = LocalPlacement().plan, JobSpec(np=2)
    notes = plan(spec).notes
    assert [note.partition(" (it is not on the PATH); ")[0] for note in notes] == [
        "all ranks use the CPU: nvidia-smi does not list the GPUs of this machine"
    ]
    with pytest.raises(PlacementError, match="`--gpu`: nvidia-smi does not list"):
        plan(replace(spec, gpu=True))
    named = replace(spec, gpu=True, env=(("CUDA_VISIBLE_DEVICES", "1,0"),))
    assert [slot.gpu for slot in plan(named).slots] == ["1", "0"]
    hidden = replace(spec, env=(("CUDA_VISIBLE_DEVICES", ""),))
    assert plan(hidden).notes == plan(replace(spec, gpu=False)).notes == ()
    (tmp_path / "nvidia0").unlink()
    assert plan(spec).notes == ()


@pytest.mark.parametrize(
    ("np", "most", "n_gangs", "threads"),
    [(4, 9, 2, "1"), (1, 4, 4, "2"), (1, 9, 8, "1"), (1, 1, 1, None), (16, 3, 1, "1")],
)
def test_without_gpus_each_rank_has_a_core(
    monkeypatch: pytest.MonkeyPatch, np: int, most: int, n_gangs: int, threads: str | None
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(local.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(devices, "visible_gpus", lambda environ: ("0",))
    placement, spec = LocalPlacement(), JobSpec(np=np, gpu=False)
    assert placement.n_at_once(spec, most) == n_gangs
    around = SimpleNamespace(env={})
    job: Any = SimpleNamespace(
        plan=placement.plan(spec),
        spec=replace(spec, n_at_once=n_gangs),
        surroundings=around,
        feed=None,
    )
    assert local._threads(job).get("OMP_NUM_THREADS") == threads
    around.env["OMP_NUM_THREADS"] = "3"
    assert not local._threads(job), "the user's own number"
