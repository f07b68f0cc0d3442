"""Training samples of text and images for vision-language models, from tar shards.

A sample is one conversation or caption with its images.  Its values depend only on the data, the
seed and the sample number.  ``s`` tokens, ``t`` tiles of all its images, ``H`` x ``W`` pixels of a
tile.
"""

from __future__ import annotations

import os
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.conversations import (
    IMAGE_TOKEN,
    caption_turns,
    error_at,
    parse_object,
    turns_of,
)
from megatron.core.datasets.images import ImageSettings, size_of_image, tile_tags
from megatron.core.datasets.index_cache import cached_arrays
from megatron.core.datasets.megatron_dataset import (
    LowLevelDataset,
    ReplacedSamples,
    ReplacedSamplesConfig,
    Sample,
    describe,
    description_hash,
    given_path,
)
from megatron.core.datasets.packing import RowPlan, pack_samples
from megatron.core.datasets.tar_shards import TarSample, TarShards

_NO_LOSS = -100  # target of a token without loss, as tokenize_conversation returns it


@dataclass(kw_only=True)
class ImageTextDatasetConfig(ReplacedSamplesConfig):
    """Settings of samples of images and text.

    ``tokenizer`` is a MultimodalTokenizer.  ``sequence_length`` counts an image as one token.  If
    ``decoder_sequence_length`` is given, text is also cut where the row of the language model is
    full; an image then counts as its tiles times ``embeddings_per_tile``.
    """

    images: ImageSettings
    image_token_index: int = -200  # id of an image in a sample, outside of any vocabulary
    embeddings_per_tile: int = 1
    decoder_sequence_length: int | None = None
    packs_samples: bool = False  # several in one row
    use_tile_tags: bool = False  # NVLM: each tile is a token of its own, after a text like <tile_1>
    caption_prompt: str = ""  # question before a caption
    caption_prompts: tuple[str, ...] = ()  # several, of which the name of a sample chooses one
    weighs_answers: bool = False  # by the root of their length, in place of their length

    def __post_init__(self) -> None:
        super().__post_init__()
        if not hasattr(self.tokenizer, "tokenize_conversation"):
            raise ConfigError(
                "samples of images and text are conversations, which this tokenizer does not "
                "write: use --tokenizer-type MultimodalTokenizer"
            )


class _LaidOut(NamedTuple):
    """A text with images: ids, targets, tiles and positions of each token [n].

    ``end``: number of tokens that fit into a row.
    """

    ids: np.ndarray
    target: np.ndarray
    tiles: np.ndarray
    positions: np.ndarray
    end: int


