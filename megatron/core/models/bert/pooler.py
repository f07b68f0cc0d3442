"""Pooling: one vector for a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.models.bert.bert_lm_head import dense
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig


class Pooler(MegatronModule):
    """Linear layer and tanh of one token; every tensor-parallel rank computes it in full."""

    def __init__(self, hidden_size: int, config: TransformerConfig) -> None:
        super().__init__(config)
        self.dense = dense(hidden_size, hidden_size, config)

    def forward(self, hidden_states: Tensor, sequence_index: int = 0) -> Tensor:
        """Pool hidden states [s, b, h] -> [b, h] by the token at ``sequence_index``."""
        return torch.tanh(self.dense(hidden_states[sequence_index])[0])


def mean_of_text(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """Average over each text: [s, b, h] and mask [b, s] (1 = token) -> [b, h] float32.

    The first and the last token ([CLS] and [SEP]) and padding do not count.  A sequence without
    text gives zeros.
    """
    place = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    lengths = attention_mask.long().sum(1, keepdim=True)
    is_text = ((place > 0) & (place < lengths - 1)).float()
    share = is_text / is_text.sum(1, keepdim=True).clamp(min=1)
    return torch.einsum("sbh,bs->bh", hidden.float(), share)
