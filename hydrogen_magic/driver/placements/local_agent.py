"""The kernel's end of an agent on this machine: start, communication, end.

An agent gets its keys, and closures and results as memory files, over an inherited socket. All other
messages use the channel, as from another machine.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hydrogen_magic.core import file_limit, processes, run_log
from hydrogen_magic.core import messages as msg
from hydrogen_magic.driver.placements import AgentLostError, EventSink
from hydrogen_magic.driver.placements.agent_client import AgentClient, take_file
from hydrogen_magic.driver.placements.surroundings import (
    Surroundings,
    forkserver_fingerprint,
    shadowed_modules,
)
from hydrogen_magic.errors import HydrogenError, PlacementError
from hydrogen_magic.node.agent import command_line
from hydrogen_magic.transport import framing
from hydrogen_magic.transport.channel import Hub

_LOOPBACK = "127.0.0.1"
_HELLO_S = 60.0
"""How long an agent may take to start: an interpreter and a few imports, on a machine under load."""
_CLOSE_S = 5.0
_CLEANUP_S = 1.0
"""How long killed processes may take to exit. One that hangs in the system takes longer, and waiting does
not help."""
_STDERR_TAIL = 2000
"""Characters of an agent's stderr in an error: a traceback of a few frames."""


class _CapturedStderr:
    """The stderr of an agent."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("hydrogen-agent-stderr")
        self.tail = ""
        """The end of it, after it is closed."""
        self._forwarded = 0

    def forward(self) -> None:
        """Write new data to this process's stderr, as if it were inherited."""
        size = os.fstat(self.fd).st_size
        new = os.pread(self.fd, size - self._forwarded, self._forwarded)
        self._forwarded = size
        with suppress(OSError):
            os.write(2, new)

    def close(self) -> None:
        size = os.fstat(self.fd).st_size
        tail = os.pread(self.fd, _STDERR_TAIL, max(0, size - _STDERR_TAIL))
        self.tail = tail.decode(errors="replace").strip()
        os.close(self.fd)


