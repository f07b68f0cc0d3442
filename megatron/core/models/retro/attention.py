"""Chunked cross attention: tokens attend to the neighbors of the chunk before, layers and specs.

``s`` tokens in ``n`` chunks of ``m``, ``b`` sequences, ``k`` neighbors of each chunk of ``r``
tokens, ``h`` hidden size.  Chunk ``i`` (from 0) is known when its last token is read.  So the
tokens from that one to the last but one of chunk ``i + 1`` attend to its neighbors, and the first
``m - 1`` tokens of a sequence to none.

Hidden states of neighbors are [r n k, b, h] between layers: rows of a pipeline message.  Under
sequence parallelism every tensor-parallel rank gathers the tokens, and holds complete neighbors.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.enums import AttnMaskType
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.rope import RotaryTable
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import ENGINE, LOCAL, layer_of
from megatron.core.models.retro.config import RetroConfig
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import CrossAttention, CrossAttentionSubmodules
from megatron.core.transformer.layer_layout import attends_to_neighbors
from megatron.core.transformer.module import MegatronModule, WithBias
from megatron.core.transformer.norms import Stream
from megatron.core.transformer.spec_utils import ModuleSpec, Slot
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer


class NeighborStates:
    """Hidden states of neighbors; the first layer that attends to them replaces them.

    It encodes the embedded neighbors, once for all layers.  FSDP2 would copy a dataclass for each
    layer.
    """

    def __init__(self, states: Tensor, rotary: RotaryTable | None = None) -> None:
        """``states`` [r n k, b, h]; ``rotary``: angles of the positions in a neighbor."""
        self.states = states
        self.rotary = rotary


class BaseRetroCrossAttention(MegatronModule):
    """Cross attention between complete sequences, on every tensor-parallel rank."""

    config: RetroConfig

    @library_call("... model_comm_pgs")
    def __init__(
        self,
        config: RetroConfig,
        submodules: CrossAttentionSubmodules,
        layer_number: int = 1,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        self.tp_group = pg_collection.tp
        whole = config.with_whole_sequences()
        self.attn = CrossAttention(
            whole, submodules, layer_number, attn_mask_type, pg_collection=pg_collection
        )

    def attend(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Attend, without a mask: [q, x, h] and [k, x, h] -> [q, x, h], bias included."""
        output: Tensor
        output, bias = self.attn(queries, None, keys.to(self.config.params_dtype))
        return output if bias is None else output + bias


