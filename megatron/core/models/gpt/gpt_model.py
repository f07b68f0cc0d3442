"""GPTModel: embedding, decoder layers, output layer; or the part of them that a stage holds.

``s`` tokens, ``b`` sequences, ``h`` width, ``v`` vocabulary, ``x/tp`` this rank's share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import device, parallel_state
from megatron.core.config.errors import ConfigError
from megatron.core.fusions.rope import RotaryTable
from megatron.core.models.common.embeddings.language_model_embedding import (
    LanguageModelEmbedding,
)
from megatron.core.models.common.language_module.language_module import (
    LanguageModule,
    mark_as_shared_embedding,
)
from megatron.core.packed_seq_params import PackedSeqParams, position_in_sequence
from megatron.core.param_info import name_parameters
from megatron.core.param_init import initialize_parameters
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.sequence_share import held_tokens, row_lengths
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.attention_masks import alibi_bias, alibi_slopes, is_causal_mask
from megatron.core.transformer.kv_cache import KVCache
from megatron.core.transformer.module import before_reading
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPrediction,
    tokens_ahead,
)
from megatron.core.transformer.rope import RopeScaling, RotaryEmbedding, yarn_mscale
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import PaddedSize

POSITION_TYPES = ("learned_absolute", "rope", "alibi", "none")


class GPTModel(LanguageModule):
    """A decoder-only language model."""

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        scatter_embedding_sequence_parallel: bool = True,
        seq_len_interpolation_factor: float | None = None,
        mtp_block_spec: ModuleSpec | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        *,
        unpadded_vocab_size: int | None = None,
    ) -> None:
        """``vocab_size`` counts padding rows, ``unpadded_vocab_size`` does not.

        Left out, the latter is what ``vocab_size`` remembers, else the same.
        """
        if unpadded_vocab_size is None and isinstance(vocab_size, PaddedSize):
            unpadded_vocab_size = vocab_size.true_size
        groups = parallel_state.current() if pg_collection is None else pg_collection
        super().__init__(config, groups, unpadded_vocab_size)
        if position_embedding_type not in POSITION_TYPES:
            raise ConfigError(
                f"--position-embedding-type {position_embedding_type} is not one of "
                f"{', '.join(POSITION_TYPES)}"
            )
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.fp16_lm_cross_entropy, self.parallel_output = fp16_lm_cross_entropy, parallel_output
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.position_embedding_type = position_embedding_type
        self._has_seen_positions = False
        predicts_ahead = mtp_block_spec is not None
        self.has_embedding = pre_process or (predicts_ahead and post_process)
        if self.has_embedding:
            self.embedding = self._build_embedding(
                scatter_embedding_sequence_parallel, predicts_ahead=predicts_ahead
            )
        self.rotary_pos_emb: RotaryEmbedding | None = None
        if position_embedding_type == "rope":
            self.rotary_pos_emb = RotaryEmbedding(
                _rotated_width(config),
                rotary_percent,
                config.rotary_interleaved or config.multi_latent_attention,
                seq_len_interpolation_factor,
                rotary_base,
                rope_scaling,
                rope_scaling_factor,
                scaling=_scaling(config, max_sequence_length),
            )
        self.decoder = TransformerBlock(
            config,
            transformer_layer_spec,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        self.mtp: MultiTokenPrediction | None = None
        if mtp_block_spec is not None and post_process:
            self.mtp = MultiTokenPrediction(config, mtp_block_spec, pg_collection=groups)
        if post_process:
            self.output_layer = self._build_output_layer()
        self._name_and_fill_parameters()

    def _build_embedding(
        self, scatter_to_sequence_parallel: bool, *, predicts_ahead: bool
    ) -> LanguageModelEmbedding:
        """That of the first stage, or the last one's copy for tokens ahead."""
        if predicts_ahead and self.position_embedding_type == "learned_absolute":
            raise ConfigError(
                "--mtp-num-layers has no positions to learn for the tokens ahead: use "
                "--position-embedding-type rope, or alibi or none"
            )
        embedding = LanguageModelEmbedding(
            self.config,
            self.vocab_size,
            self.max_sequence_length,
            self.position_embedding_type,
            tp_group=self.tp_group,
            num_tokens=self.num_tokens,
            scatter_to_sequence_parallel=scatter_to_sequence_parallel,
        )
        has_copy = predicts_ahead and self.pg_collection.pp.size() > 1
        if self.share_embeddings_and_output_weights or has_copy:
            weight = embedding.word_embeddings.weight
            mark_as_shared_embedding(weight, is_copy=not self.pre_process)
        return embedding

    def _build_output_layer(self) -> ColumnParallelLinear:
        is_tied = self.share_embeddings_and_output_weights
        layer = ColumnParallelLinear(
            self.config.hidden_size,
            self.vocab_size,
            config=self.config,
            init_method=self.config.embedding_init_method if is_tied else self.config.init_method,
            tp_group=self.tp_group,
            bias=False,
            skip_weight_param_allocation=is_tied and self.has_embedding,
            unpadded_output_size=self.num_tokens,
            is_embedding_or_output=True,
        )
        if is_tied and not self.has_embedding:
            mark_as_shared_embedding(layer.weight, is_copy=True)
        return layer

    def _name_and_fill_parameters(self) -> None:
        """Write the global names, and the values that the default random seed gives them."""
        first = self.decoder.layer_range.start
        rename = {
            f"decoder.layers.{i}.": f"decoder.layers.{first + i}."
            for i in range(len(self.decoder.layers))
        }
        if self.share_embeddings_and_output_weights:
            rename["output_layer.weight"] = "embedding.word_embeddings.weight"
        name_parameters(self, rename)
        random = self.config.perform_initialization
        initialize_parameters(self, torch.initial_seed(), random=random)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """What the previous stage computed."""
        is_list = isinstance(input_tensor, list)
        self.decoder.set_input_tensor(input_tensor[0] if is_list else input_tensor)

    def shared_embedding_or_output_weight(self) -> nn.Parameter | None:
        """The word embedding of the first stage, or the last one's copy or output weight."""
        if self.has_embedding:
            return self.embedding.word_embeddings.weight
        return self.output_layer.weight if self.post_process else None

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: KVCache | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        extra_block_kwargs: dict[str, Any] | None = None,
        runtime_gather_output: bool | None = None,
        *,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """ids and positions [b, s] -> loss of each token [b, s], or logits [b, s, v].

        ``attention_mask`` [b, 1, s, s] is True where a key is hidden.  Logits are divided over
        ranks, [b, s, v/tp], unless gathering is asked for here or by ``parallel_output``.  With
        ``inference_context`` they are gathered and those of the last token.  Stages without the
        output layer return hidden states, those without the embedding need neither ids nor
        positions.  ``loss_mask`` is the caller's to apply; multi-token prediction, which is part of
        training alone, applies it to its own losses, whose gradients come in backward.
        """
        hidden: Tensor | None = decoder_input
        if hidden is None and self.pre_process:
            hidden = self.embedding(input_ids, position_ids)
        cp = self.pg_collection.cp
        if attention_mask is not None and cp.size() == 1 and not device.is_cuda():
            # Plain causality has faster ways; on a GPU the comparison would wait for the device,
            # and ranks that share a sequence must agree.
            attention_mask = None if is_causal_mask(attention_mask) else attention_mask
        if cp.size() > 1:
            self._check_share(position_ids, inference_context)
        offset = 0 if inference_context is None else inference_context.num_tokens
        num_tokens = self._num_tokens(input_ids)
        shared: dict[str, Any] = {
            "rotary_pos_emb": self._rotary_table(num_tokens, offset, packed_seq_params),
            "attention_bias": self._attention_bias(num_tokens, offset, packed_seq_params),
            "packed_seq_params": packed_seq_params,
        }
        hidden = self.decoder(
            hidden,
            attention_mask,
            inference_context=inference_context,
            **shared,
            **(extra_block_kwargs or {}),
        )
        if not self.post_process:
            return hidden
        if labels is not None:
            if self.mtp is not None and self.training:
                rows = input_ids, labels, loss_mask
                hidden = self._with_predictions(hidden, rows, attention_mask, shared)
            return self._loss(hidden, labels)
        if inference_context is not None:
            hidden, runtime_gather_output = hidden[-1:], True
        gather = runtime_gather_output
        gather = not self.parallel_output if gather is None else gather
        logits, _ = self.output_layer(hidden, self._output_weight(), runtime_gather_output=gather)
        return self.finish_logits(logits, is_gathered=gather)

    def _with_predictions(
        self,
        hidden: Tensor,
        rows: tuple[Tensor | None, Tensor, Tensor | None],
        attention_mask: Tensor | None,
        shared: dict[str, Any],
    ) -> Tensor:
        """``hidden``, whose backward pass also trains what predicts further ahead.

        ``rows``: tokens, labels and loss mask.
        """
        tokens, labels, mask = rows
        assert self.mtp is not None, "called where it is"
        assert tokens is not None, "multi-token prediction embeds tokens on the last stage"
        if mask is None:
            mask = torch.ones(labels.shape, device=labels.device)
        cp, packed = self.pg_collection.cp, shared["packed_seq_params"]
        num_tokens = tokens.shape[1] * cp.size()
        lengths = row_lengths(None if packed is None else packed.lengths, num_tokens)
        depths = tokens_ahead((tokens, labels, mask), self.mtp.num_depths, lengths, cp)
        state = hidden
        for depth, ahead in enumerate(depths):
            embedded = self.embedding(ahead.tokens, None)
            state = self.mtp.layers[depth](state, embedded, attention_mask, **shared)
            losses = self._loss(state, ahead.labels)
            hidden = self.mtp.attach(hidden, depth, losses, ahead)
        return hidden

    def _check_share(self, position_ids: Tensor | None, cache: KVCache | None) -> None:
        """Raise ConfigError where a sequence is not, or cannot be, divided over the ranks.

        Positions are looked at once: that waits for the device.
        """
        if cache is not None:
            raise ConfigError("generation needs --context-parallel-size 1")
        if self._has_seen_positions or position_ids is None:
            return
        self._has_seen_positions = True
        length, cp = position_ids.shape[1], self.pg_collection.cp.size()
        is_whole = bool((position_ids == torch.arange(length, device=position_ids.device)).all())
        if is_whole and length * cp > self.max_sequence_length:
            raise ConfigError(
                f"--context-parallel-size {cp}: each rank was handed the positions 0 to "
                f"{length - 1}, more than its share of {self.max_sequence_length}; cut the batch "
                "by get_batch_on_this_cp_rank()"
            )

    def _num_tokens(self, input_ids: Tensor | None) -> int:
        """Of each sequence, also where hidden states come cut along it from another stage."""
        if input_ids is not None:
            return input_ids.shape[1]
        assert self.decoder.input_tensor is not None, "a later stage needs set_input_tensor"
        cut = self.tp_group.size() if self.config.sequence_parallel else 1
        return self.decoder.input_tensor.shape[0] * cut

    def _output_weight(self) -> Tensor | None:
        is_tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if is_tied else None

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        layer, weight = self.output_layer, self._output_weight()
        if type(layer) is ColumnParallelLinear and self.config.final_logit_softcapping is None:
            before_reading(layer)
            weight = layer.weight if weight is None else weight
            return self.linear_and_loss(
                hidden,
                weight,
                labels,
                is_sequence_cut=layer.sequence_parallel,
                is_own_weight=weight is layer.weight,
            )
        logits, _ = layer(hidden, weight, runtime_gather_output=False)
        return self.compute_language_model_loss(labels, self.cap(logits))

    def _rotary_table(
        self, num_tokens: int, offset: int, packed: PackedSeqParams | None
    ) -> RotaryTable | None:
        if self.rotary_pos_emb is None:
            return None
        dtype, cp = self.config.params_dtype, self.pg_collection.cp
        total = num_tokens * cp.size()
        if packed is None and cp.size() == 1:
            return self.rotary_pos_emb.table(num_tokens, offset, dtype)
        held = self._held_tokens(num_tokens, packed)
        if packed is not None:
            held = position_in_sequence(packed.ends, total)[held]
        return self.rotary_pos_emb.table_at(held, total, dtype)

    def _attention_bias(
        self, num_tokens: int, offset: int, packed: PackedSeqParams | None
    ) -> Tensor | None:
        if self.position_embedding_type != "alibi":
            return None
        slopes = alibi_slopes(self.config.num_attention_heads).to(device.current())
        mine = slopes.chunk(self.tp_group.size())[self.tp_group.rank()]
        queries = offset + self._held_tokens(num_tokens, packed)
        return alibi_bias(mine, queries, offset + num_tokens * self.pg_collection.cp.size())

    def _held_tokens(self, num_tokens: int, packed: PackedSeqParams | None) -> Tensor:
        """Places in their row of the tokens of this context-parallel rank: [s/cp]."""
        cp = self.pg_collection.cp
        is_cut = packed is not None and cp.size() > 1
        lengths = row_lengths(packed.lengths if is_cut else None, num_tokens * cp.size())
        return held_tokens(lengths, cp.rank(), cp.size(), device.current())


