"""The wrapper of encoder-decoder models."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.inference.contexts.base_context import BaseInferenceContext
from megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper import (
    AbstractModelInferenceWrapper,
    token_of,
)
from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import (
    InferenceWrapperConfig,
)

_SENTINEL = re.compile(r"<extra_id_(\d+)>")


class T5InferenceWrapper(AbstractModelInferenceWrapper):
    """A T5Model: its encoder reads a prompt of its own, its decoder generates."""

    reads_prompt_in_encoder = True
    _end_roles = ("eos", "eos_id", "eod")

    def __init__(
        self,
        model: nn.Module,
        inference_wrapper_config: InferenceWrapperConfig,
        inference_context: BaseInferenceContext | None = None,
        use_local: bool = False,
    ) -> None:
        """``use_local`` has no effect: it chooses a form of masks in Megatron-LM."""
        super().__init__(model, inference_wrapper_config, inference_context)

    def start_of_decoder(self, tokenizer: Any) -> int | None:
        """Return BOS, as in training; without BOS the padding token, as in the published T5.

        A tokenizer without both, such as NullTokenizer, gets 0: the PAD of the published T5.
        """
        return token_of(tokenizer, "bos", "bos_id", "pad", "pad_id") or 0

    def tokenize_encoder_prompt(self, encoder_prompt: str, tokenizer: Any) -> list[int]:
        """Return the tokens of a text, in which ``<extra_id_N>`` is the N-th sentinel token."""
        special = getattr(tokenizer, "additional_special_tokens_ids", None) or []
        tokens: list[int] = []
        for i, part in enumerate(_SENTINEL.split(encoder_prompt)):
            if i % 2 == 0:
                tokens += tokenizer.tokenize(part) if part else []
            elif int(part) < len(special):
                tokens.append(special[int(part)])
            else:
                raise ConfigError(
                    f"<extra_id_{part}> in a prompt: the tokenizer has {len(special)} sentinels; "
                    "set --vocab-extra-ids as in training"
                )
        return tokens

    def pad_encoder_prompts_tokens(
        self, encoder_prompts_tokens_list: list[list[int]], max_sequence_length: int, tokenizer: Any
    ) -> list[list[int]]:
        """Return the prompts, each padded to ``max_sequence_length``."""
        pad = token_of(tokenizer, "pad", "pad_id") or 0
        return [
            tokens + [pad] * (max_sequence_length - len(tokens))
            for tokens in encoder_prompts_tokens_list
        ]

    def prep_inference_input(
        self,
        prompts_tokens: Tensor,
        encoder_prompts: list[str] | None = None,
        tokenizer: Any = None,
    ) -> dict[str, Any]:
        """Return tokens of encoder [b, s] and decoder [b, t], and the encoder's padding mask."""
        found = [self.tokenize_encoder_prompt(p, tokenizer) for p in encoder_prompts or []]
        longest = max(map(len, found), default=0)
        rows = self.pad_encoder_prompts_tokens(found, longest, tokenizer)
        encoder_tokens = torch.tensor(rows, device=prompts_tokens.device)
        lengths = torch.tensor([len(tokens) for tokens in found], device=prompts_tokens.device)
        places = torch.arange(longest, device=prompts_tokens.device)
        return {
            "encoder_tokens": encoder_tokens,
            "decoder_tokens": prompts_tokens,
            "encoder_mask": places[None] >= lengths[:, None],
        }

    def get_batch_for_context_window(
        self,
        inference_input: dict[str, Any],
        context_start_position: int,
        context_end_position: int,
    ) -> dict[str, Any]:
        """Return the input with the decoder tokens of positions 0 to end - 1: nothing is cached."""
        tokens = inference_input["decoder_tokens"][:, :context_end_position]
        return {**inference_input, "decoder_tokens": tokens}

    def forward_pass_without_pipeline_parallel(self, inference_input: dict[str, Any]) -> Tensor:
        """Run encoder and decoder; return logits [b, t, v]."""
        mask = inference_input["encoder_mask"]
        with self.sequences.bound():
            logits: Tensor = self.model(
                inference_input["encoder_tokens"],
                inference_input["decoder_tokens"],
                encoder_attn_mask=mask,
                encoder_decoder_attn_mask=mask,
                runtime_gather_output=True,
            )
        return logits

    def forward_pass_with_pipeline_parallel_small_input_batch(
        self, inference_input: dict[str, Any], recv_buffer_seq_len: int | None = None
    ) -> Tensor | None:
        """Raise ConfigError: encoder and decoder run on one stage."""
        raise ConfigError("T5 generates with --pipeline-model-parallel-size 1")
