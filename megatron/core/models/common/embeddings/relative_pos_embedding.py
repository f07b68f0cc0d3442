"""T5's relative positions: a learned bias on attention scores for each bucket of distances.

Near keys have buckets of their own; farther keys share buckets whose width grows with the logarithm
of the distance (Raffel et al. 2020).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.params.param_init import InitMethod, new_parameter, param_info_for
from megatron.core.tensor_parallel.layers import divide_over_group


def buckets_of(
    distance: Tensor, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> Tensor:
    """Return the bucket of each ``distance`` (key minus query).

    If attention is ``bidirectional``, later keys have half of the buckets.  Otherwise they are
    hidden and count as distance 0.
    """
    if bidirectional:
        num_buckets //= 2
        half = torch.where(distance > 0, num_buckets, 0)
        distance = distance.abs()
    else:
        half = torch.zeros_like(distance)
        distance = (-distance).clamp(min=0)
    num_exact = num_buckets // 2
    ratio = torch.log(distance.clamp(min=1).float() / num_exact)
    steps = ratio / math.log(max_distance / num_exact) * (num_buckets - num_exact)
    shared = (num_exact + steps.long()).clamp(max=num_buckets - 1)
    return half + torch.where(distance < num_exact, distance, shared)


class RelativePositionEmbedding(nn.Module):
    """A table [buckets, n] with heads sharded over ``tp_group``, and the bias computed from it."""

    def __init__(
        self,
        bidirectional: bool,
        init_method: InitMethod,
        num_attention_heads: int,
        relative_attention_num_buckets: int = 32,
        relative_attention_max_distance: int = 128,
        *,
        params_dtype: torch.dtype = torch.float32,
        tp_group: ProcessGroup,
    ) -> None:
        super().__init__()
        self.bidirectional = bidirectional
        self.num_buckets = relative_attention_num_buckets
        self.max_distance = relative_attention_max_distance
        heads = divide_over_group(num_attention_heads, tp_group, "--num-attention-heads")
        shape = self.num_buckets, num_attention_heads
        info = param_info_for(shape, init_method, over=tp_group, dim=1)
        self.relative_attention_bias = nn.Embedding(self.num_buckets, heads, device="meta")
        self.relative_attention_bias.weight = new_parameter(
            (self.num_buckets, heads), params_dtype, info
        )

    def forward(self, query_seq_length: int, key_seq_length: int, *, offset: int = 0) -> Tensor:
        """Return the bias [1, n/tp, q, k]; the first query has position ``offset``."""
        last = offset + query_seq_length
        distance = torch.arange(1 - last, key_seq_length - offset, device=device.current())
        buckets = buckets_of(
            distance,
            bidirectional=self.bidirectional,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
        )
        by_distance: Tensor = self.relative_attention_bias(buckets).t()  # [n/tp, q + k - 1]
        if torch.compiler.is_exporting():  # unfold() would fix the number of keys
            places = torch.arange(query_seq_length).flip(0)[:, None]
            return by_distance[:, places + torch.arange(key_seq_length)].unsqueeze(0)
        # A query sees a window of them, each later one a window that starts one further left.
        return by_distance.unfold(1, key_seq_length, 1).flip(1).unsqueeze(0)
