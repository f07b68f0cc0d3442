"""Collectives under the names of the newest torch."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

# torch 2.13 warns of the names that are the only ones in 2.11.
all_gather_single: Any = vars(dist).get("all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Any = vars(dist).get("reduce_scatter_single", dist.reduce_scatter_tensor)
