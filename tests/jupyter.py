"""A Jupyter kernel as a front end drives it, for tests: cells in, outputs and errors out."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import port_names
from jupyter_client.manager import KernelManager
from jupyter_client.session import Session

from hydrogen_magic.core import processes
from tests import kernels
from tests.gangs import free_ports

PATIENCE_S = 60.0
"""A cell that takes longer hangs, even on a machine under load."""
_UNREAD_S = 2.0
"""After which a kernel that may have left a request unread gets another one."""
_FRONT_ENDS = ("JPY_SESSION_NAME", "VSCODE_PID", "VSCODE_CWD", "COLAB_RELEASE_TAG")
"""Variables by which a front end marks its kernels; the tests may run inside of one."""


@dataclass
class Cell:
    """A cell that was sent to a kernel, with the messages published for it so far."""

    msg_id: str
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Kind and content of every message published under this cell."""
    ended: bool = False

    def stream(self, name: str = "stdout") -> str:
        return "".join(
            content["text"]
            for kind, content in self.messages
            if kind == "stream" and content["name"] == name
        )

    @property
    def value(self) -> str | None:
        """The cell's value as text, None when it has none."""
        values = self._contents("execute_result")
        return values[-1]["data"]["text/plain"] if values else None

    @property
    def error(self) -> str:
        """The error's name and text as it is shown, empty when there is none."""
        errors = self._contents("error")
        return "\n".join([errors[-1]["ename"], *errors[-1]["traceback"]]) if errors else ""

    @property
    def block(self) -> str:
        """The gang's status as text, as it was displayed last."""
        shown = self._contents("display_data") + self._contents("update_display_data")
        return shown[-1]["data"]["text/plain"] if shown else ""

    @property
    def html(self) -> str:
        """The HTML that was displayed last."""
        shown = self._contents("display_data") + self._contents("update_display_data")
        return shown[-1]["data"].get("text/html", "") if shown else ""

    def _contents(self, kind: str) -> list[dict[str, Any]]:
        return [content for each, content in self.messages if each == kind]


class Manager(KernelManager):
    """Starts a kernel, of the environment's ipykernel or of an older version."""

    leaves_unread = False

    def __init__(self) -> None:
        # By default, ports that the system may give to another process before the kernel binds them.
        ports = dict(zip(port_names, free_ports(len(port_names)), strict=True))
        super().__init__(cache_ports=False, **ports)


