"""The controller of vision-language models."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import Tensor

from megatron.core.config.errors import ConfigError
from megatron.core.inference.inference_request import InferenceRequest, VLMInferenceRequest
from megatron.core.inference.model_inference_wrappers.multimodal.vlm_inference_wrapper import (
    VLMInferenceWrapper,
)
from megatron.core.inference.paged_engine.prompt_images import PromptImage
from megatron.core.inference.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)


class VLMTextGenerationController(TextGenerationController):
    """Prompts of a `VLMInferenceRequest` have its images in the places of image tokens.

    These are the model's ``image_token_index`` and, if the tokenizer has one, its "<image>".
    """

    inference_wrapped_model: VLMInferenceWrapper

    def prompt_rows(self, request: InferenceRequest) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the ids of the prompt with those of its images, and the images."""
        ids, _ = super().prompt_rows(request)
        tokens = self._image_tokens()
        places = [i for i, token in enumerate(ids) if token in tokens]
        images = self._images(request)
        if len(places) != len(images):
            raise ConfigError(
                f"request {request.request_id}: the prompt has {len(places)} image tokens for "
                f"{len(images)} images: give one token for each image"
            )
        for place, image in reversed(list(zip(places, images, strict=True))):
            ids[place : place + 1] = image.ids
        if isinstance(request, VLMInferenceRequest) and len(ids) > request.decoder_seq_length:
            raise ConfigError(
                f"request {request.request_id}: the prompt has {len(ids)} positions with its "
                f"images, more than decoder_seq_length {request.decoder_seq_length}: raise it"
            )
        return ids, images

    def _image_tokens(self) -> set[int]:
        found = {self.inference_wrapped_model.whole_model.image_token_index}
        convert = getattr(self.tokenizer, "convert_tokens_to_ids", None)
        token = None if convert is None else convert("<image>")
        return found if token is None else found | {int(token)}

    def _images(self, request: InferenceRequest) -> tuple[PromptImage, ...]:
        if not isinstance(request, VLMInferenceRequest):
            return ()
        counts = [int(count) for count in request.num_tiles.flatten()]
        per_tile = self.inference_wrapped_model.whole_model.embeddings_per_tile
        if request.num_img_embeddings_per_tile != per_tile or sum(counts) != len(request.imgs):
            raise ConfigError(
                f"request {request.request_id}: {len(request.imgs)} tiles of "
                f"{request.num_img_embeddings_per_tile} embeddings do not fit num_tiles {counts} "
                f"and the model, which has {per_tile} embeddings of a tile"
            )
        tiles = request.imgs.float().cpu().split(counts)
        return tuple(
            PromptImage(pixels.numpy(), count * per_tile)
            for pixels, count in zip(tiles, counts, strict=True)
        )

    def prep_inference_input(
        self,
        prompts_tokens: Tensor,
        active_requests: OrderedDict[int, InferenceRequest],
        use_attention_mask: bool = False,
    ) -> dict[str, Any]:
        """Return the input of the wrapper's `get_batch_for_context_window`, of one request."""
        (request,) = active_requests.values()
        if not isinstance(request, VLMInferenceRequest):
            return self.inference_wrapped_model.prep_inference_input(
                prompts_tokens, 0, None, None, None
            )
        return self.inference_wrapped_model.prep_inference_input(
            prompts_tokens,
            request.num_img_embeddings_per_tile,
            request.imgs,
            request.num_tiles,
            request.decoder_seq_length,
        )
