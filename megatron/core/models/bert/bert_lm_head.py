"""What BERT has between its last layer and the vocabulary."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norms import Norm
from megatron.core.transformer.transformer_config import TransformerConfig


def dense(input_size: int, output_size: int, config: TransformerConfig) -> ReplicatedLinear:
    """A matrix with a bias, computed alike on all tensor-parallel ranks."""
    return ReplicatedLinear(
        input_size,
        output_size,
        config=config,
        init_method=config.init_method,
        bias=True,
        has_partial_gradient=False,
    )


class BertLMHead(MegatronModule):
    """dense, GELU and norm, computed alike on all tensor-parallel ranks."""

    def __init__(self, hidden_size: int, config: TransformerConfig) -> None:
        super().__init__(config)
        self.dense = dense(hidden_size, hidden_size, config)
        self.layer_norm = Norm(
            config, hidden_size, config.layernorm_epsilon, has_partial_gradient=False
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., h] -> [.., h]"""
        out: Tensor = self.layer_norm(F.gelu(self.dense(hidden)))
        return out
