"""Settings of a session that matter to its ranks, in processes of their own."""

from __future__ import annotations

import re
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import leaks, spark_rig, spark_settings

pytestmark = [pytest.mark.spark, pytest.mark.exhaustive, pytest.mark.timeout(300)]

PROXY = "http://127.0.0.1:9"
"""Refuses connections."""


def answers(
    names: Sequence[str],
    standalone: spark_rig.Standalone,
    environment: dict[str, str],
    *,
    cwd: Path | None = None,
    n_executors: int = 2,
    **more: str,
) -> dict[str, Any]:
    """Return what functions of :mod:`tests.spark_settings` return in one session, by their names."""
    arguments = [standalone.url, str(n_executors), *names]
    env = {**environment, **more}
    try:
        found: dict[str, Any] = spark_rig.answer_of("spark_settings", *arguments, env=env, cwd=cwd)
    finally:
        spark_rig.kill_all(leaks.LENT, environment[leaks.LENT])
    return found


def packed(folder: Path, archive: Path) -> str:
    """Pack the contents of a folder; return what ``spark.archives`` calls it."""
    with tarfile.open(archive, "w:gz") as tar:
        for entry in sorted(folder.iterdir()):
            tar.add(entry, entry.name)
    return f"{archive}#{archive.name.partition('.')[0]}"


def test_settings_that_ranks_inherit(
    spark_site: spark_rig.Site, standalone: spark_rig.Standalone, tmp_path: Path
) -> None:
    """And modules that came with the session, by paths in its settings."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "labels.txt").write_text("cat dog")
    (data / "in_archive.py").write_text("ANSWER = 42\n")
    link = tmp_path / "current"
    link.symlink_to(spark_site.python.parents[1])
    distributed, archive = write_all_modules(tmp_path)
    environment = spark_site.driver(
        **{
            "spark.python.worker.reuse": "false",
            "spark.task.cpus": "2",
            "spark.executor.pyspark.memory": "8g",
            "spark.executorEnv.MINE": "yes",
            "spark.executorEnv.http_proxy": PROXY,
            "spark.executorEnv.PYTHONPATH": UNPACKED,
            "spark.archives": f"{packed(data, tmp_path / 'data.tar.gz')},{archive}",
            "spark.submit.pyFiles": distributed,
        }
    )
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY"), PROXY)
    python = str(link / "bin" / "python")
    told = answers(
        ["modules", "many"], standalone, environment, cwd=tmp_path, PYSPARK_PYTHON=python, **proxies
    )
    check_modules(told["modules"])
    found = told["many"]
    each = {"mine": "yes", "proxy": PROXY, "python": python, "file": "cat dog", "module": 42}
    assert [{"ranks": [0, 1], **each}] * 2 == [{**rank, "ranks": [0, 1]} for rank in found["found"]]
    assert found["again"]
    assert "2 slots (2 executors x 2 cores, 2 cores per task)" in found["refused"]
    for failed in ("memory", "abort"):
        said = "(RLIMIT_AS), which may be the cause; on Spark, spark.executor.pyspark.memory sets"
        assert said in found[failed]
    assert found["ended"].startswith("the Spark session was stopped, or its driver has exited")


def test_an_environment_that_spark_unpacks(
    spark_site: spark_rig.Site, standalone: spark_rig.Standalone, tmp_path: Path
) -> None:
    """And modules that came with the session, by options of ``spark-submit``; each task has a GPU."""
    distributed, archive = write_all_modules(tmp_path)
    packed(spark_site.python.parents[1], tmp_path / "environment.tar.gz")
    environment = spark_site.driver(
        **spark_rig.GPU_OPTIONS,
        **{
            "spark.task.resource.gpu.amount": "1",
            "spark.cores.max": "2",  # one executor
            "spark.executorEnv.PYTHONPATH": UNPACKED,
        },
    )
    archives = f"environment.tar.gz#environment,{archive}"
    options = f"--archives {archives} --py-files {distributed} "
    environment["PYSPARK_SUBMIT_ARGS"] = options + environment["PYSPARK_SUBMIT_ARGS"]
    relative = "./environment/bin/python"
    told = answers(
        ["packed", "gpus", "modules"],
        standalone,
        environment,
        cwd=tmp_path,
        n_executors=1,
        PYSPARK_PYTHON=relative,
    )
    found = told["packed"]
    assert found["ranks"] == [0, 1]
    assert found["prefix"].endswith("/environment") and "-work/app-" in found["prefix"]
    assert told["gpus"] == {"found": True, "gpus": 2, "none": True}
    check_modules(told["modules"])


UNPACKED = "./modules"
"""Where executors unpack the archive of :func:`write_all_modules`."""


def write_all_modules(folder: Path) -> tuple[str, str]:
    """Write modules; return those to distribute, and an archive with one, by relative paths, as people write
    them.
    """
    distributed = ["by_file.py", "by_archive.zip"]
    write_modules(folder, *distributed, "added.py", "added_archive.zip", "only_here.zip")
    (folder / "files").mkdir()
    write_modules(folder / "files", "unpacked.py")
    packed(folder / "files", folder / "modules.tar.gz")
    return ",".join(distributed), "modules.tar.gz#modules"


def check_modules(found: dict[str, Any]) -> None:
    """Check what ranks imported; the check for missing modules knows those that came."""
    assert found["found"] == [42] * 5
    assert "have no module only_here (Python" in found["refused"]


def test_a_python_that_never_starts(
    spark_site: spark_rig.Site, standalone: spark_rig.Standalone, tmp_path: Path
) -> None:
    """Its tasks hold slots and say nothing, which must not look like a full cluster."""
    python = tmp_path / "python"
    # Executors run in folders named by their numbers. cat waits until its executor ends.
    hang = f'case "$PWD" in */1) exec cat ;; esac\nexec {spark_site.python} "$@"\n'
    python.write_text(f"#!/bin/sh\n{hang}")
    python.chmod(0o755)
    environment = spark_site.driver()
    found = answers(["hangs"], standalone, environment, PYSPARK_PYTHON=str(python))["hangs"]
    holds = r"2 executors; job 0 \(collect at .*\) holds 3 slots"
    assert found["queued"][0][0] == 1 and re.fullmatch(holds, found["queued"][0][1])
    assert found["queued"][-1] == [4, ""]
    limit_s = spark_settings.HANG_S
    assert found["late_s"] < limit_s + 15, "the check is a second late, and a busy machine is later"
    said = (
        f"did not reach the cell within {limit_s:g} s (start_timeout): {python} has not started in "
        "2 of 4 Spark tasks; see the stderr of executor 1 on 127.0.0.1"
    )
    assert said in found["report"]
    assert found["few"] == [0, 1], "the other executor is well"
    held = rf"2 slots free; 2 executors; job 1 \(hydrogen_magic gang {found['gang']}, 4 ranks\)"
    assert re.search(f"{held} holds 2 slots", found["many"])


def write_modules(folder: Path, *files: str) -> None:
    """Write modules and archives of one, which have the name of their file."""
    for file in map(Path, files):
        if file.suffix == ".py":
            (folder / file).write_text("ANSWER = 42\n")
        else:
            with zipfile.ZipFile(folder / file, "w") as archive:
                archive.writestr(
                    f"{file.stem}/__init__.py", f"from {file.stem}.deep import ANSWER\n"
                )
                archive.writestr(f"{file.stem}/deep.py", "ANSWER = 42\n")
