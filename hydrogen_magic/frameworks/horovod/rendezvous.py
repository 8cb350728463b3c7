"""Horovod's rendezvous: the environment that ``hvd.init()`` reads, and the server for its Gloo.

Horovod needs no launcher: variables tell a rank its place, and it finds its peers through a key-value
server over HTTP. Its own server has no authentication; ours (:mod:`.node.key_value_server`) requires a
secret in every path. That needs no change in Horovod: it builds URLs as ``http://ADDR:PORT/scope/key`` and
uses the part before the first slash as host and port, so ``ADDR`` may be ``10.0.0.1:4567/secret/attempt``.
Names and meanings of the variables: ``horovod/runner/gloo_run.py`` and
``horovod/common/gloo/gloo_context.cc`` of Horovod 0.28.1.
"""

from __future__ import annotations

import functools
import math
import os
import re
import secrets
import sys
from collections import Counter
from collections.abc import Callable, Mapping

from hydrogen_magic.core.job import JobSpec, Plan, Slot
from hydrogen_magic.core.timeline_files import LibraryTimeline
from hydrogen_magic.driver.rendezvous import (
    Diagnosis,
    Rendezvous,
    RendezvousInfo,
    ServiceSpec,
    VictimErrors,
)
from hydrogen_magic.driver.rendezvous.torchrun import RANK_VARIABLES, place
from hydrogen_magic.errors import PlacementError
from hydrogen_magic.frameworks.horovod import installation
from hydrogen_magic.frameworks.horovod.node import DYNAMIC, TIMELINE, group_recovery

_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
_LATER_S = 3.0
"""Additional time limit of Gloo: it aborts the waiting process, and names at most one missing rank."""
_LEAST_S = 120.0
"""Gloo's limit also applies to every later collective, in which a rank may be paused for a while."""

_MOST_S = 2**31 - 1
"""The maximum of Gloo's limit."""


