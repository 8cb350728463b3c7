"""Receives messages of pages while a cell of ours blocks the kernel's main thread.

A Jupyter kernel reads messages of pages from one stream, its shell channel, and passes them to the main
thread, where they wait until the running cell has ended: a Stop arrives when there is nothing left to stop,
and a page that was reloaded meanwhile cannot request the list of widgets. While gangs are shown, a
:class:`ShellInterceptor` intercepts that stream. It handles messages for a gang's view at once, and while a
cell waits for a gang, also the requests of a page that reconnects. It forwards all other messages unchanged
and in order: code cells are not affected.

- ipykernel 7 reads the stream in a thread of its own, so the interceptor works in that thread.
  It needs neither a front end with support for subshells, nor the right subshell (7.4 sends comm messages
  back to the shell that last used the comm, which is the blocked one).
- ipykernel 6 reads it in the main thread: the waiting cell calls :meth:`ShellInterceptor.pump`.

If a kernel lacks the required interfaces, :func:`interceptor_of` is None, and messages arrive when the kernel
is idle; a page without an answer to a Stop interrupts the kernel through its server instead.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

JupyterMessage = dict[str, Any]
"""A Jupyter message as ``jupyter_client`` unpacks it."""

_CONTROL = "jupyter.widget.control"
"""Target of the comm by which a page asks for the state of all widgets."""
_QUESTIONS = ("kernel_info_request", "comm_info_request")
"""The first request of a page, before it shows anything of the kernel's."""
_NEEDED = ("_recv_callback", "on_recv", "flush", "io_loop")
"""Attributes of the shell stream; the first is private, and needed to restore the exact handler."""
_INSTALL_S = 2.0
"""More than a kernel's thread ever takes to respond."""
_PUMPED = 64
"""Messages read at a time: a burst must not separate a gang's cell from its gang."""


@dataclass(frozen=True)
class _CommRoute:
    """The receiver of one comm's messages."""

    receive: Callable[[JupyterMessage], None]
    context: Context
    """Context of the cell: output of a thread belongs under it."""
    cell: JupyterMessage
    """The request that the cell runs for."""
    blocking: bool


