"""``TorchDistributor`` as the notebooks use it that were written for pyspark's."""

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hydrogen_magic.compat import TorchDistributor
from tests import distributor_ranks, made_up_gpus, ranks
from tests.documented import covers

pytestmark = pytest.mark.usefixtures("warm_agents")


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that reports two GPUs; there are none."""
    made_up_gpus.report(2, tmp_path, monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def same_environment() -> Iterator[None]:
    """What the kernel has in its environment is there afterwards, and nothing else."""

    def own() -> dict[str, str]:
        return {name: os.environ[name] for name in os.environ if name != "PYTEST_CURRENT_TEST"}

    before = own()
    yield
    assert own() == before


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


# ── functions ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("same_environment")
def test_a_function_gets_its_arguments_and_rank_0s_value_comes_back() -> None:
    distributor = TorchDistributor(2, True, False)
    assert (distributor.num_processes, distributor.local_mode, distributor.use_gpu) == (
        2,
        True,
        False,
    )
    value = distributor.run(
        distributor_ranks.train, 1e-3, 64, 32, np=4, timeout="the function's own"
    )
    options = {"np": 4, "timeout": "the function's own"}
    assert value[:3] == (1e-3, (64, 32), options)
    assert value[3] == {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def test_a_lambda_in_one_process() -> None:
    assert TorchDistributor(use_gpu=False).run(distributor_ranks.ADD_ONE, 3) == 4


def test_a_failing_function_raises_its_message() -> None:
    with pytest.raises(RuntimeError, match="rank 1 failed: ValueError: bad batch 17") as caught:
        TorchDistributor(num_processes=2, use_gpu=False).run(distributor_ranks.fail_on_rank_1)
    shown = "\n".join(caught.value._render_traceback_())
    assert 'raise ValueError("bad batch 17")' in shown


# ── scripts ──────────────────────────────────────────────────────────────────────────────────────

ALL_REDUCE = """
    import os, sys
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    print("rank", os.environ["RANK"], "of", int(ones), sys.argv[1:])
    dist.destroy_process_group()
"""


@pytest.mark.usefixtures("same_environment")
def test_a_script_gets_text_and_returns_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers become text, as with the original; its lines are shown here."""
    distributor = TorchDistributor(num_processes=2, local_mode=True, use_gpu=False)
    assert distributor.run(script(tmp_path, ALL_REDUCE), "--lr=1e-3", 64) is None
    lines = [line for line in capsys.readouterr().out.splitlines() if " rank " in line]
    said = "of 2 ['--lr=1e-3', '64']"
    assert sorted(lines) == [f"[0] rank 0 {said}", f"[1] rank 1 {said}"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise ValueError('bad batch 17')", "failed: ValueError: bad batch 17"),
        ("import sys; sys.exit(7)", "status 7"),
        ("import os; os._exit(7)", "status 7"),
    ],
)
def test_a_failing_script_raises(text: str, message: str, tmp_path: Path) -> None:
    """The original returns None from each of these, as from a script that did well."""
    with pytest.raises(RuntimeError, match=message):
        TorchDistributor(num_processes=2, use_gpu=False).run(script(tmp_path, text))


def test_a_script_takes_no_keywords(tmp_path: Path) -> None:
    marker = tmp_path / "it ran"
    path = script(tmp_path, f"open({str(marker)!r}, 'w')")
    with pytest.raises(ValueError, match="does not support key-word type arguments"):
        TorchDistributor(use_gpu=False).run(path, lr=1e-3)
    assert not marker.exists()


def test_a_missing_script_is_reported_before_anything_starts() -> None:
    with pytest.raises(RuntimeError, match=r"there is no script nowhere\.py"):
        TorchDistributor(use_gpu=False).run("nowhere.py")


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("number", "error"), [(0, ValueError), (-1, ValueError), ("2", TypeError), (2.0, TypeError)]
)
def test_num_processes_is_a_positive_number(number: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="num_processes"):
        TorchDistributor(num_processes=number, use_gpu=False)


