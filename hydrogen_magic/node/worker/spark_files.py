"""``SparkFiles`` on a rank: the files and unpacked archives that Spark has sent to its executor.

pyspark only tells its own Python workers where they are (``worker_util.setup_spark_files``).
"""

from __future__ import annotations

import os
from types import ModuleType

from hydrogen_magic.node.worker.import_hooks import hooks

VARIABLE = "HYDROGEN_MAGIC_SPARK_FILES"
"""The directory; :mod:`hydrogen_magic.node.spark.barrier_task` finds it."""


def install_if_asked() -> None:
    """Give pyspark the directory when it is imported, if the environment has one."""
    if VARIABLE in os.environ:
        hooks.add("pyspark.core.files", _set_directory)


def _set_directory(module: ModuleType) -> None:
    module.SparkFiles._root_directory = os.environ[VARIABLE]
    module.SparkFiles._is_running_on_worker = True
