"""Prompts with images: text with a tag for each image, as ids and pixels for the engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from megatron.core.config.errors import DataError
from megatron.core.datasets.images.pixels import ImageProcessor
from megatron.core.inference.paged_engine.images import PromptImage
from megatron.core.inference.paged_engine.request import RequestError
from megatron.core.models.multimodal.llava_model import IMAGE_TOKEN
from megatron.core.models.vision.kinds import get_num_image_embeddings
from megatron.training.config.vision import VisionConfig
from megatron.training.models.vlm import image_settings
from megatron.training.tokenizer import MegatronTokenizer

# A path, the bytes of a file, or a PIL image.
Image: TypeAlias = str | os.PathLike[str] | bytes | Any


class ImagePrompts:
    """Turns text and images into prompts for a model that reads images."""

    def __init__(self, vision: VisionConfig, tokenizer: MegatronTokenizer) -> None:
        self._processor = ImageProcessor(image_settings(vision))
        self._tokenizer = tokenizer
        self._rows_of_tile = get_num_image_embeddings(
            vision.img_h,
            vision.img_w,
            vision.patch_dim,
            vision.vision_model_type,
            vision.disable_vision_class_token,
            1,
            vision.pixel_shuffle,
        )

    def prompt(
        self, text: str, images: Sequence[Image]
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the ids of ``text`` with ``images`` in the places of its tags ``<image>``.

        Images stand before a text without tags.  Raises RequestError for another number of tags,
        and for an image that cannot be read.
        """
        parts = text.split(IMAGE_TOKEN)
        if len(parts) == 1:
            parts = [""] * len(images) + parts
        if len(parts) != len(images) + 1:
            raise RequestError(
                f"the prompt has {len(parts) - 1} tags {IMAGE_TOKEN} and {len(images)} images: "
                "give an image for each tag",
                "images",
            )
        found = tuple(self._read(image, f"image {i}") for i, image in enumerate(images))
        ids = self._tokenizer.tokenize(parts[0]) if parts[0] or not images else []
        for image, part in zip(found, parts[1:], strict=True):
            ids = [*ids, *image.ids, *(self._tokenizer.tokenize(part) if part else [])]
        return ids, found

    def _read(self, image: Image, name: str) -> PromptImage:
        try:
            if isinstance(image, str | os.PathLike):
                name = str(image)
                image = Path(image).read_bytes()
            pixels: np.ndarray
            if isinstance(image, bytes):
                pixels = self._processor.decode(image, name)
            else:
                pixels = self._processor.process(image, name)
        except (OSError, DataError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise RequestError(f"{name}: {reason}", "images") from error
        return PromptImage(pixels, len(pixels) * self._rows_of_tile)
