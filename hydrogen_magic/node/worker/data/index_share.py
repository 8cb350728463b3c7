"""Which items of common data a rank gets."""

from __future__ import annotations

from dataclasses import dataclass

from hydrogen_magic.core.units import counted


@dataclass(frozen=True)
class IndexShare:
    """The indices of one rank's share."""

    rank: int
    world_size: int
    drop_last: bool

    def bounds(self, n_items: int) -> tuple[int, int]:
        """Return start and end of this rank's slice of ``n_items``.

        If items are on two ranks, the slices overlap: each stays one slice, and needs no copy. Raises
        ValueError if there are fewer items than ranks.
        """
        if n_items < self.world_size > 1:
            raise ValueError(
                f"hm.shard() got {counted(n_items, 'item')} for {self.world_size} ranks: every rank needs at "
                "least one; use fewer ranks, or use all of the data on every rank"
            )
        if self.drop_last:
            size = n_items // self.world_size
            return self.rank * size, (self.rank + 1) * size
        size = -(-n_items // self.world_size)
        start = self.rank * n_items // self.world_size
        return start, start + size