class ImageTextDataset(ReplacedSamples):
    """Samples of one split of tar shards, shuffled in each epoch, as dictionaries of tensors.

    Keys: tokens, labels, position_ids, num_tiles i64 [s]; loss_mask f32 [s]; images
    f32 [t, 3, H, W]; with tiles in rows (anyres) image_sizes i64 [images, 4], rows and columns of
    tiles, height and width in pixels; with patches images f32 [blocks, 4, values of a patch] and
    image_sizes i64 [images, 3], patches along time, height and width.  An image is the token
    ``image_token_index``; num_tiles has its tiles at this token, 0 at text and -1 at padding behind
    it.  labels[i] is what token i predicts, the padding id without loss.

    A sample cannot be used if an image is damaged, the number of images differs from the text, or
    no answer is within s tokens.

    With ``packs_samples`` a row has several samples, see `packing`: position_ids begin at 0 at
    each.  An unusable sample is left out then.  The lengths of all samples are counted once, and
    written beside the first shard, or into the cache directory.
    """

    config: ImageTextDatasetConfig
    dataset: TarShards

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        self._image_id = int(config.tokenizer.convert_tokens_to_ids(IMAGE_TOKEN))
        self._rows: RowPlan | None = None
        if config.packs_samples:
            positions = config.decoder_sequence_length or config.sequence_length
            limits = config.sequence_length, positions
            self._rows = RowPlan(self._all_lengths()[self.indices], limits, self._order.seed)

    def __len__(self) -> int:
        if self._rows is not None and self.num_samples is None:
            return self._rows.num_rows(0)
        return super().__len__()

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: BlendedMegatronDatasetConfig
    ) -> LowLevelDataset:
        """Open the tar shards of a path; see `shard_paths`."""
        return TarShards(given_path(dataset_path), config.path_to_cache)

    def _content(self, element: int) -> tuple[str, TarSample]:
        content = self.dataset[element]  # a missing or changed shard ends the run
        return content.name, content

    def _usable(self, number: int) -> Sample:
        if self._rows is None:
            return super()._usable(number)
        found: list[Sample] = []
        for place in self._rows[number]:
            element = int(self.indices[place])
            name, content = self._content(element)
            try:
                found.append(self._sample(content, number))
            except DataError as error:
                self._report(element, name, error)
        found = found or [super()._usable(number)]
        return pack_samples(found, self.config.sequence_length, self.config.tokenizer.pad)

    def _all_lengths(self) -> np.ndarray:
        """Return tokens and positions of all samples, 0 for unusable ones: [n, 2]."""
        config = self.config
        description = describe(
            OrderedDict(
                shards=[(shard.path, shard.num_bytes) for shard in self.dataset.shards],
                images=asdict(self.config.images),
                tokenizer=config.tokenizer,
                limits=[config.sequence_length, config.decoder_sequence_length],
                texts=[
                    config.use_tile_tags,
                    config.caption_prompts or config.caption_prompt,
                    config.broken_samples,
                ],
            )
        )
        name = f"{description_hash(description)}-packing"
        first = self.dataset.shards[0].path
        directory = config.path_to_cache
        prefix = f"{first}.{name}" if directory is None else os.path.join(directory, name)
        (lengths,) = cached_arrays(
            prefix,
            description,
            {"lengths": (2,)},
            lambda: [np.array([self._lengths_of(i) for i in range(len(self.dataset))], np.int64)],
        )
        return lengths

    def _lengths_of(self, element: int) -> tuple[int, int]:
        """Return tokens and positions of a sample, 0 if it cannot be used."""
        name, content = self._content(element)
        try:
            ids, target = self._tokens(content)
            sizes = [
                size_of_image(data, f"{name}, image {i}") for i, data in enumerate(content.images)
            ]
            laid = self._laid_out(ids, target, sizes)
        except DataError as error:
            self._report(element, name, error)
            return 0, 0
        return laid.end, int(laid.positions[: laid.end].sum())

    def _laid_out(
        self, ids: np.ndarray, target: np.ndarray, sizes: Sequence[tuple[int, int]]
    ) -> _LaidOut:
        """Return a text with the tiles of images of these (widths, heights) in their places.

        Raises DataError if no token with a loss is left.
        """
        settings = self.config.images
        per_tile = self.config.embeddings_per_tile
        counts = [settings.num_tiles(*size) for size in sizes]
        ids, target, tiles = self._with_tiles(ids, target, counts)
        positions = np.where(tiles > 0, tiles * per_tile, 1)
        if not self.config.use_tile_tags:  # else each tile is a token of its own
            positions[tiles > 0] = [settings.num_positions(*size, per_tile) for size in sizes]
        end = min(len(positions), self.config.sequence_length)
        if self.config.decoder_sequence_length is not None:  # an image is complete or left out
            room = self.config.decoder_sequence_length
            end = min(end, int(np.searchsorted(positions.cumsum(), room, side="right")))
        if (target[1 : end + 1] == _NO_LOSS).all():
            raise DataError(
                f"no token of an answer is within the first {end} (--dataloader-seq-length, or "
                "the row of the language model)"
            )
        return _LaidOut(ids, target, tiles, positions, end)

    def _sample(self, content: TarSample, number: int) -> Sample:
        """Return the tensors of a sample; raise DataError if it cannot be used."""
        ids, target = self._tokens(content)
        images = [
            self.config.images.read(data, f"{content.name}, image {i}")
            for i, data in enumerate(content.images)
        ]
        laid = self._laid_out(ids, target, [size for _, size in images])
        sample = self._tensors(laid, [pixels for pixels, _ in images])
        kept = int((sample["num_tiles"] > 0).sum())
        settings = self.config.images
        if num_fields := {"anyres": 4, "patches": 3}.get(settings.tiling):
            sizes = [settings.image_size(*size) for _, size in images[:kept]]
            found = torch.tensor(sizes, dtype=torch.int64)
            sample["image_sizes"] = found.view(-1, num_fields)
        return sample

    def _tokens(self, content: TarSample) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and targets; raise DataError unless the text has a place for each image."""
        num_images = len(content.images)
        prompt = self.config.caption_prompt
        if prompts := self.config.caption_prompts:
            # Not the path: the question stays the same if the data move.
            name = os.path.basename(content.name)
            prompt = prompts[zlib.crc32(name.encode()) % len(prompts)]
        if content.json is not None:
            with error_at("its .json"):
                record = parse_object(content.json, "write one object")
            turns = turns_of(record, num_images, prompt)
        elif content.text is not None:
            caption = content.text.decode("utf-8", "replace").strip()
            turns = caption_turns(caption, num_images, prompt)
        else:
            raise DataError("it has no .json and no .txt file")
        ids, target = self.config.tokenizer.tokenize_conversation(turns, True, False)
        is_image = ids == self._image_id
        if is_image.sum() != num_images:
            raise DataError(f"its text has {is_image.sum()} {IMAGE_TOKEN} for {num_images} images")
        return ids, np.where(is_image, _NO_LOSS, target)

    def _with_tiles(
        self, ids: np.ndarray, target: np.ndarray, num_tiles: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ids, targets and tiles [n]; with tags, each image becomes tags and tiles."""
        index = self.config.image_token_index
        settings = self.config.images
        tiles = np.zeros(len(ids), np.int64)
        places = np.flatnonzero(ids == self._image_id)
        tiles[places] = num_tiles
        ids = np.where(ids == self._image_id, index, ids)
        if not self.config.use_tile_tags:
            return ids, target, tiles
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        first = 0
        for place, count in zip(places.tolist(), num_tiles, strict=True):
            parts.append((ids[first:place], target[first:place], tiles[first:place]))
            for tag in tile_tags(count, settings.ends_with_whole_image(count)):
                text = np.array([*self.config.tokenizer.tokenize_plain(tag), index], np.int64)
                is_tile = (text == index).astype(np.int64)
                parts.append((text, np.full_like(text, _NO_LOSS), is_tile))
            first = place + 1
        parts.append((ids[first:], target[first:], tiles[first:]))
        all_ids, all_targets, all_tiles = zip(*parts, strict=True)
        return np.concatenate(all_ids), np.concatenate(all_targets), np.concatenate(all_tiles)

    def _tensors(self, laid: _LaidOut, pixels: Sequence[np.ndarray]) -> Sample:
        end = laid.end
        s = self.config.sequence_length
        pad = self.config.tokenizer.pad
        following = laid.target[1 : end + 1]
        has_loss = following != _NO_LOSS
        weights = _weights_by_root(has_loss) if self.config.weighs_answers else has_loss
        tiles = laid.tiles[:end]
        shape = self.config.images.tile_shape
        all_pixels = np.concatenate([np.empty((0, *shape), np.float32), *pixels])

        def row(values: np.ndarray, filler: int) -> torch.Tensor:
            return torch.from_numpy(np.pad(values, (0, s - len(values)), constant_values=filler))

        return {
            "tokens": row(laid.ids[:end], pad),
            "labels": row(np.where(has_loss, following, pad), pad),
            "loss_mask": row(weights.astype(np.float32), 0),
            "position_ids": torch.arange(s),
            "num_tiles": row(tiles, -1),
            "images": torch.from_numpy(all_pixels[: int(tiles.sum())]),
        }


def _weights_by_root(has_loss: np.ndarray) -> np.ndarray:
    """Return 1/sqrt(n) for each token of an answer of n tokens, 0 for the other tokens.

    Answers are runs of tokens with a loss.  The weights of an answer sum to sqrt(n).
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], has_loss, [False]])))
    weights = np.zeros(len(has_loss), np.float32)
    for start, stop in edges.reshape(-1, 2):
        weights[start:stop] = (stop - start) ** -0.5
    return weights