@covers("""`TorchDistributor(num_processes=2, local_mode=True, use_gpu=True)`""")
@pytest.mark.usefixtures("two_gpus", "same_environment")
def test_more_processes_than_gpus_are_lowered_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    distributor = TorchDistributor(num_processes=3)
    assert distributor.num_processes == 2
    assert "available GPUs on the driver, which is 2" in caplog.text
    seen = distributor.run(distributor_ranks.gathered_environment, "CUDA_VISIBLE_DEVICES")
    assert seen == [("0", "0,1"), ("1", "0,1")]


@pytest.mark.usefixtures("two_gpus", "same_environment")
def test_without_gpus_the_ranks_see_none() -> None:
    seen = TorchDistributor(2, use_gpu=False).run(
        distributor_ranks.gathered_environment, "CUDA_VISIBLE_DEVICES"
    )
    assert seen == [("0", ""), ("1", "")]


def test_no_gpu_here_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="GPUs were unable to be found on the driver"):
        TorchDistributor()


# ── beside the original, on its cluster ──────────────────────────────────────────────────────────


def parameters(function: Any) -> list[tuple[Any, ...]]:
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


ADDED = {"__init__": ["env", "retries", "timeout", "start_timeout", "pack"]}


@pytest.mark.spark
@pytest.mark.parametrize("name", ["__init__", "run"])
def test_signatures_are_the_originals(name: str) -> None:
    from pyspark.ml.torch import distributor

    original = getattr(distributor.TorchDistributor, name)
    ours, theirs = parameters(getattr(TorchDistributor, name)), parameters(original)
    added = [name for name, *_ in ours[len(theirs) :]]
    assert (ours[: len(theirs)], added) == (theirs, ADDED.get(name, []))


@pytest.mark.spark
def test_without_a_session_there_are_no_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    # By its name, since ranks cannot import all of the package.
    none = "hydrogen_magic.driver.placements.spark.spark_session._session_classes"
    monkeypatch.setattr(none, lambda: ())
    with pytest.raises(
        RuntimeError, match=r"SparkSession[^\n]*\nhere `--on spark` is `local_mode=False`"
    ):
        TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)


@covers(
    """
    `TorchDistributor(num_processes=2, local_mode=False, use_gpu=True)`
    `spark.task.resource.gpu.amount` of the cluster
    """
)
@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_every_process_has_a_gpu_of_its_own() -> None:
    """``spark.task.resource.gpu.amount`` is not set, which the original calls unavailable."""
    distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=True)
    seen = distributor.run(distributor_ranks.gathered_environment, "CUDA_VISIBLE_DEVICES")
    assert [local_rank for local_rank, _ in seen] == ["0", "1"]
    assert {len(devices.split(",")) for _, devices in seen} == {2}


@pytest.mark.spark
def test_a_script_on_executors_leaves_their_workers_as_they_were(
    spark: Any, tmp_path: Path
) -> None:
    """With the original, a pandas UDF that runs in the same worker afterwards sees no GPU either."""
    distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
    assert distributor.run(script(tmp_path, ALL_REDUCE), "--lr=1e-3") is None
    tasks = spark.sparkContext.parallelize(range(4), 4)
    assert tasks.map(lambda _: os.environ.get("CUDA_VISIBLE_DEVICES")).collect() == [None] * 4


@covers("""`pytorch.spark.distributor.ignoreSsl`""")
@pytest.mark.spark
def test_a_cluster_that_wants_tls_is_refused_unless_ignored(
    spark: Any, caplog: pytest.LogCaptureFixture
) -> None:
    distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
    spark.conf.set("spark.ssl.enabled", "true")
    try:
        with pytest.raises(RuntimeError, match=r"pytorch\.spark\.distributor\.ignoreSsl"):
            distributor.run(ranks.gather)
        spark.conf.set("pytorch.spark.distributor.ignoreSsl", "true")
        assert distributor.run(ranks.gather) == [0, 1]
        assert "TLS" in caplog.text
    finally:
        spark.conf.unset("spark.ssl.enabled")
        spark.conf.unset("pytorch.spark.distributor.ignoreSsl")
