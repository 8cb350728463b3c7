"""Random results and random endings: nothing that was sent is lost, and nothing is left running."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import hydrogen_magic as hm
from hydrogen_magic.core import events as ev
from hydrogen_magic.core import run_log
from hydrogen_magic.driver import launcher
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.placements import local_agents
from hydrogen_magic.errors import HydrogenError, ResultError
from tests import array_ranks, random_results
from tests.gangs import alive, ended, family_of, until, wait_until, wait_until_gone
from tests.random_results import Point, build, has_unpicklable, is_large, same
from tests.result_checks import run_cell

_PER_GANG = 30


@pytest.fixture(autouse=True)
def forget_gangs() -> Iterator[None]:
    """The kernel keeps the last gangs, with results that are memory files."""
    yield
    launcher._recent.clear()


@pytest.mark.parametrize(
    ("np_", "seed", "n_large"),
    [
        (2, 30, 0),
        pytest.param(1, 0, 0, marks=pytest.mark.exhaustive),
        *(
            pytest.param(1 + n % 2, 30 * n, n_large, marks=pytest.mark.exhaustive)
            for n, n_large in [*((n, 0) for n in range(2, 10)), (10, 2 << 30)]
        ),
    ],
)
def test_results_come_home_or_are_reported(
    notebook_shell: InteractiveShell, np_: int, seed: int, n_large: int
) -> None:
    """``n_large``: the size of another one, of which the notebook holds one copy, and the rank two."""
    names = [f"r{n}" for n in range(_PER_GANG)]
    group = "torch.distributed.init_process_group('gloo')" if np_ > 1 else "pass"
    body = "\n".join(f"{name} = build({seed + n})" for n, name in enumerate(names))
    head = f"%%distributed --np {np_} --quiet --out {','.join(names)},large"
    run_cell(notebook_shell, "import torch\nfrom tests.random_results import build, build_large")
    done = notebook_shell.run_cell(f"{head}\n{group}\n{body}\nlarge = build_large({n_large})")
    error = done.error_in_exec
    assert error is None or isinstance(error, ResultError), error
    for n, name in enumerate(names):
        expected = build(seed + n)
        if has_unpicklable(expected):
            assert name not in notebook_shell.user_ns
            assert re.search(rf"`{name}\b", str(error)), name
        else:
            assert same(notebook_shell.user_ns[name], expected), name
    assert is_large(notebook_shell.user_ns.pop("large"), n_large)
    if error is not None:
        (gang_id,) = [line.split("'")[1] for line in str(error).splitlines() if "load_res" in line]
        kept = hm.load_results(gang_id)
        lost = [name for name in names if name not in notebook_shell.user_ns]
        for name in set(lost) & kept.keys():
            assert random_results.has_lost(kept[name]) and not has_unpicklable(kept[name])
        del kept
        run_log.delete(gang_id)  # with all results: pytest keeps the folder


def test_what_is_shared_makes_a_difference() -> None:
    def rows() -> torch.Tensor:
        return torch.arange(6.0).reshape(2, 3)

    base, point = rows(), Point(1, [])
    views = [base, base[1], Point(base, base.t())]
    again = rows()
    assert same(views, [again, again[1], Point(again, again.t())])
    assert not same(views, [again, again[1], Point(again, rows().t())]), "a storage of its own"
    assert not same([base[1], rows()], [again[1], again]), "one storage"
    assert not same(base[1], again[1].clone()), "another offset"
    assert same([point, point], [Point(1, [])] * 2)
    assert not same([point, point], [Point(1, []), Point(1, [])])
    assert not same([Point(1, []), Point(1, [])], [point, point])


# ── endings ──────────────────────────────────────────────────────────────────────────────────────


def end(gang: Gang, how: str, pid: int) -> None:
    """End a gang, or the process ``pid`` of it if that still runs."""
    if how in ("stop", "kill"):
        gang.stop(kill=how == "kill")
    elif how != "nothing" and not gang.wait(0) and alive([pid]):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "seeds",
    [
        range(4),
        *(pytest.param(range(n, n + 12), marks=pytest.mark.exhaustive) for n in range(4, 100, 12)),
    ],
    ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}",
)
def test_what_was_sent_is_not_lost(seeds: range) -> None:
    were_sent = [sent_before_a_random_end(seed) for seed in seeds]
    assert any(0 < len(sent) < 2 for sent in were_sent), "some end while results are on their way"


def sent_before_a_random_end(seed: int) -> set[int]:
    """End a gang; check what its ranks had sent, and return their numbers.

    Every other one is ended soon after the first result has arrived, and before the other rank returns.
    """
    choose, is_in_flight = random.Random(seed), seed % 2 == 1
    n_bytes = choose.choice([100, 3 << 20, 60 << 20])
    late_rank, killed_rank = choose.randrange(2), choose.randrange(2)
    late_s = choose.choice([0.5, 1.0] if is_in_flight else [0.0, 0.3])
    gang = hm.launch(array_ranks.two_results, n_bytes, late_rank, late_s, np=2)
    until(gang, lambda: all(rank.pid is not None for rank in gang.ranks))
    (agent,) = [one for one in local_agents.pool().all if one.attempt == (gang.id, 0)]
    family = family_of(gang)
    if is_in_flight:
        wait_until(lambda: sent_by(gang))
    time.sleep(choose.uniform(0, 0.2 if is_in_flight else 0.6))
    how = choose.choice(["stop", "kill", "rank", "agent", *([] if is_in_flight else ["nothing"])])
    pid = agent.process.pid if how == "agent" else gang.ranks[killed_rank].pid
    assert pid is not None
    end(gang, how, pid)
    ended(gang)
    wait_until_gone(family)  # a process that was killed with its agent may still be exiting
    sent = sent_by(gang)
    if gang.state == "SUCCEEDED":
        assert sent == {0, 1}
        assert all(
            np.array_equal(gang.results[rank], array_ranks.result_of(rank, n_bytes))
            for rank in sent
        )
    else:
        assert how != "nothing"
        for rank in sent:
            found = hm.load_results(gang.id, rank)
            assert found.keys() == {"_"} and np.array_equal(
                found["_"], array_ranks.result_of(rank, n_bytes)
            )
        with pytest.raises(HydrogenError):
            gang.raise_for_state()
    launcher._recent.clear()  # else the kernel holds the results, which are memory files
    return sent


def sent_by(gang: Gang) -> set[int]:
    """Return the ranks whose results have arrived."""
    return {event.rank for event in gang.events() if isinstance(event, ev.RankResult)}
