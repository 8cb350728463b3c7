"""The Spark placement: the capacity of the cluster, and the agents that will run a gang there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager

from hydrogen_magic.core import processes
from hydrogen_magic.core.job import JobSpec, Plan
from hydrogen_magic.driver.placements import Placement
from hydrogen_magic.driver.placements.remote import rank_assignment
from hydrogen_magic.driver.placements.remote.agent_group import RemoteAgentGroup
from hydrogen_magic.driver.placements.spark import (
    capacity_check,
    host_choice,
    owner_session,
    spark_session,
)
from hydrogen_magic.driver.placements.spark.hosts import SparkHosts
from hydrogen_magic.errors import PlacementError


class SparkPlacement(Placement):
    """The tasks of a barrier stage on the notebook's Spark session."""

    on_this_machine = False
    ends_with_kernel = ""

    def plan(self, spec: JobSpec) -> Plan:
        """Return a plan whose hosts are preferences at most: Spark decides which host a rank gets."""
        if fault := processes.pidfd_fault():
            raise PlacementError(
                f"`--on spark` needs Linux 5.3 or newer, here and on the executors; here is {fault}"
            )
        if spec.outlive:
            self.owner_setup()
        found, capacity = _cluster.look(spec)
        gpu = "assigned by Spark" if capacity.gpus else None
        chosen = host_choice.choose(found, capacity, spec)
        plan = rank_assignment.unassigned(spec, found.where, gpu, capacity.notes)
        if chosen is None:
            return plan
        hosts = chosen.hosts or [slot.host for slot in plan.slots]
        return rank_assignment.expected(plan, hosts, chosen.note)

    def n_at_once(self, spec: JobSpec, most: int) -> int:
        """Return how many there are slots for."""
        _, capacity = _cluster.look(spec)
        return max(1, min(most, (capacity.slots or spec.np) // spec.np))

    def open(self, spec: JobSpec) -> RemoteAgentGroup:
        found, capacity = _cluster.look(spec)
        for_jobs = found.of_this_thread()
        return RemoteAgentGroup(lambda: SparkHosts(for_jobs, capacity))

    def owner_setup(self) -> Mapping[str, object]:
        """Return how to connect to the Spark Connect server; sessions of other kinds are refused."""
        return owner_session.setup(spark_session.find())

    def in_owner(self, setup: Mapping[str, object]) -> AbstractContextManager[None]:
        return owner_session.owned(setup)


class _Cluster:
    """The capacity of the notebook's cluster, queried again after a moment.

    One cell needs it for its plan, then for that of its gang, then for its agent group.
    """

    def __init__(self) -> None:
        self._last: tuple[object, capacity_check.ClusterCapacity, float] | None = None
        """The question, its answer and their time: together, since threads ask, too."""

    def look(self, spec: JobSpec) -> tuple[spark_session.Session, capacity_check.ClusterCapacity]:
        """Return the notebook's session and the capacity for ``spec``."""
        found, last = spark_session.find(), self._last
        asked = spec, found.spark
        if last is not None and last[0] == asked and time.monotonic() <= last[2] + _FRESH_S:
            return found, last[1]
        capacity = capacity_check.capacity(found, spec)
        self._last = asked, capacity, time.monotonic()
        return found, capacity


_FRESH_S = 0.5
_cluster = _Cluster()
