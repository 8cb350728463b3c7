"""torchrun's variables for a rank's place, which :func:`hydrogen_magic.rank` and most code read.

Names and meanings: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

from hydrogen_magic.core.job import Slot

RANK_VARIABLES = frozenset(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"))
"""Those of :func:`place` by which ranks of any library know who they are; users must not set them."""


def interface(slot: Slot, *variables: str) -> dict[str, str]:
    """Return ``variables`` with the network interface that faces the other hosts, if there are others."""
    return dict.fromkeys(variables, slot.interface) if slot.interface else {}


def place(slot: Slot) -> dict[str, str]:
    """Return the variables for a rank's place, without those for finding other ranks."""
    environment = {
        "RANK": slot.rank,
        "LOCAL_RANK": slot.local_rank,
        "WORLD_SIZE": slot.world_size,
        "LOCAL_WORLD_SIZE": slot.local_world_size,
        "GROUP_RANK": slot.node_rank,
        "GROUP_WORLD_SIZE": slot.n_nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": slot.rank,
        "ROLE_WORLD_SIZE": slot.world_size,
    }
    return {name: str(value) for name, value in environment.items()}
