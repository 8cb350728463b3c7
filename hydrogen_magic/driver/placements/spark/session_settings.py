"""Start-up settings of a Spark session that determine the placement of a gang."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hydrogen_magic.driver.placements.spark.spark_session import Session

_LOCAL = re.compile(r"local(?:\[(\d+|\*)(?:,.*)?\])?")
_LOCAL_CLUSTER = re.compile(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]")

_read: dict[str, SessionSettings] = {}
"""By application. To list all settings of a classic session is some hundred calls of Py4J."""


@dataclass(frozen=True)
class SessionSettings:
    """Settings that cannot change during the session."""

    master: str
    task_cpus: int
    """``spark.task.cpus``: cores of one task."""
    task_gpus: float
    """``spark.task.resource.gpu.amount``: below 1 tasks share a GPU; 0 when it is not set."""
    executor_gpus: int
    """``spark.executor.resource.gpu.amount``; 0 when it is not set."""
    has_dynamic_allocation: bool
    n_executors: int | None
    """Number of executors requested, None if not set."""
    max_cores: int | None = None
    """``spark.cores.max``: of all executors together."""
    executor_cores: int | None = None
    """``spark.executor.cores``."""

    @classmethod
    def read(cls, session: Session) -> SessionSettings:
        """Return the settings of a session."""
        if session.application not in _read:
            _read[session.application] = cls._of(session.spark.conf.getAll)
        return _read[session.application]

    @classmethod
    def _of(cls, found: Mapping[str, str]) -> SessionSettings:
        master = found.get("spark.master", "")
        cluster = _LOCAL_CLUSTER.fullmatch(master)
        asked = cluster[1] if cluster else found.get("spark.executor.instances")
        each = cluster[2] if cluster else found.get("spark.executor.cores")
        most = found.get("spark.cores.max")
        return cls(
            master=master,
            task_cpus=int(found.get("spark.task.cpus", 1)),
            task_gpus=float(found.get("spark.task.resource.gpu.amount", 0)),
            executor_gpus=int(found.get("spark.executor.resource.gpu.amount", 0)),
            has_dynamic_allocation=found.get("spark.dynamicAllocation.enabled") == "true",
            n_executors=int(asked) if asked else None,
            max_cores=int(most) if most else None,
            executor_cores=int(each) if each else None,
        )

    @property
    def is_local(self) -> bool:
        """True for ``local``, ``local[4]`` and so on: tasks run in the driver itself."""
        return _LOCAL.fullmatch(self.master) is not None

    @property
    def most_cores(self) -> int | None:
        """Total number of cores requested for all executors, None if not set."""
        if self.n_executors is None or self.executor_cores is None:
            return self.max_cores
        asked = self.n_executors * self.executor_cores
        return asked if self.max_cores is None else min(asked, self.max_cores)

    @property
    def expected_executors(self) -> int | None:
        """Number of executors that the application will have if the cluster has room; None if unknown."""
        if self.is_local:
            return 1
        if self.n_executors is None and self.max_cores is not None and self.executor_cores:
            return self.max_cores // self.executor_cores
        return self.n_executors

    def remedies(self, n_tasks: int, *others: str) -> str:
        """Return ways out for a gang that has too few slots: ``--wait`` if it may help, and ``others``."""
        cores = self.most_cores
        may_help = not self.is_local and (cores is None or n_tasks <= cores // self.task_cpus)
        wait = ["wait for more executors with `--wait 10m`"] if may_help else []
        *most, last = [*wait, *others]
        return ", or ".join([", ".join(most), last] if most else [last])

    @property
    def slots(self) -> int | None:
        """The number of slots in the master's name, None if it has none."""
        if local := _LOCAL.fullmatch(self.master):
            cores = local[1] or "1"
            return int(cores) // self.task_cpus if cores != "*" else None
        if cluster := _LOCAL_CLUSTER.fullmatch(self.master):
            return int(cluster[1]) * (int(cluster[2]) // self.task_cpus)
        return None
