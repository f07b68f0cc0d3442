"""LayerNorm and RMSNorm over the last dimension, with statistics in float32.

Parameters are replicated over tensor-parallel ranks.  If ranks normalize different tokens (sequence
parallelism) or different heads, the gradient on each rank is a partial sum; ParamInfo records it,
and `finalize_model_grads` all-reduces it.

A GPU computes a residual addition and the next norm in one kernel, so a sublayer returns a
`PendingSum` there and the norm that reads it returns both.  Any other reader calls `summed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core import device
from megatron.core.fusions.rms_norm import adds_bias_in_norm, norm_rows, norm_rows_of_sum
from megatron.core.params.param_init import Init, new_parameter, param_info_for
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.random import fork_for_tokens
from megatron.core.transformer.hyper_connection import RecomputedStreams
from megatron.core.transformer.module import is_replaced
from megatron.core.transformer.transformer_config import TransformerConfig


class PendingSum(NamedTuple):
    """residual + dropout(x + bias), not computed yet: [s, b, h], [h], [s, b, h]."""

    x: Tensor
    bias: Tensor | None
    residual: Tensor
    prob: float
    is_sequence_sharded: bool  # tensor-parallel ranks hold different tokens

    def total(self) -> Tensor:
        """Compute the sum alone, with the values that it has with its norm."""
        if self.bias is None and not self.prob:
            return self.residual + self.x.to(self.residual.dtype)
        with fork_for_tokens(self.prob > 0, is_sequence_sharded=self.is_sequence_sharded):
            return norm_rows_of_sum((self.x, self.bias), self.residual, self.prob)[0]

    def normed(self, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        """Compute the sum and its norm, a LayerNorm if there is a bias, else an RMSNorm."""
        with fork_for_tokens(self.prob > 0, is_sequence_sharded=self.is_sequence_sharded):
            added = self.x, self.bias
            return norm_rows_of_sum(added, self.residual, self.prob, (weight, bias), eps)


Stream = Tensor | PendingSum | RecomputedStreams  # hidden states between sublayers


def leaves_bias_to_sum(
    config: TransformerConfig, tp_group: ProcessGroup, sublayer: nn.Module
) -> bool:
    """Return whether the sum, and not the last GEMM of ``sublayer``, adds its output bias.

    Tensor-parallel ranks add a bias after the reduction of their partial outputs, and a project
    that computes with the output expects it without the bias.
    """
    if tp_group.size() > 1 or is_replaced(sublayer, "forward"):
        return True
    like = torch.empty(0, dtype=config.params_dtype, device=device.current())
    return config.bias_dropout_fusion and adds_bias_in_norm(config.hidden_size, like)


def summed(stream: Stream) -> Tensor:
    """Return hidden states, whose sum is computed if it is pending."""
    return stream if isinstance(stream, Tensor) else stream.total()


def normalize(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    rows: Callable[..., Tensor] = norm_rows,
) -> Tensor:
    """Normalize [..., h] by ``rows``; the result has the dtype of ``weight``."""
    dtype = weight.dtype
    if x.dtype != dtype:  # a float32 residual stream
        weight = weight.to(x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
    return rows(x, weight, bias, eps).to(dtype)


class Norm(nn.Module):
    """LayerNorm or RMSNorm, according to ``config.normalization``.

    The output has the dtype of the parameters.  With ``layernorm_zero_centered_gamma`` the stored
    weight is the effective weight minus 1.  ``has_partial_gradient``: ranks normalize different
    tokens or heads; the default is the config's sequence parallelism.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        has_partial_gradient: bool | None = None,
        normalization: str | None = None,
    ) -> None:
        super().__init__()
        self.norm_rows = norm_rows
        self.is_rms = (normalization or config.normalization) == "RMSNorm"
        self.eps, self.is_zero_centered = eps, config.layernorm_zero_centered_gamma
        if has_partial_gradient is None:
            has_partial_gradient = config.sequence_parallel

        def vector(init: str) -> nn.Parameter:
            shape = (hidden_size,)
            info = param_info_for(shape, Init(init), sequence_parallel=has_partial_gradient)
            return new_parameter(shape, config.params_dtype, info)

        self.weight = vector("zeros" if self.is_zero_centered else "ones")
        self.bias: nn.Parameter | None = None if self.is_rms else vector("zeros")

    def forward(self, x: Tensor | PendingSum) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize: [..., h] -> [..., h].  Of a `PendingSum`, return the sum and its norm."""
        if isinstance(x, PendingSum):
            if self.norm_rows is norm_rows:
                return x.normed(self.effective_weight(), self.bias, self.eps)
            return norm_hidden(self, x.total())
        return normalize(x, self.effective_weight(), self.bias, self.eps, self.norm_rows)

    def effective_weight(self) -> Tensor:
        """Return the factor of normalized rows: [h]."""
        return self.weight + 1 if self.is_zero_centered else self.weight

    def extra_repr(self) -> str:
        """Return kind and width, for the printed model."""
        return f"{'RMSNorm' if self.is_rms else 'LayerNorm'}, {self.weight.shape[0]}"


WrappedTorchNorm = FusedLayerNorm = Norm


def norm_hidden(norm: nn.Module, stream: Stream) -> tuple[Tensor, Tensor]:
    """Return hidden states, summed if their sum is pending, and their norm."""
    if isinstance(stream, PendingSum) and isinstance(norm, Norm):
        both: tuple[Tensor, Tensor] = norm(stream)
        return both
    x = summed(stream)
    return x, norm(x)


class HeadsWideRMSNorm(nn.Module):
    """RMSNorm over all heads at once, with heads sharded over ``tp_group``.

    Collective over ``tp_group``: an all-reduce of the sum of squares in forward, and one of its
    gradient in backward.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, tp_group: ProcessGroup
    ) -> None:
        super().__init__()
        self.tp_group, self.hidden_size, self.eps = tp_group, hidden_size, eps
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        init = Init("zeros" if self.is_zero_centered else "ones")
        info = param_info_for((hidden_size,), init, over=tp_group)
        shape = (hidden_size // tp_group.size(),)
        self.weight = new_parameter(shape, config.params_dtype, info)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize: [..., n/tp, d] -> [..., n/tp, d].  Collective over ``tp_group``."""
        flat = x.flatten(-2)
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
        squares = flat.square().sum(-1, keepdim=True)
        squares = reduce_from_tensor_model_parallel_region(squares, self.tp_group)
        squares = copy_to_tensor_model_parallel_region(squares, self.tp_group)
        y = (flat * torch.rsqrt(squares / self.hidden_size + self.eps)).to(x.dtype)
        weight = self.weight + 1 if self.is_zero_centered else self.weight
        return (y * weight).view(x.shape)


def l2_norm(x: Tensor) -> Tensor:
    """Divide ``x`` by its root mean square over the last dimension; no learned weight."""
    return F.rms_norm(x, (x.shape[-1],), eps=1e-6)


class L2Norm(nn.Module):
    """RMSNorm without a weight."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, **unused: object) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize: [..., d] -> [..., d], with statistics in float32."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), x.shape[-1:], eps=self.eps).to(x.dtype)
