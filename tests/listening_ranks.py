"""What ranks run that listen on ports of their own."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

PORT = "MY_PORT"
"""Variable with the rank's port."""


def listen() -> tuple[int, bool]:
    """Serve on this rank's port; return that, and whether it is held from sockets that do not share it."""
    port = int(os.environ[PORT])
    with socket.socket() as other, socket.socket() as mine:
        is_held = other.connect_ex(("127.0.0.1", port)) != 0 and not _can_bind(port)
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # for connections in TIME_WAIT
        mine.bind(("", port))
        mine.listen()
        for _ in range(8):  # all of them come here
            with socket.create_connection(("127.0.0.1", port)), mine.accept()[0]:
                pass
    return port, is_held


def _can_bind(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def listen_anywhere() -> int:
    """Return the port of a socket for other machines."""
    with socket.create_server(("", 0)) as sock:
        return int(sock.getsockname()[1])


def ports_of_groups() -> list[int]:
    """Return the ports at which this rank listens for others, with two groups of Gloo and other sockets."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    for each in (None, group):
        dist.all_reduce(torch.ones(1), group=each)
    own = [
        socket.create_server(("", 0), family=family) for family in (socket.AF_INET, socket.AF_INET6)
    ]
    found = _listening_ports()
    assert {sock.getsockname()[1] for sock in own} < set(found)
    dist.barrier()  # a rank that has ended no longer holds its ports
    return found


def ports_of_nccl() -> list[int]:
    """Return the ports at which NCCL listens for others; for this it needs no GPU."""
    import ctypes

    import nvidia.nccl

    os.environ["NCCL_SOCKET_IFNAME"] = "^lo"
    nccl = ctypes.CDLL(str(Path(*nvidia.nccl.__path__, "lib", "libnccl.so.2")))
    for _ in range(2):
        error = nccl.ncclGetUniqueId(ctypes.create_string_buffer(128))  # and listens
        assert error == 0, f"NCCL's error {error}"
    return _listening_ports()


def _listening_ports() -> list[int]:
    """Return the ports of this process's sockets that listen (proc_net_tcp.rst)."""
    mine = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            mine.add(os.readlink(f"/proc/self/fd/{fd}"))
    tables = (Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6"))
    rows = [row.split() for table in tables for row in table.splitlines()[1:]]
    own = (row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine)
    return [int(row[1].rpartition(":")[2], 16) for row in own]


def ports_of_other_sockets() -> list[int]:
    """Return the ports of sockets that are not for other machines, or are at a certain port."""
    with socket.create_server(("127.0.0.1", 0)) as free, socket.socket() as certain:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
        certain.bind(("0.0.0.0", port))
        with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
            datagrams.bind(("0.0.0.0", 0))
            every = (free, certain, datagrams)
            return [sock.getsockname()[1] for sock in every]
