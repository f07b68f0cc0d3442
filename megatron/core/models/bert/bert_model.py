"""BertModel: embedding, bidirectional layers, heads; or the part of them that a stage holds.

``s`` tokens, ``b`` sequences, ``h`` hidden size, ``v`` vocabulary, ``k`` tokens to predict,
``x/tp`` this rank's part of ``x``.  After the last layer a stage all-gathers a sequence that
sequence parallelism has split.  Every tensor-parallel rank computes the heads in full, except for
the vocabulary, which is sharded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core import device
from megatron.core.config.errors import ConfigError
from megatron.core.device import cpu_kernels
from megatron.core.models.bert.bert_lm_head import BertLMHead, dense
from megatron.core.models.bert.pooler import Pooler, mean_of_text
from megatron.core.models.common.language_module.language_module import OPTIONS, LanguageModule
from megatron.core.parallel.default_groups import library_call
from megatron.core.parallel.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class BertModel(LanguageModule):
    """An encoder that predicts masked tokens, and whether two texts are in order."""

    position_types = ("learned_absolute", "rope", "none")

    @library_call(
        f"... {OPTIONS} seq_len_interpolation_factor add_binary_head return_embeddings vp_stage",
        like=LanguageModule.set_language_options,
    )
    def __init__(
        self,
        config: TransformerConfig,
        num_tokentypes: int,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        *,
        add_binary_head: bool = True,
        return_embeddings: bool = False,
        pg_collection: ProcessGroupCollection,
        **of_language: Any,
    ) -> None:
        """With ``return_embeddings`` the model returns the mean over each text, without heads.

        ``of_language``: the options of `LanguageModule.set_language_options`.
        """
        if pg_collection.cp.size() > 1:
            raise ConfigError(
                f"--context-parallel-size {pg_collection.cp.size()}: BERT does not support it; use "
                "--context-parallel-size 1"
            )
        super().__init__(config, pg_collection=pg_collection)
        self.set_language_options(vocab_size, max_sequence_length, **of_language)
        self.add_binary_head, self.return_embeddings = add_binary_head, return_embeddings
        if self.pre_process:
            self.embedding = self.build_embedding(num_tokentypes=num_tokentypes)
        self.encoder = self.build_decoder(transformer_layer_spec)
        if self.post_process:
            h = config.hidden_size
            self.lm_head = BertLMHead(h, config)
            self.output_layer = self.build_output_layer(bias=True)
            self.output_layer.sequence_parallel = False  # it gets complete sequences
            if add_binary_head:
                self.pooler = Pooler(h, config)
                self.binary_head = dense(h, 2, config)
        self.finalize_parameters()

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Set the hidden states that the previous stage sent."""
        self.encoder.set_input_tensor(input_tensor)

    @library_call()
    def forward(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        tokentype_ids: Tensor | None = None,
        lm_labels: Tensor | None = None,
        inference_context: None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Map ids, token types and labels [b, s] to (losses [b, s], order logits [b, 2] or None).

        ``attention_mask`` [b, s] is 1 for tokens and 0 for padding; None means no padding.  A token
        with a negative label is not predicted and has loss 0.  Without labels the first result is
        the logits of the vocabulary: [b, s, v], or [b, s, v/tp] with ``parallel_output``.  With
        ``return_embeddings`` there is one result, [b, h] float32.  Stages before the last return
        hidden states.
        """
        assert inference_context is None, "BERT generates no text"
        embedded: Tensor | None = None
        if self.pre_process:
            assert input_ids is not None, "the first stage needs ids"
            places = torch.arange(input_ids.shape[1], device=input_ids.device)
            embedded = self.embedding(input_ids, places.expand_as(input_ids), tokentype_ids)
        num_tokens = self.tokens_in_row(input_ids, self.encoder.input_tensor)
        hidden: Tensor = self.encoder(
            embedded, _hidden_keys(attention_mask), rotary_pos_emb=self.rotary_table(num_tokens)
        )
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel and self.tp_group.size() > 1:
            hidden = gather_from_sequence_parallel_region(hidden, False, group=self.tp_group)
        if self.return_embeddings:
            if attention_mask is None:
                attention_mask = hidden.new_ones(hidden.shape[1::-1])
            return mean_of_text(hidden, attention_mask)
        order = self.binary_head(self.pooler(hidden))[0] if self.add_binary_head else None
        if lm_labels is None:
            return self.logits(self.lm_head(hidden), gather=not self.parallel_output), order
        return self.hidden_token_losses(hidden, lm_labels), order

    def hidden_token_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Map hidden states [s, b, h] and labels [b, s] to losses [b, s] in float32.

        Only the k tokens that have a label pass through the head and the vocabulary: equal to
        the losses from the logits of all tokens, at k / (b s) of their cost.
        """
        rows = (labels >= 0).flatten().nonzero().squeeze(1)
        chosen = hidden.transpose(0, 1).flatten(0, 1).index_select(0, rows).unsqueeze(1)
        losses = self.token_losses(self.lm_head(chosen), labels.flatten()[rows].unsqueeze(0))
        whole = losses.new_zeros(labels.numel()).index_put((rows,), losses.squeeze(0))
        return whole.view_as(labels)


def _hidden_keys(attention_mask: Tensor | None) -> Tensor | None:
    """Convert a mask [b, s] of 1 for tokens to bool [b, 1, 1, s]: True for padding.

    Returns None without padding.  This is not checked on a GPU, where it would wait for the device,
    and while the pass is recorded.
    """
    if attention_mask is None:
        return None
    is_padding = attention_mask < 0.5
    may_read = not (device.is_cuda(is_padding.device) or cpu_kernels.is_recording())
    if may_read and not is_padding.any():
        return None
    return is_padding[:, None, None, :]
