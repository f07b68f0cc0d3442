"""The wrapper of vision-language models.

``b`` rows of ``s`` tokens, of which some stand for an image; ``t`` tiles of all images.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.config.errors import ConfigError
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import (
    GPTInferenceWrapper,
)
from megatron.core.inference.paged_engine.runner import GenerationModel
from megatron.core.models.multimodal.llava_model import LLaVAModel
from megatron.core.models.multimodal.splicing import splice
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_attr_wrapped_model


class VLMInferenceWrapper(GPTInferenceWrapper):
    """A LLaVAModel, which writes text about images."""

    @property
    def whole_model(self) -> LLaVAModel:
        """The model without its wrappers."""
        whole = get_attr_wrapped_model(self.model, "language_model", return_model_obj=True)
        assert isinstance(whole, LLaVAModel), f"{type(whole).__name__} does not read images"
        if whole.reads_image_sizes:
            raise ConfigError(
                "requests of this API have no sizes of images, which this model reads: generate "
                "with megatron.inference.LLM"
            )
        return whole

    def text_model(self) -> nn.Module:
        """Return the language model, to whose input the engine adds embeddings of images."""
        text = self.whole_model.language_model
        return Float16Module(text.config, text) if isinstance(self.model, Float16Module) else text

    def generation_model(self, tokenizer: Any, eod: int | None = None) -> GenerationModel:
        """Return the model for an engine, with the encoder of images on its first stage."""
        whole = self.whole_model
        has_encoder = whole.vision_model is not None
        found = super().generation_model(tokenizer, eod)
        encode = whole.rows_of_images if has_encoder else None
        return replace(found, encode_images=encode, reads_images=True)

    # ---- forward passes of scripts -------------------------------------------------------------

    def prep_inference_input(  # type: ignore[override]
        self,
        prompts_tokens: Tensor,
        num_img_embeddings_per_tile: int,
        images: Tensor | None,
        num_tiles: Tensor | None,
        decoder_seq_length: int | None,
    ) -> dict[str, Any]:
        """Return tokens [b, s], tiles [t, 3, H, W] and the number of tiles of each image.

        Raises ConfigError if the model has another number of embeddings of a tile.
        """
        per_tile = self.whole_model.embeddings_per_tile
        if images is not None and num_img_embeddings_per_tile != per_tile:
            raise ConfigError(
                f"num_img_embeddings_per_tile is {num_img_embeddings_per_tile}, and the model has "
                f"{per_tile} embeddings of a tile: give this number"
            )
        found = super().prep_inference_input(prompts_tokens)
        return found | {
            "images": images,
            "num_tiles": num_tiles,
            "decoder_seq_length": decoder_seq_length,
        }

    def get_batch_for_context_window(
        self,
        inference_input: dict[str, Any],
        context_start_position: int,
        context_end_position: int,
    ) -> dict[str, Any]:
        """Return the tokens of positions start to end - 1, and the images that these stand for."""
        start = context_start_position
        end = context_end_position
        found = super().get_batch_for_context_window(inference_input, start, end)
        is_image = inference_input["tokens"] == self.whole_model.image_token_index
        tiles = self._tiles(is_image, inference_input["num_tiles"])[:, start:end]
        images: Tensor | None = inference_input["images"]
        if images is not None:
            # Rows have all their tiles in one tensor; a window has those of its tokens.
            counts = self._tiles(is_image, inference_input["num_tiles"])
            inside = torch.zeros_like(counts, dtype=torch.bool)
            inside[:, start:end] = True
            images = images[inside.flatten().repeat_interleave(counts.flatten())]
        return found | {"images": images, "num_tiles": tiles}

    def num_positions(self, inference_input: dict[str, Any]) -> int:
        """Return the positions of a row.  Raises ConfigError for rows of several lengths."""
        tiles: Tensor = inference_input["num_tiles"]
        per_row = torch.where(tiles > 0, tiles * self.whole_model.embeddings_per_tile, 1).sum(1)
        if bool((per_row != per_row[0]).any()):
            raise ConfigError(
                f"rows with {per_row.tolist()} positions grow together: give them images of as "
                "many tiles, or use StaticInferenceEngine"
            )
        return int(per_row[0])

    def _forward(self, inference_input: dict[str, Any]) -> Tensor:
        whole = self.whole_model
        tokens = inference_input["tokens"]
        combined: Tensor | None = None
        if whole.pre_process:
            is_image = tokens == whole.image_token_index
            ids = tokens.masked_fill(is_image, 0)
            embedding = whole.language_model.embedding
            text = embedding(ids, inference_input["position_ids"]).transpose(0, 1)
            if bool(is_image.any()):
                counts = inference_input["num_tiles"] * whole.embeddings_per_tile
                found = whole.image_embeddings(inference_input["images"])
                text = splice(is_image, counts).embeddings(text, found)
            combined = text.transpose(0, 1).contiguous()
        out: Tensor = self.text_model()(
            None,
            None,
            None,
            decoder_input=combined,
            inference_context=self.inference_context,
        )
        return out

    def _tiles(self, is_image: Tensor, num_tiles: Tensor | None) -> Tensor:
        """Return the tiles at each token [b, s]: 0 at text, by default 1 at an image."""
        if num_tiles is None:
            return is_image.long()
        tiles = torch.zeros_like(is_image, dtype=torch.int64)
        tiles[is_image] = num_tiles.to(tiles.device, torch.int64).flatten()
        return tiles
