"""Embedding: words, learned positions and token types to the first hidden states.

``s`` tokens, ``b`` sequences, ``h`` hidden size.  Under sequence parallelism each rank ends with
its slice of the tokens: the partial sums of words are reduce-scattered, and positions and types are
looked up for the slice alone.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron.core.parallel.default_groups import library_call
from megatron.core.params.param_init import new_parameter, param_info_for
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import slice_of_first_dim
from megatron.core.tensor_parallel.random import fork_for_tokens
from megatron.core.transformer.module import MegatronModule, is_replaced
from megatron.core.transformer.transformer_config import TransformerConfig


class PositionEmbedding(nn.Module):
    """A learned vector for each position, or for each token type."""

    def __init__(
        self, config: TransformerConfig, num_positions: int, *, is_sequence_sharded: bool
    ) -> None:
        """``is_sequence_sharded``: gradients are partial over tensor-parallel ranks."""
        super().__init__()
        shape = num_positions, config.hidden_size
        info = param_info_for(
            shape, config.embedding_init_method, sequence_parallel=is_sequence_sharded
        )
        self.weight = new_parameter(info.global_shape, config.params_dtype, info)

    def forward(self, position_ids: Tensor) -> Tensor:
        """Look up [..., s] -> [..., s, h].  Raises IndexError beyond the last position (on CPU)."""
        return F.embedding(position_ids, self.weight)


class LanguageModelEmbedding(MegatronModule):
    """Token ids [b, s] -> [s, b, h], or [s/tp, b, h] under sequence parallelism."""

    @library_call("... scatter_to_sequence_parallel tp_group")
    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: str = "learned_absolute",
        num_tokentypes: int = 0,
        *,
        tp_group: ProcessGroup,
        num_tokens: int | None = None,
        scatter_to_sequence_parallel: bool = True,
    ) -> None:
        """``vocab_size`` includes padding rows, ``num_tokens`` does not."""
        super().__init__(config)
        self.tp_group = tp_group
        self.vocab_size = vocab_size
        self.max_sequence_length = max_sequence_length
        self.num_tokentypes = num_tokentypes
        self.add_position_embedding = position_embedding_type == "learned_absolute"
        self.scatter_to_sequence_parallel = scatter_to_sequence_parallel
        self.reduce_scatter_embeddings = self.is_sequence_sharded = (
            config.sequence_parallel and scatter_to_sequence_parallel and tp_group.size() > 1
        )
        self.embedding_dropout = nn.Dropout(config.hidden_dropout)
        self.word_embeddings = VocabParallelEmbedding(
            vocab_size,
            config.hidden_size,
            config=config,
            init_method=config.embedding_init_method,
            tp_group=tp_group,
            num_tokens=num_tokens,
            reduce_scatter_embeddings=self.is_sequence_sharded,
        )

        def table(num_positions: int) -> PositionEmbedding | None:
            if not num_positions:
                return None
            return PositionEmbedding(
                config, num_positions, is_sequence_sharded=self.is_sequence_sharded
            )

        has_positions = self.add_position_embedding
        self.position_embeddings = table(max_sequence_length if has_positions else 0)
        self.tokentype_embeddings = table(num_tokentypes)
        scale = config.embedding_scale
        self.scale = math.sqrt(config.hidden_size) if scale == 0 else scale

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None, tokentype_ids: Tensor | None = None
    ) -> Tensor:
        """Embed ids, positions and types [b, s] -> [s, b, h] (or [s/tp, b, h])."""
        # A project's own look-up expects rows of ids; ours needs no copy if they are columns.
        has_rows = is_replaced(self.word_embeddings, "forward")
        in_order = self.is_sequence_sharded or has_rows
        hidden: Tensor = self.word_embeddings(input_ids if in_order else input_ids.transpose(0, 1))
        if has_rows and not self.is_sequence_sharded:
            hidden = hidden.transpose(0, 1)
        if self.scale is not None:
            hidden = hidden * self.scale
        for table, places in (
            (self.position_embeddings, position_ids),
            (self.tokentype_embeddings, tokentype_ids),
        ):
            if table is not None:
                assert places is not None, "the model needs position_ids, or tokentype_ids"
                ids = places.transpose(0, 1)
                if self.is_sequence_sharded:
                    ids = slice_of_first_dim(ids, self.tp_group)
                hidden = hidden + table(ids)
        hidden = hidden.contiguous()
        if self.config.fp32_residual_connection:
            hidden = hidden.float()
        if self.training and self.config.hidden_dropout > 0:
            with fork_for_tokens(True, is_sequence_sharded=self.is_sequence_sharded):
                hidden = self.embedding_dropout(hidden)
        return hidden
