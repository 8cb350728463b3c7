"""The Unix socket of JAX's coordination service, and the process that forwards connections to it."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydrogen_magic.node.rendezvous.connection_guard import forward_guarded
from hydrogen_magic.transport.stale_sockets import remove_stale

_FOLDERS = Path("/tmp")
"""Not ``$TMPDIR``: the path of a Unix socket has at most 107 bytes."""
_PREFIX, _NAME = "hydrogen_magic-jax-", "coordinator"
_UNIX = "unix:"
_STALE_S = 10.0
"""Age from which a socket that refuses connections is stale: a younger one may not listen yet."""


def socket_path(token: str, port: int) -> str:
    """Return the path of the socket behind a port of this machine; ``token``: the kernel's."""
    return str(_FOLDERS / f"{_PREFIX}{token}-{port}" / _NAME)


def forward(listen_fd: int, token: str, hosts: Sequence[str] = ()) -> None:
    """Forward connections to the coordination service of rank 0 until this process is ended.

    ``hosts``: addresses of other machines with ranks of the gang.
    """
    # Those of ranks that were killed while they waited for others.
    remove_stale(str(_FOLDERS), _PREFIX, _NAME, _STALE_S)
    with socket.socket(fileno=os.dup(listen_fd)) as bound:
        port = bound.getsockname()[1]
    forward_guarded(listen_fd, socket_path(token, port), hosts)


@contextmanager
def private_directory(bind_address: str) -> Iterator[None]:
    """Make the directory of the socket meanwhile. Once all ranks are connected, nothing looks for it again:
    JAX ends a process that loses its connection.
    """
    if not bind_address.startswith(_UNIX):
        yield
        return
    folder = Path(bind_address.removeprefix(_UNIX)).parent
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier attempt
    folder.mkdir(mode=0o700)  # raises FileExistsError if it is another user's
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