class Client:
    """One connection to a kernel; a second one is what another browser tab has."""

    def __init__(self, manager: Manager, *, wait: bool = True) -> None:
        self._manager = manager
        self._asked_at = time.monotonic()
        self._waker: BlockingKernelClient | None = None
        self._cells: dict[str, Cell] = {}
        self._displays: dict[str, Cell | None] = {}
        self._client: BlockingKernelClient = manager.client()
        # Two with one identity would take each other's place at the kernel's socket.
        self._client.session = Session(key=manager.session.key)
        self._client.start_channels()
        if wait:
            self._client.wait_for_ready(timeout=PATIENCE_S)

    def start(self, code: str, *, has_input: bool = True) -> Cell:
        """Send a cell off and return at once; ``has_input``: this client has an input line."""
        self._asked_at = time.monotonic()
        cell = Cell(self._client.execute(code, allow_stdin=has_input))
        self._cells[cell.msg_id] = cell
        return cell

    def _read(self, waiting_for: Cell) -> None:
        """Take in the next message, of any cell."""
        try:
            message = self._receive(self._client.get_iopub_msg, PATIENCE_S)
        except queue.Empty:
            raise AssertionError(f"nothing more came after {waiting_for.messages}") from None
        self._take(message)

    def _receive(self, get: Callable[..., dict[str, Any]], join_timeout_s: float) -> dict[str, Any]:
        """Return a channel's next message. Raises queue.Empty."""
        deadline = time.monotonic() + join_timeout_s
        while True:
            if self._manager.leaves_unread and time.monotonic() - self._asked_at > _UNREAD_S:
                self._asked_at = time.monotonic()
                self._wake()
            left_s = deadline - time.monotonic()
            try:
                return get(timeout=max(0.01, min(left_s, _UNREAD_S)))
            except queue.Empty:
                if left_s <= _UNREAD_S:
                    raise

    def _wake(self) -> None:
        """Ask for something by another connection: by this one it would not be noticed either."""
        self._close_waker()
        self._waker = self._manager.client()
        self._waker.session = Session(key=self._manager.session.key)
        self._waker.start_channels(iopub=False, stdin=False, hb=False, control=False)
        self._waker.kernel_info()  # on its way when this returns: so it stays open

    def _close_waker(self) -> None:
        if self._waker is not None:
            self._waker.stop_channels()

    def _take(self, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        cell = self._cells.get(message["parent_header"].get("msg_id"))
        display = content.get("transient", {}).get("display_id")
        if display is not None:  # front ends find an update by its id, under any cell
            cell = self._displays.setdefault(display, cell)
        if cell is not None:
            cell.messages.append((kind, content))
            cell.ended |= kind == "status" and content["execution_state"] == "idle"

    def until(self, cell: Cell, holds: Callable[[], Any]) -> None:
        """Read until something about ``cell`` holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, cell.messages
            self._read(cell)

    def prompt(self) -> str:
        """Wait until the kernel asks for input, and return the prompt."""
        request = self._receive(self._client.get_stdin_msg, PATIENCE_S)
        return str(request["content"]["prompt"])

    def answer(self, text: str) -> None:
        """Type a line after :meth:`prompt`."""
        self._client.input(text)

    def type(self, text: str) -> str:
        """Wait until the kernel asks for input, type a line, and return the prompt."""
        prompt = self.prompt()
        self.answer(text)
        return prompt

    def finish(self, cell: Cell) -> Cell:
        self.until(cell, lambda: cell.ended)
        return cell

    def run(self, code: str) -> Cell:
        """Run a cell to its end."""
        return self.finish(self.start(code))

    def reply(self, cell: Cell) -> dict[str, Any]:
        """Return the kernel's reply to the execute request: what Run-All looks at."""
        while True:
            message = self._receive(self._client.get_shell_msg, PATIENCE_S)
            if message["parent_header"].get("msg_id") == cell.msg_id:
                content: dict[str, Any] = message["content"]
                return content

    def value(self, code: str) -> str:
        """Return the value of an expression as text."""
        cell = self.run(code)
        assert cell.value is not None, cell.messages
        return cell.value

    @property
    def is_busy(self) -> bool:
        """True while a cell has not ended, as far as the messages have been read."""
        return not all(cell.ended for cell in self._cells.values())

    def close(self) -> None:
        self._close_waker()
        self._client.stop_channels()


class Kernel(Client):
    """A kernel process, and the first connection to it."""

    def __init__(
        self,
        home: Path,
        folder: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
        version: str = kernels.NEWEST,
    ) -> None:
        """``version``: of ipykernel, one of :data:`tests.kernels.VERSIONS`."""
        self.home = home
        self.manager = Manager()
        self.manager.leaves_unread = version in kernels.LEAVE_UNREAD
        around = {name: value for name, value in os.environ.items() if name not in _FRONT_ENDS}
        own = {"HYDROGEN_MAGIC_HOME": str(home), **kernels.environment(version)}
        self._environment = {**around, **own, **environment}
        self.manager.start_kernel(env=self._environment, cwd=str(folder))
        super().__init__(self.manager)

    @property
    def pid(self) -> int:
        pid = self.manager.provisioner.pid  # type: ignore[union-attr]
        assert pid is not None
        return int(pid)

    def load(self) -> str:
        """Load the extension; return what it printed."""
        cell = self.run(kernels.LOAD)
        assert not cell.error, cell.error
        return cell.stream()

    def second_client(self) -> Client:
        return Client(self.manager)

    def interrupt(self) -> None:
        """Do what the stop button does."""
        self.manager.interrupt_kernel()

    def restart(self, *, now: bool) -> None:
        """Restart it; the connection goes on to the fresh kernel."""
        self.manager.restart_kernel(now=now)
        self._cells.clear()
        self._client.wait_for_ready(timeout=PATIENCE_S)

    def revive(self) -> None:
        """Start a kernel in the place of one that has ended."""
        process = self.manager.provisioner.process  # type: ignore[union-attr]
        if process is not None:
            process.wait()
        self.manager.start_kernel(env=self._environment)
        self._cells.clear()
        self._client.wait_for_ready(timeout=PATIENCE_S)

    def rss_bytes(self) -> int:
        return next(processes.processes([self.pid])).rss_bytes

    def shut_down(self, *, now: bool = True) -> None:
        self.close()
        self.manager.shutdown_kernel(now=now)
        self.manager.context.destroy()
