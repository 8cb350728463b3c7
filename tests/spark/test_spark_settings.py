"""Settings of a session that its ranks inherit, in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests import leaks, spark_rig, spark_settings

pytestmark = [pytest.mark.spark, pytest.mark.exhaustive, pytest.mark.timeout(300)]

PROXY = "http://127.0.0.1:9"
"""Refuses connections."""


def answers(name: str, url: str, environment: dict[str, str], **more: str) -> dict[str, Any]:
    """Return what :mod:`tests.spark_settings` prints."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.spark_settings", url, name], timeout=240,
            env={**environment, "PYTHONPATH": os.getcwd(), **more}, capture_output=True, text=True,
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
            "spark.archives": packed(spark_site.python.parents[1], tmp_path / "environment.tar.gz"),
        }
    )
    relative = "./environment/bin/python"
    found = answers("packed", standalone.url, environment, PYSPARK_PYTHON=relative)
    assert found["ranks"] == [0, 1]
    assert found["prefix"].endswith("/environment") and "-work/app-" in found["prefix"]
