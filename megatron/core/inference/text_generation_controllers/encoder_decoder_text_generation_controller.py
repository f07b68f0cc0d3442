"""The controller of encoder-decoder models."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.inference.inference_request import InferenceRequest
from megatron.core.inference.model_inference_wrappers.t5.t5_inference_wrapper import (
    T5InferenceWrapper,
)
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)


class EncoderDecoderTextGenerationController(TextGenerationController):
    """Requests have an ``encoder_prompt``; the decoder continues ``prompt``, which may be empty."""

    inference_wrapped_model: T5InferenceWrapper

    def source_tokens(self, request: InferenceRequest) -> list[int]:
        """Return the tokens of the request's encoder prompt."""
        if not request.encoder_prompt:
            raise ConfigError(
                f"request {request.request_id} has no encoder_prompt: the encoder reads it; pass "
                "generate(encoder_prompts=[...])"
            )
        wrapper = self.inference_wrapped_model
        return wrapper.tokenize_encoder_prompt(request.encoder_prompt, self.tokenizer)

    def prep_inference_input(
        self,
        prompts_tokens: Tensor,
        active_requests: OrderedDict[int, InferenceRequest],
        use_attention_mask: bool = False,
    ) -> dict[str, Any]:
        """Return the input of the wrapper's `get_batch_for_context_window`."""
        prompts = [request.encoder_prompt or "" for request in active_requests.values()]
        return self.inference_wrapped_model.prep_inference_input(
            prompts_tokens, prompts, self.tokenizer
        )
