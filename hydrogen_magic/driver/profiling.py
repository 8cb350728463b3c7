"""A profile of all ranks, from the request to the merged file; on the hub's loop, during the run.

Only the gang's own end waits for it, for a limited time: a rank that never steps, has exited, or hangs in
its last step is left out.
"""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Callable
from pathlib import Path

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.driver import profile_merge
from hydrogen_magic.driver.gang_run import GangRun
from hydrogen_magic.driver.placements import AgentGroup
from hydrogen_magic.driver.state.formatting import ranks_text
from hydrogen_magic.transport.daemon_thread import in_daemon_thread

_STEP_S = 120.0
"""How long ranks may take to their next optimizer step: a compiled one takes a minute the first time."""
_RECORD_S = 600.0
"""How long the steps themselves may take."""
_OTHERS_S = 30.0
"""How long to wait for the others after the first rank has answered: ranks step together."""
_READ_S = 30.0
"""How long the end of a successful gang waits for a trace that is being merged."""
_CHUNK = 4000
"""Spans in one event: some 300 kB of JSON for the record."""


class GangProfiler:
    """Profiles one gang, one profile at a time."""

    def __init__(
        self, run: GangRun, agent_group: AgentGroup, folder: Path, now_s: Callable[[], float]
    ) -> None:
        self._run = run
        self._agent_group = agent_group
        self._folder = folder
        self._now_s = now_s
        self._number = 0
        self._phase = ""
        self._missing: set[int] = set()
        """Ranks that have not answered yet."""
        self._traces: dict[int, mmap.mmap] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._reading: asyncio.Future[None] | None = None
        self._unwanted = threading.Event()
        self._is_notified = False
        """A profile in progress has been reported: a button may be pressed many times."""

    # ── requests and answers ──

    def start(self, steps: int) -> None:
        """Profile the next ``steps`` steps of every running rank."""
        running = {rank.rank for rank in self._run.state.ranks if rank.phase == "running"}
        if self._phase:
            if not self._is_notified:
                self._is_notified = True
                self._notice("info", "a profile is already in progress: wait for it to finish")
        elif not running:
            self._notice("warning", "no rank is running, so there is nothing to profile")
        else:
            self._number += 1
            self._missing, self._traces, self._is_notified = running, {}, False
            self._enter("waiting")
            self._wait(_STEP_S)
            self._send(steps)

    def on_event(self, event: ev.Event) -> bool:
        """Handle a rank's event; True for one that only concerns profiling."""
        if isinstance(event, ev.RankExited):
            self._on_answer(event.rank)
        elif isinstance(event, ev.Profiling):
            if self._phase == "waiting":
                self._enter("recording")
                self._wait(_RECORD_S)
            return True
        return False

    def on_trace(self, rank: int, number: int, trace: mmap.mmap) -> None:
        """Store a rank's answer."""
        if number == self._number and rank in self._missing:
            self._traces[rank] = trace
            self._wait(_OTHERS_S)
            self._on_answer(rank)

    async def close(self, *, is_wanted: bool) -> None:
        """The ranks have ended: finish if that is possible soon, or drop the profile."""
        if not is_wanted:
            self._unwanted.set()
        elif self._missing:
            self._missing.clear()
            self._read()
        if self._reading is not None and not self._reading.done():
            await asyncio.wait([self._reading], timeout=_READ_S if is_wanted else 0)
            self._unwanted.set()
        self._end()

    # ── internals ──

    def _on_answer(self, rank: int) -> None:
        if rank in self._missing:
            self._missing.discard(rank)
            if not self._missing:
                self._read()

    def _send(self, steps: int) -> None:
        """Ask the ranks for a profile; 0 steps cancel it."""
        self._agent_group.send(msg.ProfileSteps(self._run.id, self._number, steps))

    def _wait(self, limit_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._give_up, limit_s)

    def _give_up(self, waited_s: float) -> None:
        """Continue without the missing ranks."""
        late = ranks_text(sorted(self._missing))
        if self._phase == "waiting":
            text = (
                f"no optimizer step within {waited_s:g} s on {late}: a profile covers steps of "
                "torch.optim; start it while the ranks train"
            )
        else:
            text = f"the profile lacks {late}, whose steps did not finish within {waited_s:g} s"
        self._notice("warning", text)
        self._send(0)
        self._missing.clear()
        self._read()

    def _read(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._traces:
            self._enter("reading")
            self._reading = asyncio.ensure_future(self._merge())
        else:
            self._end()

    async def _merge(self) -> None:
        path = self._folder / f"profile-{self._number}.json.gz"
        traces, self._traces = self._traces, {}
        written = ""
        try:
            profile = await in_daemon_thread(
                lambda: profile_merge.merge(
                    traces, path, lambda: not self._unwanted.is_set(), self._run.mask.text
                ),
                "hydrogen_magic profiles",
            )
            await self._report(profile)
            written = str(path) if profile.ranks else ""
        except profile_merge.UnwantedError:
            pass  # the gang has ended meanwhile
        except OSError as error:
            self._notice("warning", f"the profile could not be written: {error}")
        except Exception as error:
            # An internal error: the gang continues, and may be profiled again.
            text = f"{type(error).__name__}: {error}"
            self._notice("warning", f"the ranks' traces could not be merged ({text})")
        self._end(written)

    async def _report(self, profile: profile_merge.Profile) -> None:
        for why in dict.fromkeys(profile.errors.values()):
            ranks = ranks_text([rank for rank, error in profile.errors.items() if error == why])
            self._notice("warning", f"no profile of {ranks}: {why}")
        for spans in profile.spans:
            await self._show(spans)

    async def _show(self, spans: ev.Spans) -> None:
        for start in range(0, len(spans.names), _CHUNK):
            if self._unwanted.is_set():
                return
            part = slice(start, start + _CHUNK)
            self._run.emit(
                ev.Spans(
                    self._now_s(),
                    spans.rank,
                    spans.names[part],
                    spans.starts_ns[part],
                    spans.ends_ns[part],
                    spans.depths[part],
                    0 if start else spans.skipped,
                    spans.track,
                )
            )
            await asyncio.sleep(0)  # other gangs have their turn

    def _enter(self, phase: str, path: str = "") -> None:
        self._phase = phase
        self._run.emit(ev.Profiling(self._now_s(), phase, path))

    def _end(self, path: str = "") -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._missing.clear()
        self._traces = {}
        if self._phase:
            self._enter("", path)

    def _notice(self, level: str, text: str) -> None:
        if self._unwanted.is_set():
            return  # the gang's last event has been emitted
        self._run.emit(ev.Notice(self._now_s(), level, text))
