"""Collectives under the names of the newest torch."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

# torch 2.13 warns of the names that are the only ones in 2.11.
_InOneTensor = Callable[..., dist.Work | None]
all_gather_single: _InOneTensor = vars(dist).get("all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: _InOneTensor = vars(dist).get(
    "reduce_scatter_single", dist.reduce_scatter_tensor
)
