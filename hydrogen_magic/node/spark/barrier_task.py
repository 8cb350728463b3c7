"""The code of one barrier task, in its Python worker: what Spark knows of it, for the task on its host.

Only the source of this file is sent with the task, so it uses only the standard library and Spark's
own packages, and what it is given of :mod:`~hydrogen_magic.node.agent.host_task`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any


def serve(batches: Any, instructions: dict[str, Any], code: bytes, host_task: Any) -> Any:
    """Run the task. ``instructions`` and ``code``: for ``hold()`` of the module ``host_task``.

    ``instructions["ends_idle_workers"]``: see ``Session.ends_idle_workers``.
    """
    for _ in batches:
        pass
    from pyspark import BarrierTaskContext, SparkFiles

    context = BarrierTaskContext.get()
    assert context is not None
    address = context.getTaskInfos()[context.partitionId()].address.rpartition(":")[0]
    env = {"HYDROGEN_MAGIC_SPARK_FILES": os.path.abspath(SparkFiles.getRootDirectory())}
    about = {**_about(context, host_task.read), "host": address, "env": env}
    import pyarrow

    schema = pyarrow.schema({"o": pyarrow.binary()})
    output = _output()
    provider = -1 if output is None else output.fileno()
    beats = instructions["ends_idle_workers"]
    holding = host_task.hold(
        instructions, code, about, address, _local_dir(), provider, beats=beats
    )
    for _ in holding:
        if output is not None:
            # An executor looks whether the job was cancelled when it gets a batch, and then closes the
            # connection. Otherwise it kills this process, within four seconds.
            yield pyarrow.RecordBatch.from_pylist([], schema)
            with contextlib.suppress(OSError):
                output.flush()
    yield pyarrow.RecordBatch.from_pylist([{"o": b"done"}], schema)


def _about(context: Any, read: Any) -> dict[str, Any]:
    """Return the fields of ``TaskHello`` that Spark determines."""
    executor_pid = _executor_pid(read)
    return {
        "number": context.partitionId(),
        "kind": "Spark task",
        "parent": "Spark executor",
        "parent_pid": executor_pid,
        "place": f"executor {_executor(executor_pid)}",
        "gpus": [
            a for name, r in context.resources().items() if name == "gpu" for a in r.addresses
        ],
    }


def _executor(pid: int) -> str:
    """Return the executor's name: a standalone worker starts it in a folder named by its number."""
    number = os.path.basename(os.getcwd())
    return number if number.isdigit() else f"with pid {pid}"


def _executor_pid(read: Any) -> int:
    """Return the JVM above this worker: pyspark's daemon may be in between."""
    pid = os.getppid()
    for _ in range(3):
        if b"java" in read(f"/proc/{pid}/comm"):
            return pid
        parent = read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        if len(parent) < 2 or int(parent[1]) <= 1:
            break
        pid = int(parent[1])
    return os.getppid()


def _output() -> Any:
    """Return the file by which this worker sends batches to its executor, None if it is not found."""
    frame: Any = sys._getframe()
    while frame is not None:  # one of them is main() of pyspark's worker
        output = frame.f_locals.get("outfile")
        with contextlib.suppress(AttributeError, OSError, ValueError):
            output.fileno()
            return output
        frame = frame.f_back
    return None


def _local_dir() -> str:
    """Return a directory that Spark removes with the application, in case the agent is killed."""
    for variable in ("SPARK_LOCAL_DIRS", "LOCAL_DIRS"):  # the second one on YARN
        folder = os.environ.get(variable, "").partition(",")[0]
        if os.access(folder, os.W_OK):
            return folder
    return ""