class LocalAgent(AgentClient):
    """One agent process on this machine."""

    def __init__(
        self, hub: Hub, around: Surroundings, env: Mapping[str, str], preload: Sequence[str]
    ) -> None:
        super().__init__(hub)
        self._handover, theirs = framing.pair()
        self._handed_over = framing.FrameReader(self._handover)
        self.marks = {
            processes.AGENT: secrets.token_hex(16),
            processes.OWNER: run_log.owner_of_this_process(),
        }
        """Variables that identify all descendants of the agent."""
        self.why_killed = ""
        """Part of the error once :meth:`kill` was called."""
        self._began = time.time()
        self._killing: asyncio.Task[None] | None = None
        self._is_closing = False
        self._cleaning: asyncio.Task[None] | None = None
        self._stderr = _CapturedStderr()
        self.process = _start_agent_process(around, theirs, self._stderr.fd, self.marks)
        theirs.close()
        with suppress(BrokenPipeError):  # it has ended already, as its descriptor tells
            framing.send(self._handover, self._config(around.sys_path, env, preload))
        self._exit_fd = os.pidfd_open(self.process.pid)
        hub.loop.add_reader(self._exit_fd, self._on_exit)
        self._handover.setblocking(False)
        hub.loop.add_reader(self._handover, self._on_handover)

    def _config(
        self, sys_path: tuple[str, ...], env: Mapping[str, str], preload: Sequence[str]
    ) -> msg.LocalAgentConfig:
        return msg.LocalAgentConfig(
            endpoint=self.keys.endpoint,
            server_key=self.keys.server_key,
            secret=self.keys.secret,
            bind=_LOOPBACK,
            env={**env, **self.marks},
            sys_path=sys_path,
            fingerprint=forkserver_fingerprint(env, sys_path),
            preload=(*shadowed_modules(sys_path), *preload),
            kernel_pid=os.getpid(),
        )

    # ── messages ──

    @property
    def is_usable(self) -> bool:
        """Whether it is alive, and :meth:`kill` was not called."""
        return self.alive and self._killing is None

    def launch(self, request: msg.LaunchRequest, handed: Sequence[int], sink: EventSink) -> None:
        """Have the agent start the ranks of ``request``, and report to ``sink`` what happens.

        ``handed``: descriptors of the closure and of the channels by which ranks are fed.
        """
        self.sink, self.attempt = sink, (request.gang, request.attempt)
        self.expect_cleanup()
        files = msg.LaunchFiles(request.gang, request.attempt)
        self._handover.setblocking(True)
        with suppress(BrokenPipeError, ConnectionResetError):  # it has died: see _on_exit
            framing.send(self._handover, files, handed)
        self._handover.setblocking(False)
        self.send(request)

    def let_go(self) -> None:
        """The attempt is over for us, or another agent runs it."""
        self.sink = self.attempt = None
        self.count_as_clean()
        if self._clean is not None and not self._clean.cancelled():
            self._clean.exception()  # known, or of no interest: asyncio would report it

    async def ready(self) -> None:
        """Wait for the agent's hello."""
        try:
            await asyncio.wait_for(asyncio.shield(self.greeted), _HELLO_S)
        except asyncio.TimeoutError:
            raise PlacementError(f"the agent did not start within {_HELLO_S:.0f} s") from None
        if not self.alive:
            killed = self.process.returncode < 0
            raise (AgentLostError if killed else PlacementError)(self._how_it_ended())

    async def cleaned_up(self) -> None:
        """Wait until nothing of the launched attempt is left. Raises AgentLostError."""
        assert self._clean is not None
        await self._clean
        self._on_handover()  # results travel beside the messages, so the last may still wait there
        if self.alive:  # else it is in the gang's error
            self._stderr.forward()

    def kill(self) -> None:
        """End the agent and all its descendants, whether or not it responds."""
        if self._killing is None and self.alive:
            self._killing = asyncio.ensure_future(self._kill())

    async def _kill(self) -> None:
        self.process.send_signal(signal.SIGSTOP)  # it must not fork meanwhile
        try:
            seen, _ = await processes.end_descendants(self.process.pid, _CLEANUP_S)
        finally:  # it needs an open file
            self.process.kill()
        processes.unlink_shared_memory(seen, self._began)

    def _on_handover(self) -> None:
        try:
            self._take_handed_over()
        except (OSError, msg.MessageError) as error:  # a file in memory cannot be opened
            self.hub.loop.remove_reader(self._handover)
            why = f"a result could not be received: {file_limit.explained(error)}"
            self.fail(HydrogenError(why))
            self.kill()

    def _take_handed_over(self) -> None:
        with suppress(BlockingIOError):
            while self._handed_over.feed():
                pass
            self.hub.loop.remove_reader(self._handover)
        for message, fds in self._handed_over.messages():
            try:
                file = msg.decode(message, msg.RankFile)
                if self.sink is not None and self.attempt == (file.gang, file.attempt):
                    take_file(self.sink, file, fds[0])
            finally:
                framing.close_all(fds)

    def _on_exit(self) -> None:
        """The agent has exited, on request or not; its ranks died with it (parent-death signal)."""
        self.process.wait()
        if self.alive:
            self._on_handover()  # results that it handed over before it ended
        self._disconnect()
        self.finish(self.greeted)
        self.on_session_lost("its agent has ended")
        self._message_arrived.set()  # there will be no other
        if self._clean is not None and not self._clean.done():
            self._cleaning = asyncio.ensure_future(self._clean_up())

    async def _clean_up(self) -> None:
        """End what the agent could not end, such as helpers in sessions of their own."""
        try:
            await processes.end_marked(processes.AGENT, self.marks[processes.AGENT], _CLEANUP_S)
        finally:  # it needs an open file
            lost = HydrogenError if self._is_closing else AgentLostError
            self.fail(lost(self._how_it_ended()))

    def _how_it_ended(self) -> str:
        code = self.process.returncode
        how = processes.name_of_signal(-code) if code < 0 else f"exit code {code}"
        why = self.why_killed or f"exited unexpectedly ({how})"
        text = f"the agent process {why}; its ranks were killed"
        return f"{text}; its last output:\n{self._stderr.tail}" if self._stderr.tail else text

    def _disconnect(self) -> None:
        if self.alive:
            self.alive = False
            self._stderr.close()
            self.hub.revoke_key(self.keys.key)
            self.hub.loop.remove_reader(self._exit_fd)
            self.hub.loop.remove_reader(self._handover)
            os.close(self._exit_fd)
            self._handover.close()
            self._handed_over.close()

    async def close(self) -> None:
        """End the agent within a time limit."""
        if not self.alive:
            return
        self._is_closing = True
        self.process.terminate()
        deadline = time.monotonic() + _CLOSE_S
        while self.process.poll() is None:  # no helper thread: none can be started at exit
            if time.monotonic() > deadline:
                self.kill()
            if time.monotonic() > deadline + _CLOSE_S:
                return  # it hangs in the system, and dies when the system releases it
            await asyncio.sleep(0.005)
        if self.alive:  # otherwise it is in the gang's error
            self._stderr.forward()
        self._disconnect()
        if self._killing is not None:
            await self._clean_up()


def _start_agent_process(
    around: Surroundings, theirs: socket.socket, stderr: int, marks: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start it in its own session: a Ctrl-C meant for the kernel must not reach it."""
    return subprocess.Popen(
        command_line.command(
            "hydrogen_magic.node.agent.__main__", around.sys_path, str(theirs.fileno())
        ),
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stderr=stderr,
        env=command_line.environment({**around.env, **marks}),
        cwd="/",
    )
