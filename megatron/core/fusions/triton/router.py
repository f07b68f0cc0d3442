"""Top-k experts and weights from float32 logits [n, E], and the gradient of the logits.

One program handles one token: scores, group limit, top k and weights are computed in registers,
while plain torch sorts all scores and writes each step to memory.  Backward reads the chosen
experts and recomputes the scores.  Equal scores go to the lower index, as in the plain form
`transformer.moe.routing`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SIGMOID, SOFTMAX, CHOSEN_SOFTMAX = 0, 1, 2  # scores; the last: a softmax over the chosen logits
_FAR = 2**30  # beyond any expert


def choose(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    *,
    score: int,
    scale: float,
    groups: tuple[int, int, int] = (1, 1, 1),
) -> tuple[Tensor, Tensor]:
    """Return experts and weights, both [n, k].

    ``groups``: number of groups, groups per token, and scores that make up the score of a group.
    """
    (n, num_experts), (num_groups, group_topk, group_scores) = logits.shape, groups
    experts = torch.empty(n, k, dtype=torch.int64, device=logits.device)
    weights = logits.new_empty(n, k)
    if n:
        size = num_experts // num_groups
        _choose[(n,)](
            logits,
            bias,
            experts,
            weights,
            scale,
            K=k,
            SCORE=score,
            GROUPS=num_groups,
            SIZE=size,
            GROUP_TOPK=group_topk,
            GROUP_SCORES=group_scores,
            GROUP_BLOCK=triton.next_power_of_2(num_groups),
            SIZE_BLOCK=triton.next_power_of_2(size),
            K_BLOCK=triton.next_power_of_2(k),
            num_warps=_warps(num_experts),
        )
    return experts, weights


def gradient(logits: Tensor, experts: Tensor, grad: Tensor, *, score: int, scale: float) -> Tensor:
    """Return the gradient of the logits [n, E] from that of the weights [n, k]."""
    (n, num_experts), k = logits.shape, experts.shape[1]
    out = torch.empty_like(logits)
    if n:
        _gradient[(n,)](
            logits,
            experts,
            grad,
            out,
            num_experts,
            scale,
            K=k,
            SCORE=score,
            BLOCK=triton.next_power_of_2(num_experts),
            K_BLOCK=triton.next_power_of_2(k),
            num_warps=_warps(num_experts),
        )
    return out


def _warps(num_experts: int) -> int:
    return max(1, min(4, num_experts // 128))


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _choose(
    Logits,
    Bias,
    Experts,
    Weights,
    scale,
    K: tl.constexpr,
    SCORE: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP_TOPK: tl.constexpr,
    GROUP_SCORES: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lowest, far = -float("inf"), 2**30
    group, place = tl.arange(0, GROUP_BLOCK), tl.arange(0, SIZE_BLOCK)
    expert = group[:, None] * SIZE + place[None, :]
    is_free = (group[:, None] < GROUPS) & (place[None, :] < SIZE)
    x = tl.load(Logits + token * (GROUPS * SIZE) + expert, mask=is_free, other=lowest)
    if SCORE == 0:
        scores = _sigmoid(x)
    elif SCORE == 1:
        scores = tl.exp(x - tl.max(tl.max(x, 1), 0))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    else:
        scores = x
    ranked = scores
    if Bias is not None:
        ranked += tl.load(Bias + expert, mask=is_free, other=0.0)
    # NaN equals nothing, so that no expert would be found; a sort puts it first.
    ranked = tl.where(ranked != ranked, float("inf"), ranked)
    if GROUPS > 1:
        sums, is_left = tl.zeros((GROUP_BLOCK,), tl.float32), is_free
        for _ in tl.static_range(GROUP_SCORES):
            left = tl.where(is_left, ranked, lowest)
            best = tl.max(left, 1)
            hit = is_left & (left == best[:, None])
            first = tl.min(tl.where(hit, expert, far), 1)
            is_left = is_left & (expert != first[:, None])
            sums += best
        is_open = group < GROUPS
        for _ in tl.static_range(GROUP_TOPK):
            left = tl.where(is_open, sums, lowest)
            hit = is_open & (left == tl.max(left, 0))
            is_open = is_open & (group != tl.min(tl.where(hit, group, far), 0))
        ranked = tl.where(is_open[:, None], lowest, ranked)  # the chosen groups are closed
    visit = tl.arange(0, K_BLOCK)
    chosen, weights = tl.zeros((K_BLOCK,), tl.int64), tl.full((K_BLOCK,), lowest, tl.float32)
    for i in tl.static_range(K):
        left = tl.where(is_free, ranked, lowest)
        hit = is_free & (left == tl.max(tl.max(left, 1), 0))
        first = tl.min(tl.min(tl.where(hit, expert, far), 1), 0)
        is_free = is_free & (expert != first)
        score = tl.sum(tl.sum(tl.where(expert == first, scores, 0.0), 1), 0)
        chosen = tl.where(visit == i, first.to(tl.int64), chosen)
        weights = tl.where(visit == i, score, weights)
    is_visit = visit < K
    if SCORE == 2:
        weights = tl.exp(weights - tl.max(weights, 0))
        weights = weights / tl.sum(weights, 0)
    elif SCORE == 0 and K > 1:
        weights = weights / (tl.sum(tl.where(is_visit, weights, 0.0), 0) + 1e-20)
    tl.store(Experts + token * K + visit, chosen, mask=is_visit)
    tl.store(Weights + token * K + visit, weights * scale, mask=is_visit)


@triton.jit
def _gradient(
    Logits,
    Experts,
    Grad,
    Out,
    num_experts,
    scale,
    K: tl.constexpr,
    SCORE: tl.constexpr,
    BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    visit, expert = tl.arange(0, K_BLOCK), tl.arange(0, BLOCK)
    is_visit = visit < K
    chosen = tl.load(Experts + token * K + visit, mask=is_visit, other=0)
    grad = tl.load(Grad + token * K + visit, mask=is_visit, other=0.0).to(tl.float32) * scale
    logit = tl.load(Logits + token * num_experts + chosen, mask=is_visit, other=-float("inf"))
    row = tl.zeros((BLOCK,), tl.float32)
    if SCORE == 0:
        score = _sigmoid(logit)
        if K > 1:
            total = tl.sum(tl.where(is_visit, score, 0.0), 0) + 1e-20
            grad = (grad - tl.sum(grad * score, 0) / total) / total
        of_chosen = grad * score * (1 - score)
    else:
        x = logit
        if SCORE == 1:
            x = tl.load(
                Logits + token * num_experts + expert,
                mask=expert < num_experts,
                other=-float("inf"),
            )
        highest = tl.max(x, 0)
        total = tl.sum(tl.exp(x - highest), 0)
        score = tl.exp(logit - highest) / total
        mean = tl.sum(grad * score, 0)
        if SCORE == 1:
            row -= tl.exp(x - highest) / total * mean
            of_chosen = grad * score
        else:
            of_chosen = (grad - mean) * score
    for i in tl.static_range(K):
        number = tl.sum(tl.where(visit == i, chosen, 0), 0)
        row += tl.where(expert == number, tl.sum(tl.where(visit == i, of_chosen, 0.0), 0), 0.0)
    tl.store(Out + token * num_experts + expert, row, mask=expert < num_experts)
