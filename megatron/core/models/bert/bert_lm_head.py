"""BERT's head between the last layer and the vocabulary."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.transformer_config import TransformerConfig


def dense(input_size: int, output_size: int, config: TransformerConfig) -> ReplicatedLinear:
    """Build a linear layer with bias that every tensor-parallel rank computes in full."""
    return ReplicatedLinear(
        input_size,
        output_size,
        config=config,
        init_method=config.init_method,
        bias=True,
        has_partial_gradient=False,
    )


class BertLMHead(MegatronModule):
    """Linear layer, GELU and norm; every tensor-parallel rank computes them in full."""

    def __init__(self, hidden_size: int, config: TransformerConfig) -> None:
        super().__init__(config)
        self.dense = dense(hidden_size, hidden_size, config)
        self.layer_norm = Norm(
            config, hidden_size, config.layernorm_epsilon, has_partial_gradient=False
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Transform hidden states [.., h] -> [.., h]."""
        out: Tensor = self.layer_norm(F.gelu(self.dense(hidden_states)[0]))
        return out
