"""Megatron Core's fused functions, on the kernels of `megatron.core.fusions`.

``fp8_input_store`` and ``cpu_offload_input`` have no effect: inputs are saved for backward as they
are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.activations import openai_gelu
from megatron.core.enums import AttnMaskType
from megatron.core.fusions.bias_glu import activation, glu
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.parallel.default_groups import library_call
from megatron.core.tensor_parallel.cross_entropy import (
    at_least_float32,
    vocab_parallel_cross_entropy,
)

bias_dropout_add_fused_train = get_bias_dropout_add(True, True)
bias_dropout_add_fused_inference = get_bias_dropout_add(False, True)


def bias_swiglu_impl(
    input: Tensor,
    bias: Tensor | None,
    fp8_input_store: bool = False,
    cpu_offload_input: bool = False,
) -> Tensor:
    """Return silu(gate) * up of the input [..., 2 f], gate first, plus the bias: [..., f]."""
    return glu(input if bias is None else input + bias, F.silu)


def bias_swiglu(y: Tensor, bias: Tensor) -> Tensor:
    """Return `bias_swiglu_impl` of the arguments."""
    return bias_swiglu_impl(y, bias)


def weighted_bias_swiglu_impl(
    input: Tensor, bias: None, weights: Tensor, fp8_input_store: bool = False
) -> Tensor:
    """Return silu(gate) * up of the input [..., 2 f], each row times its weight [..., 1]."""
    if bias is not None:
        raise NotImplementedError("weighted SwiGLU takes no bias: add it to the input")
    return glu(input, F.silu, weights=weights.squeeze(-1))


def bias_geglu_impl(input: Tensor, bias: Tensor | None) -> Tensor:
    """Return gelu(gate) * up of the input plus the bias, with the tanh approximation of GELU."""
    return glu(input if bias is None else input + bias, openai_gelu)


def bias_gelu(bias: Tensor, y: Tensor) -> Tensor:
    """Return the tanh approximation of gelu(y + bias)."""
    return activation(y, openai_gelu, bias)


def bias_gelu_impl(input: Tensor, bias: Tensor) -> Tensor:
    """Return the tanh approximation of gelu(input + bias)."""
    return activation(input, openai_gelu, bias)


def calculate_logits_max(vocab_parallel_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits in float32, and the largest of this rank for each token."""
    logits = at_least_float32(vocab_parallel_logits)
    return logits, logits.amax(-1)


@library_call()
def fused_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: ProcessGroup
) -> Tensor:
    """Return the loss of each token in float32.  Collective over ``tp_group``."""
    loss: Tensor = vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group=tp_group)
    return loss


class FusedScaleMaskSoftmax(nn.Module):
    """softmax(mask(scale * scores)) over the last dimension of [b, heads, query, key].

    Computed by torch, in float32 where ``softmax_in_fp32``; ``scaled_masked_softmax_fusion`` has no
    effect.  With ``attn_mask_type`` causal no mask need be given.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: AttnMaskType,
        scaled_masked_softmax_fusion: bool,
        mask_func: Callable[[Tensor, Tensor], Tensor],
        softmax_in_fp32: bool,
        scale: float | None,
    ) -> None:
        super().__init__()
        assert not (input_in_fp16 and input_in_bf16), "fp16 and bf16 exclude each other"
        assert scale is None or softmax_in_fp32, "a scale needs softmax_in_fp32"
        self.input_in_float16 = input_in_fp16 or input_in_bf16
        self.attn_mask_type = attn_mask_type
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale

    def forward(self, input: Tensor, mask: Tensor | None) -> Tensor:
        """Return the probabilities in the dtype of ``input``."""
        scores = input.float() if self.input_in_float16 and self.softmax_in_fp32 else input
        scores = scores if self.scale is None else scores * self.scale
        queries, keys = input.shape[-2:]
        if self.attn_mask_type is AttnMaskType.causal and mask is None and queries > 1:
            assert queries == keys, "a causal mask needs as many keys as queries"
            mask = torch.ones(queries, keys, dtype=torch.bool, device=input.device).triu(1)
        scores = scores if mask is None else self.mask_func(scores, mask)
        return torch.softmax(scores, -1).to(input.dtype)
