"""The wrapper of decoder-only models: GPT and Mamba."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.inference.contexts.base_context import BaseInferenceContext
from megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper import (
    AbstractModelInferenceWrapper,
)
from megatron.core.inference.model_inference_wrappers.inference_wrapper_config import (
    InferenceWrapperConfig,
)


class GPTInferenceWrapper(AbstractModelInferenceWrapper):
    """A GPTModel or MambaModel, which generates text."""

    def __init__(
        self,
        model: nn.Module,
        inference_wrapper_config: InferenceWrapperConfig,
        inference_context: BaseInferenceContext | None = None,
    ) -> None:
        super().__init__(model, inference_wrapper_config, inference_context)

    def prep_inference_input(self, prompts_tokens: Tensor) -> dict[str, Any]:
        """Return tokens [b, s] and their positions; no mask: the decoder is causal."""
        positions = torch.arange(prompts_tokens.shape[1], device=prompts_tokens.device)
        return {
            "tokens": prompts_tokens,
            "attention_mask": None,
            "position_ids": positions.expand_as(prompts_tokens),
        }

    def get_batch_for_context_window(
        self,
        inference_input: dict[str, Any],
        context_start_position: int,
        context_end_position: int,
    ) -> dict[str, Any]:
        """Return the tokens of positions start to end - 1."""
        window = slice(context_start_position, context_end_position)
        return {
            "tokens": inference_input["tokens"][:, window],
            "position_ids": inference_input["position_ids"][:, window],
            "attention_mask": inference_input["attention_mask"],
        }
