"""The tasks that run on hosts: their instructions, what is sent with them, and their errors."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from hydrogen_magic.core import messages as msg
from hydrogen_magic.driver.placements import Attempt, Job
from hydrogen_magic.driver.placements.remote import forwarded_settings, packaging
from hydrogen_magic.driver.placements.remote.addresses import own_addresses
from hydrogen_magic.driver.placements.remote.agents import Invitation, RemoteAgentPool
from hydrogen_magic.driver.placements.surroundings import forkserver_fingerprint
from hydrogen_magic.node.agent import host_task

IDLE_S = 60.0
"""How long agents on hosts wait for another gang of this notebook."""


@dataclass(frozen=True)
class HostTasks:
    """The tasks of one attempt: one per rank, numbered from 0. Which one gets which rank is decided later."""

    attempt: Attempt
    hosts: str
    """What the hosts are called in messages."""
    pool: RemoteAgentPool
    invited: Invitation
    """The agents that the tasks may start."""
    attached: Callable[[], Collection[int]]
    """Returns the numbers of the tasks that have attached to the agents of their hosts."""

    def missing(self) -> set[int]:
        """Return the numbers of the other tasks."""
        return set(range(self.attempt.job.spec.np)).difference(self.attached())

    def program(self, addresses: Sequence[str] = (), host: str = "") -> str:
        """Return a program for a host's Python, which runs the task whose number is its argument.

        It contains secrets: pass it by stdin, as in ``ssh HOST python3 - NUMBER``. It ends when the task
        does; for the reason, see :func:`problem_of`.

        Args:
            addresses: of this machine, by which hosts may reach it, the best one first; empty: all but
                loopback.
            host: distinguishes hosts that share a machine.
        """
        endpoints = self.pool.listen(addresses or own_addresses(), self.attempt.job.spec.ports)
        instructions = json.dumps(self.instructions(endpoints, host))
        code = base64.b64encode(packaging.code()).decode()
        source = packaging.source(host_task.__name__)
        return f"{source}\nmain(json.loads({instructions!r}), {code!r})\n"

    def instructions(self, endpoints: Sequence[str], host: str = "") -> dict[str, Any]:
        """Return the argument of ``host_task.hold``, for a task that is not a program of its own.

        Tasks with another ``host`` do not use its agents.
        """
        attempt, job = self.attempt, self.attempt.job
        ports = job.spec.ports
        # A new agent's forkserver has the host's variables. If the gang sets others that matter on import,
        # the launch replaces it: it imports nothing before.
        of_host = forkserver_fingerprint({}, job.surroundings.sys_path)
        return {
            "gang": attempt.gang,
            "attempt": attempt.number,
            # A warm agent holds a port already: one of other ports is not for this gang.
            "token": f"{self.pool.token}{host}{ports or ''}",
            "owner": self.pool.owner,
            "hosts": self.hosts,
            "python": list(sys.version_info[:2]),
            "needs": packaging.not_sent(["zmq", *job.needs]),
            "with": job.spec.rendezvous,
            "library": packaging.source(job.rendezvous.library),
            "endpoints": list(endpoints),
            "ports": None if ports is None else asdict(ports),
            "server_key": self.pool.hub.server_key,
            "key_seed": self.invited.key_seed,
            "fingerprint": of_host,
            "preload": list(job.preload) if fingerprint(job) == of_host else [],
            "record_dir": str(job.record_dir),
            "idle_s": IDLE_S,
        }


def fingerprint(job: Job) -> str:
    """Return the fingerprint that a forkserver on a host must have to serve this gang."""
    env = forwarded_settings.environment(job)
    return forkserver_fingerprint(env, job.surroundings.sys_path)


def problem_of(text: str) -> msg.TaskProblem | None:
    """Return the problem that a task has reported in ``text``, such as its stderr; None if there is none.

    The text may also have the report where it is cut off, in a summary of an error.
    """
    for rest in text.split(host_task.PROBLEM)[1:]:
        with suppress(json.JSONDecodeError):
            return msg.decode(json.JSONDecoder().raw_decode(rest)[0], msg.TaskProblem)
    return None
