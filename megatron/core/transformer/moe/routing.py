"""Routing arithmetic: top-k experts of each token, weights, balance losses, capacity.

Pure arithmetic, no communication.  ``n`` tokens, ``E`` experts, ``k`` experts per token.  Ties go
to the expert with the lower number, and among tokens to the first, so that every layout decides
alike.

Sources: arXiv 2101.03961 (balance loss), 2202.08906 (z-loss), 2405.04434 (groups of experts),
2412.19437 (sigmoid scores, balancing bias, loss per sequence), 2202.01169 (Sinkhorn).  The scores
sqrt(softplus(logit)) are those of DeepSeek-V4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.autograd import Context, Function
from megatron.core.fusions import kernels
from megatron.core.transformer.config.moe import SCORE_FUNCTIONS

_TIE = 2.0**-12  # weights closer than this are equal when visits have to be dropped


@dataclass(frozen=True)
class RoutingResult:
    """The chosen experts of each token.

    ``experts`` [n, k]: expert numbers, E for a dropped visit.  ``weights`` [n, k]: factor of each
    expert's output.  ``capacity``: maximum number of tokens of a micro-batch per expert, None
    without a limit.  ``may_have_dropped``: whether there may be dropped visits.

    It unpacks to Megatron Core's pair, which `of` converts back: probs [n, E], the weights or 0,
    and routing_map [n, E], which experts are chosen.
    """

    experts: Tensor
    weights: Tensor
    num_experts: int
    capacity: int | None = None
    may_have_dropped: bool = False

    def counts(self) -> Tensor:
        """Count the tokens of each expert: [E]."""
        return tally(self.experts, self.num_experts + 1)[:-1]

    def __iter__(self) -> Iterator[Tensor]:
        shape = self.experts.shape[0], self.num_experts + 1  # symbolic where a pass is exported
        probs = self.weights.new_zeros(shape).scatter(1, self.experts, self.weights)
        yield probs[:, :-1]
        yield torch.zeros_like(probs, dtype=torch.bool).scatter_(1, self.experts, True)[:, :-1]

    def __getitem__(self, place: int) -> Tensor:
        pair: list[Tensor] = [*self]
        return pair[place]

    @classmethod
    def of(cls, routing: RoutingResult | tuple[Tensor, Tensor]) -> RoutingResult:
        """Convert Megatron Core's pair; reads the largest number of experts of a token."""
        if isinstance(routing, RoutingResult):
            return routing
        probs, routing_map = routing
        k = int(routing_map.sum(-1).max()) if len(routing_map) else 1
        visits = probs.detach().masked_fill(~routing_map, float("-inf"))
        experts = best(visits, max(k, 1))
        is_dropped = ~routing_map.gather(1, experts)
        weights = probs.gather(1, experts)
        return keeping(cls(experts, weights, probs.shape[-1]), ~is_dropped)


@dataclass(frozen=True, kw_only=True)
class RoutingRule:
    """Settings of the choice of experts from router logits."""

    k: int
    score_function: str = "softmax"  # or another of SCORE_FUNCTIONS
    pre_softmax: bool = False  # softmax over all experts, not over the chosen ones
    num_groups: int = 1  # groups of experts in group-limited routing
    groups_per_token: int = 1
    scores_per_group: int = 0  # the best, which sum to the score of a group; 0: as many as chosen
    scaling_factor: float | None = None
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
    softplus: Callable[[Tensor], Tensor] = F.softplus

    def __post_init__(self) -> None:
        if self.score_function not in SCORE_FUNCTIONS:
            choices = " or ".join(SCORE_FUNCTIONS)
            message = f"Invalid score_function: {self.score_function}: use {choices}"
            raise ValueError(message)
        chosen = self.k // self.groups_per_token
        object.__setattr__(self, "scores_per_group", self.scores_per_group or chosen)


def tally(numbers: Tensor, size: int, padding: Tensor | None = None) -> Tensor:
    """Count each number below ``size``: [size], without those in rows where ``padding`` is True.

    Unlike torch.bincount it does not synchronize with the device.
    """
    if padding is not None:
        return tally(numbers.masked_fill(padding.unsqueeze(1), size), size + 1)[:-1]
    flat = numbers.flatten()
    return torch.zeros(size, dtype=flat.dtype, device=flat.device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )


Choose = Callable[[Tensor, int], Tensor]  # from scores [n, E] and k to experts [n, k]


