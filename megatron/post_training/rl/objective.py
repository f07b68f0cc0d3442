"""The GRPO objective of GPT: the tensors of a micro-batch, and the loss.

Shapes: ``b`` rollouts of a micro-batch, ``s`` positions, each of which predicts the next token.
With ratio = exp(log_prob - old_log_prob) and advantage A of its answer, the loss of a token is

    -min(ratio * A, clip(ratio, 1 - eps_lower, 1 + eps_upper) * A) * importance_weight
    + kl_beta * (exp(r) - r - 1) - entropy_weight * entropy,      r = reference - log_prob

(Shao et al., 2024, with the estimator k3 of the KL divergence; importance_weight is
min(exp(old_log_prob - sampled_log_prob), coefficient)).  The weight of each token in the loss of
the step is part of the data (`rounds.token_weights`), so the loss does not depend on micro-batches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.autograd import Context, Function
from megatron.core.config.errors import ConfigError
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.cross_entropy import (
    at_least_float32,
    vocab_parallel_cross_entropy,
)
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.post_training.rl.rounds import num_rollouts
from megatron.post_training.sft.objective import apply_rows
from megatron.training.config.rl import RLConfig
from megatron.training.config.run import RunConfig
from megatron.training.models.gpt import GPT
from megatron.training.models.kind import Batch, BatchTable, TensorSpec

Reported = dict[str, Tensor]


def grpo_batch(config: RunConfig, stage: int, num_stages: int) -> BatchTable:
    """Return the tensors [b, s] that ``stage`` reads, None for those it does not.

    ``weights`` are 0 outside answers.  Experts leave out padding.  Where a round is trained on
    once, in one step, there are no old log-probabilities: the step computes the same values.
    """
    shape = config.training.micro_batch_size, config.data.seq_length
    is_first = stage == 0
    is_last = stage == num_stages - 1
    has_experts = config.model.num_moe_experts is not None
    ids = TensorSpec(torch.int64, shape)
    values = TensorSpec(torch.float32, shape) if is_last else None
    return {
        "tokens": ids if is_first else None,
        "position_ids": ids if is_first or is_last else None,
        "labels": ids if is_last else None,
        "is_padding": TensorSpec(torch.bool, shape) if has_experts else None,
        "routes": _routes_spec(config),
        "weights": values,
        "advantages": values,
        "sampled_log_probs": values,
        "old_log_probs": values if needs_old_log_probs(config) else None,
        "reference_log_probs": values if config.rl.grpo_kl_beta else None,
    }


def _routes_spec(config: RunConfig) -> TensorSpec | None:
    m = config.model
    if not m.moe_enable_routing_replay:
        return None
    shape = config.training.micro_batch_size, config.data.seq_length
    return TensorSpec(torch.int32, (*shape, m.num_layers, m.moe_router_topk))


def needs_old_log_probs(config: RunConfig) -> bool:
    """Return whether a round takes several steps, so that its policy is older than the weights."""
    length = num_rollouts(config) * config.rl.grpo_iterations
    return length != config.training.global_batch_size


def grpo_loss(
    config: RunConfig,
    groups: ProcessGroupCollection,
    batch: Batch,
    logits: Tensor,
) -> tuple[Tensor, Tensor, Reported]:
    """Return the sum of the weighted token losses, the number of rollouts, and logged values."""
    rl = config.rl
    scores = score_labels(
        logits,
        batch["labels"],
        groups.tp,
        temperature=rl.rl_default_temperature,
        entropy_has_gradient=rl.grpo_entropy_term_weight > 0,
        as_engine=config.model.batch_invariant_mode,
    )
    losses, reported = token_losses(rl, batch, scores)
    total = (losses * batch["weights"]).sum()
    count = total.new_tensor(config.training.micro_batch_size / groups.cp.size())
    return total, count, {"grpo loss": torch.stack([total.detach(), count]), **reported}


def token_losses(rl: RLConfig, batch: Batch, scores: TokenScores) -> tuple[Tensor, Reported]:
    """Return the loss [b, s] of each token, and sum and count of each logged value."""
    is_trained = batch["weights"] > 0
    log_probs = scores.log_probs.masked_fill(~is_trained, 0)
    found: dict[str, Tensor] = {"entropy": scores.entropy}
    old = batch["old_log_probs"]
    old = log_probs.detach() if old is None else old
    advantages = batch["advantages"]
    ratio = torch.exp(log_probs - old)
    low = 1 - rl.grpo_clamp_eps_lower
    high = 1 + rl.grpo_clamp_eps_upper
    losses = -torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
    found["clip fraction"] = ((ratio < low) & (advantages < 0)) | (
        (ratio > high) & (advantages > 0)
    )
    difference = old - batch["sampled_log_probs"]
    found["sampling difference"] = difference.abs()
    if rl.rl_inference_logprobs_is_correction:
        weight = difference.exp()
        limit = rl.rl_importance_sampling_truncation_coef
        if limit is not None:
            found["truncated fraction"] = weight > limit
            weight = weight.clamp(max=limit)
        losses = losses * weight
    if rl.grpo_kl_beta:
        gap = batch["reference_log_probs"] - log_probs
        kl = gap.exp() - gap - 1
        losses = losses + rl.grpo_kl_beta * kl
        found["kl"] = kl
    if rl.grpo_entropy_term_weight:
        losses = losses - rl.grpo_entropy_term_weight * scores.entropy
    count = is_trained.sum()
    return losses, {
        name: torch.stack([values.detach().masked_fill(~is_trained, 0).float().sum(), count])
        for name, values in found.items()
    }


def _no_data(config: RunConfig, **common: Any) -> NoReturn:
    raise ConfigError(
        "--perform-rl-step trains on rollouts, and this program reads data sets: use pretrain_rl.py"
    )


class TokenScores(NamedTuple):
    """Log-probabilities of the labels, and entropy of the predictions: [b, s] in float32."""

    log_probs: Tensor
    entropy: Tensor


def score_labels(
    logits: Tensor,
    labels: Tensor,
    group: ProcessGroup,
    *,
    temperature: float,
    entropy_has_gradient: bool = False,
    as_engine: bool = False,
) -> TokenScores:
    """Score ``labels`` [b, s] by ``logits`` [b, s, v/tp], which are divided by ``temperature``.

    Logits of padding are -inf.  At temperature 1 the log-probabilities are bitwise
    the negated losses of training on one rank.  ``as_engine``: with the bits of the engine, which
    does not sum over padding.  Collective over the tensor-parallel ``group``.
    """
    if temperature != 1.0:
        logits = logits / temperature
    if as_engine:
        log_probs = _whole_log_probs(logits, labels, group)
    else:
        log_probs = -vocab_parallel_cross_entropy(logits, labels, tp_group=group)
    with torch.set_grad_enabled(entropy_has_gradient and torch.is_grad_enabled()):
        entropy = _Entropy.apply(logits, group)
    return TokenScores(log_probs, entropy)


def _whole_log_probs(logits: Tensor, labels: Tensor, group: ProcessGroup) -> Tensor:
    """Return the log-probabilities of ``labels`` in the steps of the engine's `log_probs_of`."""
    whole = at_least_float32(gather_from_tensor_model_parallel_region(logits, group))
    num_tokens = int((~whole.detach().isneginf().flatten(0, -2).all(0)).sum())  # without padding
    whole = whole[..., :num_tokens].contiguous()
    highest = whole.detach().amax(-1, keepdim=True)
    sums = (whole - highest).exp().sum(-1)
    at_label = (whole.gather(-1, labels.clamp(min=0).unsqueeze(-1)) - highest).squeeze(-1)
    return (at_label - sums.log()).masked_fill(labels < 0, 0)