def _rotated_width(config: TransformerConfig) -> int:
    """Channels of a head that may be rotated."""
    return config.qk_pos_emb_head_dim if config.multi_latent_attention else config.kv_channels


def _scaling(config: TransformerConfig, max_sequence_length: int) -> RopeScaling | None:
    if config.rope_type == "yarn" or (config.multi_latent_attention and config.rope_type is None):
        return _yarn(config, max_sequence_length)
    return None if config.multi_latent_attention else _longrope(config, max_sequence_length)


def _yarn(c: TransformerConfig, max_sequence_length: int) -> RopeScaling:
    """What latent attention has unless --rope-type says otherwise, and others if it says so."""
    factor = c.rotary_scaling_factor
    ratio = yarn_mscale(factor, c.mscale) / yarn_mscale(factor, c.mscale_all_dim)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_positions=c.yarn_original_max_position_embeddings or max_sequence_length,
        beta_fast=32.0 if c.yarn_beta_fast is None else c.yarn_beta_fast,
        beta_slow=1.0 if c.yarn_beta_slow is None else c.yarn_beta_slow,
        round_correction_range=c.yarn_correction_range_round_to_int,
        attention_factor=ratio,
    )


def _longrope(config: TransformerConfig, max_sequence_length: int) -> RopeScaling | None:
    """LongRoPE where the config has its factors."""
    short, long = config.longrope_short_factor, config.longrope_long_factor
    original = config.longrope_original_max_position_embeddings
    if short is None and long is None:
        return None
    if short is None or long is None or original is None:
        raise ConfigError(
            "LongRoPE needs --longrope-short-factor, --longrope-long-factor and "
            "--longrope-original-max-position-embeddings together"
        )
    return RopeScaling(
        kind="longrope",
        factor=max_sequence_length / original,
        original_max_positions=original,
        short_factors=short,
        long_factors=long,
    )
