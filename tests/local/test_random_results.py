"""Random results and random endings: nothing that was sent is lost, and nothing is left running."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

import hydrogen_magic as hm
from hydrogen_magic.core import events as ev
from hydrogen_magic.driver import launcher
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.placements import local_agents
from hydrogen_magic.errors import HydrogenError, ResultError
from tests import random_results
from tests.gangs import alive, ended, family_of, until, wait_until_gone
from tests.random_results import build, has_unpicklable, same

_PER_GANG = 30


@pytest.fixture(autouse=True)
def forget_gangs() -> Iterator[None]:
    """The kernel keeps the last gangs, with results that are memory files."""
    yield
    launcher._recent.clear()


@pytest.mark.parametrize(
    ("np_", "seed"),
    [
        (1, 0),
        (2, 30),
        *(pytest.param(1 + n % 2, 30 * n, marks=pytest.mark.exhaustive) for n in range(2, 10)),
    ],
)
def test_results_come_home_or_are_reported(
    notebook_shell: InteractiveShell, np_: int, seed: int
) -> None:
    names = [f"r{n}" for n in range(_PER_GANG)]
    group = "torch.distributed.init_process_group('gloo')" if np_ > 1 else "pass"
    body = "\n".join(f"{name} = build({seed + n})" for n, name in enumerate(names))
    head = f"%%distributed --np {np_} --quiet --out {','.join(names)}"
    notebook_shell.run_cell("import torch\nfrom tests.random_results import build")
    done = notebook_shell.run_cell(f"{head}\n{group}\n{body}")
    error = done.error_in_exec
    assert error is None or isinstance(error, ResultError), error
    for n, name in enumerate(names):
        expected = build(seed + n)
        if has_unpicklable(expected):
            assert name not in notebook_shell.user_ns and f"`{name}" in str(error)
        else:
            assert same(notebook_shell.user_ns[name], expected), name
    if error is not None:
        (gang_id,) = [line.split("'")[1] for line in str(error).splitlines() if "load_res" in line]
        kept = hm.load_results(gang_id)
        lost = [name for name in names if name not in notebook_shell.user_ns]
        for name in set(lost) & kept.keys():
            assert random_results.has_lost(kept[name]) and not has_unpicklable(kept[name])


@pytest.mark.exhaustive
def test_two_gigabytes_come_home() -> None:
    found = ended(hm.launch(np.ones, 2 << 30, np.uint8, np=1)).result
    assert found.nbytes == 2 << 30 and found[:: 1 << 20].all()


# ── endings ──────────────────────────────────────────────────────────────────────────────────────


def two_results(n_bytes: int, wait_s: float) -> Any:
    """Rank 1 goes on for a while when rank 0 has returned."""
    if hm.rank() == 1:
        time.sleep(wait_s)
    return np.full(n_bytes, hm.rank() + 1, np.uint8)


def end(gang: Gang, how: str) -> None:
    pid = gang.ranks[hm.world_size() % 2].pid or 0
    if how == "agent":
        (agent,) = [one for one in local_agents.pool().all if one.attempt == (gang.id, 0)] or [None]
        pid = agent.process.pid if agent is not None else 0
    if how in ("stop", "kill"):
        gang.stop(kill=how == "kill")
    elif how != "nothing" and pid and alive([pid]):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "seed",
    [*range(4), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(4, 100))],
)
def test_what_was_sent_is_not_lost(seed: int) -> None:
    choose = random.Random(seed)
    n_bytes = choose.choice([100, 3 << 20, 60 << 20])
    gang = hm.launch(two_results, n_bytes, choose.choice([0.0, 0.3]), np=2)
    until(gang, lambda: all(rank.phase != "waiting" for rank in gang.ranks))
    family = family_of(gang)
    time.sleep(choose.uniform(0, 0.6))
    end(gang, choose.choice(["stop", "kill", "rank", "agent", "nothing"]))
    ended(gang)
    wait_until_gone(family)  # a process that was killed with its agent may still be exiting
    sent = {e.rank for e in gang.events() if isinstance(e, ev.RankResult)}
    if gang.state == "SUCCEEDED":
        assert [value.sum() for value in gang.results] == [n_bytes, 2 * n_bytes]
    elif 0 in sent:
        assert hm.load_results(gang.id)["_"].sum() == n_bytes
    else:
        with pytest.raises(HydrogenError):
            gang.raise_for_state()
