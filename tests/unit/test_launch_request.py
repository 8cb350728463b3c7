"""What agents are asked to launch: one builder for every placement."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hydrogen_magic.core.job import JobSpec, Plan, Slot
from hydrogen_magic.core.messages import AgentCommand, LaunchRequest, ServiceSpec, decode, encode
from hydrogen_magic.core.processes import COOKIE
from hydrogen_magic.driver.placements import Attempt, Job, launch_request
from hydrogen_magic.driver.placements.surroundings import forkserver_fingerprint
from hydrogen_magic.driver.rendezvous import RendezvousInfo
from hydrogen_magic.driver.rendezvous.torch import TorchRendezvous

PLAN = Plan(tuple(Slot(rank, 0, rank, 2, 1, 2, f"host{rank}", "0") for rank in range(2)))
MEETING = RendezvousInfo(
    ({"MINE": "0"}, {"MINE": "1"}), ServiceSpec("module:serve", {"hosts": ["h"]})
)


def request_for(slot: Slot, spec: JobSpec) -> LaunchRequest:
    unused: Any = None
    job = Job(spec, PLAN, unused, ("torch",), (), TorchRendezvous(), Path("/runs/cafe"), 12.5)
    host = launch_request.HostLaunch(
        slots=[slot],
        env={"A": "of the notebook"},
        preload=job.preload,
        fingerprint="f",
        user_env=dict(spec.env),
        rank_env={"MINE": "default", "OMP_NUM_THREADS": "1"},
        tasks={0: 7},
    )
    attempt = Attempt("cafe", 1, job, lambda: False)
    built = launch_request.build(attempt, PLAN, MEETING, host)
    sent = decode(json.loads(json.dumps(encode(built))), AgentCommand)
    assert sent == built
    return built


def test_each_agent_launches_its_own_ranks_and_the_first_serves_the_rendezvous() -> None:
    first, second = (request_for(slot, JobSpec(np=2)) for slot in PLAN.slots)
    assert [one.service for one in (first, second)] == [MEETING.service, None]
    assert [(one.rank, one.gpu, one.task) for one in (*first.ranks, *second.ranks)] == [
        (0, "0", 7), (1, "0", None),
    ]  # fmt: skip
    assert first.env == second.env == {"A": "of the notebook", COOKIE: "cafe"}


def test_the_users_variables_win_then_those_of_the_rendezvous() -> None:
    (rank,) = request_for(PLAN.slots[1], JobSpec(np=2, env=(("OMP_NUM_THREADS", "9"),))).ranks
    assert (rank.env["MINE"], rank.env["OMP_NUM_THREADS"]) == ("1", "9")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, (0,)),
        ({"on_ranks": (1,)}, (1,)),
        ({"on_ranks": (0, 1), "display": (1,)}, (1,)),
        ({"on_ranks": (1,), "display": ()}, ()),
        ({"session": None, "on_ranks": (1,), "pdb": True}, (0,)),
    ],
)
def test_a_rank_that_runs_the_cell_is_displayed(options: Any, shown: tuple[int, ...]) -> None:
    request = request_for(PLAN.slots[1], JobSpec(np=2, **{"session": "lab", **options}))
    assert request.options.spec.displaying == shown


def test_infinite_times_can_be_sent() -> None:
    spec = JobSpec(np=2, grace_s=math.inf, timeout_s=math.inf)
    assert request_for(PLAN.slots[0], spec).options.spec.grace_s > 1e7


@pytest.mark.parametrize(("name", "is_other"), [("KERAS_BACKEND", True), ("HOME", False)])
def test_a_forkserver_is_for_one_setting_that_is_read_on_import(name: str, is_other: bool) -> None:
    """With another one, the modules that it has imported would be of the wrong backend."""
    found = {forkserver_fingerprint({name: value}, ()) for value in ("torch", "jax")}
    assert (len(found) == 2) is is_other
