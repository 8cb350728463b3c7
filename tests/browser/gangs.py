"""The cells that tests run, and the record of a gang that one of them started."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import run_log
from tests.browser.page import wait_until
from tests.gangs import alive, wait_until_gone
from tests.kernels import LOAD

__all__ = [
    "ALL",
    "ASKING",
    "CAPTURED",
    "DETACHED",
    "FAILING",
    "FRAME",
    "HOSTILE",
    "LOAD",
    "LOGGING",
    "IN_OUTPUT",
    "NEXT",
    "PAYLOAD",
    "PREDICT",
    "SLOW_TO_END",
    "STUCK",
    "TRAINING",
    "WAITING",
    "Run",
]

E = TypeVar("E")

NEXT = "6 * 7"
"""Runs after a gang, to see that the kernel is free again."""

STUCK = """%%distributed --np 4 --grace 600
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("all met", flush=True)
if dist.get_rank() == 0:
    dist.recv(torch.ones(1), src=1)
dist.all_reduce(torch.ones(1))
"""
"""Rank 0 waits for a message that is never sent, the others for rank 0. None of them reacts to an
interrupt, so the grace, ten minutes, must not be waited for."""

WAITING = """%%distributed --np 2 --grace 600
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("all met", flush=True)
time.sleep(600)
"""
"""As STUCK, but cheap: its ranks do not import torch."""

DETACHED = WAITING.replace("--np 2", "--np 2 --detach")

LOGGING = """%%distributed --np 4
import time
import hydrogen_magic as hm
print("all met", flush=True)
start_s, step = time.monotonic(), 0
while True:
    while step < (time.monotonic() - start_s) * 1000:
        hm.log(step, loss=1 / (step + 1), accuracy=step % 1000, lr=1e-3, norm=step % 7)
        step += 1
    time.sleep(0.005)
"""
"""Four ranks with four metrics, 1,000 points of each a second."""

SLOW_TO_END = """%%distributed --np 2 --grace 600
import time
try:
    print("all met", flush=True)
    time.sleep(600)
finally:
    time.sleep(600)
"""
"""Its ranks clean up for ten minutes, and may."""

FAILING = """%%distributed --np 2
import time
import hydrogen_magic as hm
if hm.rank() == 1:
    raise ValueError("bad batch 17")
time.sleep(600)
"""

TRAINING = """%%distributed --np 2
import hydrogen_magic as hm
for step in hm.track(range(200), desc="training"):
    with hm.span("forward"):
        hm.log(step, loss=1 / (step + 1), accuracy=step / 200)
print("trained", flush=True)
"""

PAYLOAD = (
    "</script><img src=x onerror='window.hacked = 1; alert(1)'><script>window.hacked = 2</script>"
)
HOSTILE = f"""%%distributed --np 2
import sys
import hydrogen_magic as hm
bad = {PAYLOAD!r}
for step in hm.track(range(3), desc=bad):
    with hm.span(bad):
        hm.log(step, **{{bad: step}})
print("1", bad, flush=True)
title, link = "\\x1b]0;" + bad + "\\x07", "\\x1b]8;;javascript:alert(1)\\x1b\\\\" + bad
sys.stderr.write("2 " + title + link + "\\x1b[2J\\x1b[31m\\n")
sys.stderr.flush()
if hm.rank() == 1:
    raise ValueError(bad)
"""
"""Everything that a rank can name is a piece of HTML, or a sequence that would steer a terminal."""

FRAME = """import time
import pandas as pd
pixels = pd.DataFrame({"x": range(24_000)})"""

PREDICT = """%%infer pixels --np 2 --batch-size 1 --out scored
def predict(batch):
    time.sleep(0.02)
    return {"twice": batch["x"] * 2}
"""
"""Takes four minutes; the first rows come back after some seconds."""

IN_OUTPUT = """import ipywidgets
import hydrogen_magic as hm
output = ipywidgets.Output()
display(output)
with output:
    hm.run(int, np=1)
"""

CAPTURED = """%%capture
hm.run(int, np=1)
"""

ASKING = """%%distributed --np 2
import os
if os.environ["RANK"] == "1":
    display({"text/html": "", "text/plain": "printed by rank 1"}, raw=True)
else:
    display({"text/html": "<b class='of-a-rank'>wait</b>", "text/plain": ""}, raw=True, display_id="a")
    answer = input("name? ")
    bold = f"<b class='of-a-rank'>{answer}</b>"
    display({"text/html": bold, "text/plain": ""}, raw=True, display_id="a", update=True)
"""
"""Rank 0 displays the line that the user types."""

ASKING_TOO_LONG = """%%distributed --np 2
import hydrogen_magic as hm
answer = input("what? ") if hm.rank() == 0 else None
"""

ASKING_AS_A_PEER_FAILS = """%%distributed --np 2
import time
import hydrogen_magic as hm
if hm.rank() == 0:
    input("what? ")
time.sleep(3)
raise ValueError("bad batch 18")
"""

ALL = (
    STUCK,
    WAITING,
    DETACHED,
    LOGGING,
    SLOW_TO_END,
    FAILING,
    ASKING,
    ASKING_TOO_LONG,
    ASKING_AS_A_PEER_FAILS,
    IN_OUTPUT,
    CAPTURED,
    FRAME,
    PREDICT,
    NEXT,
    TRAINING,
    HOSTILE,
)
"""The cells of a notebook that tests share; each runs those it needs."""


class Run:
    """The newest gang of the server's kernels, read from its record."""

    def __init__(self, not_these: frozenset[str]) -> None:
        def newest() -> list[str]:
            fresh = [name for name in run_log.recent_ids() if name not in not_these]
            return [name for name in fresh if run_log.summary(name) is not None]

        self.id: str = wait_until(newest, "record of a gang")[0]

    def all(self, kind: type[E]) -> list[E]:
        return [event for event in run_log.read(self.id) if isinstance(event, kind)]

    def wait_for(self, kind: type[E], holds: Callable[[list[E]], bool]) -> list[E]:
        """Wait until something holds of all events of a kind; return them."""
        found: list[E] = []

        def enough() -> bool:
            found[:] = self.all(kind)
            return holds(found)

        wait_until(enough, f"{kind.__name__} of gang {self.id}", every_s=0.1)
        return found

    def met(self, n_ranks: int) -> list[int]:
        """Wait until every rank has printed "all met"; return the ranks' processes."""
        self.wait_for(
            ev.Output,
            lambda outputs: {e.rank for e in outputs if "all met" in e.text} == {*range(n_ranks)},
        )
        pids = [started.pid for started in self.all(ev.RankStarted)]
        assert sorted(alive(pids)) == sorted(pids) and len(pids) == n_ranks
        return pids

    def ended_by_user(self, pids: list[int], *, kills: tuple[bool, ...] = (False,)) -> None:
        """Wait until the ranks' processes are gone; check that only the user's orders ended them."""
        wait_until_gone(pids)
        assert self.wait_for(ev.GangEnded, bool)[0].state == "STOPPED"
        orders = [(order.reason, order.kill) for order in self.all(ev.StopRequested)]
        assert orders == [("user", kill) for kill in kills]
