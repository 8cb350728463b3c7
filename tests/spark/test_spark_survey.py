"""What is found out about a cluster before anything is submitted: slots, GPUs, what is in the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hydrogen_magic.errors import PlacementError
from hydrogen_magic.placements.spark import session as sessions
from hydrogen_magic.placements.spark import survey as surveys
from hydrogen_magic.placements.spark.capacity import registered_cores
from hydrogen_magic.placements.spark.executors import Executor, Roster, roster
from hydrogen_magic.placements.spark.session import Session
from hydrogen_magic.placements.spark.settings import Settings
from hydrogen_magic.placements.spark.survey import Survey, free_slots, survey
from hydrogen_magic.spec import JobSpec
from tests import spark_rig

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(180)]

CLUSTER = "local-cluster[2,2,512]"
GPU = {"spark.worker.resource.gpu.amount": "2", "spark.executor.resource.gpu.amount": "2"}
DISCOVERY = """#!/bin/sh
if mkdir "$0.first" 2>/dev/null
then echo '{"name": "gpu", "addresses": ["0", "1"]}'
else echo '{"name": "gpu", "addresses": ["2", "3"]}'
fi
"""
"""Reports GPUs that are not there: two to the first worker that asks, two others to the second."""


@contextmanager
def on_cluster(site: spark_rig.Site, folder: Path, **options: str) -> Iterator[Session]:
    """Give a session on two workers of two cores and two GPUs each."""
    script = folder / "gpus.sh"
    script.write_text(DISCOVERY)
    script.chmod(0o755)
    options = {**GPU, "spark.worker.resource.gpu.discoveryScript": str(script), **options}
    with spark_rig.session(site, CLUSTER, **options) as spark:
        found = sessions._session(spark)
        spark_rig.until(lambda: _n_slots(found) == 4, 60)
        yield found


def _n_slots(session: Session) -> int:
    seen = roster(session, 1.0)
    return 0 if seen is None else seen.slots(1, 0)


def timed(session: Session, spec: JobSpec) -> Survey:
    """Survey, and hold it to its second."""
    begun = time.monotonic()
    try:
        return survey(session, spec)
    finally:
        assert time.monotonic() - begun < 1.0


def say_gpus() -> Callable[[Any], Any]:
    """Return a task that gives its GPUs; made here, so that it travels by value."""

    def task(batches: Any) -> Iterator[Any]:
        import pyarrow
        from pyspark import BarrierTaskContext

        for _ in batches:
            pass
        context = BarrierTaskContext.get()
        assert context is not None
        gpus = [address for r in context.resources().values() for address in r.addresses]
        yield pyarrow.RecordBatch.from_pydict({"o": [" ".join(gpus).encode()]})

    return task


def sleep() -> Callable[[Any], Any]:
    def task(batches: Any) -> Iterator[Any]:
        import time

        time.sleep(60)
        yield from batches

    return task


# ── on clusters ──────────────────────────────────────────────────────────────────────────────────


def test_gpus_by_a_profile(spark_site: spark_rig.Site, tmp_path: Path) -> None:
    with on_cluster(spark_site, tmp_path) as session:
        found = timed(session, JobSpec(np=4, gpu=True))
        assert (found.slots, found.gpus, found.notes) == (4, True, ())
        given = session.run_tasks(say_gpus(), 4, found.profile, "gpus")
        assert sorted(given) == [b"0", b"1", b"2", b"3"]
        with pytest.raises(PlacementError) as refused:
            timed(session, JobSpec(np=8, gpu=True))
        assert str(refused.value) == (
            "np 8, the cluster has 4 slots (2 executors x 2 cores and 2 GPUs, 1 core and 1 GPU per "
            "task): use `--np 4`, or start the session with more executors or cores"
        )
        without = timed(session, JobSpec(np=4, gpu=False))
        assert not without.gpus and without.profile is None
        assert free_slots(session, without) == 4
        running = threading.Thread(target=_run_until_cancelled, args=(session,), daemon=True)
        running.start()
        spark_rig.until(lambda: free_slots(session, without) == 2, 30)
        session.cancel("busy")
        running.join(30)


def _run_until_cancelled(session: Session) -> None:
    with pytest.raises(sessions.SparkJobError):
        session.run_tasks(sleep(), 2, None, "busy")


def test_gpus_by_the_sessions_own_settings(spark_site: spark_rig.Site, tmp_path: Path) -> None:
    options = {"spark.task.resource.gpu.amount": "1"}
    with on_cluster(spark_site, tmp_path, **options) as session:
        found = timed(session, JobSpec(np=4))
        assert found == Survey(4, True, None)
        assert sorted(session.run_tasks(say_gpus(), 4, None, "gpus")) == [b"0", b"1", b"2", b"3"]
        without = timed(session, JobSpec(np=4, gpu=False))
        assert not without.gpus
        assert session.run_tasks(say_gpus(), 4, without.profile, "cpu") == [b""] * 4


def test_a_server_says_through_connect_what_its_driver_knows(spark_site: spark_rig.Site) -> None:
    from pyspark.sql.connect.session import SparkSession

    server = spark_rig.ConnectServer(spark_site, "local[2]", **{"spark.ui.enabled": "true"})
    try:
        spark = SparkSession.builder.remote(server.url).create()
        session = sessions._session(spark)
        spark_rig.until(lambda: roster(session, 1.0) is not None, 30)  # a UI's first answer is slow
        assert timed(session, JobSpec(np=2)) == Survey(2, False, None)
        assert free_slots(session, Survey(2, False, None)) == 2
        with pytest.raises(PlacementError) as refused:
            timed(session, JobSpec(np=8))
        assert str(refused.value) == (
            "np 8, local[2] has 2 slots (2 cores, 1 core per task): use `--np 2`, or start the "
            "session with master local[8]"
        )
        spark.stop()
    finally:
        server.close()


def test_what_never_fits_is_refused_while_executors_are_still_coming(
    spark_site: spark_rig.Site, standalone: spark_rig.Standalone, monkeypatch: pytest.MonkeyPatch
) -> None:
    with spark_rig.session(spark_site, standalone.url) as spark:
        session = sessions._session(spark)
        young = replace(roster(session, 1.0), executors=())
        monkeypatch.setattr(surveys, "roster", lambda session, within_s: young)
        with pytest.raises(PlacementError, match="np 8, the cluster has 4 slots"):
            timed(session, JobSpec(np=8))
        assert timed(session, JobSpec(np=4)).slots == 4, "Spark's scheduler knows of them"


def test_slots_through_connect_without_spark_s_ui(spark_site: spark_rig.Site) -> None:
    from pyspark.sql.connect.session import SparkSession

    with closing(spark_rig.ConnectServer(spark_site, "local-cluster[2,2,512]")) as server:
        spark = SparkSession.builder.remote(server.url).create()
        session = sessions._session(spark)
        settings = Settings.read(session)
        spark_rig.until(lambda: registered_cores(session, settings) == 4, 60)
        spark.stop()


# ── what no small cluster shows ──────────────────────────────────────────────────────────────────


def imagined(monkeypatch: pytest.MonkeyPatch, seen: Roster | None, **settings: str) -> Session:
    """Return a Connect session of which no more is known than its settings and executors."""
    monkeypatch.setattr(surveys, "roster", lambda session, within_s: seen)
    known = {name.replace("__", "."): value for name, value in settings.items()}
    return Session(_Imagined(SimpleNamespace(getAll=known)), True, "app", "sc://there")


@dataclass(frozen=True, eq=False)
class _Imagined:
    """As much of a ``SparkSession`` as a survey reads."""

    conf: Any


def executors(*gpus: tuple[str, ...], host: str = "node-{}", age_s: float = 60) -> Roster:
    found = tuple(
        Executor(str(n), host.format(n), 2, 0, addresses, 1000.0)
        for n, addresses in enumerate(gpus)
    )
    return Roster(found, 1000.0, 1000.0 + age_s)


STANDALONE = {"spark__master": "spark://there:7077"}
WITH_GPUS = {**STANDALONE, "spark__executor__resource__gpu__amount": "2"}


def test_dynamic_allocation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**STANDALONE, "spark__dynamicAllocation__enabled": "true"}
    with pytest.raises(PlacementError, match=r"spark\.dynamicAllocation\.enabled=false"):
        survey(imagined(monkeypatch, executors(()), **settings), JobSpec())
    ignored = {**settings, "spark__master": "local[2]"}
    assert survey(imagined(monkeypatch, executors(()), **ignored), JobSpec()).slots == 2


@pytest.mark.parametrize(
    ("seen", "settings", "reason"),
    [
        (executors(()), STANDALONE, "no GPUs that Spark knows of"),
        (executors(()), {**STANDALONE, "spark__master": "local[2]"}, r"local mode \(local\[2\]\)"),
        (
            executors(("0", "1")),
            {**WITH_GPUS, "spark__task__resource__gpu__amount": "0.5"},
            "spark.task.resource.gpu.amount is 0.5, so that tasks share a GPU",
        ),
        (
            executors(("0", "1"), ("0", "1"), host="one"),
            WITH_GPUS,
            "executors 0, 1 on one all report GPU 0, and ranks would share it",
        ),
        (executors(("0",), ()), WITH_GPUS, "2 ranks need 2 GPUs, the cluster has 1: use `--np 1`"),
    ],
)
def test_gpus_that_ranks_cannot_have_for_themselves(
    monkeypatch: pytest.MonkeyPatch, seen: Roster, settings: dict[str, str], reason: str
) -> None:
    session = imagined(monkeypatch, seen, **settings)
    with pytest.raises(PlacementError, match=reason):
        survey(session, JobSpec(gpu=True))
    unasked = survey(session, JobSpec())
    assert not unasked.gpus
    assert bool(unasked.notes) == ("spark__executor__resource__gpu__amount" in settings)


def test_executors_that_are_still_coming_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    young = executors((), age_s=2)
    found = survey(imagined(monkeypatch, young, **STANDALONE), JobSpec(np=4))
    assert found.slots is None
    assert found.notes == ("2 slots of 4 so far: executors are still coming",)
    known = {**STANDALONE, "spark__executor__instances": "1"}
    with pytest.raises(PlacementError, match="np 4, the cluster has 2 slots"):
        survey(imagined(monkeypatch, young, **known), JobSpec(np=4))
    bounded = {**STANDALONE, "spark__cores__max": "3"}
    with pytest.raises(PlacementError, match="np 4, the cluster has 3 slots"):
        survey(imagined(monkeypatch, young, **bounded), JobSpec(np=4))
    assert survey(imagined(monkeypatch, young, **bounded), JobSpec(np=3)).slots is None


def test_an_application_without_executors_is_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    none = replace(executors(()), executors=(), at_s=1100.0)
    with pytest.raises(PlacementError, match="has 0 slots: this application has no executor"):
        survey(imagined(monkeypatch, none, **STANDALONE), JobSpec())


def test_what_cannot_be_known_is_not_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {**STANDALONE, "spark__default__parallelism": "8"}
    assert survey(imagined(monkeypatch, None, **own), JobSpec(np=99)).slots is None
    named = {"spark__master": "local-cluster[2,2,1024]"}
    with pytest.raises(PlacementError, match="np 5, the cluster has 4 slots"):
        survey(imagined(monkeypatch, None, **named), JobSpec(np=5))
