"""The agents of this kernel on its own machine, and the hub that all agents connect to."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial

from hydrogen_magic.driver.placements.local_agent import LocalAgent
from hydrogen_magic.driver.placements.surroundings import Surroundings
from hydrogen_magic.transport.background_tasks import BackgroundTasks
from hydrogen_magic.transport.channel import Hub

_SPARE_S = 2.0
"""How long the agents of a sweep wait for its next gangs."""
_CLOSE_S = 15.0
"""How long all agents may take to end."""


class AgentPool:
    """The agents of this kernel: as many as concurrent gangs; one stays when all have ended."""

    def __init__(self) -> None:
        self.all: list[LocalAgent] = []
        self.idle: list[LocalAgent] = []
        self.warms_up = False
        """Agents are started ahead of the gangs that need them."""
        self._closings = BackgroundTasks()

    def take(
        self, hub: Hub, around: Surroundings, env: Mapping[str, str], preload: Sequence[str]
    ) -> LocalAgent:
        """Return an agent; a new one imports ``preload`` in the environment ``env``."""
        self.idle = [agent for agent in self.idle if agent.is_usable]
        if self.idle:
            return self.idle.pop()
        agent = LocalAgent(hub, around, env, preload)
        self.all.append(agent)
        return agent

    def get_ready(
        self, hub: Hub, around: Surroundings, env: Mapping[str, str], preload: Sequence[str]
    ) -> None:
        """Have an idle agent for the next gang: the last one's stays with its session."""
        if self.warms_up:
            agent = self.take(hub, around, env, preload)
            self.idle.append(agent)  # looked up here: take() creates a new list

    async def give_back(self, agent: LocalAgent, n_at_once: int = 1) -> None:
        """Keep ``agent`` for the next gang; for a moment also idle ones that ``n_at_once`` gangs need.

        Ranks of a session that has just ended may still run their exit handlers there.
        """
        if agent.is_usable and agent.is_ready:
            self.idle.append(agent)
            await self._keep(n_at_once)
        else:
            await self._close([agent])
        if len(self.idle) > 1:
            end = partial(self._keep, 1)
            agent.hub.loop.call_later(_SPARE_S, lambda: self._closings.start(end()))

    async def _keep(self, n: int) -> None:
        """Close all idle agents but the last ``n``."""
        spare, self.idle = self.idle[:-n], self.idle[-n:]
        await self._close(spare)

    async def _close(self, agents: Sequence[LocalAgent]) -> None:
        self.all = [one for one in self.all if one.alive and one not in agents]
        for one in agents:
            await one.close()

    async def close(self) -> None:
        agents, self.all, self.idle, self.warms_up = self.all, [], [], False
        await asyncio.gather(*(agent.close() for agent in agents))


class _Kernel:
    """The hub and the agents of this process. A fork of the kernel gets its own."""

    def __init__(self) -> None:
        self.pool = AgentPool()
        self.closers: list[Callable[[], Awaitable[None]]] = []
        self._hub: Hub | None = None
        self._pid = 0
        self._lock = threading.Lock()

    def hub(self) -> Hub:
        """Return this process's hub, started on first use; forks of the kernel get their own."""
        with self._lock:
            if self._hub is None or self._pid != os.getpid():
                self._hub, self._pid, self.pool = Hub(), os.getpid(), AgentPool()
                self.closers.clear()
            return self._hub

    def close(self) -> None:
        """End all agents of this process, including running gangs, and the hub. Safe to call twice."""
        with self._lock:
            current, self._hub = self._hub, None
        if current is not None and self._pid == os.getpid():
            done: Future[None] = asyncio.run_coroutine_threadsafe(self._close_all(), current.loop)
            with suppress(FutureTimeoutError):  # not yet the built-in one in Python 3.10
                done.result(timeout=_CLOSE_S)
            current.close()

    async def _close_all(self) -> None:
        closers = [self.pool.close, *self.closers]
        self.closers.clear()
        await asyncio.gather(*(one() for one in closers))


_kernel = _Kernel()
hub, close = _kernel.hub, _kernel.close


def pool() -> AgentPool:
    """Return this process's agents; used on the hub's loop."""
    return _kernel.pool


def warm_up(preload: Sequence[str]) -> None:
    """Start an agent in the background that imports ``preload``, for a fast start of the first gang."""

    def start() -> None:
        pool().warms_up = True
        if not pool().all:
            pool().get_ready(current, around, around.env, preload)

    current, around = hub(), Surroundings.now()
    current.loop.call_soon_threadsafe(start)


def before_closing(close: Callable[[], Awaitable[None]]) -> None:
    """Await ``close`` on the hub's loop before this process's next hub ends."""
    _kernel.closers.append(close)


atexit.register(close)
