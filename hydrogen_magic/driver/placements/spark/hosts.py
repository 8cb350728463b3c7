"""A Spark cluster as a provider of hosts: the tasks of a barrier stage on the notebook's session.

A task holds its slot (and GPUs). Spark is never used to exchange data between tasks (``barrier()`` costs a
second each time), nor to restart a stage.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import network
from hydrogen_magic.core.network import PortRange
from hydrogen_magic.core.units import counted
from hydrogen_magic.driver.placements import Attempt, EventSink
from hydrogen_magic.driver.placements.remote.addresses import own_addresses
from hydrogen_magic.driver.placements.remote.agents import RelayRoute, RemoteAgentPool, agent_pool
from hydrogen_magic.driver.placements.remote.host_tasks import HostTasks
from hydrogen_magic.driver.placements.remote.provider import HostProvider
from hydrogen_magic.driver.placements.spark.application_status import (
    executors_of_tasks,
    running_tasks,
)
from hydrogen_magic.driver.placements.spark.barrier_job import as_error, is_unreachable, submit
from hydrogen_magic.driver.placements.spark.capacity_check import (
    ClusterCapacity,
    capacity,
    free_slots,
    slots_by_host,
    slots_now,
    waits_for,
)
from hydrogen_magic.driver.placements.spark.host_choice import choose, obstacle_to_choice
from hydrogen_magic.driver.placements.spark.job_errors import STOPPED, SparkJobError
from hydrogen_magic.driver.placements.spark.relay import Relay
from hydrogen_magic.driver.placements.spark.spark_session import Session
from hydrogen_magic.errors import HydrogenError, PlacementError

_QUEUED_S = 1.0
"""How often the number of free slots is reported to a gang that waits for slots."""
_ROOM_S = 0.5
"""How often to check for new executors."""
_UNNOTICED_S = 180.0
"""How long Spark may count an executor that does not respond: by default ``spark.network.timeout`` is two
minutes, and Spark checks it every minute."""
_CUT_OFF_S = 45.0
"""A host without a message for so long is cut off or has crashed; before, only its agent may be stopped."""
_WILDCARDS = ("0.0.0.0", "::")
_STARTING_S = 15.0
"""How long tasks that have slots may take to attach, where they cannot be told from those of other jobs."""
_WORKERS_S = 5.0
"""How long a Python worker may take to start before that is reported; a second as a rule."""
_MOST_HOSTS = 2
"""Number of hosts that are named, whose Python workers do not start."""
_UNSEEN_S = 5.0
"""How long a gang waits for slots of unknown number before that is reported."""
_UNSEEN = (
    "waiting for task slots of the cluster; the number of free slots is unknown, since Spark's "
    "UI is off or not reachable from here"
)


class SparkHosts(HostProvider):
    """See :class:`hydrogen_magic.driver.placements.remote.provider.HostProvider`."""

    noun = "executors"

    def __init__(self, session: Session, capacity: ClusterCapacity) -> None:
        self._session = session
        self._capacity = capacity
        self._tag = ""
        """Of the stage; empty before there is one."""
        self._late_s = math.inf
        """Monotonic time at which the wait for slots is over."""
        self._is_late = False
        """The stage was ended because it had no slots by then."""

    @property
    def gives_gpus(self) -> bool:
        return self._capacity.gpus

    async def acquire(self, attempt: Attempt, sink: EventSink) -> None:
        """Wait until the cluster is large enough for the gang, though other jobs may hold its slots.

        Spark itself would check only every fifteen seconds whether a stage fits. If it fits, Spark starts
        its tasks as soon as enough slots are free.
        """
        begun_s, wait_s = time.monotonic(), attempt.job.spec.wait_s
        if wait_s is not None:
            self._late_s = begun_s + wait_s
        try:
            await self._wait_for_slots(attempt, sink, begun_s)
        except HydrogenError:
            raise
        except Exception as error:  # of Java, gRPC or pyspark: the driver has exited
            found = await asyncio.to_thread(self._session.explain, error)
            raise as_error(found, self._session) from error

    async def _wait_for_slots(self, attempt: Attempt, sink: EventSink, begun_s: float) -> None:
        is_first, spec = attempt.number == 0, attempt.job.spec
        while not (is_first and self._capacity.slots is not None):
            if await asyncio.to_thread(self._session.has_ended):
                raise as_error(SparkJobError("stopped", STOPPED), self._session)
            slots = await self._slots(self._usable_slots)
            reason = await self._reason(slots, attempt)
            _report(slots, reason, attempt, sink)
            if slots is None or slots >= spec.np:
                return
            if time.monotonic() > self._late_s:
                raise _late(attempt, f"the cluster has {counted(slots, 'slot')}", reason)
            # Executors are still starting, or Spark replaces lost ones: refused when no more are expected.
            if is_first or time.monotonic() > begun_s + _UNNOTICED_S:
                self._capacity = await asyncio.to_thread(capacity, self._session, spec)
            await asyncio.sleep(_ROOM_S)

    async def start_agents(self, tasks: HostTasks, sink: EventSink) -> None:
        error = await self._run_stage(tasks, sink)
        if is_unreachable(error) and self._session.is_connect:
            where = await _use_relay(self._session, tasks.attempt.job.spec.ports)
            text = f"executors cannot reach this machine; they connect through a relay at {where}"
            sink.emit(ev.Notice(tasks.attempt.job.now_s(), "info", text))
            error = await self._run_stage(tasks, sink)
        if self._is_late and error is not None and error.kind == "cancelled":
            free = await self._slots(free_slots)
            found = "free slots: unknown" if free is None else f"{counted(free, 'slot')} free"
            hint = "other jobs or a session (see %gang) may hold the others"
            raise _late(tasks.attempt, found, await self._reason(free, tasks.attempt) or hint)
        if error is not None:
            raise as_error(error, self._session)

    async def release(self) -> None:
        # Spark would restart a stage whose tasks have lost their agents.
        self._session.cancel(self._tag)

    async def _run_stage(self, tasks: HostTasks, sink: EventSink) -> SparkJobError | None:
        """Submit the stage and wait for its end; return its error. Reports that it waits for slots."""
        attempt, np = tasks.attempt, tasks.attempt.job.spec.np
        free = await self._slots(free_slots)
        self._tag = f"hydrogen_magic-{attempt.gang}-{attempt.number}"
        if free is not None and free < np:
            _report(free, await self._reason(free, attempt), attempt, sink)
        session = attempt.job.spec.session
        ranks = counted(np, "rank")
        description = f"hydrogen_magic gang {attempt.gang}, {ranks}"
        if session is not None:  # others wait for its slots: messages name the jobs that hold some
            description = f"hydrogen_magic session {session}, {ranks}, until %gang end {session}"
        # Spark deletes an agent's code at the end of the application. In local mode the agent itself stays.
        instructions = {
            **tasks.instructions(
                endpoints(self._session, attempt.job.spec.ports), self._session.application
            ),
            "ends_idle_workers": await asyncio.to_thread(self._session.ends_idle_workers),
        }
        hosts = await self._preferred_hosts(attempt, sink)
        profile = self._capacity.profile
        ended = submit(self._session, self._tag, description, instructions, np, profile, hosts)
        watching = asyncio.ensure_future(self._watch(free, tasks, sink))
        try:
            return await ended
        finally:
            watching.cancel()

    async def _preferred_hosts(self, attempt: Attempt, sink: EventSink) -> tuple[str, ...]:
        """Return the host for each task, and report the reason; empty: Spark chooses."""
        spec = attempt.job.spec
        chosen = await asyncio.to_thread(
            choose, self._session, self._capacity, spec, self._avoided()
        )
        if chosen is None:
            return ()
        sink.emit(ev.Notice(attempt.job.now_s(), "info", chosen.note))
        return chosen.hosts

    def _avoided(self, silence_s: float = 0.0) -> list[str]:
        """Return the lost hosts to which Spark may still assign tasks, which would never start.

        Only those without a message for ``silence_s`` or longer.
        """
        now_s = time.monotonic()
        lost = self.lost_hosts.items()
        return [host for host, at_s in lost if silence_s <= now_s - at_s < _UNNOTICED_S]

    def _usable_slots(self, session: Session, capacity: ClusterCapacity) -> int | None:
        """Return the number of slots, without those of hosts that are cut off where others can be chosen."""
        avoided = self._avoided(_CUT_OFF_S)
        if not avoided or obstacle_to_choice(session):
            return slots_now(session, capacity)
        slots = slots_by_host(session, capacity)
        return sum(n_all for host, (_, n_all) in slots.items() if host not in avoided)

    async def _watch(self, free: int | None, tasks: HostTasks, sink: EventSink) -> None:
        await self._watch_queue(free, tasks, sink)
        if not self._is_late:
            await self._watch_workers(tasks, sink)

    async def _watch_queue(self, free: int | None, tasks: HostTasks, sink: EventSink) -> None:
        """Report the number of free slots until the tasks have theirs; end the stage if it is late.

        ``free``: the number before the stage was submitted, None if unknown.
        """
        np, begun_s = tasks.attempt.job.spec.np, time.monotonic()
        is_reported = False
        while True:
            await asyncio.sleep(_QUEUED_S)
            if tasks.attached():
                return
            try:
                # In this order: a task that starts in between counts twice, and not as another job's.
                slots = None if free is None else await self._slots(free_slots)
                running = await asyncio.to_thread(running_tasks, self._session, self._tag)
                slots = None if slots is None else slots + (running or 0)
                reason = await self._reason(slots, tasks.attempt)
            except Exception:  # of Py4J, Java or HTTP; a session that has ended ends the stage
                continue
            if tasks.attached():
                return
            if running is not None and running >= np:  # their Python workers are starting
                _report(np, "", tasks.attempt, sink)
                return
            is_exact = running is not None and not self._session.is_connect
            lacks_slots = slots is None or slots < np
            if lacks_slots and time.monotonic() > self._give_up_s(begun_s, is_exact=is_exact):
                self._is_late = True
                self._session.cancel(self._tag)
                return
            if free is None and not is_reported and time.monotonic() - begun_s > _UNSEEN_S:
                is_reported = True
                sink.emit(ev.Notice(tasks.attempt.job.now_s(), "info", _UNSEEN))
            elif free is not None and (free < np or is_exact):  # slots may have been lost since
                _report(slots, reason, tasks.attempt, sink)

    def _give_up_s(self, begun_s: float, *, is_exact: bool) -> float:
        """Return the monotonic time after which a stage without slots is ended.

        Where the number of its tasks that run is unknown or old, they may be what holds the slots.
        """
        return self._late_s if is_exact else max(self._late_s, begun_s) + _STARTING_S

    async def _watch_workers(self, tasks: HostTasks, sink: EventSink) -> None:
        """Report tasks that have slots and do not attach: a Python worker may never start, in silence."""
        job, reported = tasks.attempt.job, set[int]()
        await asyncio.sleep(_WORKERS_S)
        while missing := tasks.missing():
            if missing != reported:
                with suppress(Exception):  # as above
                    found = await asyncio.to_thread(executors_of_tasks, self._session, self._tag)
                    reported = tasks.missing()  # others have attached meanwhile
                    text = late_workers(reported, job.spec.np, found, self._session.python)
                    # Which rank has which task is decided when all have attached.
                    for rank in range(job.spec.np if reported else 0):
                        sink.emit(ev.RankPhase(job.now_s(), rank, "starting", text))
            await asyncio.sleep(_QUEUED_S)

    async def _slots(self, look: Callable[[Session, ClusterCapacity], int | None]) -> int | None:
        return await asyncio.to_thread(look, self._session, self._capacity)

    async def _reason(self, slots: int | None, attempt: Attempt) -> str:
        """Return what a gang that has so many slots waits for; empty if it has enough, or if unknown."""
        if slots is None or slots >= attempt.job.spec.np:
            return ""
        return await asyncio.to_thread(waits_for, self._session, self._tag)


def late_workers(
    missing: Collection[int], n_tasks: int, executors: Mapping[int, tuple[str, str]], python: str
) -> str:
    """Return a text about the tasks that have slots and have not attached.

    ``executors``: host and id of the executor of each task, if known. ``python``: that they run; empty if
    unknown.
    """
    ids_of: dict[str, dict[str, None]] = {}
    for host, number in (executors[task] for task in sorted(missing) if task in executors):
        ids_of.setdefault(host, {})[number] = None
    named = [
        f"executor{'s' * (len(ids) > 1)} {', '.join(ids)} on {host}"
        for host, ids in [*ids_of.items()][:_MOST_HOSTS]
    ]
    if rest := len(ids_of) - len(named):
        named.append(counted(rest, "more host"))
    where = ", ".join(named) or "the executors"
    tasks = f"{len(missing)} of {counted(n_tasks, 'Spark task')}"
    return f"{python or 'Python'} has not started in {tasks}; see the stderr of {where}"


def _late(attempt: Attempt, found: str, reason: str) -> PlacementError:
    spec = attempt.job.spec
    why = "; ".join(filter(None, [found, reason]))
    return PlacementError(f"np {spec.np} did not fit within {spec.wait_s:g} s (`--wait`): {why}")


def _report(slots: int | None, reason: str, attempt: Attempt, sink: EventSink) -> None:
    wanted = attempt.job.spec.np
    if slots is not None:
        sink.emit(ev.Queued(attempt.job.now_s(), min(slots, wanted), wanted, reason))


# ── the way from executors to this process ───────────────────────────────────────────────────────


def endpoints(session: Session, ports: PortRange | None) -> list[str]:
    """Return where executors may reach this process, the best first.

    With ``spark.driver.bindAddress`` that is ``spark.driver.host``, as for Spark, and then the machine's
    own addresses: a service may pass on other ports only.
    """
    pool = agent_pool()
    relay = pool.relays.get(session.application)
    if relay is not None and relay.endpoint.done():
        return [relay.endpoint.result()]
    bind = session.bind_address()
    if not bind:
        return pool.listen(session.addresses(), ports)
    (own,) = pool.listen([bind], ports)
    _, port = network.host_and_port(own)
    behind = own_addresses() if bind in _WILDCARDS else (bind,)
    reachable = (network.endpoint(host, port) for host in (session.server_host(), *behind))
    return list(dict.fromkeys(reachable))


async def _use_relay(session: Session, ports: PortRange | None) -> str:
    """Connect this application's executors through the Spark Connect server; return the address.

    ``ports``: of the relay. Raises PlacementError if the server does not allow that.
    """
    pool = agent_pool()
    # Gangs of one application share a relay, and a stop of one of them leaves it to the others: the pool
    # closes it, also while it starts.
    route = pool.relays.get(session.application) or _start_relay(pool, session, ports)
    where = await asyncio.shield(route.endpoint)
    return f"{where.removeprefix('tcp://')}, on the Spark driver's host"


def _start_relay(pool: RemoteAgentPool, session: Session, ports: PortRange | None) -> RelayRoute:
    relay = Relay(session.spark, network.host_and_port(pool.hub.listen("127.0.0.1")), ports)

    async def start() -> str:
        try:
            return network.endpoint(*await asyncio.to_thread(relay.start))
        except BaseException:
            forget()
            raise

    def forget() -> None:
        if pool.relays.get(session.application) is route:
            del pool.relays[session.application]

    def failed(text: str) -> None:
        """Called in a thread of the relay. The agents behind it detect its failure themselves."""
        pool.hub.loop.call_soon_threadsafe(forget)

    relay.on_failure = failed
    route = RelayRoute(asyncio.ensure_future(start()), relay.close)
    # asyncio logs an exception for which no gang waits any more.
    route.endpoint.add_done_callback(lambda started: started.cancelled() or started.exception())
    pool.relays[session.application] = route
    return route
