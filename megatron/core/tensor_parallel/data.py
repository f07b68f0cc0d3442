"""Broadcast of a batch: rank 0 of a tensor-parallel group reads it and sends it to the others.

Order of collectives: one broadcast of all shapes, then one of all values, which share a dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core import device

_MAX_DIMS = 5


def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, Tensor] | None,
    datatype: torch.dtype,
    *,
    tp_group: ProcessGroup,
) -> dict[str, Tensor]:
    """Broadcast the tensors ``data[key]`` from the group's rank 0; return them on the device.

    All tensors have dtype ``datatype`` and at most 5 dimensions.  ``data`` is ignored on the other
    ranks and may be None.  Collective over ``tp_group``.
    """
    is_source, where = tp_group.rank() == 0, device.current()
    if is_source:
        assert data is not None, "the first rank of the group reads the batch"
        for key in keys:
            assert data[key].dtype == datatype, f"{key} is {data[key].dtype}, not {datatype}"
    if tp_group.size() == 1 and data is not None:
        return {key: data[key].to(where, non_blocking=True) for key in keys}
    source = dist.get_global_rank(tp_group, 0)
    sizes = torch.full((len(keys), _MAX_DIMS), -1, dtype=torch.int64)
    if is_source and data is not None:
        for row, key in zip(sizes, keys, strict=True):
            row[: data[key].dim()] = torch.tensor(data[key].shape)
    sizes = sizes.to(where)
    dist.broadcast(sizes, source, group=tp_group)
    shapes = [[n for n in row if n >= 0] for row in sizes.tolist()]
    counts = [math.prod(shape) for shape in shapes]
    if is_source and data is not None:
        flat = torch.cat([data[key].to(where).flatten() for key in keys])
    else:
        flat = torch.empty(sum(counts), dtype=datatype, device=where)
    dist.broadcast(flat, source, group=tp_group)
    parts = flat.split(counts)
    return {k: p.view(s) for k, p, s in zip(keys, parts, shapes, strict=True)}
