"""``MirroredStrategyRunner`` as the notebooks use it that were written for ``spark_tensorflow_distributor``.

The expectations are those of the original's integration tests: GPUs are split evenly, none is used twice, and
the environment is restored.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hydrogen_magic.compat import MirroredStrategyRunner
from hydrogen_magic.core import events as ev
from hydrogen_magic.driver import known_gangs
from hydrogen_magic.driver.gang import Gang
from tests import made_up_gpus
from tests.documented import covers
from tests.tensorflow_ranks import custom, gpus_of_rank, readme, replicas

pytestmark = pytest.mark.usefixtures("warm_agents")


def last_results() -> list[Any]:
    """What every rank of the last gang returned."""
    return last_gang().results


def last_gang() -> Gang:
    return list(known_gangs.gangs().values())[-1]


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that reports four GPUs; there are none."""
    made_up_gpus.report(4, tmp_path, monkeypatch)


def test_signatures_are_the_originals() -> None:
    """Those of version 1.0.0, and the options of a gang."""
    found = inspect.signature(MirroredStrategyRunner).parameters.values()
    assert {each.kind for each in found} == {inspect.Parameter.KEYWORD_ONLY}
    assert [(each.name, each.default) for each in found][:5] == [
        ("num_slots", inspect.Parameter.empty),
        ("local_mode", False),
        ("use_gpu", True),
        ("gpu_resource_name", "gpu"),
        ("use_custom_strategy", False),
    ]
    assert [each.name for each in found][5:] == [
        "env",
        "retries",
        "timeout",
        "start_timeout",
        "pack",
    ]
    run = inspect.signature(MirroredStrategyRunner.run)
    assert str(run) == "(self, train_fn: 'Callable[..., Any]', **kwargs: 'Any') -> 'Any'"


@covers("""`MirroredStrategyRunner(num_slots=0)`""")
@pytest.mark.parametrize(
    ("number", "error"), [(0, ValueError), (-1, ValueError), ("2", TypeError), (2.0, TypeError)]
)
def test_num_slots_is_a_positive_number(number: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="num_slots"):
        MirroredStrategyRunner(num_slots=number, local_mode=True)


@pytest.mark.usefixtures("four_gpus")
def test_more_slots_than_gpus_here_are_refused() -> None:
    runner = MirroredStrategyRunner(num_slots=5, local_mode=True)
    with pytest.raises(ValueError, match=r"5 slots were requested .* only 4 GPUs"):
        runner.run(gpus_of_rank)


@covers("""`gpu_resource_name="fpga"`""")
def test_another_gpu_resource_is_refused() -> None:
    with pytest.raises(RuntimeError, match="gpu_resource_name='fpga' is not supported"):
        MirroredStrategyRunner(num_slots=2, gpu_resource_name="fpga")
    MirroredStrategyRunner(num_slots=2, gpu_resource_name="fpga", local_mode=True)  # without Spark


@covers(
    """
    `from spark_tensorflow_distributor import MirroredStrategyRunner`
    `local_mode=True`
    `runner.run(train_fn, **kwargs)` and its value
    """
)
@pytest.mark.exhaustive  # ranks import TensorFlow, which takes seconds
@pytest.mark.tensorflow
def test_plain_code_runs_in_the_scope_of_a_strategy() -> None:
    runner = MirroredStrategyRunner(num_slots=2, local_mode=True, use_gpu=False)
    found = runner.run(replicas, epochs=3, timeout="the function's own")
    options = {"epochs": 3, "timeout": "the function's own"}
    assert found == ("CollectiveAllReduceStrategy", 2, options)


KERAS_2 = {"TF_USE_LEGACY_KERAS": "1"}


