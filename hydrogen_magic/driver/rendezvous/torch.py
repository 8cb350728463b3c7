"""torchrun's rendezvous: the environment that ``torch.distributed.init_process_group()`` reads.

torch's own ``TCPStore`` listens on every interface without authentication, whatever address it is given.
Here the agent binds the socket (loopback on one machine) and a process beside the ranks serves the store
behind it (``master_listen_fd``, :mod:`~hydrogen_magic.node.rendezvous.connection_guard`);
``TORCHELASTIC_USE_AGENT_STORE`` makes the ranks connect only. Names and meanings of the variables:
https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections.abc import Callable

from hydrogen_magic.core.job import JobSpec, Plan
from hydrogen_magic.driver.rendezvous import Rendezvous, RendezvousInfo, ServiceSpec, VictimErrors
from hydrogen_magic.driver.rendezvous.torchrun import RANK_VARIABLES, interface, place
from hydrogen_magic.node.rendezvous import torch_address, torch_groups, torch_store

_POLL_S = 0.02
"""How soon a lone rank's first connection, or its end, is noticed."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_VICTIM_MESSAGES = (
    r"Connection closed by (remote )?peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    r"Timed out waiting \d+ms",
    "Socket Timeout",
    "[Ww]ait timeout",
    "gloo/transport",
    "connectFullMesh",
    "NCCL (error|communicator|operation)",
    "ncclRemoteError",
    "ncclSystemError",
    "collective operation timeout",
    "failed to recv, got 0 bytes",
    "Application timeout caused pair closure",
)


class TorchRendezvous(Rendezvous):
    """``torch.distributed``, as under torchrun."""

    variables = RANK_VARIABLES | {"MASTER_ADDR", "MASTER_PORT"}
    forwarded = ("CUBLAS_", "GLOO_", "NCCL_", "PYTORCH_", "TORCH_")
    launcher = "torchrun --nproc-per-node {np}"
    joining = ("init_process_group",)
    group_recovery = torch_groups.__name__
    collectives = (
        "reduce",
        "gather",
        "broadcast",
        "barrier",
        "scatter",
        "all_to_all",
        "alltoall",
        "init_process_group",
    )
    victims = VictimErrors(
        types=("DistBackendError", "DistNetworkError", "DistStoreError"),
        messages=_VICTIM_MESSAGES,
        files=("distributed_c10d",),
    )

    def prepare(
        self, plan: Plan, address: str, port: int, *, spec: JobSpec, gang: str, attempt: int
    ) -> RendezvousInfo:
        shared = {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            torch_address.STORE: f"{address}:{port}",
            "TORCHELASTIC_RUN_ID": gang,
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.retries),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }
        environments = tuple(
            {**shared, **place(slot), **interface(slot, *_INTERFACES)} for slot in plan.slots
        )
        hosts = sorted({slot.address for slot in plan.slots}) if plan.slots[0].n_nodes > 1 else []
        service = ServiceSpec(f"{torch_store.__name__}:serve_store", {"hosts": hosts})
        return RendezvousInfo(environments, service)

    def serve_here(self, held: socket.socket, over: threading.Event) -> None:
        while not select.select([held], [], [], _POLL_S)[0]:
            if over.is_set():
                return
        store = torch_store.open_store(os.dup(held.fileno()))
        over.wait()
        del store

    def undo_here(self) -> Callable[[], None]:
        had_group = torch_groups.is_joined()

        def undo() -> None:
            if torch_groups.is_joined() and not had_group:
                sys.modules["torch.distributed"].destroy_process_group()

        return undo
