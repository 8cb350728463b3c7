"""A notebook that reaches Spark Connect's server, whose executors do not reach it; see
:func:`tests.spark_machines.visited`.

``python -m tests.spark_elsewhere URL`` prints one line of JSON, with what it saw, and stays in a gang.
"""

from __future__ import annotations

import sys

from tests import plain_ranks, spark_machines, spark_ranks
from tests import spark_rig as rig


def main(url: str) -> None:
    """Run gangs through Spark Connect; say how that went, and wait for the end in the last one."""
    from pyspark.sql.connect.session import SparkSession

    import hydrogen_magic as hm

    spark = SparkSession.builder.remote(url).create()
    spark.range(1).collect()  # a server's first query takes seconds
    gang = hm.launch(spark_ranks.where, np=4, on="spark")
    everyone = gang.result
    notices = [notice.text for notice in gang.snapshot().notices]
    again = hm.launch(spark_ranks.count, 100_000, np=4, on="spark")
    rig.until(
        lambda: all("step 5" in text for text in again.logs.values()) and again.ranks,
        spark_machines.AWAY_S,
    )
    told = {
        "refused": refusal(),
        "hosts": sorted({rank["host"] for rank in everyone}),
        "notices": notices,
    }
    rig.tell(told)
    again.wait()


def refusal() -> str:
    """Return the message about a gang that is too large."""
    import hydrogen_magic as hm

    try:
        hm.run(plain_ranks.parent, np=8, on="spark")
    except hm.errors.PlacementError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(sys.argv[1])
