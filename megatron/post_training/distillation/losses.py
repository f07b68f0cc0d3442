"""Losses of distillation per token, how they are combined, and logits in chunks of tokens.

``s`` tokens, ``b`` sequences, ``h`` hidden size; ``v`` true vocabulary size, ``p`` padded size: a
tensor-parallel rank holds p/tp columns of logits.  All losses are computed in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from megatron.core.autograd import Context, Function
from megatron.core.config.errors import ConfigError
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.parallel.collectives import all_reduce_over
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.cross_entropy import (
    at_least_float32,
    log_sum_exp,
    true_columns,
)
from megatron.core.tensor_parallel.mappings import all_gather_last_dim
from megatron.training.config.run import RunConfig
from megatron.training.models.kind import Batch, ModelImplementation

_NAMES = ("logits distillation loss", "intermediate distillation loss")
_LEAST_REST = 1e-7  # probability of all tokens that are not stored, beyond float32's rounding


def divergence_from_stored(
    logits: Tensor,
    ids: Tensor,
    log_probs: Tensor,
    *,
    tp_group: ProcessGroup,
    vocab_size: int,
) -> Tensor:
    """Return KL(teacher || student) from the teacher's most probable tokens: [..., p/tp] -> [...].

    ``ids`` and ``log_probs`` [..., k]: these tokens; -inf stands for none.  All other tokens count
    as one, with the rest of the probability.  So the divergence is 0 only for a student
    with the same probabilities of the ``k``, and with all tokens it is `kl_divergence`.  A token
    without any entry has loss 0.  Collective over ``tp_group`` in forward.
    """
    log_q = _LogProbsAt.apply(logits, ids, tp_group, vocab_size)
    is_given = log_probs > float("-inf")
    p = log_probs.exp()
    loss = (p * (log_probs.masked_fill(~is_given, 0) - log_q)).sum(-1)
    if ids.shape[-1] < vocab_size:
        rest_p = (1 - p.sum(-1)).clamp(min=0)
        rest_q = (1 - (log_q.exp() * is_given).sum(-1)).clamp(min=_LEAST_REST)
        loss = loss + torch.special.xlogy(rest_p, rest_p) - rest_p * rest_q.log()
    return loss * is_given.any(-1)


class _LogProbsAt(Function[Tensor]):
    """Log-probabilities [..., k] of the tokens ``ids`` [..., k] from logits [..., p/tp].

    Saves the logits in their own dtype and recomputes the softmax in backward.
    """

    @staticmethod
    def forward(
        ctx: Context[int], logits: Tensor, ids: Tensor, group: ProcessGroup, vocab_size: int
    ) -> Tensor:
        columns = true_columns(logits.shape[-1], vocab_size, group)
        x = at_least_float32(logits[..., :columns])
        index = ids.long() - group.rank() * logits.shape[-1]
        is_mine = (index >= 0) & (index < columns)
        index = index.masked_fill(~is_mine, 0)
        found = x.gather(-1, index) if columns else torch.zeros_like(index, dtype=x.dtype)
        total = log_sum_exp(x, group)
        ctx.save_for_backward(logits, total, index, is_mine)
        ctx.values = columns
        return all_reduce_over(found.masked_fill(~is_mine, 0), group) - total.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Context[int], grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, total, index, is_mine = ctx.saved_tensors
        columns = ctx.values
        share = (at_least_float32(logits[..., :columns]) - total.unsqueeze(-1)).exp_()
        share *= -grad.sum(-1, keepdim=True)
        if columns:
            share.scatter_add_(-1, index, grad * is_mine)
        gradient = torch.zeros_like(logits)
        gradient[..., :columns] = share
        return gradient, None, None, None


def find_most_probable(
    logits: Tensor, k: int, *, tp_group: ProcessGroup, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities [..., k] of the most probable tokens of [..., p/tp].

    They are in descending order, the same on all ranks.  No gradient.  Collective over
    ``tp_group``: an all-reduce of the maximum, one of the sum, and all-gathers of k values each.
    """
    columns = true_columns(logits.shape[-1], vocab_size, tp_group)
    x = at_least_float32(logits[..., :columns].detach())
    values, ids = x.topk(min(k, columns))
    ids = ids + tp_group.rank() * logits.shape[-1]
    if tp_group.size() > 1:
        missing = min(k, logits.shape[-1]) - values.shape[-1]  # ranks with padding have fewer
        values = all_gather_last_dim(F.pad(values, (0, missing), value=float("-inf")), tp_group)
        ids = all_gather_last_dim(F.pad(ids, (0, missing)), tp_group)
        values, places = values.topk(k)
        ids = ids.gather(-1, places)
    return ids, values - log_sum_exp(x, tp_group).unsqueeze(-1)


def cosine_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return 1 - cosine of the two hidden states of each token: [..., h] -> [...]."""
    return 1 - F.cosine_similarity(student.float(), teacher.float(), dim=-1)


def mse_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean squared difference of the two hidden states of each token."""
    return (student.float() - teacher.float()).square().mean(-1)


HIDDEN_LOSSES = {"cosine": cosine_loss, "mse": mse_loss}


