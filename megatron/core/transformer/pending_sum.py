"""Additions to the residual stream that wait for the norm of the next sublayer.

A GPU computes the sum and its norm in one kernel, so a sublayer returns a `PendingSum` there and
the norm that reads it returns both.  Any other reader calls `summed`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.fusions.fused_bias_dropout import bias_dropout_add
from megatron.core.fusions.rms_norm import adds_bias_in_norm, norm_rows_of_sum
from megatron.core.tensor_parallel.random import fork_for_tokens
from megatron.core.transformer.transformer_config import TransformerConfig


class PendingSum(NamedTuple):
    """residual + dropout(x + bias), not computed yet: [s, b, h], [h], [s, b, h]."""

    x: Tensor
    bias: Tensor | None
    residual: Tensor
    prob: float
    is_sequence_sharded: bool  # tensor-parallel ranks hold different tokens

    def total(self) -> Tensor:
        """Compute the sum alone."""
        with fork_for_tokens(self.prob > 0, is_sequence_sharded=self.is_sequence_sharded):
            return bias_dropout_add((self.x, self.bias), self.residual, self.prob, True)

    def normed(self, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """Compute the sum and its norm, a LayerNorm if there is a bias, else an RMSNorm."""
        with fork_for_tokens(self.prob > 0, is_sequence_sharded=self.is_sequence_sharded):
            added = self.x, self.bias
            return norm_rows_of_sum(added, self.residual, self.prob, (weight, bias), eps)


Stream = Tensor | PendingSum  # hidden states between sublayers


def leaves_bias_to_sum(config: TransformerConfig, tp_group: ProcessGroup) -> bool:
    """Return whether the sum, and not the last GEMM of a sublayer, adds its output bias.

    Tensor-parallel ranks add a bias after the reduction of their partial outputs.
    """
    if tp_group.size() > 1:
        return True
    like = torch.empty(0, dtype=config.params_dtype, device=device.current())
    return config.bias_dropout_fusion and adds_bias_in_norm(config.hidden_size, like)


def summed(stream: Stream) -> Tensor:
    """Return hidden states, whose sum is computed if it is pending."""
    return stream.total() if isinstance(stream, PendingSum) else stream
