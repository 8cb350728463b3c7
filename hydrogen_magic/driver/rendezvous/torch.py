"""torchrun's rendezvous: the environment that ``torch.distributed.init_process_group()`` reads.

torch's own ``TCPStore`` listens on every interface without authentication, whatever address it is given.
Here the agent binds the socket (loopback on one machine) and a process beside the ranks serves the store
behind it (``master_listen_fd``, :mod:`~hydrogen_magic.node.rendezvous.connection_guard`);
``TORCHELASTIC_USE_AGENT_STORE`` makes the ranks connect only. Names and meanings of the variables:
https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import math
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from hydrogen_magic.core.job import JobSpec, Plan, Slot
from hydrogen_magic.driver.rendezvous import RendezvousInfo, ServiceSpec
from hydrogen_magic.driver.rendezvous.torchrun import place
from hydrogen_magic.node.rendezvous.connection_guard import serve_guarded

__all__ = ["TorchRendezvous", "serve_store"]

_POLL_S = 0.02
"""How quickly a single rank's first connection, or its end, is noticed."""


class TorchRendezvous:
    """See :class:`hydrogen_magic.driver.rendezvous.Rendezvous`."""

    library = ""
    init_collective = ""

    def join_timeout_s(self, spec: JobSpec) -> float:
        return math.inf

    def prepare(
        self, plan: Plan, address: str, port: int, *, spec: JobSpec, gang: str, attempt: int
    ) -> RendezvousInfo:
        shared = {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": gang,
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.retries),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }
        environments = tuple({**shared, **place(slot), **_interface(slot)} for slot in plan.slots)
        hosts = sorted({slot.address for slot in plan.slots}) if plan.slots[0].n_nodes > 1 else []
        service = ServiceSpec(f"{__name__}:serve_store", {"hosts": hosts})
        return RendezvousInfo(environments, service)

    def serve_here(self, held: socket.socket, over: threading.Event) -> None:
        while not select.select([held], [], [], _POLL_S)[0]:
            if over.is_set():
                return
        store = _store(os.dup(held.fileno()))
        over.wait()
        del store

    def undo_here(self) -> Callable[[], None]:
        had_group = _has_group()

        def undo() -> None:
            if _has_group() and not had_group:
                sys.modules["torch.distributed"].destroy_process_group()

        return undo


def _has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def _interface(slot: Slot) -> Mapping[str, str]:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    return dict.fromkeys(names, slot.interface) if slot.interface else {}


def serve_store(listen_fd: int, hosts: Sequence[str] = ()) -> None:
    """Serve a ``TCPStore`` behind the bound socket until this process is ended.

    ``hosts``: addresses of other machines with ranks of the gang. torch is imported when the first rank
    connects, to save a cell without torch the time.
    """
    serve_guarded(listen_fd, _store, hosts)


def _store(listen_fd: int) -> object:
    """Return a store on the listening socket; the store owns it, including its queued connections."""
    from torch.distributed import TCPStore

    with socket.socket(fileno=os.dup(listen_fd)) as bound:
        address, port = bound.getsockname()[:2]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listen_fd
    )
