"""Broadcast of a batch: rank 0 of a tensor-parallel group reads it and sends it to the others.

Order of collectives: those of `broadcast_json` for all shapes, then one broadcast of all values,
which share a dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.parallel.collectives import broadcast_json
from megatron.core.parallel.default_groups import library_call


@library_call("keys data datatype tp_group")
def broadcast_data(
    keys: Sequence[str],
    data: Mapping[str, Tensor] | None,
    datatype: torch.dtype,
    *,
    tp_group: ProcessGroup,
) -> dict[str, Tensor]:
    """Broadcast the tensors ``data[key]`` from the group's rank 0; return them on the device.

    All tensors have dtype ``datatype``.  ``data`` is ignored on the other
    ranks and may be None.  Collective over ``tp_group``.
    """
    is_source = tp_group.rank() == 0
    where = device.current()
    values = {}
    if is_source:
        assert data is not None, "the first rank of the group reads the batch"
        values = {key: data[key] for key in keys}
        for key, value in values.items():
            assert value.dtype == datatype, f"{key} is {value.dtype}, not {datatype}"
    if tp_group.size() == 1:
        return {key: value.to(where, non_blocking=True) for key, value in values.items()}
    shapes = broadcast_json([list(value.shape) for value in values.values()], tp_group)
    counts = [math.prod(shape) for shape in shapes]
    if is_source:
        flat = torch.cat([value.to(where).flatten() for value in values.values()])
    else:
        flat = torch.empty(sum(counts), dtype=datatype, device=where)
    dist.broadcast(flat, group=tp_group, group_src=0)
    parts = flat.split(counts)
    return {k: p.view(s) for k, p, s in zip(keys, parts, shapes, strict=True)}
