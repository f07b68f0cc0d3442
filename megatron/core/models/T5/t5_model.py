"""T5Model: one word embedding, an encoder, a decoder that attends to its output, an output layer.

A pipeline stage holds a part of it: the first stages hold the encoder, the others the decoder.  An
encoder stage sends hidden states [s, b, h].  A decoder stage sends the encoder's output followed by
its own hidden states, so that backward collects the gradient of the encoder's output from every
stage that attends to it.

``s`` tokens of the encoder, ``t`` of the decoder, ``b`` sequences, ``h`` hidden size, ``v``
vocabulary, ``x/tp`` this rank's part of ``x``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.device import cpu_kernels
from megatron.core.models.common.embeddings.relative_pos_embedding import RelativePositionEmbedding
from megatron.core.models.common.language_module.language_module import (
    OPTIONS,
    LanguageModule,
    mark_as_shared_embedding,
)
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import info_of
from megatron.core.transformer.attention_masks import band
from megatron.core.transformer.kv_cache import KVCache, PositionBias
from megatron.core.transformer.layer_layout import stacked_ranges
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

_HEAD = {f"output_layer.{part}": f"lm_head.output_layer.{part}" for part in ("weight", "bias")}


class T5Model(LanguageModule):
    """An encoder-decoder language model."""

    position_types = ("learned_absolute", "rope", "relative", "none")

    @library_call(
        f"... {OPTIONS} seq_len_interpolation_factor relative_attention_num_buckets "
        "relative_attention_max_distance add_encoder add_decoder model_comm_pgs",
        like=LanguageModule.set_language_options,
    )
    def __init__(
        self,
        config: TransformerConfig,
        encoder_config: TransformerConfig,
        transformer_encoder_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        transformer_decoder_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        *,
        relative_attention_num_buckets: int = 32,
        relative_attention_max_distance: int = 128,
        add_encoder: bool = True,
        add_decoder: bool = True,
        pg_collection: ProcessGroupCollection,
        **of_language: Any,
    ) -> None:
        """``config`` is the decoder's; ``encoder_config`` differs in the number of layers only.

        With ``add_encoder`` False the model is a decoder and receives the encoder's hidden states.
        ``of_language``: the options of `LanguageModule.set_language_options`.
        """
        super().__init__(config, pg_collection=pg_collection)
        self.set_language_options(vocab_size, max_sequence_length, **of_language)
        self.encoder_stages = _encoder_stages(config, self.pp_group.size())
        self.input_tensor: Tensor | None = None
        self.looks_up = self.pp_group.rank() in (0, self.encoder_stages)
        if self.looks_up:
            self.embedding = self.build_embedding()
            for param in self.embedding.parameters() if self.pp_group.size() > 1 else ():
                if info_of(param).shared_over is None:
                    mark_as_shared_embedding(param, is_copy=not self.pre_process, over="pos_embd")
        buckets = relative_attention_num_buckets, relative_attention_max_distance
        depths = encoder_config.num_layers, config.num_layers
        in_encoder, in_decoder = stacked_ranges(
            depths,
            self.encoder_stages,
            pp_rank=self.pp_group.rank(),
            num_ranks=self.pp_group.size(),
        )
        self.encoder: TransformerBlock | None = None
        self.decoder: TransformerBlock | None = None
        if add_encoder and in_encoder is not None:
            spec = transformer_encoder_layer_spec
            self.encoder = self._build_stack(encoder_config, spec, in_encoder)
            self.encoder_relative_pos_emb = self._build_bias(buckets, bidirectional=True)
        if add_decoder and in_decoder is not None:
            self.decoder = self._build_stack(config, transformer_decoder_layer_spec, in_decoder)
            self.decoder_relative_pos_emb = self._build_bias(buckets, bidirectional=False)
        if self.post_process and self.decoder is not None:
            has_bias = self.share_embeddings_and_output_weights and config.add_bias_linear
            self.output_layer = self.build_output_layer(bias=has_bias)
        self.finalize_parameters()

    def renamed_parameters(self) -> dict[str, str]:
        """Rename also the output layer, as Megatron-LM names it."""
        return {**_HEAD, **super().renamed_parameters()}

    def _build_stack(
        self,
        config: TransformerConfig,
        spec: ModuleSpec | TransformerBlockSubmodules,
        layers: range,
    ) -> TransformerBlock:
        return TransformerBlock(
            config,
            spec,
            pre_process=self.looks_up,
            post_process=layers.stop == config.num_layers,
            pg_collection=self.pg_collection,
            layer_indices=layers,
        )

    def _build_bias(
        self, buckets: tuple[int, int], *, bidirectional: bool
    ) -> RelativePositionEmbedding | None:
        """Build the relative position bias: one table per stack, with a copy on each stage."""
        if self.position_embedding_type != "relative":
            return None
        config, pp = self.config, self.pg_collection.pp
        table = RelativePositionEmbedding(
            bidirectional,
            config.init_method,
            config.num_attention_heads,
            *buckets,
            params_dtype=config.params_dtype,
            tp_group=self.tp_group,
        )
        if pp.size() > 1:
            weight = table.relative_attention_bias.weight
            mark_as_shared_embedding(weight, is_copy=not self.looks_up, over="stack")
        return table

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Set the hidden states that the previous stage sent."""
        self.input_tensor = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    @library_call("... packed_seq_params")
    def forward(
        self,
        encoder_input_ids: Tensor | None,
        decoder_input_ids: Tensor | None,
        encoder_attn_mask: Tensor | None = None,
        decoder_attn_mask: Tensor | None = None,
        encoder_decoder_attn_mask: Tensor | None = None,
        lm_labels: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        output_encoder_hidden_only: bool = False,
        inference_context: KVCache | None = None,
        *,
        packed_seq_params: None = None,
        runtime_gather_output: bool | None = None,
    ) -> Tensor:
        """Map ids [b, s] and [b, t] to the loss of each token [b, t], or to logits [b, t, v].

        Masks are True where a key is hidden: [b, keys], up to [b, 1, queries, keys]; without a mask
        the decoder is causal.  Logits are sharded over the tensor-parallel group, [b, t, v/tp],
        unless gathering is requested here or by ``parallel_output``; with ``inference_context``
        they are gathered and those of the rows that it selects.  ``encoder_hidden_states`` replace
        the encoder.  Every stage but the last returns what the next stage needs.  All stages of
        the encoder need the encoder's ids, all stages of the decoder the decoder's.
        """
        if packed_seq_params is not None:
            raise ConfigError("T5 does not support packed sequences: pass a row for each")
        received, self.input_tensor = self.input_tensor, None  # it is freed in backward
        context, hidden = encoder_hidden_states, None
        if self.encoder is not None and context is None:
            table = self.encoder_relative_pos_emb
            inputs = encoder_input_ids, received, encoder_attn_mask
            context = self._run(self.encoder, table, *inputs)
            if self.decoder is None or output_encoder_hidden_only:
                return self._as_message(context)
        elif received is not None:
            context, hidden = self._taken_apart(received, decoder_input_ids)
        assert context is not None, "a decoder needs the output of an encoder"
        assert self.decoder is not None, "a stage without it returns the encoder's output"
        hidden = self._run(
            self.decoder,
            self.decoder_relative_pos_emb,
            decoder_input_ids,
            hidden,
            decoder_attn_mask,
            inference_context,
            context=context.to(self.config.params_dtype),
            context_mask=_needed(encoder_decoder_attn_mask, is_causal=False),
            inference_context=inference_context,
        )
        if not self.post_process:
            return self._as_message(torch.cat([context, hidden]))
        if lm_labels is not None:
            return self.token_losses(hidden, lm_labels)
        return self.generated_logits(hidden, inference_context, runtime_gather_output)

    def _run(
        self,
        stack: TransformerBlock,
        table: RelativePositionEmbedding | None,
        ids: Tensor | None,
        received: Any,
        mask: Tensor | None,
        cache: KVCache | None = None,
        **more: Any,
    ) -> Tensor:
        """Run a stack: ids [b, s] to hidden states [s, b, h]."""
        length = self.tokens_in_row(ids, received)
        bias: Tensor | PositionBias | None = None
        if table is not None:
            bias = table(length, length) if cache is None else partial(_bias_of_rows, table)
        stack.set_input_tensor(received)
        hidden: Tensor = stack(
            self._embedded(ids, cache),
            _needed(mask, is_causal=stack is self.decoder),
            rotary_pos_emb=self.rotary_table(length, cache=cache),
            attention_bias=bias,
            **more,
        )
        return hidden

    def _embedded(self, ids: Tensor | None, cache: KVCache | None) -> Tensor | None:
        """Return the embeddings on a stage that has them, else None."""
        if not self.looks_up:
            return None
        assert ids is not None, "the first stage of a half needs its ids"
        positions = torch.arange(ids.shape[1], device=ids.device)
        if cache is not None:
            positions, _ = cache.positions(ids.shape[1])
        hidden: Tensor = self.embedding(ids, positions.expand_as(ids))
        return hidden

    def _as_message(self, states: Tensor) -> Tensor:
        """Convert hidden states to the one dtype in which stages send them."""
        return states.float() if self.config.fp32_residual_connection else states

    def _taken_apart(self, received: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Split a received tensor into the encoder's output and the decoder's hidden states."""
        if self.looks_up:
            return received, None
        assert ids is not None, "a later stage of the decoder needs its ids, for their number"
        length = ids.shape[1] // (self.tp_group.size() if self.config.sequence_parallel else 1)
        context, hidden = received.split([len(received) - length, length])
        return context, hidden


def _bias_of_rows(
    table: RelativePositionEmbedding, start: int, count: int, num_keys: int
) -> Tensor:
    bias: Tensor = table(count, num_keys, offset=start)
    return bias


def _encoder_stages(config: TransformerConfig, num_stages: int) -> int:
    """Return the number of pipeline stages of the encoder; 0 without pipeline parallelism."""
    encoder_stages = config.encoder_pipeline_model_parallel_size
    if num_stages > 1 and not 0 < encoder_stages < num_stages:
        raise ConfigError(
            f"--encoder-pipeline-model-parallel-size {encoder_stages}: of "
            f"--pipeline-model-parallel-size {num_stages} stages of T5 at least one and not all "
            f"hold the encoder, give 1 to {num_stages - 1}"
        )
    return encoder_stages if num_stages > 1 else 0


def _needed(mask: Tensor | None, *, is_causal: bool) -> Tensor | None:
    """Expand ``mask`` to [b, 1, queries, keys]; None if it hides no more than causality does.

    A query that would see no key is padding; it sees all keys, as a mean over no key is undefined.
    """
    if mask is None:
        return None
    while mask.dim() < 4:
        mask = mask.unsqueeze(1)
    # A GPU's host would wait for the answer, and a recorded pass reads no values.
    if not (device.is_cuda() or mask.is_meta or cpu_kernels.is_recording()):
        queries, keys = mask.shape[-2:]
        size = keys if queries == 1 else queries
        seen = band(size, keys, -1, 0, mask.device) if is_causal else mask.new_ones(1)
        if not bool((mask & seen).any()):
            return None
    return mask & ~mask.all(-1, keepdim=True)
