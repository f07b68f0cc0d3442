"""What language models share: the loss over a divided vocabulary, and tied embeddings."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron.core.param_info import info_of, set_info
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.cross_entropy import (
    true_columns,
    vocab_parallel_cross_entropy,
)
from megatron.core.tensor_parallel.layers import check_token_ids
from megatron.core.tensor_parallel.output_loss import linear_cross_entropy
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class LanguageModule(MegatronModule):
    """Base of models that end in a vocabulary.

    ``vocab_size`` is the padded one, ``num_tokens`` the true one: the rest never enters a softmax.
    """

    def __init__(
        self, config: TransformerConfig, groups: ProcessGroupCollection, num_tokens: int | None
    ) -> None:
        super().__init__(config)
        self.pg_collection, self.tp_group = groups, groups.tp
        self.num_tokens = num_tokens

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """labels [b, s], logits [s, b, v/tp] -> loss of each token [b, s] in float32."""
        loss = vocab_parallel_cross_entropy(
            logits,
            labels.transpose(0, 1),
            tp_group=self.tp_group,
            vocab_size=self.num_tokens,
        )
        return loss.transpose(0, 1).contiguous()

    def linear_and_loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        *,
        is_sequence_cut: bool,
        is_own_weight: bool = False,
    ) -> Tensor:
        """Hidden states [s, b, h], weight [p/tp, h], labels [b, s] -> loss of each token [b, s].

        Where ``is_sequence_cut`` they are [s/tp, b, h].  Equal to the output layer
        followed by `compute_language_model_loss`.  ``is_own_weight``: no embedding shares it.
        """
        padded = weight.shape[0]
        limit = self.num_tokens or padded * self.tp_group.size()
        check_token_ids(labels, limit, may_ignore=True)
        loss = linear_cross_entropy(
            hidden.flatten(0, 1),
            weight,
            labels.transpose(0, 1).flatten(),
            group=self.tp_group,
            num_columns=true_columns(padded, self.num_tokens, self.tp_group),
            sequence_parallel=is_sequence_cut,
            is_own=is_own_weight,
        )
        return loss.view(-1, hidden.shape[1]).transpose(0, 1).contiguous()

    def finish_logits(self, logits: Tensor, *, is_gathered: bool) -> Tensor:
        """Logits [s, b, v] for a caller: [b, s, v], capped, and without padding.

        Gathered logits are cut to the true vocabulary; in divided ones padding is -inf.
        """
        logits = self.cap(logits).transpose(0, 1)
        if self.num_tokens is None:
            return logits.contiguous()
        if is_gathered or self.tp_group.size() == 1:
            return logits[..., : self.num_tokens].contiguous()
        columns = true_columns(logits.shape[-1], self.num_tokens, self.tp_group)
        hidden = torch.arange(logits.shape[-1], device=logits.device) >= columns
        return logits.masked_fill(hidden, float("-inf"))

    def cap(self, logits: Tensor) -> Tensor:
        """Squashed into +-``final_logit_softcapping``, where the config has one."""
        limit = self.config.final_logit_softcapping
        return logits if limit is None else limit * torch.tanh(logits / limit)


def mark_as_shared_embedding(weight: nn.Parameter, *, is_copy: bool) -> None:
    """Say that ``weight`` is word embedding and output layer, or the last stage's copy of it."""
    set_info(weight, replace(info_of(weight), is_duplicate=is_copy, is_shared_embedding=True))