class ShellInterceptor:
    """Takes messages for views out of a kernel's shell stream. One per kernel, see the module."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._stream = kernel.shell_stream
        self._lines: dict[str, _CommRoute] = {}
        self._onward: Callable[[Any], Any] | None = None
        self._lock = threading.Lock()
        self.is_pumped = not getattr(kernel, "shell_channel_thread", None)
        """Whether :meth:`pump` has to be called."""

    def connect(
        self, comm_id: str, receive: Callable[[JupyterMessage], None], *, blocking: bool
    ) -> None:
        """Pass messages of a comm to ``receive``, which must not wait, from any thread.

        Called by the cell; with ``blocking``, the kernel counts as busy with it until :meth:`disconnect`.
        """
        cell = self._kernel.get_parent("shell")
        with self._lock:
            self._lines[comm_id] = _CommRoute(receive, copy_context(), cell, blocking)
        self._in_stream_thread(self._install)

    def disconnect(self, comm_id: str) -> None:
        """Return the comm to the kernel. A second call has no effect."""
        with self._lock:
            self._lines.pop(comm_id, None)
        self._in_stream_thread(self._remove_when_unused)

    def pump(self) -> None:
        """Read messages that have arrived, in the kernel's main thread."""
        if self.is_pumped and threading.current_thread() is threading.main_thread():
            self._stream.flush(limit=_PUMPED)

    # ── in the stream's own thread ──

    def _in_stream_thread(self, act: Callable[[], None]) -> None:
        if not self.is_pumped:
            done = threading.Event()
            self._stream.io_loop.add_callback(act)
            self._stream.io_loop.add_callback(done.set)
            done.wait(_INSTALL_S)
        elif threading.current_thread() is threading.main_thread():
            act()
        else:
            self._stream.io_loop.add_callback(act)

    def _install(self) -> None:
        if self._onward is None and self._stream._recv_callback is not None:
            self._onward = self._stream._recv_callback
            self._stream.on_recv(self, copy=False)

    def _remove_when_unused(self) -> None:
        # Another handler installed since refers to ours: then ours stays, and forwards all
        # messages.
        if not self._lines and self._stream._recv_callback is self:
            self._stream.on_recv(self._onward, copy=False)
            self._onward = None

    def __call__(self, frames: list[Any]) -> Any:
        """Handle one message of the stream."""
        onward = self._onward
        assert onward is not None, "nothing is taken from a stream before it is installed"
        try:
            idents, parts = self._kernel.session.feed_identities(frames, copy=False)
            line = self._line_for(parts)
        except Exception:  # a page may send anything: the kernel itself reports malformed messages
            line = None
        if line is None:
            return onward(frames)
        try:
            # Verifies the signature, which is only possible once: the kernel would reject it as a
            # duplicate.
            message = self._kernel.session.deserialize(parts, content=True, copy=False)
            self._answer(line, idents, message)
        except Exception:
            self._kernel.log.exception("hydrogen_magic could not answer a page")
        return None

    def _line_for(self, parts: list[Any]) -> _CommRoute | None:
        """Return the receiver of a message, None if the kernel handles it."""
        unpack = self._kernel.session.unpack
        header = unpack(parts[1].bytes)
        kind = header["msg_type"]
        blocked = self._blocked
        if kind == "comm_msg":
            comm_id = unpack(parts[4].bytes).get("comm_id", "")
            found = self._lines.get(comm_id)
            return found or (blocked if self._is_control(comm_id) else None)
        if header.get("subshell_id") is not None:  # it has its own free thread
            return None
        if kind == "comm_open":
            return blocked if unpack(parts[4].bytes).get("target_name") == _CONTROL else None
        return blocked if kind in _QUESTIONS else None

    @property
    def _blocked(self) -> _CommRoute | None:
        """A view whose cell blocks the main thread."""
        return next((line for line in list(self._lines.values()) if line.blocking), None)

    def _is_control(self, comm_id: str) -> bool:
        comm = self._kernel.comm_manager.comms.get(comm_id)
        return comm is not None and comm.target_name == _CONTROL

    # ── answering ──

    def _answer(self, line: _CommRoute, idents: Any, message: JupyterMessage) -> None:
        with self._busy_with(message):
            # A copy: a context can only be entered once at a time.
            line.context.copy().run(self._handle, line, idents, message)

    def _handle(self, line: _CommRoute, idents: Any, message: JupyterMessage) -> None:
        kind = message["header"]["msg_type"]
        if kind in _QUESTIONS:
            _run_to_end(self._kernel.shell_handlers[kind](self._stream, idents, message))
        elif kind == "comm_open":
            self._kernel.comm_manager.comm_open(self._stream, idents, message)
        elif message["content"]["comm_id"] in self._lines:
            line.receive(message)
        else:
            comm = self._kernel.comm_manager.comms[message["content"]["comm_id"]]
            # Not handle_msg, which runs cell hooks: matplotlib would draw, in this thread.
            (getattr(comm, "_msg_callback", None) or comm.handle_msg)(message)

    @contextmanager
    def _busy_with(self, message: JupyterMessage) -> Iterator[None]:
        """Report that ``message`` is being handled, as the kernel does, and then that the cell still runs.

        A page shows the last state that it received.
        """
        self._send_status("busy", message)
        try:
            yield
        finally:
            self._send_status("idle", message)
            with self._lock:  # after a disconnect, the cell's own last message must stay last
                blocked = self._blocked
                if blocked is not None:
                    self._send_status("busy", blocked.cell)

    def _send_status(self, state: str, parent: JupyterMessage) -> None:
        self._kernel.session.send(
            self._kernel.iopub_socket,
            "status",
            {"execution_state": state},
            parent=parent,
            ident=b"status",
        )


def _run_to_end(result: Any) -> None:
    """Run a handler that is a coroutine only formally and never waits."""
    if not inspect.iscoroutine(result):
        return
    try:
        result.send(None)
    except StopIteration:
        return
    result.close()
    raise RuntimeError("a message handler of this kernel is blocked: a page gets no answer")


@lru_cache(maxsize=1)
def interceptor_of(kernel: Any) -> ShellInterceptor | None:
    """Return the kernel's one interceptor; None for a kernel with other interfaces."""
    return ShellInterceptor(kernel) if _fits(kernel) else None


def _fits(kernel: Any) -> bool:
    stream = getattr(kernel, "shell_stream", None)
    needed = ("session", "comm_manager", "shell_handlers", "iopub_socket", "get_parent", "log")
    has_all = all(hasattr(kernel, name) for name in needed)
    return has_all and all(hasattr(stream, name) for name in _NEEDED)
