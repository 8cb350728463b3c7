"""Settings of a session that matter to its ranks, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests import leaks, spark_rig, spark_settings

pytestmark = [pytest.mark.spark, pytest.mark.exhaustive, pytest.mark.timeout(300)]

PROXY = "http://127.0.0.1:9"
"""Refuses connections."""
ONE_EXECUTOR = {"spark.cores.max": "2"}
"""Of two cores, for two ranks."""


def answers(
    name: str, url: str, environment: dict[str, str], *, cwd: Path | None = None, **more: str
) -> dict[str, Any]:
    """Return what :mod:`tests.spark_settings` prints."""
    env = {**environment, "PYTHONPATH": os.getcwd(), **more}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.spark_settings", url, name],
            timeout=240, env=env, cwd=cwd, capture_output=True, text=True,
        )  # fmt: skip
    finally:
        spark_rig.kill_all(leaks.LENT, environment[leaks.LENT])
    lines = [line for line in done.stdout.splitlines() if line.startswith(spark_settings.ANSWER)]
    assert lines, done.stderr
    found: dict[str, Any] = json.loads(lines[0].removeprefix(spark_settings.ANSWER))
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
    data = tmp_path / "data"
    data.mkdir()
    (data / "labels.txt").write_text("cat dog")
    (data / "in_archive.py").write_text("ANSWER = 42\n")
    link = tmp_path / "current"
    link.symlink_to(spark_site.python.parents[1])
    environment = spark_site.driver(
        **{
            "spark.python.worker.reuse": "false",
            "spark.task.cpus": "2",
            "spark.executor.pyspark.memory": "8g",
            "spark.executorEnv.MINE": "yes",
            "spark.executorEnv.http_proxy": PROXY,
            "spark.archives": packed(data, tmp_path / "data.tar.gz"),
        }
    )
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY"), PROXY)
    python = str(link / "bin" / "python")
    found = answers("many", standalone.url, environment, PYSPARK_PYTHON=python, **proxies)
    each = {"mine": "yes", "proxy": PROXY, "python": python, "file": "cat dog", "module": 42}
    assert [{"ranks": [0, 1], **each}] * 2 == [{**rank, "ranks": [0, 1]} for rank in found["found"]]
    assert found["again"]
    assert "2 slots (2 executors x 2 cores, 2 cores per task)" in found["refused"]
    for failed in ("memory", "abort"):
        said = "(RLIMIT_AS), which may be the cause; on Spark, spark.executor.pyspark.memory sets"
        assert said in found[failed]


def test_an_environment_that_spark_unpacks(
    spark_site: spark_rig.Site, standalone: spark_rig.Standalone, tmp_path: Path
) -> None:
    environment = spark_site.driver(
        **{
            **ONE_EXECUTOR,
            "spark.archives": packed(spark_site.python.parents[1], tmp_path / "environment.tar.gz"),
        }
    )
    relative = "./environment/bin/python"
    found = answers("packed", standalone.url, environment, PYSPARK_PYTHON=relative)
    assert found["ranks"] == [0, 1]
    assert found["prefix"].endswith("/environment") and "-work/app-" in found["prefix"]


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
    found = answers("hangs", standalone.url, environment, PYSPARK_PYTHON=str(python))
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


@pytest.mark.parametrize("form", ["--py-files", "spark.submit.pyFiles"])
def test_modules_that_came_with_the_session(
    form: str, spark_site: spark_rig.Site, standalone: spark_rig.Standalone, tmp_path: Path
) -> None:
    """By relative paths, as people write them; the check for missing modules knows them."""
    distributed = ["by_file.py", "by_archive.zip"]
    write_modules(tmp_path, *distributed, "added.py", "added_archive.zip", "only_here.zip")
    (tmp_path / "files").mkdir()
    write_modules(tmp_path / "files", "unpacked.py")
    packed(tmp_path / "files", tmp_path / "modules.tar.gz")
    settings = {**ONE_EXECUTOR, "spark.executorEnv.PYTHONPATH": "./modules"}
    if form.startswith("spark."):
        settings[form] = ",".join(distributed)
    environment = spark_site.driver(**settings)
    line = "--archives modules.tar.gz#modules "
    if form.startswith("--"):
        line += f"{form} {','.join(distributed)} "
    environment["PYSPARK_SUBMIT_ARGS"] = line + environment["PYSPARK_SUBMIT_ARGS"]
    found = answers("modules", standalone.url, environment, cwd=tmp_path)
    assert found["found"] == [42] * 5
    assert "have no module only_here (Python" in found["refused"]


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
