"""Prompts with images: text with a tag for each image, as ids and pixels for the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from megatron.core.config.errors import DataError
from megatron.core.datasets.images import ImageSettings, tile_tags
from megatron.core.inference.paged_engine.request import PromptImage, RequestError
from megatron.training.tokenizer import MegatronTokenizer
from megatron.training.tokenizer.multimodal_tokenizer import (
    IMAGE_TOKEN,
    MultimodalTokenizer,
    Turn,
)

# A path, the bytes of a file, or a PIL image.
Image: TypeAlias = str | os.PathLike[str] | bytes | Any


@dataclass(frozen=True)
class ImageInput:
    """How a model reads images: as tiles, each of which takes ``rows_per_tile`` positions.

    Tiles in rows (LLaVA-NeXT) take one for each row's end, and none for padding, besides.
    ``has_tile_tags``: each tile stands after a text that names it, see `tile_tags`.
    """

    settings: ImageSettings
    rows_per_tile: int
    has_tile_tags: bool = False

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> ImageInput:
        """Return an object from its `dataclasses.asdict`; JSON has made lists of its tuples."""
        settings = dict(found["settings"])
        settings["resolutions"] = tuple(map(tuple, settings["resolutions"]))
        return cls(ImageSettings(**settings), found["rows_per_tile"], found["has_tile_tags"])

    def prompt_image(self, pixels: np.ndarray, image_size: tuple[int, int]) -> PromptImage:
        """Return the image of a prompt for its processed ``pixels`` and its (width, height)."""
        num_rows = self.settings.num_positions(*image_size, self.rows_per_tile)
        return PromptImage(pixels, num_rows, self.settings.image_size(*image_size))


class ImagePrompts:
    """Turns text and images into prompts for a model that reads images.

    ``read_file`` returns the pixels of an image file, and its width and height, by default in this
    process.  Raises DataError.
    """

    def __init__(
        self,
        images: ImageInput,
        tokenizer: MegatronTokenizer,
        read_file: Callable[[bytes, str], tuple[np.ndarray, tuple[int, int]]] | None = None,
    ) -> None:
        self.input = images
        self._read_file = read_file or images.settings.read
        self._tokenizer = tokenizer

    def prompt(
        self, text: str | Sequence[Turn], images: Sequence[Image]
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the ids of ``text`` with ``images`` in the places of its tags ``<image>``.

        Turns of a conversation become text in the prompt format of a MultimodalTokenizer, up to
        where the answer begins.  Images stand before a text without tags.  Raises RequestError for
        another number of tags, and for an image that cannot be read.
        """
        tokenizer = self._tokenizer
        try:
            if isinstance(text, str):
                first, *others = self.texts_of(text)  # the first with special tokens, such as BOS
                rows = [tokenizer.tokenize(first) if first or self.is_conversation else []]
                rows += [tokenizer.tokenize_plain(part) if part else [] for part in others]
            elif isinstance(tokenizer, MultimodalTokenizer):
                rows = [tokenizer.tokenize_conversation(text, False, True).tolist()]
            else:
                raise RequestError(
                    "turns of a conversation need a checkpoint of --tokenizer-type "
                    "MultimodalTokenizer: give a text",
                    "images",
                )
        except DataError as error:
            raise RequestError(str(error)) from error
        parts = self._split(rows[0]) if self.is_conversation else rows
        if len(parts) == 1:
            parts = [[]] * len(images) + parts
        found = tuple(self.read(image, f"image {i}") for i, image in enumerate(images))
        return self._joined(parts, found)

    @property
    def is_conversation(self) -> bool:
        """Whether a rendered text is tokenized as a whole, with an id of the tag."""
        return isinstance(self._tokenizer, MultimodalTokenizer)

    def texts_of(self, text: str) -> list[str]:
        """Return the texts to tokenize of a text that a chat template has written.

        The first begins with special tokens, such as BOS, unless the text ``is_conversation``.
        """
        return [text] if self.is_conversation else text.split(IMAGE_TOKEN)

    def rendered(
        self, rows: Sequence[list[int]], images: Sequence[PromptImage]
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return a prompt with ``images`` at its tags; ``rows``: the ids of each of `texts_of`.

        Raises RequestError for another number of tags.
        """
        return self._joined(self._split(rows[0]) if self.is_conversation else rows, images)

    def _joined(
        self, parts: Sequence[list[int]], images: Sequence[PromptImage]
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """Return the ids of texts with images between them, and the images.

        With tile tags each tile is an image of its own, after its tag.  Raises RequestError for
        another number of images.
        """
        if len(parts) != len(images) + 1:
            raise RequestError(
                f"the prompt has {len(parts) - 1} tags {IMAGE_TOKEN} and {len(images)} images: "
                "give an image for each tag",
                "images",
            )
        ids = list(parts[0])
        found: list[PromptImage] = []
        for image, part in zip(images, parts[1:], strict=True):
            tiles = [image]
            tags = [""]
            if self.input.has_tile_tags:
                count = len(image.pixels)
                tiles = [
                    PromptImage(image.pixels[i : i + 1], self.input.rows_per_tile)
                    for i in range(count)
                ]
                tags = tile_tags(count, self.input.settings.ends_with_whole_image(count))
            for tag, tile in zip(tags, tiles, strict=True):
                ids += self._tokenizer.tokenize_plain(tag) if tag else []
                ids += tile.ids
            found += tiles
            ids += part
        return ids, tuple(found)

    def _split(self, ids: Sequence[int]) -> list[list[int]]:
        """Return the ids between the tags."""
        assert isinstance(self._tokenizer, MultimodalTokenizer), "it has an id of the tag"
        image = self._tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)
        ends = [i for i, token in enumerate(ids) if token == image]
        first = [0, *(end + 1 for end in ends)]
        return [list(ids[i:end]) for i, end in zip(first, [*ends, len(ids)], strict=True)]

    def read(self, image: Image, name: str) -> PromptImage:
        """Return the pixels of an image.  Raises RequestError, which has its path or ``name``."""
        try:
            if isinstance(image, str | os.PathLike):
                name = str(image)
                image = Path(image).read_bytes()
            if isinstance(image, bytes):
                pixels, size = self._read_file(image, name)
            else:
                pixels = self.input.settings.process(image, name)
                size = image.size
        except (OSError, DataError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise RequestError(f"{name}: {reason}", "images") from error
        return self.input.prompt_image(pixels, size)
