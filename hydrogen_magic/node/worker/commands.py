"""Commands of the agent to a running rank; the reporter's thread reads them.

So they also reach a rank inside a blocked collective. Malformed commands are reported and ignored.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from hydrogen_magic.core import messages as msg
from hydrogen_magic.node.worker.interactive.user_input import UserInput
from hydrogen_magic.node.worker.observe import forward
from hydrogen_magic.node.worker.reporting.profiler import Profiler
from hydrogen_magic.node.worker.reporting.reporter import Reporter
from hydrogen_magic.transport import framing


@dataclass
class AgentCommands:
    """Takes commands from ``reader``; the reporter calls ``poll`` at every tick."""

    reader: framing.FrameReader
    reporter: Reporter
    profiler: Profiler
    follow_timeline: Callable[[bool], None]
    user_input: UserInput
    release: Callable[[bool], None]
    _is_open: bool = True

    def poll(self) -> None:
        """Carry out commands that have arrived. Never waits, never raises."""
        while self._is_open:
            try:
                for message, fds in self.reader.messages():
                    framing.close_all(fds)
                    self._handle(msg.decode(message, msg.WorkerCommand))
            except (OSError, ValueError) as error:
                self.reporter.notice("warning", f"ignored a malformed command: {error!r}")
                continue  # others may have arrived with it
            try:
                self._is_open = self.reader.feed(socket.MSG_DONTWAIT)
            except BlockingIOError:
                break  # no more commands for now
            except OSError:
                self._is_open = False  # the agent has exited
        forward.follow(self.reporter.is_recording)
        self.follow_timeline(self.reporter.is_recording)

    def _handle(self, command: msg.WorkerCommand) -> None:
        match command:
            case msg.RecordSpans():
                self.reporter.is_recording = command.on
            case msg.AnswerInput():
                self.user_input.answer(command)
            case msg.ReleaseRank():
                self.release(command.is_forced)
            case msg.StartProfile():
                self.profiler.start(command.number, command.steps, command.path)
            case _:
                raise msg.MessageError(f"a running rank does not handle {type(command).__name__}")
