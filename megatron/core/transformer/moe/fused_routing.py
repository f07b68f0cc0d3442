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
from megatron.core.transformer.moe.routing import RoutingResult, RoutingRule


def route(logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> RoutingResult:
    """Choose experts and weights [n, k] from logits [n, E]; same result as `routing.route`."""
    fused = _kernels(logits)
    if fused is None:
        return routing.route(logits, rule, bias)
    experts, weights = _Route.apply(logits.contiguous(), bias, rule, fused)
    return RoutingResult(experts, weights, logits.shape[-1])


def _kernels(scores: Tensor) -> ModuleType | None:
    return kernels.find("router", scores) if scores.dtype == torch.float32 else None


class _Options(TypedDict):
    score: int
    scale: float


def _options(rule: RoutingRule, fused: ModuleType) -> _Options:
    if rule.score_function == "sigmoid":
        score = fused.SIGMOID
    else:
        score = fused.SOFTMAX if rule.pre_softmax else fused.CHOSEN_SOFTMAX
    return {"score": score, "scale": rule.scaling_factor or 1.0}


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
        rule: RoutingRule,
        fused: ModuleType,
    ) -> tuple[Tensor, Tensor]:
        ctx.values = _Values(fused, _options(rule, fused))
        groups = 1, 1, 1
        if rule.num_groups:
            assert rule.group_topk, "checked at start"
            scores = rule.group_score_topk or rule.k // rule.group_topk
            groups = rule.num_groups, rule.group_topk, scores
        options = ctx.values.options
        experts, weights = fused.choose(logits, bias, rule.k, groups=groups, **options)
        ctx.mark_non_differentiable(experts)
        ctx.save_for_backward(logits, experts)
        return experts, weights

    @staticmethod
    def backward(ctx: Context[_Values], _: None, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, experts = ctx.saved_tensors
        fused, options = ctx.values
        out = fused.gradient(logits, experts, grad.contiguous(), **options)
        return out, None, None, None
