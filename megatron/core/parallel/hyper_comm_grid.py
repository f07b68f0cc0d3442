"""Rank grid with arbitrary named axes, for programs that place several modules on one world.

`create_process_groups` creates all groups of the usual layout at once.  A HyperCommGrid creates
single groups on request, over any combination of its axes and over a part of the world.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod

import numpy as np
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
            raise ValueError(f"len(shape) {list(shape)} != len(dim_names) {list(dim_names)}")
        if len(set(dim_names)) != len(dim_names):
            raise ValueError(f"the axes {list(dim_names)} must have different names")
        if rank_offset < 0:
            raise ValueError(f"rank_offset must be non-negative, got {rank_offset}")
        self.shape = list(shape)
        self.dim_names = list(dim_names)
        self.rank_offset = rank_offset
        self.backend = backend
        self._grid = RankGrid(dict(zip(dim_names, shape, strict=True)), rank_offset)
        self.size = self._grid.world_size
        world_size = _world_size()
        if rank_offset + self.size > world_size:
            raise RuntimeError(
                f"Grid shape {self.shape} is over sized with world size {world_size} and "
                f"rank offset {rank_offset}"
            )
        self._pgs: dict[str, ProcessGroup | None] = {}

    def create_pg(self, dims: str | Sequence[str], **kwargs: object) -> ProcessGroup | None:
        """Create the groups that span ``dims``; return this rank's group, None outside the grid.

        Collective over the world.  ``kwargs`` are passed to torch, for example ``timeout`` and
        ``group_desc``.  Raises KeyError if the groups exist already.
        """
        ordered, key = self._order_dims(dims)
        if key in self._pgs:
            raise KeyError(f"Process group {dims} has already been created: call get_pg")
        mine: ProcessGroup | None
        mine, _ = dist.new_subgroups_by_enumeration(
            self._gen_rank_enum(ordered), backend=self.backend, **kwargs
        )
        self._pgs[key] = mine
        return mine

    def get_pg(self, dims: str | Sequence[str]) -> ProcessGroup | None:
        """Return this rank's group that `create_pg` has created; ``dims`` may be in any order.

        Raises KeyError if the groups do not exist.
        """
        _, key = self._order_dims(dims)
        if key not in self._pgs:
            raise KeyError(f"Process group for {key} hasn't been created. Call create_pg first.")
        return self._pgs[key]

    def _gen_rank_enum(self, dims: Sequence[str]) -> list[list[int]]:
        """Return the ranks of every group that spans ``dims``, of which the last varies fastest."""
        names = self.dim_names[::-1]
        ranks = np.arange(self.rank_offset, self.rank_offset + self.size).reshape(self.shape[::-1])
        order = [names.index(name) for name in (*(n for n in names if n not in dims), *dims)]
        size = prod(self._grid.sizes[name] for name in dims)
        groups: list[list[int]] = ranks.transpose(order).reshape(-1, size).tolist()
        return groups

    def _order_dims(self, dims: str | Sequence[str]) -> tuple[list[str], str]:
        """Return ``dims`` from the slowest axis to the fastest, also joined by hyphens."""
        wanted = [dims] if isinstance(dims, str) else list(dims)
        unknown = [name for name in wanted if name not in self.dim_names]
        if unknown or not wanted or len(set(wanted)) != len(wanted):
            raise ValueError(f"{wanted} are not different axes of {self.dim_names}")
        ordered = [name for name in reversed(self.dim_names) if name in wanted]
        return ordered, "-".join(ordered)


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    raise RuntimeError(
        "Cannot determine world size: set WORLD_SIZE, or initialize torch.distributed before "
        "creating HyperCommGrid"
    )
