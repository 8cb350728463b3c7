"""Random results and random endings: nothing that was sent is lost, and nothing is left running."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import hydrogen_magic as hm
from hydrogen_magic import capture
from hydrogen_magic.capture import CellText
from hydrogen_magic.core import events as ev
from hydrogen_magic.core import processes, run_log
from hydrogen_magic.core.job import JobSpec
from hydrogen_magic.driver import known_gangs, launcher
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
    known_gangs._recent.clear()


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


class Ending(NamedTuple):
    """How a gang ends."""

    when: str
    """``sent``: the results of a rank are in the socket of its agent, which is stopped; ``asked``: ranks
    send their results when they are asked to stop; ``packing``: at the same time; ``first``: the results
    of one rank have arrived, and the other one has not returned; ``any``: at any time.
    """
    pause_s: float
    """After that."""
    how: str
    n_results: int
    n_bytes: int
    late_rank: int
    late_s: float
    killed_rank: int


def random_ending(seed: int) -> Ending:
    """Return the ending of this number: in two of four, and more by chance, results are on their way."""
    choose, hows = random.Random(seed), ["rank", "kill", "stop"]
    when = ["sent", "packing", "asked", choose.choice(["first", "any"])][seed % 4]
    how = choose.choice([*hows, "agent"])
    return Ending(
        when,
        choose.uniform(0, {"packing": 0.02, "first": 0.2, "any": 0.3}.get(when, 0)),
        {"sent": hows[seed // 4 % 3], "asked": "stop"}.get(when, how),
        choose.choice([1, 20]),
        choose.choice([100, 3 << 20, 30 << 20]),
        choose.randrange(2),
        choose.choice([0.5, 1.0] if when == "first" else [0.0, 0.3]),
        choose.randrange(2),
    )


@pytest.mark.parametrize(
    "seeds",
    [
        range(4),
        *(pytest.param(range(n, n + 12), marks=pytest.mark.exhaustive) for n in range(4, 100, 12)),
    ],
    ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}",
)
def test_what_was_sent_is_not_lost(seeds: range, homes: Iterator[Path]) -> None:
    were_in_flight = [was_in_flight_at_the_end(random_ending(n), next(homes)) for n in seeds]
    assert 2 * sum(were_in_flight) >= len(seeds), "results were on their way"


def was_in_flight_at_the_end(ending: Ending, notes: Path) -> bool:
    """End a gang; check what its ranks had sent. Return whether a result was on its way at the end.

    Ranks note in the new folder ``notes`` what they have sent: that must not get lost. Only an agent that is
    killed takes along what it has not passed on: no other process has it. Then, what has arrived is checked.
    """
    gang = launched(ending, notes)
    (agent,) = [one for one in local_agents.pool().all if one.attempt == (gang.id, 0)]
    family = family_of(gang)
    wait_for_its_time(ending, gang, notes, agent.process.pid)
    was_in_flight = any(
        not arrived(gang, rank) for rank in (0, 1) if (notes / f"packing-{rank}").exists()
    )
    end(
        gang, ending.how, agent.process.pid if ending.how == "agent" else family[ending.killed_rank]
    )
    agent.process.send_signal(signal.SIGCONT)
    (notes / "end").touch()
    ended(gang)
    wait_until_gone(family)  # a process that was killed with its agent may still be exiting
    if gang.state != "SUCCEEDED":
        with pytest.raises(HydrogenError):
            gang.raise_for_state()
    for rank in (0, 1):
        sent = sent_by(rank, notes) if ending.how != "agent" or arrived(gang, rank) else set()
        assert sent or gang.state != "SUCCEEDED"
        found = found_of(gang, rank) if sent else {}
        assert found.keys() >= sent
        for name, array in found.items():
            n_bytes = ending.n_bytes if name == "_" else 100
            assert np.array_equal(array, array_ranks.result_of(rank, n_bytes))
    known_gangs._recent.clear()  # else the kernel holds the results, which are memory files
    return was_in_flight


def launched(ending: Ending, notes: Path) -> Gang:
    """Return a gang whose processes have started; its results wait for ``go``, its exits for ``end``."""
    notes.mkdir()
    if ending.when == "first":
        (notes / "go").touch()
    if (ending.when, ending.how) != ("sent", "rank"):
        (notes / "end").touch()
    names = [f"v{n}" for n in range(1, ending.n_results)]
    what = (ending.n_results, ending.n_bytes, ending.late_rank, ending.late_s, str(notes))
    call = f"results(*{what}, {ending.when == 'asked'})"
    lines = ["from tests.array_ranks import results", f"{', '.join([*names, 'last'])}, = {call}"]
    cell = CellText("\n".join([*lines, "last"]), "<cell>", "cell", 3, str)
    captured = capture.capture_cell(cell, {}, out=names)
    gang = launcher.launch_captured(captured, JobSpec(np=2), title="results")
    until(gang, lambda: all(rank.pid is not None for rank in gang.ranks))
    return gang


def wait_for_its_time(ending: Ending, gang: Gang, notes: Path, agent_pid: int) -> None:
    if ending.when == "first":
        wait_until(lambda: arrived(gang, 0) or arrived(gang, 1))
    elif ending.when != "any":
        wait_until(lambda: [*notes.glob("packing-*")])
    if ending.when == "sent":
        os.kill(agent_pid, signal.SIGSTOP)
    if ending.when != "asked":
        (notes / "go").touch()
    if ending.when == "sent":
        wait_until(lambda: [*notes.glob("sent-*-_")])
        if ending.how != "rank":
            n_left = 1 if ending.late_s else 0
            wait_until(lambda: len(alive(rank.pid or 0 for rank in gang.ranks)) <= n_left)
    time.sleep(ending.pause_s)


def end(gang: Gang, how: str, pid: int) -> None:
    """End a gang, or the process ``pid`` of it if that still runs."""
    if how in ("stop", "kill"):
        gang.stop(kill=how == "kill")
    elif not gang.wait(0) and alive([pid]):
        processes.send_signal(pid, signal.SIGKILL)


def arrived(gang: Gang, rank: int) -> bool:
    """Return whether all results of a rank have arrived."""
    return any(isinstance(event, ev.RankResult) and event.rank == rank for event in gang.events())


def sent_by(rank: int, notes: Path) -> set[str]:
    """Return the names of the results that a rank has sent; "_" is its value."""
    return {note.name.split("-", 2)[2] for note in notes.glob(f"sent-{rank}-*")}


def found_of(gang: Gang, rank: int) -> dict[str, Any]:
    if gang.state != "SUCCEEDED":
        return hm.load_results(gang.id, rank)
    return {name or "_": found for name, found in gang.received.of(rank).everything().items()}
