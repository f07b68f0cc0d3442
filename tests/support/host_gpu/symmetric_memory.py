"""torch's GEMMs over symmetric memory, computed with plain collectives where there is none.

They assert what torch's implementations and cuBLAS need (torch/distributed/_symmetric_memory in
torch 2.11 and 2.13), divide the GEMM by ranks as torch does, and add the parts in its order.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torchs
from torch import Tensor
from torch.distributed import ProcessGroup

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)
calls: list[str] = []  # names of the operations that have run


def register(key: str) -> torch.library.Library:
    """Register the operations for a dispatch key, as long as the result is kept."""
    library = torch.library.Library("symm_mem", "IMPL")
    for function in (
        fused_all_gather_matmul,
        fused_all_gather_scaled_matmul,
        fused_matmul_reduce_scatter,
        fused_scaled_matmul_reduce_scatter,
    ):
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


def fused_all_gather_scaled_matmul(
    a: Tensor,
    matrices: list[Tensor],
    scale: Tensor,
    scales: list[Tensor],
    gather_dim: int,
    group_name: str,
    biases: list[Tensor | None],
    result_scales: list[Tensor | None],
    out_dtypes: list[Any],
    use_fast_accum: list[bool],
) -> tuple[Tensor, list[Tensor]]:
    calls.append("scaled gather")
    assert gather_dim == 0
    assert {len(scales), len(biases), len(out_dtypes), len(use_fast_accum)} == {len(matrices)}
    assert result_scales == [None] * len(matrices), "cuBLAS scales results in fp8 only"
    # torch takes [.., 1] for one scale per row of a shard.
    assert not (scale.dim() and scale.shape[:-1] == a.shape[:-1] and scale.shape[-1] == 1)
    group = _group(group_name)
    gathered = _gathered(a.view(torch.uint8), group).view(a.dtype)
    dtypes = _dtypes(out_dtypes)
    products = []
    for matrix, other, bias, dtype in zip(matrices, scales, biases, dtypes, strict=True):
        _check(a, matrix, scale, other, dtype)
        is_half = bias is not None and bias.dtype == dtype and dtype.itemsize == 2
        assert bias is None or is_half, "cuBLAS adds a bias of 16 bits to a result of that dtype"
        parts = gathered.chunk(group.size())
        products.append(torch.cat([_scaled(x, matrix, scale, other, dtype, bias) for x in parts]))
    return gathered, products


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


def fused_scaled_matmul_reduce_scatter(
    a: Tensor,
    matrix: Tensor,
    scale: Tensor,
    other: Tensor,
    reduce_op: str,
    scatter_dim: int,
    scatter_dim_of_rows: int,
    group_name: str,
    output_shape: list[int],
    bias: Tensor | None = None,
    result_scale: Tensor | None = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> Tensor:
    calls.append("scaled scatter")
    assert (reduce_op, scatter_dim, scatter_dim_of_rows) == ("sum", 0, 0)
    assert bias is None
    assert result_scale is None
    (dtype,) = _dtypes([out_dtype])
    _check(a, matrix, scale, other, dtype)
    assert list(output_shape) == [a.shape[0], matrix.shape[1]], "the shape before the reduction"
    group = _group(group_name)
    assert len(a) % group.size() == 0
    parts = [_scaled(part, matrix, scale, other, dtype) for part in a.chunk(group.size())]
    return _summed(parts, group)


def _check(a: Tensor, matrix: Tensor, scale: Tensor, other: Tensor, dtype: torch.dtype) -> None:
    """Assert what ``_scaled_mm`` of a GPU needs for [m, k] x [k, n] with one scale each."""
    assert a.dim() == matrix.dim() == 2
    assert a.dtype in _FP8
    assert matrix.dtype in _FP8
    assert torch.float8_e4m3fn in (a.dtype, matrix.dtype), "cuBLAS has no product of two e5m2"
    assert a.is_contiguous(), "shards are copied as one block"
    assert matrix.stride(0) == 1, "columns of adjacent values"
    assert not a.shape[1] % 16, "cuBLAS needs k in multiples of 16"
    assert not matrix.shape[1] % 16, "cuBLAS needs n in multiples of 16"
    for one in (scale, other):
        assert one.dtype == torch.float32
        assert one.numel() == 1
    assert dtype in _OUTPUTS


def _scaled(
    a: Tensor,
    matrix: Tensor,
    scale: Tensor,
    other: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    return torch._scaled_mm(a, matrix, scale_a=scale, scale_b=other, bias=bias, out_dtype=dtype)


def _dtypes(found: list[Any]) -> list[torch.dtype]:
    """Return dtypes; the dispatcher passes those of a list as numbers of ``c10::ScalarType``."""
    dtypes: Any = torchs._maybe_convert_scalar_types_to_dtypes(found)
    assert None not in dtypes, "the result would have the dtype of the codes"
    return list(dtypes)


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