class _Entropy(Function[Tensor]):
    """Entropy [...] of softmax(logits [..., v/tp])."""

    @staticmethod
    def forward(ctx: Context[None], logits: Tensor, group: ProcessGroup) -> Tensor:
        highest = at_least_float32(logits).amax(-1)
        if group.size() > 1:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        shifted = _finite(at_least_float32(logits) - highest.unsqueeze(-1))
        share = shifted.exp()
        sums = torch.stack([share.sum(-1), (share * shifted).sum(-1)])
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
        log_sum = sums[0].log()
        entropy: Tensor = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(logits, highest + log_sum, entropy)
        return entropy

    @staticmethod
    def backward(ctx: Context[None], grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, log_sum_exp, entropy = ctx.saved_tensors
        log_share = _finite(at_least_float32(logits) - log_sum_exp.unsqueeze(-1))
        found = -log_share.exp() * (log_share + entropy.unsqueeze(-1)) * grad.unsqueeze(-1)
        return found.to(logits.dtype), None


def _finite(log_share: Tensor) -> Tensor:
    """Replace -inf, the logarithm at padding, by a finite value: 0 times it must be 0."""
    return log_share.clamp(min=torch.finfo(log_share.dtype).min)


GRPO = replace(
    GPT,
    dataset_config=_no_data,
    batch=grpo_batch,
    apply=apply_rows,
    loss=grpo_loss,
)
