"""An archive of Spark's classes, with which the JVMs of tests start in half of the CPU time.

``python -m tests.spark_classes`` writes it, in some ten seconds: a JVM loads what a session and its executors
need, and stores it as it has it in memory (class data sharing, JEP 350). A JVM uses it only if its class path
begins with the same unchanged archives; otherwise, and where there is no archive, it loads classes as usual.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_PREFIX = Path(sys.prefix)
# The environment of tests/tensorflow_environment.py is inside that of the tests, and uses its Spark.
_IS_INSIDE = Path(_PREFIX.parent, "pyvenv.cfg").exists()
ARCHIVE = (_PREFIX.parent if _IS_INSIDE else _PREFIX) / "spark-classes.jsa"
QUICK = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""For JVMs that live for seconds: half of the CPU time again."""
JVM_OPTIONS = f"{QUICK} -XX:SharedArchiveFile={ARCHIVE} -Xlog:disable -Xlog:all=error:stderr"
"""A JVM warns of an archive that it does not use, on the output that Spark's scripts read."""
_TRAINING = """
from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
frame = spark.createDataFrame([(1, [1.0], "a")], ["key", "values", "text"]).cache()
frame.mapInArrow(lambda batches: batches, frame.schema).groupBy("key").count().toPandas()
spark.range(8).mapInPandas(lambda frames: frames, "id long").write.format("noop").mode("append").save()
spark.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(lambda rows: rows).collect()
java = spark.sparkContext._gateway.proc
spark.stop()
java.stdin.close()
java.wait()  # it writes the archive when it ends
"""


def write() -> None:
    """Write the archive of the installed Spark over an older one; CalledProcessError if Spark fails."""
    settings = {
        "spark.driver.extraJavaOptions": f"{QUICK} -XX:ArchiveClassesAtExit={ARCHIVE}",
        "spark.log.level": "ERROR",
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.port": "0",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.ui.enabled": "false",
    }
    options = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    arguments = " ".join(f"'{option}'" for option in ["--master", "local[2]", *options])
    subprocess.run(
        [sys.executable, "-c", _TRAINING],
        env={
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_SUBMIT_ARGS": f"{arguments} pyspark-shell",
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


if __name__ == "__main__":
    write()
