"""The owner's side of its connections: sends the gang's events, and carries out requests."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from hydrogen_magic.core import events as ev
from hydrogen_magic.core import messages as msg
from hydrogen_magic.driver.gang import Gang
from hydrogen_magic.driver.state import stragglers
from hydrogen_magic.driver.state.gang_state import GangState
from hydrogen_magic.transport import framing

_BATCH_S = 0.05
"""Events are collected for this long; a view updates ten times a second."""
_MOST_EVENTS = 2000
"""In one message: a few hundred kilobytes."""
_FLUSH_S = 5.0
"""How long a slow reader may take to receive the last events."""
_REQUESTS: Mapping[str, Callable[[Gang, int], None]] = {
    "stop": lambda gang, kill: gang.stop(bool(kill)),
    "record": lambda gang, on: gang.record(bool(on)),
    "profile": Gang.profile,
}
"""Those of the connection that has control."""


class _AttachedClient:
    """A kernel or a terminal that is attached to the gang."""

    def __init__(self, sock: socket.socket, attach: msg.Attach) -> None:
        self.sock = sock
        self.name = attach.name
        self.only_watches = attach.wants == "watch"
        self.is_lost = False
        self.sending: threading.Thread | None = None
        self.known_control: msg.Control | None = None
        """What the other end knows of who has control."""

    def send(self, report: msg.OwnerReport) -> None:
        try:
            framing.send(self.sock, report)
        except OSError:  # it has exited, or its machine is out of descriptors
            self.is_lost = True

    def hang_up(self) -> None:
        with suppress(OSError):  # it has gone
            self.sock.shutdown(socket.SHUT_RDWR)

    def send_control(self, control: msg.Control) -> None:
        """Send who has control, if that has changed."""
        if control != self.known_control:
            self.known_control = control
            self.send(control)


class OwnerServer:
    """Serves connections, each in two threads. One of them, at most, controls the gang."""

    def __init__(self, gang: Gang, listener: socket.socket) -> None:
        self._gang = gang
        self._listener = listener
        self._connections: list[_AttachedClient] = []
        """Oldest first."""
        self._controller: _AttachedClient | None = None
        self._is_hung_up = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Accept connections from now on."""
        threading.Thread(target=self._accept, name="owner", daemon=True).start()

    def serve(self, sock: socket.socket, reader: framing.FrameReader) -> None:
        """Serve one connection, of which ``reader`` may have read the beginning."""
        threading.Thread(target=self._serve, args=(sock, reader), daemon=True).start()

    @property
    def is_attended(self) -> bool:
        """Whether a kernel or a terminal is attached."""
        return bool(self._connections)

    def close(self) -> None:
        """Return when every connection has all events, or is too slow."""
        self._listener.close()
        deadline_s = time.monotonic() + _FLUSH_S
        with self._lock:
            sending = [connection.sending for connection in self._connections]
        for thread in filter(None, sending):
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def hang_up(self) -> None:
        """Close all connections: those at the other end learn that nothing more comes."""
        with self._lock:
            self._is_hung_up = True
            connections = [*self._connections]
        for connection in connections:
            connection.hang_up()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            if framing.is_of_this_user(sock):
                self.serve(sock, framing.FrameReader(sock))
            else:
                sock.close()

    # ── one connection ──

    def _serve(self, sock: socket.socket, reader: framing.FrameReader) -> None:
        with sock, suppress(ValueError, OSError):  # malformed, or lost: this connection ends
            attach = _next(reader)
            if not isinstance(attach, msg.Attach):
                return
            connection = _AttachedClient(sock, attach)
            if attach.wants == "status":
                connection.send(self._attached(connection))
                return
            try:
                self._begin(connection, is_taken=attach.wants == "take")
                while (command := _next(reader)) is not None:
                    self._take(command, connection)
            finally:
                self._end(connection)

    def _begin(self, connection: _AttachedClient, *, is_taken: bool) -> None:
        with self._lock:
            self._connections.append(connection)
            if is_taken:
                self._controller = connection
            self._pass_control_on()
        attached = self._attached(connection)
        connection.known_control = attached.control
        connection.send(attached)
        sending = threading.Thread(target=self._send_events, args=(connection,), daemon=True)
        sending.start()
        connection.sending = sending

    def _end(self, connection: _AttachedClient) -> None:
        connection.is_lost = True
        with self._lock:
            self._connections.remove(connection)
            self._pass_control_on()

    def _pass_control_on(self) -> None:
        """Give control that no connection has to the one that has waited longest."""
        if self._controller not in self._connections:
            waiting = (each for each in self._connections if not each.only_watches)
            self._controller = next(waiting, None)

    def _take(self, command: msg.OwnerCommand, connection: _AttachedClient) -> None:
        match command:
            case msg.TakeControl():
                with self._lock:
                    self._controller = connection
            case msg.AskGang(do="ask_stacks"):
                self._gang.ask_stacks()
            case msg.AskGang(do=do) if do in _REQUESTS:
                if connection is self._controller:
                    _REQUESTS[do](self._gang, command.argument)
            case _:
                raise msg.MessageError(f"unexpected {command}")

    def _send_events(self, connection: _AttachedClient) -> None:
        sent, has_ended = 0, False
        while not connection.is_lost:
            fresh = self._gang.events(sent)[:_MOST_EVENTS]
            if fresh:
                connection.send(msg.OwnerEvents(tuple(map(ev.encode, fresh))))
                sent += len(fresh)
            elif has_ended:
                if self._is_hung_up:  # it came late
                    connection.hang_up()
                return
            else:
                connection.send_control(self._control_of(connection))
                has_ended = self._gang.wait(_BATCH_S)

    def _control_of(self, connection: _AttachedClient) -> msg.Control:
        holder = self._controller
        return msg.Control(connection is holder, holder.name if holder is not None else "")

    def _attached(self, connection: _AttachedClient) -> msg.Attached:
        control, n_events = self._control_of(connection), len(self._gang.events())
        return msg.Attached(self._gang.id, control, n_events, _progress(self._gang.snapshot()))


def _next(reader: framing.FrameReader) -> msg.OwnerCommand | None:
    """Return the next command, None at the end of the connection."""
    received = framing.receive(reader)
    if received is None:
        return None
    message, fds = received
    framing.close_all(fds)
    return msg.decode(message, msg.OwnerCommand)


def _progress(state: GangState) -> float | None:
    """Return how far the slowest rank with a progress bar is, from 0 to 1; None without a bar."""
    shown = map(stragglers.progress, state.ranks)
    return min((done for done in shown if done is not None), default=None)