def balance_losses(
    sums: Tensor, *, skip_lm_loss: bool, kd_loss_scale: float, cp_group: ProcessGroup
) -> Tensor:
    """Return the loss of a micro-batch from its sums [lm, logits] or [lm, logits, intermediate].

    The intermediate loss is scaled to the size of the logits' loss.  The sum of both is the loss
    under ``skip_lm_loss``; else it is scaled to ``kd_loss_scale`` times the language-modeling
    loss and added to that.  The scales have no gradient, and are computed from
    the complete micro-batch, so they do not depend on the layout.  Collective over ``cp_group``.
    """
    sizes = sums.detach().clone()
    if cp_group.size() > 1:
        dist.all_reduce(sizes, group=cp_group)
    lm = sums[0]
    logits = sums[1]
    total = logits
    size = sizes[1]
    if len(sums) > 2:
        scale = _ratio(sizes[1], sizes[2])
        total = total + scale * sums[2]
        size = size + scale * sizes[2]
    if skip_lm_loss:
        return total
    return lm + kd_loss_scale * _ratio(sizes[0], size) * total


def _ratio(wanted: Tensor, size: Tensor) -> Tensor:
    """Return ``wanted / size``; 0 where a loss is 0 already."""
    return torch.where(size > 0, wanted / size, 0.0)


def map_chunks(
    model: LanguageModule,
    function: Callable[..., tuple[Tensor, ...]],
    states: Sequence[Tensor],
    tokens: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Call ``function`` on chunks of --loss-chunk-size tokens; return its results, joined.

    ``states`` [s, b, h] (or [s/tp, b, h]) and ``tokens`` [b, s, ...] become its arguments [c, b, h]
    and [c, b, ...]; its results [c, b, ...] become [b, s, ...].  With several chunks their
    activations are recomputed in backward: the logits of one chunk exist at a time.
    """
    config, (num_rows, batch_size) = model.config, states[0].shape[:2]
    # A sequence-parallel rank has a part of each chunk, so a chunk has tokens of all parts.
    num_parts = model.tp_group.size() if config.sequence_parallel else 1
    held = [x.transpose(0, 1).unflatten(0, (num_parts, num_rows)) for x in tokens]
    size = config.loss_chunk_size
    rows = max(1, size // (num_parts * batch_size)) if size else num_rows
    results = []
    for begin in range(0, num_rows, rows):
        chunk = [x[begin : begin + rows] for x in states]
        chunk += [x[:, begin : begin + rows].flatten(0, 1) for x in held]
        if rows >= num_rows or not torch.is_grad_enabled():
            result = function(*chunk)
        else:
            result = checkpoint(function, *chunk, use_reentrant=False, preserve_rng_state=False)
        results.append([x.unflatten(0, (num_parts, -1)) for x in result])
    joined = (torch.cat(parts, 1).flatten(0, 1) for parts in zip(*results, strict=True))
    return tuple(x.transpose(0, 1) for x in joined)


def lm_losses(model: LanguageModule, logits: Tensor, labels: Tensor, *, learns: bool) -> Tensor:
    """Return the cross entropy of each token: logits [c, b, v/tp], labels [c, b] -> [c, b].

    Without ``learns`` it has no gradient.
    """
    read = logits if learns else logits.detach()
    return model.compute_language_model_loss(labels.transpose(0, 1), read).transpose(0, 1)


def distillation_loss(
    combine: Callable[[RunConfig, ProcessGroupCollection, list[Tensor]], Tensor],
    inner: ModelImplementation,
    config: RunConfig,
    groups: ProcessGroupCollection,
    batch: Batch,
    output: Tensor,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the loss of a micro-batch, from the losses of its tokens [n, b, s].

    The loss function of ``inner`` sums each of them, so that it also decides which tokens count.
    ``combine`` returns the loss of the sums, of which there are several except in an evaluation.
    """
    count = inner.loss or _sum_masked
    lm, num_tokens, reported = count(config, groups, batch, output[0])
    sums = [lm, *(count(config, groups, batch, row)[0] for row in output[1:])]
    if len(sums) == 1:
        return lm, num_tokens, reported
    total = combine(config, groups, sums)
    named = {"total loss": total, **dict(zip(_NAMES, sums[1:], strict=False))}
    pairs = {name: torch.stack([x.detach(), num_tokens.to(x)]) for name, x in named.items()}
    return total, num_tokens, reported | pairs


def _sum_masked(
    _config: RunConfig, _groups: ProcessGroupCollection, batch: Batch, losses: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the loss of pretraining: the sum over tokens, their number, and the logged sums."""
    mask = batch["loss_mask"].float()
    total = (losses.float() * mask).sum()
    num_tokens = mask.sum()
    return total, num_tokens.int(), {"lm loss": torch.stack([total.detach(), num_tokens])}


def require_wrapper(chunks: Sequence[nn.Module], wrapper: type[nn.Module], flag: str) -> None:
    """Raise ConfigError unless each of ``chunks`` contains a ``wrapper``."""
    if not all(any(isinstance(m, wrapper) for m in chunk.modules()) for chunk in chunks):
        raise ConfigError(
            f"{flag} has no effect on this program: its model provider builds a model itself; "
            "return megatron.training.runtime.setup.build_stage(get_run(), ...) from it"
        )