def route(
    logits: Tensor, rule: RoutingRule, bias: Tensor | None = None, choose: Choose | None = None
) -> RoutingResult:
    """Choose experts by score plus ``bias`` [E], weigh by score alone.  ``logits``: [n, E].

    Softmax scores with a bias are those over all experts.  ``choose``: default is `best`.
    """
    is_ranked_by_logits = rule.score_function == "softmax" and not rule.pre_softmax and bias is None
    scores = logits if is_ranked_by_logits else scores_of(logits, rule)
    ranked = scores.detach() if bias is None else scores.detach() + bias
    if rule.num_groups > 1:
        ranked = within_best_groups(ranked, rule)
    experts = (choose or best)(ranked, rule.k)
    return RoutingResult(experts, weights_of(logits, experts, rule), logits.shape[-1])


def weights_of(logits: Tensor, experts: Tensor, rule: RoutingRule) -> Tensor:
    """Return the weights of the given experts: [n, k]."""
    is_softmax = rule.score_function == "softmax"
    if rule.pre_softmax or not is_softmax:
        weights = scores_of(logits, rule).gather(-1, experts)
    else:
        weights = _softmax(logits.gather(-1, experts))
    if not is_softmax and rule.k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights if rule.scaling_factor is None else weights * rule.scaling_factor


def scores_of(logits: Tensor, rule: RoutingRule) -> Tensor:
    """Return the score of every expert: [n, E]."""
    if rule.score_function == "sigmoid":
        return rule.sigmoid(_at_least_fp32(logits)).to(logits.dtype)
    if rule.score_function == "sqrtsoftplus":
        # The root has no finite gradient at 0, the softplus of a logit below -103 in float32.
        return rule.softplus(_at_least_fp32(logits)).clamp_min(1e-30).sqrt().to(logits.dtype)
    return _softmax(logits)


def best(scores: Tensor, k: int) -> Tensor:
    """Return the ``k`` experts with the highest scores: [n, k].

    A kernel of a GPU selects them.  Without one it is a stable sort: torch.topk does not define the
    order of ties.
    """
    if fused := kernels.find("router", scores):
        exact = scores.float().contiguous()  # any 16-bit score is exact in float32
        experts: Tensor
        experts, _ = fused.choose(exact, None, k, score=fused.CHOSEN_SOFTMAX, scale=1.0)
        return experts
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]


def within_best_groups(scores: Tensor, rule: RoutingRule) -> Tensor:
    """Mask scores with -inf outside the groups with the highest sums of best scores."""
    groups: Tensor = scores.unflatten(-1, (rule.num_groups, -1))
    of_group = groups.topk(rule.scores_per_group, dim=-1).values.sum(-1)
    is_out = torch.ones_like(of_group, dtype=torch.bool)
    is_out.scatter_(-1, best(of_group, rule.groups_per_token), False)
    return groups.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(-2)


# -- balance ---------------------------------------------------------------------------------


def balance_scores(logits: Tensor, rule: RoutingRule) -> Tensor:
    """Return scores that sum to 1 over the experts: [n, E]."""
    scores = scores_of(_at_least_fp32(logits), rule)
    if rule.score_function == "softmax":
        return scores
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def z_loss(logits: Tensor, *, num_tokens: int | Tensor, padding: Tensor | None = None) -> Tensor:
    """Return the mean over ``num_tokens`` of the squared log-sum-exp of the logits."""
    squares = torch.logsumexp(_at_least_fp32(logits), dim=-1).square()
    if padding is not None:
        squares = squares.masked_fill(padding, 0.0)
    return squares.sum() / num_tokens


@torch.no_grad()
def sinkhorn(cost: Tensor, tol: float = 1e-4) -> Tensor:
    """Scale exp(``cost``), logits [n, E], to equal row sums and equal column sums: [n, E].

    Iterates to the tolerance, at most 100 rounds; synchronizes with the device every tenth round.
    """
    cost = _at_least_fp32(cost)
    # Subtracting the maximum scales a row, which the iteration undoes; with it and the lower bound
    # every sum is finite and positive.
    cost = torch.exp(cost - cost.amax(1, keepdim=True)).clamp_min(1e-30)
    num_rows, num_columns = cost.shape
    of_column = torch.ones(num_columns, dtype=cost.dtype, device=cost.device)
    for turn in range(1, 101):
        before = of_column
        of_row = 1 / (num_rows * (of_column * cost).sum(1))
        of_column = 1 / (num_columns * (of_row.unsqueeze(1) * cost).sum(0))
        if turn % 10 == 0:
            moved = of_column / before  # if all are equal only the overall scale changed
            if moved.max() <= moved.min() * (1 + tol):
                break
    return of_column * cost * of_row.unsqueeze(1)


