"""The barrier stage of one attempt: its tasks, its thread in the kernel, and its errors."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from hydrogen_magic import plugins
from hydrogen_magic.core.messages import TaskProblem, decode
from hydrogen_magic.driver.placements import AgentLostError, Attempt, Job, local_agents
from hydrogen_magic.driver.placements.spark import forwarded_settings, packaging
from hydrogen_magic.driver.placements.spark.capacity_check import ClusterCapacity
from hydrogen_magic.driver.placements.spark.remote_agents import RemoteAgent, RemoteAgentPool
from hydrogen_magic.driver.placements.spark.session import Session, SparkJobError
from hydrogen_magic.errors import HydrogenError, PlacementError
from hydrogen_magic.node.spark.barrier_task import PROBLEM

__all__ = ["BarrierJob", "as_error", "fingerprint", "problem_of", "submit"]

_SHIPPED = {"cloudpickle", "hydrogen_magic"}
"""Names in the zip that is sent with the task."""
IDLE_S = 60.0
"""How long agents on executors wait for another gang of this notebook."""


class BarrierJob:
    """A running barrier stage, in its own thread."""

    def __init__(self, session: Session, tag: str, description: str) -> None:
        self.is_over = False
        self.error: SparkJobError | None = None
        self.on_end: Callable[[], None] = lambda: None
        self._session = session
        self._tag = tag
        self._description = description
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()

    def start(self, task: Callable[..., Any], n: int, profile: Any) -> None:
        def run() -> None:
            error: SparkJobError | None = None
            try:
                self._session.run_tasks(task, n, profile, self._tag, self._description)
            except SparkJobError as problem:
                error = problem
            except BaseException as problem:  # whatever it is, the gang must get the error
                error = SparkJobError("other", f"{type(problem).__name__}: {problem}")
            try:
                self._loop.call_soon_threadsafe(self._end, error)
            except RuntimeError:
                pass  # the loop was closed meanwhile, with the kernel

        name = f"hydrogen_magic Spark job of gang {self._tag}"
        threading.Thread(target=run, name=name, daemon=True).start()

    def _end(self, error: SparkJobError | None) -> None:
        self.is_over, self.error = True, error
        self._over.set()
        self.on_end()

    async def wait_then_cancel(self, join_timeout_s: float) -> None:
        """Wait for the stage's end, then make Spark end it; at once when this kernel exits.

        Spark would restart a stage whose tasks have lost their agents.
        """
        self.on_end = lambda: None
        try:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._over.wait(), join_timeout_s)
        finally:
            if not self.is_over:
                self._session.cancel(self._tag)


def submit(
    session: Session,
    capacity: ClusterCapacity,
    agent_pool: RemoteAgentPool,
    invited: list[RemoteAgent],
    attempt: Attempt,
) -> BarrierJob:
    """Submit the stage of an attempt's tasks, one for each of the possible agents."""
    boot = _boot(session, agent_pool, invited, attempt)
    tag = f"hydrogen_magic-{attempt.gang}-{attempt.number}"
    ranks = "1 rank" if len(invited) == 1 else f"{len(invited)} ranks"
    job = BarrierJob(session, tag, f"hydrogen_magic gang {attempt.gang}, {ranks}")
    job.start(_task(boot), attempt.job.spec.np, capacity.profile)
    return job


def _boot(
    session: Session, agent_pool: RemoteAgentPool, invited: list[RemoteAgent], attempt: Attempt
) -> dict[str, Any]:
    job = attempt.job
    needs = {"zmq", *(name.partition(".")[0] for name in job.needs)}
    return {
        "gang": attempt.gang, "attempt": attempt.number, "token": agent_pool.token,
        "owner": agent_pool.owner, "python": list(sys.version_info[:2]),
        "needs": sorted(needs - _SHIPPED.union(plugins.shipped())),
        "with": job.spec.rendezvous, "library": packaging.source(job.rendezvous.library),
        "endpoints": agent_pool.endpoints(session),
        "server_key": invited[0].keys.server_key,
        "keys": [(agent.keys.key, agent.keys.secret) for agent in invited],
        "fingerprint": fingerprint(job), "preload": list(job.preload),
        "record_dir": str(job.record_dir), "idle_s": IDLE_S,
    }  # fmt: skip


def _task(boot: dict[str, Any]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function that Spark pickles by value, since executors do not have this package."""
    source, code = packaging.source("hydrogen_magic.node.spark.barrier_task"), packaging.code()

    def hydrogen_magic_task(batches: Iterator[Any]) -> Iterator[Any]:
        namespace: dict[str, Any] = {"__name__": "hydrogen_magic_task"}
        exec(compile(source, "hydrogen_magic/node/spark/barrier_task.py", "exec"), namespace)
        yield from namespace["serve"](batches, boot, code)

    return hydrogen_magic_task


def fingerprint(job: Job) -> str:
    """Return the fingerprint that a forkserver on an executor must have to serve this gang."""
    return local_agents.fingerprint(forwarded_settings.environment(job))


def problem_of(error: SparkJobError | None) -> TaskProblem | None:
    """Return the problem with which a task ended the stage, None if it was not one of ours."""
    if error is None:
        return None
    text = f"{error}\n{getattr(error, 'details', '')}"
    _, found, rest = text.partition(PROBLEM)
    if not found:
        return None
    return decode(json.JSONDecoder().raw_decode(rest)[0], TaskProblem)


def as_error(error: SparkJobError | None, session: Session) -> HydrogenError:
    """Return the user's error for a stage that ended before its ranks did.

    AgentLostError where a process or an executor has ended, so that another attempt may succeed.
    """
    problem = problem_of(error)
    if problem is not None and problem.kind == "agent_ended":
        return AgentLostError(f"{problem.text} (host {problem.host})")
    if problem is not None:
        return PlacementError(f"{problem.text} (host {problem.host}){_advice(problem)}")
    if error is None:
        return HydrogenError(f"the Spark job on {session.where} ended before its ranks did")
    if error.kind == "python":
        return PlacementError(f"{error}{session.says_of_python()}")
    if error.kind in ("executor_lost", "worker_lost"):
        return AgentLostError(str(error))
    return PlacementError(str(error)) if error.kind == "slots" else HydrogenError(str(error))


_ADVICE = {
    "missing": ": install it in the executors' Python, or remove the code that imports it from the cell",
    "python": (
        ": create a new session with PYSPARK_PYTHON set to an interpreter of the same minor version"
    ),
    "unreachable": ": set spark.driver.host to an address of this machine that executors can reach",
}


def _advice(problem: TaskProblem) -> str:
    return _ADVICE.get(problem.kind, "")
