"""Commands of the agent to a running rank; the reporter's thread reads them.

So they also reach a rank inside a blocked collective. Malformed commands are reported and ignored.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from hydrogen_magic.horovod.node.observe import timeline
from hydrogen_magic.node.worker.observe import forward
from hydrogen_magic.node.worker.profiler import Profiler
from hydrogen_magic.node.worker.reporter import Reporter
from hydrogen_magic.transport import framing

__all__ = ["AgentCommands"]


class AgentCommands:
    """Takes commands from ``reader``; the reporter calls ``poll`` at every tick."""

    def __init__(self, reader: framing.FrameReader, reporter: Reporter, profiler: Profiler) -> None:
        self._reader = reader
        self._reporter = reporter
        self._profiler = profiler
        self._is_open = True

    def poll(self) -> None:
        """Carry out commands that have arrived. Never waits, never raises."""
        try:
            while self._is_open:
                self._obey_all()
                self._is_open = self._reader.feed(socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # no more commands for now
        except OSError:
            self._is_open = False  # the agent has exited
        forward.follow(self._reporter.is_recording)
        timeline.follow(self._reporter.is_recording)

    def _obey_all(self) -> None:
        is_over = False
        while not is_over:
            try:
                is_over = self._obey_next()
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                self._reporter.notice("warning", f"ignored a malformed command: {error!r}")

    def _obey_next(self) -> bool:
        """Carry out one command; return True if there is none."""
        for order, fds in self._reader.messages():
            for fd in fds:
                os.close(fd)
            self._obey(order)
            return False
        return True

    def _obey(self, order: Mapping[str, Any]) -> None:
        action = order["do"]
        if action == "record":
            self._reporter.is_recording = bool(order["on"])
        elif action == "profile":
            self._profiler.ask(int(order["number"]), int(order["steps"]), str(order["path"]))
        else:
            raise ValueError(f"unknown action {str(action)[:80]!r}")