class HorovodRendezvous(Rendezvous):
    """Horovod by Gloo, for PyTorch."""

    library = "hydrogen_magic.frameworks.horovod.installation"
    variables = RANK_VARIABLES | {
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
        "HOROVOD_CROSS_RANK",
        "HOROVOD_CROSS_SIZE",
        "HOROVOD_HOSTNAME",
        "HOROVOD_CONTROLLER",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR",
        "HOROVOD_GLOO_RENDEZVOUS_PORT",
    }
    forwarded = ("HOROVOD_", "GLOO_", "NCCL_")
    launcher = "horovodrun -np {np} python"
    init_collective = "hvd.init"
    joining = ("hvd.init", "hvd.shutdown")
    collectives = ("reduce", "gather", "broadcast", "barrier", "scatter", "alltoall")
    shipped = ("hydrogen_magic.frameworks.horovod.node",)
    group_recovery = "hydrogen_magic.frameworks.horovod.node.group_recovery"
    join_advice = "call hvd.init() and wrap the optimizer in hvd.DistributedOptimizer"
    timeline = LibraryTimeline(
        name="horovod",
        recorder="hydrogen_magic.frameworks.horovod.node.observe.timeline:install",
        follower="hydrogen_magic.frameworks.horovod.node.timeline_follower:Timelines",
        variable=TIMELINE,
        not_paths=(DYNAMIC,),
    )
    victims = VictimErrors(
        types=("HorovodInternalError",), files=("/horovod/torch/", "/horovod/common/")
    )

    def join_timeout_s(self, spec: JobSpec) -> float:
        given_s = _given_s(spec)
        return spec.start_timeout_s if given_s is None else max(1.0, given_s - _LATER_S)

    def prepare(
        self, plan: Plan, address: str, port: int, *, spec: JobSpec, gang: str, attempt: int
    ) -> RendezvousInfo:
        shared = {
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            # If set by another launcher, it would make Horovod ask a driver for its place.
            "HOROVOD_ELASTIC": "0",
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.retries),
            _TIMEOUT: str(_bound_s(spec)),
        }
        service = None
        if len(plan.slots) > 1 and ":" in address:
            raise PlacementError(
                f"Horovod connects by IPv4 only, but the other hosts know host {plan.slots[0].host} "
                f"by {address}: give hosts IPv4 addresses, or use `--with torch`"
            )
        if len(plan.slots) > 1:  # Gloo uses memory for its rendezvous if no server is given
            # It contains the attempt, so that a rank of an earlier one is never taken for one of
            # this.
            shared["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = f"{address}:{port}/{_token()}/{gang}-{attempt}"
            shared["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(port)
            hosts = sorted({slot.address for slot in plan.slots})
            options = {"token": _token(), "hosts": hosts if len(hosts) > 1 else []}
            service = ServiceSpec(
                "hydrogen_magic.frameworks.horovod.node.key_value_server:serve_keys", options
            )
        n_ranks = Counter(slot.node_rank for slot in plan.slots)
        environments = tuple(
            {**place(slot), **shared, **_own(slot, n_ranks)} for slot in plan.slots
        )
        return RendezvousInfo(environments, service)

    def undo_here(self) -> Callable[[], None]:
        was_initialized = group_recovery.is_joined()

        def undo() -> None:
            if group_recovery.is_joined() and not was_initialized:
                sys.modules["horovod.torch"].shutdown()

        return undo

    def diagnose(self) -> Diagnosis:
        """Horovod need not be installed; where it is, it has to fit this torch."""
        found, fault = installation.horovod(), self.fault()
        if found is None:
            missing = f"not installed; for `--with horovod`: {installation.BUILD}"
            return Diagnosis("Horovod", True, missing)
        if fault is not None:
            return Diagnosis("Horovod", False, fault, installation.BUILD)
        operations = f" with {', '.join(found.operations)}" if found.operations else ""
        return Diagnosis("Horovod", True, f"{found.version}{operations}, built for this torch")


def _given_s(spec: JobSpec) -> int | None:
    """Return the user's own time limit of Gloo, in seconds, or raise PlacementError."""
    given = {**os.environ, **dict(spec.env)}.get(_TIMEOUT)
    if given is None:
        return None
    seconds = int(given) if re.fullmatch("[0-9]{1,10}", given) else 0
    if not 1 <= seconds <= _MOST_S:  # Horovod's library would abort every rank
        raise PlacementError(
            f"{_TIMEOUT} should be a number of whole seconds, such as 600; got {given!r}"
        )
    return seconds


def _bound_s(spec: JobSpec) -> int:
    return _given_s(spec) or math.ceil(max(_LEAST_S, spec.start_timeout_s + _LATER_S))


def _own(slot: Slot, n_ranks: Mapping[int, int]) -> dict[str, str]:
    """Return the variables for a rank's place in Horovod. ``n_ranks``: the number of ranks of each node.

    Its cross-host peers are the ranks with the same ``local_rank`` on other hosts: if hosts have different
    numbers of ranks, not every host has one.
    """
    across = [node for node in sorted(n_ranks) if n_ranks[node] > slot.local_rank]
    environment = {
        "HOROVOD_RANK": slot.rank,
        "HOROVOD_SIZE": slot.world_size,
        "HOROVOD_LOCAL_RANK": slot.local_rank,
        "HOROVOD_LOCAL_SIZE": slot.local_world_size,
        "HOROVOD_CROSS_RANK": across.index(slot.node_rank),
        "HOROVOD_CROSS_SIZE": len(across),
        # Ranks with equal values belong to one host; two containers may have the same hostname.
        "HOROVOD_HOSTNAME": f"{slot.host}-{slot.node_rank}",
    }
    if slot.interface:
        environment["HOROVOD_GLOO_IFACE"] = slot.interface
    return {name: str(value) for name, value in environment.items()}


@functools.cache
def _token() -> str:
    """Return this kernel's secret. One for all its gangs: a server may start before its gang."""
    return secrets.token_hex(16)
