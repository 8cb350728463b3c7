"""Kernels of notebooks that have a Spark session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import leaks, spark_rig
from tests.jupyter import Kernel

CLASSIC = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master({!r}).getOrCreate()
"""
CONNECT = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.remote({!r}).getOrCreate()
"""


@contextmanager
def notebook(site: spark_rig.Site, folder: Path, cell: str, **options: str) -> Iterator[Kernel]:
    """Give a kernel whose notebook has made its session ``spark``; all that it started ends with it."""
    environment = site.driver(**options)
    kernel = Kernel(folder / "home", folder, environment)
    try:
        kernel.load()
        made = kernel.run(cell)
        assert not made.error, made.error
        yield kernel
    finally:
        kernel.shut_down()
        spark_rig.kill_all(leaks.LENT, environment[leaks.LENT])
