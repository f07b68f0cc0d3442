"""Orthogonalise matrices by Newton-Schulz iterations, which need only matmuls.

X <- aX + (bA + cA^2)X with A = X X^T moves all singular values towards 1: X approaches the nearest
matrix with orthogonal rows.  If tensor-parallel ranks hold shards of the columns of X, A is the sum
of the ranks' products; X is transposed first if they hold shards of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.parallel.collectives import all_gather_single
from megatron.core.params.param_info import ParamInfo

Coefficients = tuple[tuple[float, float, float], ...]

# One triple (a, b, c) per iteration; iterations beyond the list use the last one.  simple: Keller
# Jordan; quintic: Franz Louis Cesista, searched for 5 iterations; polar_express: arXiv 2505.16932,
# optimal for each iteration.
COEFFICIENTS: dict[str, Coefficients] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845749493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.875, -1.25, 0.375),
    ),
}
SCALES = {
    "spectral": lambda rows, cols: max(rows, cols) ** 0.5,
    "unit_rms_norm": lambda rows, cols: (rows / cols) ** 0.5,
    "shape_scaling": lambda rows, cols: max(1.0, rows / cols) ** 0.5,
}
_EPS = 1e-7


def orthogonalize(
    matrix: Tensor,
    coefficients: Sequence[tuple[float, float, float]],
    *,
    cut: tuple[int, ProcessGroup] | None = None,
) -> Tensor:
    """Return ``matrix`` [m, n] with all singular values moved close to 1, in its dtype.

    ``cut``: (dimension, group) if the ranks of ``group`` hold shards of ``matrix`` along this
    dimension.  Then collective over the group: one all-reduce for the norm and one per iteration.
    """
    is_tall = matrix.shape[0] > matrix.shape[1] if cut is None else cut[0] == 0
    x: Tensor = matrix.T if is_tall else matrix
    x = x / _summed(x.square().sum(), cut).sqrt().clamp(min=_EPS) if cut else x / _norm(x)
    for a, b, c in coefficients:
        gram = _summed(x @ x.T, cut)
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = x.norm()
    return norm.clamp(min=_EPS)


def _summed(tensor: Tensor, cut: tuple[int, ProcessGroup] | None) -> Tensor:
    if cut is not None:
        dist.all_reduce(tensor, group=cut[1])
    return tensor


def orthogonalize_share(
    share: Tensor,
    info: ParamInfo,
    group: ProcessGroup,
    coefficients: Sequence[tuple[float, float, float]],
    *,
    mode: str,
    scale_mode: str,
    split_interleaved: bool,
) -> Tensor:
    """Orthogonalise and scale each matrix of a parameter; return this rank's share, in fp32.

    ``share`` [rows, columns] is this rank's tensor-parallel shard of the parameter, which may fuse
    several matrices (query, key and value; gate and up).  ``mode``: "duplicated" gathers the
    complete matrix on every rank, "distributed" all-reduces within the iterations, "blockwise"
    treats the shard as a matrix of its own.  ``scale_mode`` is a key of `SCALES`;
    ``split_interleaved``: treat interleaved query, key and value as separate matrices.  Collective
    over ``group`` if the parameter is sharded over it, except in mode "blockwise".
    """
    is_sharded = info.shard_dim is not None and group.size() > 1
    dim, count = info.shard_dim or 0, group.size() if is_sharded else 1
    shares = [share]
    if is_sharded and mode == "duplicated":
        gathered = share.new_empty(count * share.shape[0], share.shape[1])
        all_gather_single(gathered, share.contiguous(), group=group)
        shares = list(gathered.chunk(count))
    result = torch.empty_like(share, dtype=torch.float32)
    places = _matrices(result, info, split_interleaved)
    for place, *parts in zip(
        places, *(_matrices(s, info, split_interleaved) for s in shares), strict=True
    ):
        matrix = torch.cat([part.reshape(-1, share.shape[1]) for part in parts], dim)
        cut = (dim, group) if is_sharded and mode == "distributed" else None
        found = orthogonalize(matrix, coefficients, cut=cut)
        if len(parts) > 1:
            found = found.chunk(count, dim)[group.rank()]
        shape = list(found.shape)
        shape[dim] *= count
        place.copy_((found.float() * SCALES[scale_mode](*shape)).view_as(place))
    return result


def _matrices(share: Tensor, info: ParamInfo, split_interleaved: bool) -> Sequence[Tensor]:
    """Return views of the matrices that ``share`` fuses.

    They are concatenated (gate, up) or interleaved in blocks of rows (query, key, value).
    """
    if info.interleaved and split_interleaved:
        rows = share.view(-1, sum(info.interleaved), share.shape[1])
        return torch.split(rows, list(info.interleaved), 1)
    dim, total = info.shard_dim or 0, sum(info.blocks)
    return torch.split(share, [share.shape[dim] * block // total for block in info.blocks], dim)


def coefficients_of(kind: str, num_steps: int) -> Coefficients:
    """Return the coefficients of each iteration."""
    known = COEFFICIENTS[kind]
    return tuple(known[min(step, len(known) - 1)] for step in range(num_steps))


@contextmanager
def products_in(precision: str) -> Iterator[torch.dtype]:
    """Yield the dtype of matrices under --muon-fp32-matmul-prec: bf16 for low, else fp32.

    Inside the context fp32 matmuls have torch's precision "medium" or "high".
    """
    before = torch.get_float32_matmul_precision()
    if precision != "low":
        torch.set_float32_matmul_precision(precision)
    try:
        yield torch.bfloat16 if precision == "low" else torch.float32
    finally:
        torch.set_float32_matmul_precision(before)
