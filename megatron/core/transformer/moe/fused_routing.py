"""Router as one GPU kernel forward and one backward (--moe-router-fusion).

The kernels accept float32 logits only.  In bf16 or fp16 they would round at other points than the
operations of `routing`, which could change the chosen experts.  Without a kernel `routing` runs.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from megatron.core.autograd import Context, Function
from megatron.core.fusions import kernels
from megatron.core.transformer.moe import routing
from megatron.core.transformer.moe.routing import Choice, Routing


def route(logits: Tensor, choice: Choice, bias: Tensor | None = None) -> Routing:
    """Choose experts and weights [n, k] from logits [n, E]; same result as `routing.route`."""
    fused = _kernels(logits)
    if fused is None:
        return routing.route(logits, choice, bias)
    experts, weights = _Route.apply(logits.contiguous(), bias, choice, fused)
    return Routing(experts, weights, logits.shape[-1])


def _kernels(scores: Tensor) -> ModuleType | None:
    return kernels.find("router", scores) if scores.dtype == torch.float32 else None


class _Options(TypedDict):
    score: int
    scale: float


def _options(choice: Choice, fused: ModuleType) -> _Options:
    if choice.score_function == "sigmoid":
        score = fused.SIGMOID
    else:
        score = fused.SOFTMAX if choice.pre_softmax else fused.CHOSEN_SOFTMAX
    return {"score": score, "scale": choice.scaling_factor or 1.0}


class _Values(NamedTuple):
    fused: ModuleType
    options: _Options


class _Route(Function[tuple[Tensor, Tensor]]):
    """Returns experts and weights; saves the logits and recomputes scores in backward."""

    @staticmethod
    def forward(
        ctx: Context[_Values],
        logits: Tensor,
        bias: Tensor | None,
        choice: Choice,
        fused: ModuleType,
    ) -> tuple[Tensor, Tensor]:
        ctx.values = _Values(fused, _options(choice, fused))
        groups = 1, 1, 1
        if choice.num_groups:
            assert choice.group_topk, "checked at start"
            scores = choice.group_score_topk or choice.k // choice.group_topk
            groups = choice.num_groups, choice.group_topk, scores
        options = ctx.values.options
        experts, weights = fused.choose(logits, bias, choice.k, groups=groups, **options)
        ctx.mark_non_differentiable(experts)
        ctx.save_for_backward(logits, experts)
        return experts, weights

    @staticmethod
    def backward(ctx: Context[_Values], _: None, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, experts = ctx.saved_tensors
        fused, options = ctx.values
        out = fused.gradient(logits, experts, grad.contiguous(), **options)
        return out, None, None, None
