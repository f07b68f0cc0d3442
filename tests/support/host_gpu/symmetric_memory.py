"""torch's GEMMs over symmetric memory, computed with plain collectives where there is none.

They assert what torch's implementations need (torch/distributed/_symmetric_memory in torch 2.11 and
2.13), divide the GEMM by ranks as torch does, and add the parts in its order.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torchs
from torch import Tensor
from torch.distributed import ProcessGroup

calls: list[str] = []  # names of the operations that have run


def register(key: str) -> torch.library.Library:
    """Register the operations for a dispatch key, as long as the result is kept."""
    library = torch.library.Library("symm_mem", "IMPL")
    for function in (fused_all_gather_matmul, fused_matmul_reduce_scatter):
        library.impl(function.__name__, function, key, allow_override=True)
    return library


def let_ranks_share_memory() -> None:
    """Answer as torch does where the devices of a group can map each other's memory."""
    workspace: Any = SimpleNamespace()
    torchs.enable_symm_mem_for_group = lambda group_name: None
    torchs.get_symm_mem_workspace = lambda group_name, min_size: workspace


def fused_all_gather_matmul(
    a: Tensor, matrices: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    calls.append("gather")
    assert gather_dim == 0
    assert a.is_contiguous(), "another layout is copied first"
    group = _group(group_name)
    assert all(matrix.dim() == 2 and matrix.dtype == a.dtype for matrix in matrices)
    gathered = _gathered(a, group)
    parts = gathered.flatten(0, -2).chunk(group.size())
    products = [torch.cat([part @ matrix for part in parts]) for matrix in matrices]
    shaped = [y.view(*gathered.shape[:-1], y.shape[-1]) for y in products]
    return gathered if return_A else None, shaped


def fused_matmul_reduce_scatter(
    a: Tensor, matrix: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    calls.append("scatter")
    assert (reduce_op, scatter_dim) == ("sum", 0)
    assert a.is_contiguous(), "another layout is copied first"
    assert matrix.dim() == 2
    assert matrix.dtype == a.dtype
    group = _group(group_name)
    parts = [part @ matrix for part in a.flatten(0, -2).chunk(group.size())]
    y = _summed(parts, group)
    return y.view(a.shape[0] // group.size(), *a.shape[1:-1], y.shape[-1])


def _group(name: str) -> ProcessGroup:
    group: ProcessGroup = dist.distributed_c10d._resolve_process_group(name)
    return group


def _gathered(x: Tensor, group: ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x, group=group)
    return out


def _summed(parts: list[Tensor], group: ProcessGroup) -> Tensor:
    """Return the sum over ranks of the part for this rank."""
    sent = torch.stack(parts)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.sum(0)
