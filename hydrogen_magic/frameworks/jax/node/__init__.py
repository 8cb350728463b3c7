"""JAX on machines with ranks: its coordinator's socket, and the observers of its functions."""

from __future__ import annotations

ADDRESS = "JAX_COORDINATOR_ADDRESS"
"""Variable with the address to which ranks connect."""
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
"""Variable with the address on which rank 0 serves the coordination service."""
INITIALIZE = "jax.distributed.initialize"
"""The function in which ranks wait for all others at the start."""
INTERFACE = "GLOO_SOCKET_IFNAME"
"""Variable with the network interface of Gloo, as torch names it."""
MULTIHOST_COLLECTIVES = (
    "assert_equal",
    "broadcast_one_to_all",
    "process_allgather",
    "sync_global_devices",
)
"""Functions of ``jax.experimental.multihost_utils`` that wait for all ranks."""
