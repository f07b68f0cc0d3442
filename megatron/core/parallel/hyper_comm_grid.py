"""Rank grid with arbitrary named axes, for programs that place several modules on one world.

`create_process_groups` creates all groups of the usual layout at once.  A HyperCommGrid creates
single groups on request, over any combination of its axes and over a part of the world.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron.core.parallel.rank_grid import RankGrid


class HyperCommGrid:
    """Grid of the ranks ``rank_offset`` to ``rank_offset + size``; the first axis varies fastest.

    >>> grid = HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"])  # doctest: +SKIP
    >>> dp_cp = grid.create_pg(["dp", "cp"])  # doctest: +SKIP
    """

    def __init__(
        self,
        shape: Sequence[int],
        dim_names: Sequence[str],
        rank_offset: int = 0,
        backend: str | None = None,
    ) -> None:
        """Lay out the ranks; ``backend`` None: groups have the backend of the default group.

        Raises ValueError for an invalid shape, RuntimeError if the grid exceeds the world.
        """
        if len(shape) != len(dim_names):
            raise ValueError(f"{len(shape)} sizes {list(shape)} for {len(dim_names)} names")
        if len(set(dim_names)) != len(dim_names) or rank_offset < 0:
            raise ValueError(f"axes {list(dim_names)} from rank {rank_offset}: names differ, >= 0")
        self.shape = list(shape)
        self.dim_names = list(dim_names)
        self.rank_offset = rank_offset
        self.backend = backend
        self._grid = RankGrid(dict(zip(dim_names, shape, strict=True)), rank_offset)
        self.size = self._grid.world_size
        if rank_offset + self.size > dist.get_world_size():
            raise RuntimeError(
                f"a grid of shape {self.shape} from rank {rank_offset} needs "
                f"{rank_offset + self.size} ranks, the world has {dist.get_world_size()}"
            )
        self._groups: dict[tuple[str, ...], ProcessGroup | None] = {}

    def create_pg(self, dims: str | Sequence[str], **kwargs: object) -> ProcessGroup | None:
        """Create the groups that span ``dims``; return this rank's group, None outside the grid.

        Collective over the world.  ``kwargs`` are passed to torch, for example ``timeout`` and
        ``group_desc``.  Raises KeyError if the groups exist already.
        """
        key = self._key(dims)
        if key in self._groups:
            raise KeyError(f"the groups of {'-'.join(key)} exist already: get_pg gives them")
        kwargs.setdefault("group_desc", "_".join(key))
        mine: ProcessGroup | None
        mine, _ = dist.new_subgroups_by_enumeration(
            self.get_rank_enum(key), backend=self.backend, **kwargs
        )
        self._groups[key] = mine
        return mine

    def get_pg(self, dims: str | Sequence[str]) -> ProcessGroup | None:
        """Return this rank's group that `create_pg` has created; ``dims`` may be in any order.

        Raises KeyError if the groups do not exist.
        """
        key = self._key(dims)
        if key not in self._groups:
            raise KeyError(f"no groups of {'-'.join(key)}: create_pg comes first")
        return self._groups[key]

    def get_rank_enum(self, dims: str | Sequence[str]) -> list[list[int]]:
        """Return the world ranks of every group that spans ``dims``."""
        return self._grid.groups(*self._key(dims))

    def _key(self, dims: str | Sequence[str]) -> tuple[str, ...]:
        """Return ``dims`` in the grid's order."""
        wanted = [dims] if isinstance(dims, str) else list(dims)
        unknown = [name for name in wanted if name not in self.dim_names]
        if unknown or not wanted or len(set(wanted)) != len(wanted):
            raise ValueError(f"{wanted} is no choice among the axes {self.dim_names}")
        return tuple(name for name in self.dim_names if name in wanted)
