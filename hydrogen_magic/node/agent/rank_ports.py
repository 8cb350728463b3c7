"""Ports on which ranks themselves listen, held by their agent so that no other process gets one."""

from __future__ import annotations

import socket

from hydrogen_magic.core import messages as msg
from hydrogen_magic.core import network
from hydrogen_magic.core.network import PortRange


class RankPorts:
    """The ports of one attempt's ranks.

    Each is bound, but never listens. ``SO_REUSEPORT`` lets sockets of the same user bind it too, if they have
    that option, and Linux gives connections to the one that listens.
    """

    def __init__(self, allowed: PortRange | None) -> None:
        self._allowed = allowed
        self._held: list[socket.socket] = []

    def hold(self, request: msg.HoldPorts) -> msg.PortsHeld:
        """Hold so many ports; those that were held before are released."""
        self.release()
        try:
            for _ in range(request.count):
                self._hold_one()
        except OSError as error:
            self.release()
            return msg.PortsHeld((), error.strerror or str(error))
        return msg.PortsHeld(tuple(sock.getsockname()[1] for sock in self._held))

    def _hold_one(self) -> None:
        sock = socket.socket()
        self._held.append(sock)
        network.bind(self._allowed, lambda port: sock.bind(("", port)))
        # Not before: the system would choose a port that another of our sockets has.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)

    def release(self) -> None:
        """Let others have the ports."""
        while self._held:
            self._held.pop().close()
