"""RetroModel: a GPT with a block of layers that attend to retrieved neighbors.

The first stage embeds the neighbors with the embedding of the decoder.  A stage sends the hidden
states of neighbors [r n k, b, h], embedded or encoded, before those of its tokens [s/tp, b, h], so
that backward collects the gradient of the encoded neighbors from every stage that attends to them.

``s`` tokens in ``n`` chunks, ``b`` sequences, ``k`` neighbors of each chunk of ``r`` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.retro.attention import NeighborStates, RetroDecoderCrossAttention
from megatron.core.models.retro.config import RetroConfig
from megatron.core.packed_seq_params import AttentionMask
from megatron.core.parallel.default_groups import library_call
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.kv_cache import KVCache
from megatron.core.transformer.norms import Stream
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    Span,
    TransformerBlock,
    TransformerBlockSubmodules,
)

Shapes = list[tuple[int, int, int]]


class RetroDecoder(TransformerBlock):
    """Layers of which some attend to neighbors: ``context`` of `forward` is a `NeighborStates`."""

    def _spans(self) -> list[Span]:
        """Do not recompute the layer with the encoder: it has two results.

        The encoder recomputes its own layers.
        """
        return [part for span in super()._spans() for part in self._without_encoder(span)]

    def _without_encoder(self, span: Span) -> Iterator[Span]:
        start = span.start
        for at in range(span.start, span.stop if span.is_recomputed else span.start):
            attention = getattr(self.layers[at], "cross_attention", None)
            if isinstance(attention, RetroDecoderCrossAttention) and attention.encoder is not None:
                if start < at:
                    yield Span(start, at, True)
                yield Span(at, at + 1, False)
                start = at + 1
        if start < span.stop:
            yield Span(start, span.stop, span.is_recomputed)

    def _run_span(self, span: Span, stream: Stream, shared: dict[str, object]) -> Stream:
        neighbors = shared.get("context")
        if span.is_recomputed and isinstance(neighbors, NeighborStates):
            shared = {**shared, "context": neighbors.states}  # a tensor, whose gradient it returns
        return super()._run_span(span, stream, shared)


class RetroModel(GPTModel):
    """A decoder-only language model that reads retrieved neighbors."""

    config: RetroConfig
    position_types = ("learned_absolute", "rope", "none")

    def build_decoder(
        self, spec: ModuleSpec | TransformerBlockSubmodules, block: object = None
    ) -> TransformerBlock:
        """Build the stack of layers."""
        return super().build_decoder(spec, RetroDecoder)

    @library_call()
    def forward(  # type: ignore[override]  # as in Megatron-LM
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: AttentionMask | None,
        context_input_ids: Tensor | None = None,
        context_position_ids: Tensor | None = None,
        context_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: KVCache | None = None,
        *,
        runtime_gather_output: bool | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """Map ids and positions [b, s] to the loss of each token [b, s], or to logits [b, s, v].

        ``context_input_ids`` [b n k, r] are the neighbors of the s // m complete chunks, in the
        order of sequences, chunks and neighbors; without them, and with a gate of 0, the model is
        a GPT.  ``context_mask`` hides nothing and is not read.  See `GPTModel.forward`.
        """
        if inference_context is not None:
            raise ConfigError(
                "RetroModel does not support a KV cache: pass the complete sequence with the "
                "neighbors of its chunks, without inference_context"
            )
        neighbors: NeighborStates | None = None
        if self.reads_neighbors:
            neighbors = self._neighbors(input_ids, context_input_ids, context_position_ids)
        output: Tensor = super().forward(
            input_ids,
            position_ids,
            attention_mask,
            decoder_input,
            labels,
            extra_block_kwargs={"context": neighbors},
            runtime_gather_output=runtime_gather_output,
            loss_mask=loss_mask,
        )
        if self.post_process or neighbors is None:
            return output
        return torch.cat([neighbors.states, output])

    @property
    def reads_neighbors(self) -> bool:
        """Whether tokens attend to neighbors."""
        return self.config.retro_attention_gate != 0

    def _neighbors(
        self, tokens: Tensor | None, ids: Tensor | None, positions: Tensor | None
    ) -> NeighborStates | None:
        """Return the embedded neighbors of ``tokens``, or those of the stage before."""
        config = self.config
        rotary = self.rotary_table(config.retro_retrieved_length)
        if not self.pre_process:
            received = self.decoder.input_tensor
            assert received is not None, "a later stage needs set_input_tensor"
            rows = self._rows_of_neighbors(len(received), is_sum=True)
            states, hidden = received.split([rows, len(received) - rows])
            self.decoder.set_input_tensor(hidden)
            return NeighborStates(states, rotary)
        if ids is None or tokens is None:
            return None
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        embedded: Tensor = self.embedding(ids, positions)
        if self.embedding.is_sequence_sharded:
            embedded = gather_from_sequence_parallel_region(embedded, False, group=self.tp_group)
        by_sequence = ids.shape[1], len(tokens), -1, config.hidden_size
        states = embedded.view(by_sequence).transpose(1, 2).flatten(0, 1)
        return NeighborStates(states, rotary)

    def _rows_of_neighbors(self, num_rows: int, *, is_sum: bool = False) -> int:
        """Return the rows of neighbors in a message with ``num_rows`` rows of tokens, or of both.

        A rank has [s/tp] rows of tokens under sequence parallelism, and all rows of neighbors.
        """
        config = self.config
        ranks = self.tp_group.size() if config.sequence_parallel else 1
        of_neighbors = config.neighbor_tokens * ranks
        return num_rows * of_neighbors // (config.retro_chunk_length + is_sum * of_neighbors)

    def adjust_tensor_shapes(self, received: Shapes, sent: Shapes) -> tuple[Shapes, Shapes]:
        """Return the shapes of messages between stages, which have neighbors too."""
        if not self.reads_neighbors:
            return received, sent
        rows = self._rows_of_neighbors
        received, sent = ([(s + rows(s), b, h) for s, b, h in x] for x in (received, sent))
        return received, sent

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return the entries of `LanguageModule`, with keys of their own for each layer."""
        metadata = {**(metadata or {}), "non_homogeneous_layers": True}
        return super().sharded_state_dict(prefix, sharded_offsets, metadata)
