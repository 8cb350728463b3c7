"""The barrier stage of one attempt: its tasks, its thread in the kernel, and its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hydrogen_magic.driver.placements import AgentLostError
from hydrogen_magic.driver.placements.remote import packaging
from hydrogen_magic.driver.placements.remote.host_tasks import problem_of
from hydrogen_magic.driver.placements.remote.provider import HostsRevokedError, task_error
from hydrogen_magic.driver.placements.spark.job_errors import SparkJobError
from hydrogen_magic.driver.placements.spark.spark_session import Session
from hydrogen_magic.errors import HydrogenError, PlacementError
from hydrogen_magic.transport.daemon_thread import in_daemon_thread


def submit(
    session: Session,
    tag: str,
    description: str,
    instructions: Mapping[str, Any],
    n_tasks: int,
    profile: Any,
    hosts: Sequence[str] = (),
) -> asyncio.Future[SparkJobError | None]:
    """Run the stage in its own thread; return a future of its end, with its error.

    Its tasks follow the same ``instructions`` (:class:`~.host_tasks.HostTasks`). See
    :meth:`Session.run_tasks` for the others.
    """

    forget = session.expect(tag)  # a stop may come before the package is packed and sent

    def run() -> SparkJobError | None:
        try:
            task = _task(instructions, *_code())
            session.run_tasks(task, n_tasks, profile, tag, description, hosts)
        except SparkJobError as error:
            return error
        except BaseException as error:  # whatever it is, the gang must get the error
            return SparkJobError("other", f"{type(error).__name__}: {error}")
        finally:
            forget()
        return None

    return in_daemon_thread(run, f"hydrogen_magic Spark job of gang {tag}")


def _task(
    instructions: Mapping[str, Any], package: bytes, *modules: tuple[str, bytes]
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function that Spark pickles by value, since executors do not have this package.

    For the others, see :func:`_code`.
    """

    def hydrogen_magic_task(batches: Iterator[Any]) -> Iterator[Any]:
        import marshal
        import types

        host_task, barrier_task = (types.ModuleType(name) for name, _ in modules)
        for module, (_, bytecode) in zip((host_task, barrier_task), modules, strict=True):
            exec(marshal.loads(bytecode), vars(module))
        yield from barrier_task.serve(batches, instructions, package, host_task)

    return hydrogen_magic_task


def _code() -> tuple[Any, ...]:
    """Return the package, and name and bytecode of each module that a task runs."""
    names = ("hydrogen_magic.node.agent.host_task", "hydrogen_magic.node.spark.barrier_task")
    return packaging.code(), *((name, packaging.bytecode(name)) for name in names)


# ── errors ───────────────────────────────────────────────────────────────────────────────────────


def is_unreachable(error: SparkJobError | None) -> bool:
    """Whether the stage ended because executors cannot connect to this machine."""
    problem = None if error is None else problem_of(_all_of(error))
    return problem is not None and problem.kind == "unreachable"


def as_error(error: SparkJobError, session: Session) -> HydrogenError:
    """Return the user's error for a stage that failed before its ranks ended.

    AgentLostError where a process or an executor has ended, so that another attempt may succeed.
    """
    problem = problem_of(_all_of(error))
    if problem is not None:
        return task_error(problem, _ADVICE)
    if error.kind == "python":
        return PlacementError(f"{error}{session.says_of_python()}")
    if error.kind == "forbidden":
        return PlacementError(f"{error}, which gangs need: {_ALLOWING}")
    if error.kind in ("executor_lost", "worker_lost"):
        return AgentLostError(str(error))
    if error.kind in ("cancelled", "stopped"):
        return HostsRevokedError(str(error))
    return PlacementError(str(error)) if error.kind == "slots" else HydrogenError(str(error))


def _all_of(error: SparkJobError) -> str:
    return f"{error}\n{error.details}"


_ALLOWING = (
    "use a cluster that does not restrict Python, on Databricks one with dedicated access mode"
)
_ADVICE = {
    "missing": "install it in the executors' Python, or remove the code that imports it from the cell",
    "python": "create a new session with PYSPARK_PYTHON set to an interpreter of the same minor version",
    "unreachable": "set spark.driver.host to an address at which executors reach this machine; behind a "
    'firewall set `%config Distributed.ports = "40000-40100"` and open these ports; in a container also '
    "set spark.driver.bindAddress=0.0.0.0 and publish them",
}
