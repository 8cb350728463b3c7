"""torch's ``TCPStore``, served beside the ranks behind a socket that the agent has bound."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from hydrogen_magic.node.rendezvous.connection_guard import serve_guarded


def serve_store(listen_fd: int, hosts: Sequence[str] = ()) -> None:
    """Serve a ``TCPStore`` behind the bound socket until this process is ended.

    ``hosts``: addresses of other machines with ranks of the gang.
    torch is imported when the first rank connects: a cell that never connects does not import it.
    """
    serve_guarded(listen_fd, open_store, hosts)


def open_store(listen_fd: int) -> object:
    """Return a store on the listening socket, which it takes over, backlog and all."""
    from torch.distributed import TCPStore

    with socket.socket(fileno=os.dup(listen_fd)) as bound:
        address, port = bound.getsockname()[:2]
    options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listen_fd}
    try:
        return TCPStore(address, port, **options)
    except NotImplementedError:  # by libuv in torch 2.6
        return TCPStore(address, port, **options, use_libuv=False)