@covers(
    """
    `multi_worker_model.fit(x=train_datasets, epochs=3, steps_per_epoch=5)`
    `options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA`
    `return tf.config.experimental.list_physical_devices('GPU')`
    `tf.distribute.experimental.MultiWorkerMirroredStrategy()`
    """
)
@pytest.mark.exhaustive
@pytest.mark.tensorflow
def test_the_readmes_example_trains_here() -> None:
    runner = MirroredStrategyRunner(num_slots=2, local_mode=True, use_gpu=False, env=KERAS_2)
    losses, *rest = runner.run(readme, epochs=3)
    assert rest == [[], 2]
    gang = last_gang()
    for rank in range(2):
        seen = gang.metrics[gang.metrics["rank"] == rank]
        assert list(seen["step"]) == list(range(15))
        assert list(seen["loss"][4::5]) == pytest.approx(losses, rel=1e-4)
    assert not [e for e in gang.events() if isinstance(e, ev.Notice) and e.level == "warning"]
    runner = MirroredStrategyRunner(
        num_slots=2, local_mode=True, use_gpu=False, use_custom_strategy=True
    )
    assert runner.run(custom) == 2


@pytest.mark.exhaustive
@pytest.mark.spark
@pytest.mark.tensorflow
@pytest.mark.usefixtures("spark")
def test_the_readmes_example_trains_on_executors() -> None:
    runner = MirroredStrategyRunner(num_slots=2, use_gpu=False, env=KERAS_2)
    losses, *rest = runner.run(readme, epochs=3)
    assert len(losses) == 3 and rest == [[], 2]


@pytest.mark.tensorflow
@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("given", [None, "3,1,0"])
def test_local_ranks_have_gpus_of_their_own(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that the notebook may use; its environment stays as it is."""
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    runner = MirroredStrategyRunner(num_slots=3, local_mode=True, use_custom_strategy=True)
    names = ["0", "1", "2"] if given is None else given.split(",")
    assert runner.run(gpus_of_rank) == ("0", names, 0)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == given


@covers(
    """
    `MirroredStrategyRunner(num_slots=8)`
    `gpu_resource_name="gpu"`
    `use_custom_strategy=True`
    `runner.get_num_tasks()`
    """
)
@pytest.mark.exhaustive
@pytest.mark.spark
@pytest.mark.tensorflow
@pytest.mark.usefixtures("spark")
def test_gpus_of_a_cluster_are_split_evenly_and_none_is_used_twice() -> None:
    """Two executors with two GPUs each, on one machine: the four are those of its ranks."""
    runner = MirroredStrategyRunner(num_slots=4, use_custom_strategy=True)
    assert runner.get_num_tasks() == 4
    runner.run(gpus_of_rank)
    own = {(host, visible[place]) for host, visible, place in last_results()}
    assert len(own) == 4
    n_ranks = Counter(host for host, _, _ in last_results())
    assert all(len(visible) == n_ranks[host] for host, visible, _ in last_results())


@covers("""`use_gpu=False`""")
@pytest.mark.exhaustive
@pytest.mark.spark
@pytest.mark.tensorflow
@pytest.mark.usefixtures("spark")
def test_ranks_of_a_cluster_without_gpus_see_none() -> None:
    runner = MirroredStrategyRunner(num_slots=2, use_gpu=False, use_custom_strategy=True)
    runner.run(gpus_of_rank)
    assert [visible for _, visible, _ in last_results()] == [[], []]


@covers("""`tensorflow.spark.distributor.ignoreSsl`""")
@pytest.mark.exhaustive
@pytest.mark.spark
@pytest.mark.tensorflow
def test_a_cluster_that_wants_tls_is_refused_unless_ignored(spark: Any) -> None:
    runner = MirroredStrategyRunner(num_slots=1, use_gpu=False, use_custom_strategy=True)
    spark.conf.set("spark.ssl.enabled", "true")
    try:
        with pytest.raises(RuntimeError, match=r"tensorflow\.spark\.distributor\.ignoreSsl"):
            runner.run(gpus_of_rank)
        spark.conf.set("tensorflow.spark.distributor.ignoreSsl", "true")
        assert runner.run(gpus_of_rank)[1] == []
    finally:
        spark.conf.unset("spark.ssl.enabled")
        spark.conf.unset("tensorflow.spark.distributor.ignoreSsl")