# -- capacity --------------------------------------------------------------------------------


def fits(visits: Tensor, capacity: int, policy: str, *, fills: bool = False) -> Tensor:
    """Return which visits are not dropped: [n, E] bool, at most ``capacity`` per expert.

    ``visits`` [n, E]: the weight of each visit, -inf for experts that the token does not visit;
    tokens in an order that is the same in every layout.  Policy "probs" keeps the largest weights,
    "position" the first.  Weights are rounded to multiples of `_TIE` before they are compared:
    equal tokens, such as padding, have weights whose last bits differ between layouts.  If it
    ``fills``, the first other tokens visit an expert that has room.
    """
    is_visit = visits > float("-inf")
    if policy == "position" and not fills:
        return is_visit & (is_visit.cumsum(0) <= capacity)
    ranks = is_visit.byte() if policy == "position" else torch.round(visits / _TIE)
    order = torch.sort(ranks, dim=0, descending=True, stable=True).indices[:capacity]
    kept = torch.zeros_like(is_visit).scatter_(0, order, True)
    return kept if fills else kept & is_visit


def dense_visits(routing: RoutingResult) -> Tensor:
    """Return the weight of each visit, -inf for experts that are not visited: [n, E]."""
    table = torch.full(
        (len(routing.experts), routing.num_experts + 1),
        float("-inf"),
        dtype=routing.weights.dtype,
        device=routing.weights.device,
    )
    return table.scatter_(1, routing.experts, routing.weights.detach())[:, :-1]


def keeping(routing: RoutingResult, is_kept: Tensor) -> RoutingResult:
    """Return ``routing`` with visits dropped where ``is_kept``, broadcast to [n, k], is False."""
    return replace(
        routing,
        experts=routing.experts.masked_fill(~is_kept, routing.num_experts),
        weights=routing.weights.masked_fill(~is_kept, 0.0),
        may_have_dropped=True,
    )


def _softmax(logits: Tensor) -> Tensor:
    return torch.softmax(_at_least_fp32(logits), dim=-1).to(logits.dtype)


def _at_least_fp32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def route_fused(logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> RoutingResult:
    """Choose experts and weights [n, k] from logits [n, E], by one GPU kernel if there is one.

    Same result as `route`, which computes sqrtsoftplus scores.  The kernels accept float32 logits
    only: in bf16 or fp16 they would round at other points than `route`, which could change the
    chosen experts.
    """
    adds_to_logits = bias is not None and not (rule.pre_softmax or rule.score_function == "sigmoid")
    is_exact = logits.dtype == torch.float32 and not adds_to_logits  # the kernel ranks by logits
    is_exact = is_exact and rule.score_function != "sqrtsoftplus"
    fused = kernels.find("router", logits) if is_exact else None
    if fused is None:
        return route(logits, rule, bias)
    experts, weights = _Route.apply(logits.contiguous(), bias, rule, fused)
    return RoutingResult(experts, weights, logits.shape[-1])


class _Route(Function[tuple[Tensor, Tensor]]):
    """Returns experts and weights; saves the logits and recomputes scores in backward."""

    @staticmethod
    def forward(
        ctx: Context[Any], logits: Tensor, bias: Tensor | None, rule: RoutingRule, fused: Any
    ) -> tuple[Tensor, Tensor]:
        score = fused.SOFTMAX if rule.pre_softmax else fused.CHOSEN_SOFTMAX
        if rule.score_function == "sigmoid":
            score = fused.SIGMOID
        options = {"score": score, "scale": rule.scaling_factor or 1.0}
        ctx.values = fused, options
        groups = rule.num_groups, rule.groups_per_token, rule.scores_per_group
        experts, weights = fused.choose(logits, bias, rule.k, groups=groups, **options)
        ctx.mark_non_differentiable(experts)
        ctx.save_for_backward(logits, experts)
        return experts, weights

    @staticmethod
    def backward(ctx: Context[Any], _: None, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, experts = ctx.saved_tensors
        fused, options = ctx.values
        out = fused.gradient(logits, experts, grad.contiguous(), **options)
        return out, None, None, None
