"""What the kernel sends to a host in parts: the closure of one gang, data of ``hm.dataset``, checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hydrogen_magic.core import messages as msg
from hydrogen_magic.node.agent.host_closure import HostClosure
from hydrogen_magic.node.agent.host_folders import HostFolders
from hydrogen_magic.transport.file_transfer import ArrivingFile

_POLL_S = 0.02
"""How often a gang that waits for its closure checks whether it was stopped."""


class HostFiles:
    """Files on this host, complete or not; those of a gang stay for its later attempts."""

    def __init__(
        self, config: msg.RemoteAgentConfig, send: Callable[[msg.AgentReport], None]
    ) -> None:
        """``send``: sends a message to the kernel."""
        folder = Path(config.folder)
        self.datasets = HostFolders(folder / msg.DATASETS, send)
        self.checkpoints = HostFolders(folder / msg.CHECKPOINTS, send)
        self._config = config
        self._send = send
        self._closure: HostClosure | None = None
        """Of the gang that is served, or was last."""
        self._closure_news = asyncio.Event()
        """Something was reported about it: it may be complete."""

    def handle(self, command: msg.AgentCommand) -> bool:
        """Carry out a command of the kernel; return whether it was about these files."""
        match command:
            case msg.KeepFolder():
                self._folders(command.kind).keep(command)
            case msg.ForgetFolders():
                self._folders(command.kind).forget(command.names)
            case msg.ServeClosure():
                closure = self._closure_of(command.gang)
                closure.serve(command, self._config.bind, self._config.ports)
            case msg.FetchClosure():
                self._closure_of(command.gang).fetch(command, self._config.secret)
            case _:
                return False
        return True

    def take(
        self, label: msg.ClosureLabel | msg.FolderFile, part: msg.FilePart, data: memoryview
    ) -> None:
        """Add a part of a file."""
        if isinstance(label, msg.ClosureLabel):
            self._closure_of(label.closure_of).take(part, data)
        else:
            self._folders(label.kind).take(label, part, data)

    async def whole_closure(
        self, gang: str, is_cancelled: Callable[[], bool]
    ) -> ArrivingFile | None:
        """Wait for the gang's closure; None if the gang is cancelled meanwhile."""
        while (closure := self._known_closure(gang)) is None and not is_cancelled():
            self._closure_news.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closure_news.wait(), _POLL_S)
        return closure

    def _known_closure(self, gang: str) -> ArrivingFile | None:
        closure = self._closure
        if closure is None or closure.gang != gang or not closure.file.is_complete:
            return None
        return closure.file

    def _closure_of(self, gang: str) -> HostClosure:
        """Return the gang's closure, whatever of it has arrived; files of other gangs are deleted."""
        if self._closure is None or self._closure.gang != gang:
            if self._closure is not None:
                self._closure.close()
            self.checkpoints.forget([name for name in self.checkpoints.names() if name != gang])
            self._closure = HostClosure(gang, self._report_closure)
        return self._closure

    def _report_closure(self, report: msg.AgentReport) -> None:
        self._send(report)
        self._closure_news.set()

    def _folders(self, kind: str) -> HostFolders:
        return self.datasets if kind == msg.DATASETS else self.checkpoints

    def stop_serving(self, gang: str) -> None:
        """Pass the gang's closure on to no other agent."""
        if self._closure is not None and self._closure.gang == gang:
            self._closure.stop_serving()

    def drop_incomplete(self) -> None:
        """Delete what was on its way when the attempt ended."""
        if self._closure is not None and not self._closure.file.is_complete:
            self._closure.close()
            self._closure = None
        self.datasets.drop_incomplete()
        self.checkpoints.drop_incomplete()

    def close(self) -> None:
        """Let go of the closure; the folders go with that of the agent."""
        if self._closure is not None:
            self._closure.close()
