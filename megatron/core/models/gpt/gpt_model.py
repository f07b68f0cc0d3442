"""GPTModel: embedding, decoder layers, output layer; or the part of them that a stage holds.

``s`` tokens, ``b`` sequences, ``h`` hidden size, ``v`` vocabulary, ``x/tp`` this rank's part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.enums import ModelType as ModelType
from megatron.core.fusions.rope import RotaryTable
from megatron.core.models.common.language_module.language_module import OPTIONS, LanguageModule
from megatron.core.packed_seq_params import AttentionMask, PackedSeqParams
from megatron.core.parallel.context_parallel_partition import row_lengths
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.params.param_info import info_of, set_info
from megatron.core.tensor_parallel.layers import ReplicatedLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttentionBase
from megatron.core.transformer.attention_masks import is_causal_mask
from megatron.core.transformer.kv_cache import KVCache
from megatron.core.transformer.module import is_replaced
from megatron.core.transformer.moe.hash_router import HashRouter
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    tokens_ahead,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class GPTModel(LanguageModule):
    """A decoder-only language model."""

    position_types: tuple[str, ...] = ("learned_absolute", "rope", "mrope", "alibi", "none")
    is_frozen = False  # the model has or trains draft heads alone: it runs without dropout

    @library_call(
        f"... {OPTIONS} rotary_base rope_scaling rope_scaling_factor "
        "scatter_embedding_sequence_parallel seq_len_interpolation_factor mtp_block_spec "
        "model_comm_pgs vp_stage",
        like=LanguageModule.set_language_options,
    )
    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        *,
        scatter_embedding_sequence_parallel: bool = True,
        mtp_block_spec: MultiTokenPredictionBlockSubmodules | None = None,
        pg_collection: ProcessGroupCollection,
        **of_language: Any,
    ) -> None:
        """``of_language``: the options of `LanguageModule.set_language_options`."""
        super().__init__(config, pg_collection=pg_collection)
        self.set_language_options(vocab_size, max_sequence_length, **of_language)
        predicts_ahead = mtp_block_spec is not None
        if predicts_ahead and self.position_embedding_type == "learned_absolute":
            raise ConfigError(
                "--mtp-num-layers does not support --position-embedding-type learned_absolute: "
                "use rope, alibi or none"
            )
        self.transformer_layer_spec = transformer_layer_spec
        self.mtp_block_spec = mtp_block_spec
        self.mtp_process = predicts_ahead and self.post_process
        if self.pre_process or self.mtp_process:
            self.embedding = self.build_embedding(
                scatter_to_sequence_parallel=scatter_embedding_sequence_parallel,
                is_shared=predicts_ahead and self.pp_group.size() > 1,
            )
        # Projects replace the class in this module.
        self.decoder = self.build_decoder(transformer_layer_spec, TransformerBlock)
        for part in self.decoder.modules():
            if isinstance(part, HashRouter):
                part.make_table(self.num_tokens or self.vocab_size)
        self._has_own_attention: bool | None = None  # known after the first forward pass
        self.draft: Any = None  # heads of `peft.draft_heads` on the last stage
        self.mtp: MultiTokenPredictionBlock | None = None
        if mtp_block_spec is not None and self.post_process:
            self.mtp = MultiTokenPredictionBlock(
                config, mtp_block_spec, pg_collection=pg_collection
            )
        if self.post_process:
            self.output_layer = self.build_output_layer()
        self.finalize_parameters()

    def train(self, mode: bool = True) -> GPTModel:
        """Set the mode; embedding and decoder under draft heads stay in evaluation mode."""
        super().train(mode)
        for part in (self.embedding, self.decoder) if self.is_frozen else ():
            part.eval()
        return self

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Set the hidden states that the previous stage sent."""
        self.decoder.set_input_tensor(input_tensor)

    @library_call()
    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: AttentionMask | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: KVCache | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        extra_block_kwargs: dict[str, object] | None = None,
        runtime_gather_output: bool | None = None,
        *,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """Map ids and positions [b, s] to the loss of each token [b, s], or to logits [b, s, v].

        ``attention_mask`` [b, 1, s, s] is True where a key is hidden; the bounds of documents in
        all rows hide each document from the others.  Logits are sharded over the
        tensor-parallel group, [b, s, v/tp], unless gathering is requested here or by
        ``parallel_output``.  With ``inference_context`` they are gathered and those of the rows
        that it selects.  Stages without the output layer return hidden states; stages without the
        embedding need neither ids nor positions.  With M-RoPE positions may be [3, b, s], those of
        this rank's tokens; then every stage needs them.  The caller applies ``loss_mask`` to the
        returned losses.  Multi-token prediction runs in training only: it applies the mask to its
        own losses, whose gradients are added in the backward pass.
        """
        prepared = self._preprocess(
            input_ids=input_ids,
            position_ids=position_ids,
            decoder_input=decoder_input,
            inference_context=inference_context,
            packed_seq_params=packed_seq_params,
        )
        hidden, rotary, cos, sin, offset = prepared[:5]
        if (
            isinstance(attention_mask, Tensor)
            and self.cp_group.size() == 1
            and not device.is_cuda()
        ):
            # Plain causality has faster ways; on a GPU the comparison would wait for the device,
            # and ranks that share a sequence must agree.
            attention_mask = None if is_causal_mask(attention_mask) else attention_mask
        received = self.decoder.input_tensor if decoder_input is None else decoder_input
        row = self.tokens_in_row(input_ids, received), packed_seq_params, inference_context
        ids = {"token_ids": input_ids} if self.config.moe_num_hash_layers else {}
        hidden = self.decoder(
            hidden,
            attention_mask,
            **ids,
            inference_context=inference_context,
            rotary_pos_emb=rotary,
            attention_bias=self.attention_bias(*row),
            packed_seq_params=packed_seq_params,
            **(extra_block_kwargs or {}),
        )
        return self._postprocess(
            hidden_states=hidden,
            input_ids=input_ids,
            position_ids=position_ids,
            labels=labels,
            rotary_pos_emb=rotary,
            rotary_pos_cos=cos,
            rotary_pos_sin=sin,
            mtp_in_postprocess=self.mtp_process,
            loss_mask=loss_mask,
            decoder_input=decoder_input,
            attention_mask=attention_mask,
            packed_seq_params=packed_seq_params,
            sequence_len_offset=offset,
            runtime_gather_output=runtime_gather_output,
            extra_block_kwargs=extra_block_kwargs,
            inference_context=inference_context,
        )

    def _preprocess(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        decoder_input: Tensor | None = None,
        inference_context: KVCache | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[Tensor | None, RotaryTable | Tensor | None, None, None, None]:
        """Return the decoder's input [s, b, h], None on later stages, and its rotary embedding.

        Projects override this method and `_postprocess`, or call them from a forward pass of their
        own: the arguments and the number of results are Megatron Core's.
        """
        hidden: Tensor | None = decoder_input
        if hidden is None and self.pre_process:
            hidden = self.embedding(input_ids, position_ids)
        # The lengths of packed sequences tell how many tokens this rank must have.
        self.check_share(position_ids if packed_seq_params is None else None, inference_context)
        received = self.decoder.input_tensor if decoder_input is None else decoder_input
        row = self.tokens_in_row(input_ids, received), packed_seq_params, inference_context
        has_angles = inference_context is None and self._reads_angles()
        rotary = (self.rotary_angles if has_angles else self.rotary_table)(*row, position_ids)
        return hidden, rotary, None, None, None

    def _reads_angles(self) -> bool:
        """Whether a project's rotary embedding or attention is in use, which deals in angles."""
        if self.rotary_pos_emb is None or is_replaced(self.rotary_pos_emb, "forward"):
            return self.rotary_pos_emb is not None
        if self._has_own_attention is None:
            parts = (part for part in self.decoder.modules() if isinstance(part, SelfAttentionBase))
            self._has_own_attention = any(is_replaced(part, "forward") for part in parts)
        return self._has_own_attention

    @library_call(
        "... rotary_pos_cos rotary_pos_sin mtp_in_postprocess loss_mask decoder_input "
        "attention_mask inference_params packed_seq_params"
    )
    def _postprocess(
        self,
        hidden_states: Tensor,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        labels: Tensor | None,
        rotary_pos_emb: Any,
        *,
        mtp_in_postprocess: bool | None = None,
        loss_mask: Tensor | None = None,
        attention_mask: AttentionMask | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        runtime_gather_output: bool | None = None,
        extra_block_kwargs: dict[str, object] | None = None,
        inference_context: KVCache | None = None,
        **of_others: object,
    ) -> Tensor:
        """Map the decoder's hidden states [s, b, h] to losses or logits, as `forward` returns them.

        See `_preprocess`; ``of_others`` are there for methods that override this one.
        """
        if not self.post_process:
            return hidden_states
        if labels is None:
            return self.generated_logits(hidden_states, inference_context, runtime_gather_output)
        if self.mtp is not None and mtp_in_postprocess and self.training:
            rows = input_ids, labels, loss_mask
            shared = {"rotary_pos_emb": rotary_pos_emb, "packed_seq_params": packed_seq_params}
            shared |= extra_block_kwargs or {}
            hidden_states = self._with_predictions(hidden_states, rows, attention_mask, shared)
        losses = (self.loss_runner or self.token_losses)(hidden_states, labels)
        if self.draft is None or not self.training:
            return losses
        rows = input_ids, labels, loss_mask
        attached: Tensor = self.draft.attach(
            losses, hidden_states, rows, attention_mask, packed_seq_params
        )
        return attached

    def draft_features(self, hidden: Tensor) -> Tensor:
        """Return the state that the first draft reads, for final hidden states [N, 1, h]."""
        found: Tensor = hidden if self.draft is None else self.draft.features(hidden)
        return found

    def draft_logits(self, state: Tensor, depth: int) -> Tensor:
        """Map the state [r, 1, h] of ``depth`` (from 0) to logits [1, r, v]."""
        if self.draft is None:
            return self.logits(state, gather=True)
        found: Tensor = self.draft.logits(state, depth)
        return found

    def predict_ahead(self, hidden: Tensor, tokens: Tensor, depth: int, cache: KVCache) -> Tensor:
        """Return the hidden states [N, 1, h] of MTP ``depth`` (from 0), or of a draft head.

        ``hidden``: those of the depth before it, first `draft_features`.  ``tokens`` [N]: ``depth``
        + 1 positions ahead.  In generation.
        """
        if self.draft is not None:
            found: Tensor = self.draft.predict(hidden, tokens, depth, cache)
            return found
        assert self.mtp is not None, "the model has no MTP layers"
        row = len(tokens), None, cache
        out, *_ = self.mtp.layer(depth)(
            None,
            None,
            hidden,
            None,
            embedded=self.embedding(tokens.unsqueeze(0), None),
            inference_context=cache,
            rotary_pos_emb=self.rotary_table(*row),
            attention_bias=self.attention_bias(*row),
        )
        states: Tensor = out
        return states

    def _with_predictions(
        self,
        hidden: Tensor,
        rows: tuple[Tensor | None, Tensor, Tensor | None],
        attention_mask: AttentionMask | None,
        shared: dict[str, Any],
    ) -> Tensor:
        """Return ``hidden``, whose backward pass also trains multi-token prediction.

        ``rows``: tokens, labels and loss mask.
        """
        tokens, labels, mask = rows
        assert self.mtp is not None, "called where it is"
        assert tokens is not None, "multi-token prediction embeds tokens on the last stage"
        if mask is None:
            mask = torch.ones(labels.shape, device=labels.device)
        cp = self.cp_group
        num_tokens = tokens.shape[1]
        packed = shared["packed_seq_params"]
        shared |= {"attention_bias": self.attention_bias(num_tokens, packed, None)}
        lengths = row_lengths(packed and packed.lengths, num_tokens * cp.size())
        depths = tokens_ahead((tokens, labels, mask), self.mtp.num_depths, lengths, cp)
        is_detached = self.config.mtp_detach_heads
        state = hidden.detach() if is_detached else hidden
        for depth, ahead in enumerate(depths):
            embedded = self.embedding(ahead.tokens, None)
            state, *_ = self.mtp.layer(depth)(
                None,
                None,
                state,
                attention_mask,
                embedded=embedded.detach() if is_detached else embedded,
                **shared,
            )
            losses = self.token_losses(state, ahead.labels, is_frozen=is_detached)
            hidden = self.mtp.attach(hidden, depth, losses, ahead)
        return hidden


class RewardModel(GPTModel):
    """GPT with a linear layer of one output, ``score``, in place of the output layer.

    Every tensor-parallel rank computes the layer in full.
    """

    def build_output_layer(self, *, bias: bool = False) -> Any:
        """Build the layer, without an embedding's weight."""
        layer = ReplicatedLinear(
            self.config.hidden_size,
            1,
            config=self.config,
            init_method=self.config.init_method,
            bias=bias,
            has_partial_gradient=self.config.sequence_parallel,
        )
        set_info(layer.weight, replace(info_of(layer.weight), is_new=True))
        return layer

    def renamed_parameters(self) -> dict[str, str]:
        """Rename the output layer, because a checkpoint's is of another shape."""
        return {"output_layer.weight": "score.weight", **super().renamed_parameters()}

    def logits(self, hidden: Tensor, *, gather: bool, layer: object = None) -> Tensor:
        """Raise ConfigError: there are no logits."""
        raise ConfigError("a reward model scores tokens and generates none: pass labels")

    def token_losses(
        self, hidden: Tensor, labels: Tensor, layer: object = None, is_frozen: bool = False
    ) -> Tensor:
        """Map hidden states [s, b, h], or [s/tp, b, h], to the score of each token [b, s], float32.

        Other arguments are not read.  With sequence parallelism collective over the
        tensor-parallel group.
        """
        scores: Tensor = self.output_layer(hidden)[0]
        if self.config.sequence_parallel:
            # Every rank computes the same loss from all scores: it keeps its part of the gradient.
            scores = gather_from_sequence_parallel_region(
                scores, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return scores.squeeze(-1).transpose(0, 1).float().contiguous()
