"""Frozen weights stored in 8 or 4 bits, and linear layers that multiply by their values.

``o``/``i`` rows and columns of this rank's weight.  A weight [o, i] becomes codes and one scale for
each block of columns of a row; each pass computes its values in the dtype of the activations, for
the duration of one GEMM.  There is no weight gradient.

Collectives: those of `linear`; for nvfp4, when a weight is stored, a max-reduction over the ranks
that shard it, so that all layouts store the same values if blocks divide the columns of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.fusions.quantize import quantize
from megatron.core.fusions.small_linear import quantize_weight
from megatron.core.low_precision import E2M1, E4M3, Scaled, largest, power_of_two
from megatron.core.parallel.collectives import all_reduce_over
from megatron.core.tensor_parallel.linear import Gemms, LinearCall, linear_of

StoredFormat = Literal["fp8", "int8", "nvfp4"]
FORMATS: tuple[StoredFormat, ...] = ("fp8", "int8", "nvfp4")
_FP8_BLOCK = (1, 128)
_FP4_BLOCK = (1, 16)
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of e2m1, in the order of its codes


@dataclass(frozen=True)
class PackedFp4:
    """nvfp4: two codes a byte [o, i/2], e4m3 scales [o, i/16], and the factor of all scales []."""

    codes: Tensor
    scale: Tensor
    factor: Tensor

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return the values [o, i]; exact in bfloat16 and wider dtypes."""
        signed = [*_MAGNITUDES, *(-value for value in _MAGNITUDES)]
        pairs = [(signed[byte & 15], signed[byte >> 4]) for byte in range(256)]
        table = torch.tensor(pairs, dtype=dtype, device=self.codes.device)
        wide = table[self.codes.int()].flatten(-2).unflatten(-1, (-1, _FP4_BLOCK[1]))
        scale = (self.scale.to(dtype) * self.factor.to(dtype)).unsqueeze(-1)
        values: Tensor = (wide * scale).flatten(-2)
        return values


Stored = Scaled | PackedFp4  # a matrix in few bits


def stored(weight: Tensor, format: StoredFormat, group: ProcessGroup | None) -> Stored:
    """Round ``weight`` [o, i] to ``format``.  For nvfp4 collective over ``group``, which shards it.

    Rounding is to nearest.  Raises ValueError if i is no multiple of the block of nvfp4.
    """
    weight = weight.detach()
    if format == "fp8":
        return quantize(weight.float(), E4M3, _FP8_BLOCK)
    if format == "int8":
        return quantize_weight(weight)
    if weight.shape[1] % _FP4_BLOCK[1]:
        raise ValueError(f"{weight.shape[1]} columns are no multiple of {_FP4_BLOCK[1]}")
    top = largest(weight)
    if group is not None:
        all_reduce_over(top, group, op=dist.ReduceOp.MAX)
    scaled = quantize(weight.float(), E2M1, _FP4_BLOCK, top=top)
    factor = power_of_two(top, E2M1.largest * E4M3.largest)
    values = scaled.codes.float()
    edges = [(a + b) / 2 for a, b in zip(_MAGNITUDES, _MAGNITUDES[1:], strict=False)]
    codes = torch.bucketize(values.abs(), torch.tensor(edges, device=weight.device))
    codes = (codes + 8 * (values < 0)).to(torch.uint8)
    packed = codes[:, ::2] | (codes[:, 1::2] << 4)
    return PackedFp4(packed, (scaled.scale / factor).to(E4M3.dtype), factor)


class FrozenWeight(Gemms):
    """Matmuls by the values of a stored weight, which each pass computes again."""

    def __init__(self, weight: Stored) -> None:
        super().__init__()
        self.weight = weight

    def __call__(self, x: Tensor, call: LinearCall) -> Tensor:
        """Compute x W^T + b; the weight of ``call`` is not read.  Collective over its groups."""
        y = linear_of(x, call._replace(bias=None), self)
        return y if call.bias is None else y + call.bias

    def values(self, weight: Tensor) -> Tensor:
        """See `Gemms`."""
        return self.weight.values(weight.dtype)

    def matrix(self, weight: Tensor, dtype: torch.dtype, *, transposed: bool = False) -> Tensor:
        """See `Gemms`."""
        values = self.weight.values(dtype)
        return values.t() if transposed else values
