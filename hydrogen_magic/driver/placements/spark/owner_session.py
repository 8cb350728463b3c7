"""The session of a process that owns a gang: a copy of the notebook's session on its Spark Connect server.

It is a session of its own because ``spark.stop()`` in the notebook releases the notebook's, and with it every
job.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from hydrogen_magic.driver.placements.spark import private_calls, spark_session
from hydrogen_magic.driver.placements.spark.job_errors import explained
from hydrogen_magic.driver.placements.spark.spark_session import Session
from hydrogen_magic.errors import PlacementError

_JOBS_S = 5.0
"""How long the gang's tasks may take to return after their ranks: a released session would cancel them."""
_RELEASE_S = 3.0
"""How long the server may take to release the session; it does so by itself after an hour."""
_CLONES = (4, 1)
"""The first version whose sessions can be cloned."""
_CONNECT = "use a session of Spark Connect, SparkSession.builder.remote('sc://HOST').getOrCreate()"


def setup(found: Session) -> Mapping[str, object]:
    """Return the values for :func:`owned`, as JSON. Raises PlacementError if gangs end with the kernel."""
    if not found.is_connect:
        raise _refusal(
            f"a classic session ends with its kernel: {_CONNECT}, or write the cell as a script with "
            "--save train.py and submit that"
        )
    if "SPARK_LOCAL_REMOTE" in os.environ and found.server_host() == "localhost":
        raise _refusal(
            "the Spark Connect server of this session runs inside the kernel and ends with it: start one "
            f"with start-connect-server.sh, and {_CONNECT}"
        )
    connection = private_calls.connection(found)
    if connection is None:
        raise _refusal(
            "the settings of its connection cannot be passed to another process: create the session with a "
            "URL, SparkSession.builder.remote('sc://HOST').getOrCreate()"
        )
    return {**connection, "can_clone": found.is_at_least(_CLONES)}


def _refusal(why: str) -> PlacementError:
    return PlacementError(f"--outlive is not possible in this Spark session: {why}")


@contextmanager
def owned(values: Mapping[str, object]) -> Iterator[None]:
    """Make a copy of the session that ``values`` describe this process's own, and release it at the end.

    Raises PlacementError if the server refuses.
    """
    try:
        spark = _copied(values)
    except Exception as error:  # gRPC's and pyspark's have no common base
        raise PlacementError(f"the Spark session cannot be copied: {explained(error)}") from error
    try:
        spark_session.use(spark)
        yield
    finally:
        spark_session.wait_for_jobs(_JOBS_S)
        _release(spark.client)


def _copied(values: Mapping[str, Any]) -> Any:
    notebooks = _connected(values)
    try:
        if values["can_clone"]:
            return notebooks.cloneSession()
        return _with_same_settings(notebooks, values)
    finally:
        notebooks.client.close()  # without a release: the notebook still uses it


def _with_same_settings(notebooks: Any, values: Mapping[str, Any]) -> Any:
    """Return a new session; files and archives that the notebook has added are missing."""
    params = {name: value for name, value in values["params"].items() if name != "session_id"}
    spark = _connected({**values, "params": params})
    initial = spark.conf.getAll
    for name, value in notebooks.conf.getAll.items():
        if initial.get(name) != value:
            spark.conf.set(name, value)
    return spark


def _connected(values: Mapping[str, Any]) -> Any:
    from pyspark.sql.connect.client import DefaultChannelBuilder
    from pyspark.sql.connect.session import SparkSession

    builder = DefaultChannelBuilder(f"sc://{values['endpoint']}")
    for name, value in values["params"].items():
        builder.set(name, value)
    for name, value in values["options"].items():
        builder.setChannelOption(name, value)
    return SparkSession(builder)


def _release(client: Any) -> None:
    """Release the session, if the server answers in time. (``stop()`` of a clone fails in pyspark 4.1.)"""

    def ask() -> None:
        with suppress(Exception):  # the server has ended
            client.release_session()

    client.set_retry_policies([])  # its own last ten minutes
    asking = threading.Thread(target=ask, name="spark-release", daemon=True)
    asking.start()
    asking.join(_RELEASE_S)
    with suppress(Exception):
        client.close()