class RetroEncoderCrossAttention(BaseRetroCrossAttention):
    """Attention of the tokens of neighbors to the chunk that they were retrieved for."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        **unused: object,
    ) -> WithBias:
        """Attend: neighbors [r, b n k, h] and chunks [m, b n, h] -> [r, b n k, h] and None."""
        assert key_value_states is not None, "the encoder reads the chunks"
        r, _, h = hidden_states.shape
        k = self.config.retro_num_neighbors
        queries = hidden_states.view(r, -1, k, h).transpose(1, 2).reshape(r * k, -1, h)
        output = self.attend(queries, key_value_states)
        return output.view(r, k, -1, h).transpose(1, 2).reshape(r, -1, h), None


class RetroDecoderCrossAttention(BaseRetroCrossAttention):
    """Attention of tokens to the neighbors of the last complete chunk before the next token.

    The module of the first such layer contains the encoder of neighbors.
    """

    @library_call("... model_comm_pgs")
    def __init__(
        self,
        config: RetroConfig,
        submodules: CrossAttentionSubmodules,
        layer_number: int = 1,
        attn_mask_type: AttnMaskType = AttnMaskType.padding,
        encoder_block_spec: TransformerBlockSubmodules | None = None,
        *,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(
            config, submodules, layer_number, attn_mask_type, pg_collection=pg_collection
        )
        self.encoder: TransformerBlock | None = None
        if encoder_block_spec is not None:
            self.encoder = TransformerBlock(
                config.encoder_config(),
                encoder_block_spec,
                post_process=False,
                pg_collection=pg_collection,
                layer_indices=range(config.retro_encoder_num_layers),
            )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        key_value_states: NeighborStates | Tensor | None = None,
        **unused: object,
    ) -> WithBias:
        """Attend: [s, b, h] -> [s, b, h] and None; tokens are [s/tp, b, h] if they are split.

        ``key_value_states``: neighbors [r n k, b, h]; with an encoder a `NeighborStates`, whose
        states it replaces by encoded ones.
        """
        neighbors = key_value_states
        assert neighbors is not None, "the layer skips attention without neighbors"
        is_split = self.config.sequence_parallel and self.tp_group.size() > 1
        hidden = hidden_states
        if is_split:  # each rank computes the complete gradient of all tokens
            hidden = gather_from_sequence_parallel_region(hidden, False, group=self.tp_group)
        if self.encoder is not None:
            assert isinstance(neighbors, NeighborStates), "it is not recomputed with its layer"
            neighbors.states = self._encode(neighbors, hidden)
        states = neighbors.states if isinstance(neighbors, NeighborStates) else neighbors
        output = self._attend_by_chunks(hidden, states)
        if is_split:
            output = scatter_to_sequence_parallel_region(output, self.tp_group)
        gate = self.config.retro_attention_gate
        return output if gate == 1 else output * gate, None

    def _encode(self, neighbors: NeighborStates, hidden: Tensor) -> Tensor:
        """Encode neighbors [r n k, b, h], which attend to their chunks of ``hidden``."""
        assert self.encoder is not None, "called where it is"
        b, h = hidden.shape[1:]
        n = self._num_chunks(hidden, neighbors.states)
        r = len(neighbors.states) // (n * self.config.retro_num_neighbors)
        embedded = neighbors.states.view(r, -1, b, h).transpose(1, 2).reshape(r, -1, h)
        chunks = _by_chunk(hidden, n, self.config.retro_chunk_length)
        encoded: Tensor = self.encoder(
            embedded, None, context=chunks, rotary_pos_emb=neighbors.rotary
        )
        return encoded.view(r, b, -1, h).transpose(1, 2).reshape(-1, b, h)

    def _attend_by_chunks(self, hidden: Tensor, states: Tensor) -> Tensor:
        s, b, h = hidden.shape
        k = self.config.retro_num_neighbors
        m = self.config.retro_chunk_length
        n = self._num_chunks(hidden, states)
        num_attending = s - (m - 1)
        padded = F.pad(hidden[m - 1 :], (0, 0, 0, 0, 0, n * m - num_attending))
        keys = states.view(-1, n, k, b, h).permute(0, 2, 3, 1, 4).reshape(-1, b * n, h)
        output = self.attend(_by_chunk(padded, n, m), keys)
        in_order = output.view(m, b, n, h).permute(2, 0, 1, 3).reshape(n * m, b, h)
        return F.pad(in_order[:num_attending], (0, 0, 0, 0, m - 1, 0))

    def _num_chunks(self, hidden: Tensor, states: Tensor) -> int:
        """Return the number of complete chunks.  Raises ConfigError if neighbors do not fit."""
        config = self.config
        n = len(hidden) // config.retro_chunk_length
        wanted = n * config.neighbor_tokens
        if not n or len(states) != wanted:
            raise ConfigError(
                f"{len(hidden)} tokens have {n} complete chunks of {config.retro_chunk_length}, "
                f"whose neighbors have {wanted} tokens, not {len(states)}: pass "
                f"context_input_ids with {config.retro_num_neighbors} neighbors for each chunk"
            )
        return n


def _by_chunk(tokens: Tensor, n: int, m: int) -> Tensor:
    """Return the first ``n`` chunks of [s, b, h] as [m, b n, h]."""
    _, b, h = tokens.shape
    return tokens[: n * m].view(n, m, b, h).permute(1, 2, 0, 3).reshape(m, b * n, h)


class RetroDecoderLayer(TransformerLayer):
    """A layer that attends to neighbors if there are any."""

    def add_cross_attention(self, hidden_states: Stream, context: Any, *more: Any) -> Stream:
        """Leave the hidden states as they are without neighbors: those of a GPT."""
        if context is None:
            return hidden_states
        return super().add_cross_attention(hidden_states, context, *more)


def retro_block_of(backend: BackendSpecProvider, config: RetroConfig) -> TransformerBlockSubmodules:
    """Return a spec for every layer of the model, with the classes of ``backend``."""
    encoder_layers = range(1, config.retro_encoder_num_layers + 1)
    encoder = TransformerBlockSubmodules(
        [
            _layer(backend, config, RetroEncoderCrossAttention if i % 3 == 1 else None)
            for i in encoder_layers
        ]
    )
    for layer in encoder.layer_specs or ():
        assert isinstance(layer, ModuleSpec), "as made above"
        layer.submodules.self_attention.params["attn_mask_type"] = AttnMaskType.padding
    attending = attends_to_neighbors(config.num_layers)
    layers: list[Slot] = []
    for number in range(1, config.num_layers + 1):
        attention = RetroDecoderCrossAttention if number in attending else None
        layer = _layer(backend, config, attention)
        if number == attending[0]:
            layer.submodules.cross_attention.params["encoder_block_spec"] = encoder
        layers.append(layer)
    return TransformerBlockSubmodules(layers, backend.layer_norm())


def _layer(
    backend: BackendSpecProvider,
    config: RetroConfig,
    attention: type[BaseRetroCrossAttention] | None,
) -> ModuleSpec:
    """Return a GPT layer, with cross attention of class ``attention`` if it has one."""
    layer = layer_of(backend, config=config)
    if attention is not None:
        column = backend.column_parallel_linear()
        parts = CrossAttentionSubmodules(
            column, column, backend.core_attention(), backend.row_parallel_linear()
        )
        layer.module = RetroDecoderLayer
        layer.submodules.pre_cross_attn_layernorm = backend.layer_norm()
        layer.submodules.cross_attention = ModuleSpec(attention, submodules=parts)
        layer.submodules.cross_attn_bda = get_bias_dropout_add
    return layer


def get_retro_decoder_block_spec(
    config: RetroConfig, use_transformer_engine: bool
) -> TransformerBlockSubmodules:
    """Return a spec for every layer of the model, with plain or Transformer Engine's modules."""
    return retro_block_of(ENGINE if use_transformer_engine else LOCAL, config)
