"""Losses of pairs of answers, from one score per answer.

Direct preference optimization: https://arxiv.org/abs/2305.18290, equation 7; the loss IPO:
https://arxiv.org/abs/2310.12036, equation 17, with log-probabilities averaged over the tokens of an
answer; the hinge loss: https://arxiv.org/abs/2305.10425.  Reward models: the loss of Bradley and
Terry, https://arxiv.org/abs/2203.02155, equation 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.packed_seq_params import PackedSeqParams, sequence_index
from megatron.core.parallel.context_parallel_partition import held_tokens, row_lengths
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_reduce, through
from megatron.training.config.preference import HINGE, IPO, SIGMOID
from megatron.training.config.run import RunConfig
from megatron.training.models.kind import Batch


class Pairs(NamedTuple):
    """Sums over the answers of a micro-batch, [pairs, 2]: the chosen answer first.

    Ranks that share sequences (context parallelism) have the same sums.  A pair that does not
    exist has no tokens.
    """

    scores: Tensor  # log-probabilities of the model, or scores of a reward model
    reference: Tensor  # log-probabilities of the reference model
    num_tokens: Tensor

    @property
    def exist(self) -> Tensor:
        """Which pairs exist: bool [pairs]."""
        return self.num_tokens[:, 0] > 0


def preference_loss(
    config: RunConfig, groups: ProcessGroupCollection, batch: Batch, token_losses: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of the losses of all pairs, their number, and what is logged.

    ``token_losses``: negative log-probabilities [1, n].  ``batch`` has what `pairs_of` reads.
    Collective over the context-parallel group.
    """
    pairs = pairs_of(batch, -token_losses, groups.cp)
    preference = config.preference
    assert preference.dpo_beta is not None, "it selects this loss"
    losses = dpo_losses(
        pairs, preference.dpo_beta, preference.dpo_loss_type, preference.dpo_label_smoothing
    )
    exist = pairs.exist
    number = exist.sum()
    rewards = preference.dpo_beta * (pairs.scores - pairs.reference).detach()
    margins = rewards[:, 0] - rewards[:, 1]
    logged = {
        "dpo loss": losses.detach(),
        "reward of chosen": rewards[:, 0],
        "reward of rejected": rewards[:, 1],
        "reward margin": margins,
        "reward accuracy": (margins > 0).float(),
    }
    return _summed(losses, logged, exist, number)


def reward_loss(
    config: RunConfig, groups: ProcessGroupCollection, batch: Batch, scores: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of the losses of all pairs, their number, and what is logged.

    ``scores`` [1, n]; the loss mask of ``batch`` selects the score of each answer, that of its last
    token.  Collective over the context-parallel group.
    """
    del config
    pairs = pairs_of(batch, scores, groups.cp)
    margins = pairs.scores[:, 0] - pairs.scores[:, 1]
    losses = -F.logsigmoid(margins)
    logged = {
        "reward loss": losses.detach(),
        "reward of chosen": pairs.scores[:, 0].detach(),
        "reward of rejected": pairs.scores[:, 1].detach(),
        "reward margin": margins.detach(),
        "reward accuracy": (margins > 0).float(),
    }
    exist = pairs.exist
    return _summed(losses, logged, exist, exist.sum())


def _summed(
    losses: Tensor, logged: dict[str, Tensor], exist: Tensor, number: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sums over the pairs that exist, as a loss function returns them."""
    count = number.float()
    reported = {
        key: torch.stack([values.masked_fill(~exist, 0).sum(), count])
        for key, values in logged.items()
    }
    return losses.masked_fill(~exist, 0).sum(), number.to(torch.int), reported


def dpo_losses(pairs: Pairs, beta: float, loss_type: str, label_smoothing: float) -> Tensor:
    """Return the loss of each pair: [pairs].

    ``beta`` weighs the distance from the reference model.  ``label_smoothing`` is the probability
    that the two answers of a pair are confused.
    """
    log_ratios = pairs.scores - pairs.reference
    if loss_type == IPO:
        per_token = log_ratios / pairs.num_tokens.clamp(min=1)
        return (per_token[:, 0] - per_token[:, 1] - 1 / (2 * beta)).square()
    margins = beta * (log_ratios[:, 0] - log_ratios[:, 1])
    if loss_type == HINGE:
        return torch.relu(1 - margins)
    assert loss_type == SIGMOID, f"{loss_type} is no choice of --dpo-loss-type"
    smooth = label_smoothing
    return -(1 - smooth) * F.logsigmoid(margins) - smooth * F.logsigmoid(-margins)


def pairs_of(batch: Batch, scores: Tensor, cp_group: ProcessGroup) -> Pairs:
    """Return the sums of each answer's tokens.  Collective over ``cp_group``.

    Each packed sequence of the micro-batch is an answer with its prompt; the rejected one follows
    the chosen one.  ``batch`` has, for this rank's n tokens, in [1, n]: loss_mask; is_rejected, 1
    for the tokens of rejected answers; and reference, whose sum over the tokens with loss of an
    answer is its log-probability under the reference model.
    """
    packed = batch["packed_seq_params"]
    mask = batch["loss_mask"].flatten()
    is_rejected = batch["is_rejected"].flatten().long()
    sequence = _held_sequences(packed, len(mask), cp_group)
    reference = torch.zeros_like(mask) if batch["reference"] is None else batch["reference"]
    values = torch.stack([scores.flatten().float(), reference.flatten(), mask.float()])
    values = torch.where(mask > 0, values, 0.0).t()
    num_sequences = packed.ends.numel()  # tokens after the last one are one more
    # The two answers of a pair are added at the number of the chosen one.
    slot = 2 * (sequence - is_rejected) + is_rejected
    sums = values.new_zeros(2 * num_sequences, 3).index_add(0, slot, values)
    if cp_group.size() > 1:
        # Each rank computes the loss of all pairs, and the framework adds the ranks' gradients and
        # their numbers of pairs: the sum over ranks is needed in backward too.
        sums = through(sums, cp_group, all_reduce, all_reduce)
    score, reference, num_tokens = sums.view(-1, 2, 3).unbind(-1)
    return Pairs(score, reference.detach(), num_tokens.detach())


def _held_sequences(packed: PackedSeqParams, num_held: int, cp_group: ProcessGroup) -> Tensor:
    """Return the number of the packed sequence of each token that this rank holds: [n/cp]."""
    num_tokens = num_held * cp_group.size()
    found = sequence_index(packed.ends, num_tokens)
    if cp_group.size() == 1:
        return found
    lengths = row_lengths(packed.lengths, num_tokens)
    return found[held_tokens(lengths, cp_group.rank(), cp_group.size(), found.device)]
