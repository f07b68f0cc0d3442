"""Global norms and zero counts of a model that is sharded over ranks.

Each parameter counts once: copies are skipped, and a parameter that all tensor-parallel ranks hold
counts on the first of them.  Squares are added in fp32 within a block and in fp64 over blocks, so
that a norm hardly depends on the sharding (one running fp32 sum over the 19 M values of a small
embedding is off by 1e-3).

Collectives: one all-reduce over mp, and one over tp_ep_pp if experts have other groups.  If
data-parallel ranks hold different parts (``is_sharded``), one over intra_dist_opt instead.  Every
rank must call them, also a rank without parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from megatron.core import device
from megatron.core.device import cpu_kernels
from megatron.core.distributed.data_parallel_base import DataParallelBase
from megatron.core.optimizer.param_groups import trainable_parameters
from megatron.core.parallel.collectives import all_reduce_over
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import ParamInfo, info_of, local_part

_BLOCK = 2**12
_PIECE = 2**14


def counts_here(info: ParamInfo, groups: ProcessGroupCollection) -> bool:
    """Return whether this rank counts the parameter: exactly one of the ranks with a copy does."""
    tp_group = groups.expt_tp if info.is_expert else groups.tp
    return not info.is_duplicate and (not info.counts_once_per_tp_group or tp_group.rank() == 0)


def global_norm(
    tensors: Iterable[tuple[ParamInfo, Tensor]],
    groups: ProcessGroupCollection,
    *,
    is_sharded: bool = False,
) -> float:
    """Return the L2 norm over all parameters of the model.  Collective over the model's ranks.

    The host waits for the device.
    """
    return math.sqrt(float(squared_norm(tensors, groups, is_sharded=is_sharded)))


def squared_norm(
    tensors: Iterable[tuple[ParamInfo, Tensor]],
    groups: ProcessGroupCollection,
    *,
    is_sharded: bool = False,
) -> Tensor:
    """Return the square of the L2 norm over all parameters of the model, in fp64 on the device.

    Collective over the model's ranks.  The result is not finite if any value on any rank is not,
    even in a copy that does not count.
    """
    dense: list[Tensor] = []
    expert: list[Tensor] = []
    elsewhere: list[Tensor] = []
    for info, tensor in tensors:
        kind = expert if info.is_expert else dense
        (kind if counts_here(info, groups) else elsewhere).append(tensor)
    squares = torch.stack([sum_of_squares(dense), sum_of_squares(expert)])
    if elsewhere:
        # 0 * inf and 0 * NaN are NaN: this adds nothing unless a copy that does not count is
        # broken.
        squares = squares + 0.0 * sum_of_squares(elsewhere)
    return _sum_over_model(squares, groups, is_sharded)


def count_zeros(
    tensors: Iterable[tuple[ParamInfo, Tensor]],
    groups: ProcessGroupCollection,
    *,
    is_sharded: bool = False,
) -> int:
    """Count values that are exactly zero, without vocabulary padding.

    Collective over the same ranks as `global_norm`.
    """
    counts = torch.zeros(2, dtype=torch.int64, device=device.current())
    for info, tensor in tensors:
        if counts_here(info, groups):
            for _, part in info.pieces(tensor):
                counts[int(info.is_expert)] += part.numel() - torch.count_nonzero(part)
    return int(_sum_over_model(counts, groups, is_sharded))


def calc_params_l2_norm(model_chunks: Sequence[nn.Module], groups: ProcessGroupCollection) -> float:
    """Return the L2 norm of the model's parameters in the dtype in which layers compute.

    Collective over the same ranks as `global_norm`, and over data-parallel ranks.
    """
    for chunk in model_chunks:
        if isinstance(chunk, DataParallelBase):
            chunk.finish_param_sync()
    params = [(info_of(p), local_part(p.detach())) for _, p in trainable_parameters(model_chunks)]
    return global_norm(
        ((info, part.to(info.dtype or part.dtype)) for info, part in params),
        groups,
        is_sharded=any(info.part is not None for info, _ in params),
    )


def gradient_divisor(squares: Tensor, scale: float, max_norm: float) -> Tensor:
    """Return by what to divide gradients, to unscale and to clip them, in fp64 on the device.

    ``squares``: of the norm of scaled gradients.  The coefficient of clipping is
    min(1, max_norm / (norm + 1e-6)), or 1 if ``max_norm`` is 0 or less.
    """
    if max_norm <= 0.0:
        return torch.full_like(squares, scale)
    # Tensors divide tensors: a number is divided by a tensor as the product with a reciprocal.
    limit = torch.full_like(squares, max_norm)
    coefficient = (limit / (squares.sqrt() / scale + 1.0e-6)).clamp(max=1.0)
    return torch.full_like(squares, scale) / coefficient


@torch.no_grad()
def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares over all tensors, as an fp64 scalar on the device."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device.current())
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    if device.is_cuda(tensors[0].device):
        return _sum_of_squared(torch.stack(torch._foreach_norm(list(tensors), 2, dtype)))
    if all(t.is_contiguous() and cpu_kernels.take(t) for t in tensors):
        return torch.cat([_squares_of_pieces(t) for t in tensors]).sum()
    in_order = sorted(tensors, key=lambda t: t.numel() <= _BLOCK)
    blocks = [norms for tensor in in_order for norms in _norms_of_blocks(tensor, dtype)]
    return _sum_of_squared(torch.cat(blocks)) if blocks else tensors[0].new_zeros(()).double()


def _sum_of_squared(norms: Tensor) -> Tensor:
    return norms.double().square().sum()


def _squares_of_pieces(tensor: Tensor) -> Tensor:
    """Return fp64 sums of squares of pieces of ``tensor``; the kernel reads it once."""
    sums = tensor.new_empty(-(-tensor.numel() // _PIECE), dtype=torch.float64)
    cpu_kernels.run(
        "sums_of_squares",
        [tensor, sums],
        format=tensor.dtype,
        sizes=(_PIECE, _BLOCK),
        count=tensor.numel(),
        grain=_PIECE,
    )
    return sums


def _norms_of_blocks(tensor: Tensor, dtype: torch.dtype) -> list[Tensor]:
    flat = tensor.reshape(-1)
    whole, rest = flat.split([flat.numel() // _BLOCK * _BLOCK, flat.numel() % _BLOCK])
    # Convert a few blocks at a time, so that the fp32 copies stay in the cache.
    parts = [whole] if flat.dtype == dtype else whole.split(32 * _BLOCK)
    return [
        torch.linalg.vector_norm(part.to(dtype).view(-1, min(_BLOCK, part.numel())), dim=1)
        for part in (*parts, rest)
        if part.numel()
    ]


def _sum_over_model(pair: Tensor, groups: ProcessGroupCollection, is_sharded: bool) -> Tensor:
    """Sum a pair (dense, expert) over the ranks that hold the model.  Collective."""
    if is_sharded or groups.mp is groups.tp_ep_pp:
        parts = [(pair, groups.intra_dist_opt if is_sharded else groups.mp)]
    else:
        parts = [(pair[:1].clone(), groups.mp), (pair[1:].clone(), groups.tp_ep_pp)]
    return torch.cat([all_reduce_over(part, group) for part, group in parts]).sum()
