"""The request by which an agent starts its ranks, and where they find each other: for all placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hydrogen_magic.core import messages as msg
from hydrogen_magic.core.job import Plan, Slot
from hydrogen_magic.core.processes import COOKIE
from hydrogen_magic.driver.placements import Attempt, devices
from hydrogen_magic.driver.rendezvous import RendezvousInfo


@dataclass(frozen=True)
class HostLaunch:
    """What differs between the agents of one attempt, or between placements."""

    slots: Sequence[Slot]
    """The ranks of this agent."""
    env: Mapping[str, str]
    preload: Sequence[str]
    fingerprint: str
    user_env: Mapping[str, str]
    """The user's variables for every rank; they win over all others."""
    rank_env: Mapping[str, str] = field(default_factory=dict)
    """Variables for every rank that its rendezvous may replace."""
    tasks: Mapping[int, int] = field(default_factory=dict)
    """Rank -> number of the task that holds its place."""
    sys_path: Sequence[str] = ()
    record_dir: str = ""
    checkpoint_dir: str | None = None
    worker_key: str = ""
    """Under which ranks of ``%%infer`` are kept; those of a session have its key."""


class SessionAddress:
    """Where the ranks of a session find each other: the same store from cell to cell, until groups break."""

    def __init__(self) -> None:
        self._epoch = -1
        self._address = ("", 0)

    def of(self, attempt: Attempt, held: tuple[str, int]) -> tuple[str, int]:
        """Return the address for ``attempt``. ``held``: what rank 0's agent has reserved for a new one."""
        cell = attempt.job.session_cell
        if cell is None:
            return held
        if cell.epoch != self._epoch:
            self._epoch, self._address = cell.epoch, held
        return self._address


def rendezvous_info(attempt: Attempt, plan: Plan, address: tuple[str, int]) -> RendezvousInfo:
    """Return how the plan's ranks find each other at ``address``."""
    job, cell = attempt.job, attempt.job.session_cell
    # A number that no earlier attempt has used at the same address: ranks may leave their process group in
    # one cell of a session and join again in another one.
    number = attempt.number if cell is None else cell.number
    return job.rendezvous.prepare(plan, *address, spec=job.spec, gang=attempt.gang, attempt=number)


def build(
    attempt: Attempt, plan: Plan, rendezvous: RendezvousInfo, host: HostLaunch
) -> msg.LaunchRequest:
    """Return the request for one agent."""
    job = attempt.job
    return msg.LaunchRequest(
        gang=attempt.gang,
        attempt=attempt.number,
        ranks=tuple(
            _rank_launch(plan, slot, rendezvous, host)
            for slot in host.slots
            if slot.rank not in job.idle_ranks
        ),
        service=rendezvous.service if any(slot.rank == 0 for slot in host.slots) else None,
        env={**host.env, COOKIE: attempt.gang},
        cwd=job.surroundings.directory,
        sys_path=tuple(host.sys_path),
        preload=tuple(host.preload),
        fingerprint=host.fingerprint,
        record_dir=host.record_dir,
        clock_zero_s=job.clock_zero_s,
        is_recording=attempt.is_recording(),
        secrets=job.secrets,
        observers=job.observers,
        timeline=job.rendezvous.timeline,
        options=msg.RankOptions(
            spec=job.spec,
            join_advice=job.rendezvous.join_advice,
            infer_options=dict(job.feed.options) if job.feed is not None else None,
            session=job.session_cell,
            group_recovery=job.rendezvous.group_recovery,
        ),
        checkpoint_dir=host.checkpoint_dir,
        worker_key=host.worker_key or ("" if job.session is None else job.session.key),
    )


def _rank_launch(
    plan: Plan, slot: Slot, rendezvous: RendezvousInfo, host: HostLaunch
) -> msg.RankLaunch:
    env = {
        **devices.environment(plan, slot),
        **host.rank_env,
        **rendezvous.environments[slot.rank],
        **host.user_env,
    }
    device = devices.device_name(plan, slot)
    return msg.RankLaunch(slot.rank, device, slot.gpu, env, host.tasks.get(slot.rank))
