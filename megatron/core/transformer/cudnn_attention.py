"""cuDNN's causal attention: with values narrower than queries and keys, and in rings.

``s`` tokens, ``b`` sequences, ``n`` heads, ``d`` width of queries and keys, ``v`` of values.

torch's flash attention requires equal widths, so that values of latent attention (128) are padded
to the width of keys (192).  cuDNN does not, and on Hopper it takes 0.53 to 0.64 of the time
(benchmarks/train_gpu.md).  torch documents neither which GPUs and releases of cuDNN take which
widths, nor does its header offer the check: `unsupported_reason` tries it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.transformer.attention_blocks import ScoreRule, block_kernel
from megatron.core.transformer.context_parallel import Ring, RingPlan, ring_attention

_TRIED_TOKENS = 128
_TOLERANCE = 2e-2  # of 16 bits
_DOCUMENTED_WIDTHS = (192, 128)  # of keys and values in DeepSeek-V2 and V3


def attend_to_narrow(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend to earlier keys: 2 x [s, b, n, d], [s, b, n, v] -> [s, b, n v]."""
    # The kernel saves its inputs: a view would keep the projection of keys and values in memory.
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value.contiguous()))
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out: Tensor = attend(q, k, v, None, True, 0.0, True, False, scale=scale)[0]
    return out.permute(2, 0, 1, 3).flatten(2)


def unsupported_reason(head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
    """Return why this GPU does not run `attend_to_narrow`; None if it does.

    A GPU is tried once.  A simulated GPU cannot try: its plans assume the widths for which cuDNN
    documents kernels, and padded values for others, which need more memory.
    """
    if head_dim % 8 or value_dim % 8:
        return "cuDNN takes widths that are multiples of 8"
    if device.launches_kernels(device.current()):
        return _reason_of_trial(attend_to_narrow, (head_dim, head_dim, value_dim), dtype)
    if (head_dim, value_dim) == _DOCUMENTED_WIDTHS:
        return None
    return "only a GPU shows whether cuDNN takes values narrower than keys"


def unsupported_reason_in_rings(head_dim: int, dtype: torch.dtype) -> str | None:
    """Return why rings do not use cuDNN on this GPU, which is tried once; None if they do."""
    where = device.current()
    if not device.launches_kernels(where) or device.capability(where) < (9, 0):
        return "rings use it on GPUs from Hopper on, where it is faster than flash attention"
    return _reason_of_trial(_attend_in_ring, (head_dim, head_dim, head_dim), dtype)


def _attend_in_ring(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend as a ring of one rank does: [s, b, n, d] three times -> [s, b, n d]."""
    plan = RingPlan(
        ring=Ring(None),
        lengths=(len(query),),
        is_causal=True,
        kernel=block_kernel("fused"),
        rule=ScoreRule(scale=scale),
    )
    return ring_attention(query, key, value, plan).flatten(2)


@lru_cache
def _reason_of_trial(
    attend: Callable[..., Tensor], widths: tuple[int, int, int], dtype: torch.dtype
) -> str | None:
    """Run ``attend`` once, forward and backward; compare with the formula."""
    # Uncorrelated values without the random generator, whose state a run must not depend on.
    waves = [
        torch.arange(_TRIED_TOKENS * 2 * n, dtype=torch.float64).square().mul(i + 0.7).sin()
        for i, n in enumerate(widths)
    ]
    host = [x.view(_TRIED_TOKENS, 1, 2, -1).to(dtype) for x in waves]
    try:
        found = _with_gradients(attend, host, device.current())
    except RuntimeError as error:
        return f"cuDNN: {str(error).splitlines()[0]}"
    expected = _with_gradients(_formula, [x.double() for x in host], host[0].device)
    for ours, exact in zip(found, expected, strict=True):
        if not (ours.double() - exact).norm() <= _TOLERANCE * exact.norm():  # also if NaN
            return "cuDNN computes other values than the formula"
    return None


def _with_gradients(
    attend: Callable[..., Tensor], host: list[Tensor], where: torch.device
) -> list[Tensor]:
    """Return the output of ``attend`` and the gradients of its inputs, on the host."""
    inputs = [x.to(where).requires_grad_() for x in host]
    with torch.enable_grad():
        out = attend(*inputs, 1 / math.sqrt(host[0].shape[-1]))
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
        grads = torch.autograd.grad(out, inputs, weights.to(out.dtype).to(where))
    return [x.detach().cpu() for x in (out, *grads)]


def _formula(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    later = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    probs = (q @ k.mT * scale).masked_fill(later, -math.inf).softmax(-1)
    return (probs @ v).permute(2, 0, 1, 3).flatten(2)
