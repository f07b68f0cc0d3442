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
from megatron.training.config.vision import VisionConfig
from megatron.training.models.vlm import embeddings_per_tile, image_settings
from megatron.training.tokenizer import MegatronTokenizer
from megatron.training.tokenizer.multimodal_tokenizer import MultimodalTokenizer, Turn

# A path, the bytes of a file, or a PIL image.
Image: TypeAlias = str | os.PathLike[str] | bytes | Any


class ImagePrompts:
    """Turns text and images into prompts for a model that reads images."""

    def __init__(self, vision: VisionConfig, tokenizer: MegatronTokenizer) -> None:
        self._processor = ImageProcessor(image_settings(vision))
        self._tokenizer = tokenizer
        self._rows_of_tile = embeddings_per_tile(vision)

    def prompt(
        self, text: str | Sequence[Turn], images: Sequence[Image]
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the ids of ``text`` with ``images`` in the places of its tags ``<image>``.

        Turns of a conversation become text in the prompt format of a MultimodalTokenizer, up to
        where the answer begins.  Images stand before a text without tags.  Raises RequestError for
        another number of tags, and for an image that cannot be read.
        """
        parts = self._parts_of_text(text) if isinstance(text, str) else self._parts_of_turns(text)
        if len(parts) == 1:
            parts = [[]] * len(images) + parts
        if len(parts) != len(images) + 1:
            raise RequestError(
                f"the prompt has {len(parts) - 1} tags {IMAGE_TOKEN} and {len(images)} images: "
                "give an image for each tag",
                "images",
            )
        found = tuple(self._read(image, f"image {i}") for i, image in enumerate(images))
        ids = parts[0]
        for image, part in zip(found, parts[1:], strict=True):
            ids = [*ids, *image.ids, *part]
        return ids, found

    def _parts_of_text(self, text: str) -> list[list[int]]:
        """Return the ids of the texts between the tags."""
        tokenize = self._tokenizer.tokenize
        return [tokenize(part) if part else [] for part in text.split(IMAGE_TOKEN)]

    def _parts_of_turns(self, turns: Sequence[Turn]) -> list[list[int]]:
        if not isinstance(self._tokenizer, MultimodalTokenizer):
            raise RequestError(
                "turns of a conversation need a checkpoint of --tokenizer-type "
                "MultimodalTokenizer: give a text",
                "images",
            )
        try:
            ids = self._tokenizer.tokenize_conversation(turns, False, True).tolist()
        except DataError as error:
            raise RequestError(str(error)) from error
        image = self._tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        ends = [i for i, token in enumerate(ids) if token == image]
        first = [0, *(end + 1 for end in ends)]
        return [ids[i:end] for i, end in zip(first, [*ends, len(ids)], strict=True)]

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
