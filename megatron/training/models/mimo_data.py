"""Samples of MiMo models: rows in which placeholders stand for images and sound.

A sample has tokens, labels, position_ids i64 [L], loss_mask f32 [L], images f32 [t, 3, H, W] and,
for a model of sound, audios f32 [a, m, 2 n] (spectrograms of m frequencies).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron.core.datasets.image_text_dataset import ImageTextDataset, ImageTextDatasetConfig
from megatron.core.datasets.megatron_dataset import Sample
from megatron.core.datasets.multimodal_dataset import MockMultimodalDataset, MultimodalDatasetConfig
from megatron.core.models.multimodal.llava_model import DEFAULT_IMAGE_TOKEN_INDEX
from megatron.core.models.multimodal.splicing import splice

_SOUND_STREAM = 2  # random numbers of the spectrogram; those of the pixels are stream 1


@dataclass(frozen=True, kw_only=True)
class PlaceholderRows:
    """Turns a sample of a vision-language model into a row of ``length`` with placeholders.

    An image token becomes ``embeddings_per_tile`` tokens for each tile.  The row begins with
    ``audio_length`` placeholders for each spectrogram.  ``num_positions``: positions of the model;
    a row may be longer by padding.
    """

    length: int
    num_positions: int
    embeddings_per_tile: int
    audio_length: int
    special_token_ids: dict[str, int]
    pad: int

    def __call__(self, sample: Sample) -> Sample:
        """Return the row.  Text with the id of a placeholder becomes padding."""
        sounds: Tensor | None = sample.get("audios")
        num_before = 0 if sounds is None else len(sounds) * self.audio_length
        tokens = torch.as_tensor(sample["tokens"])[None]
        is_image = tokens == DEFAULT_IMAGE_TOKEN_INDEX
        counts = torch.as_tensor(sample["num_tiles"])[None] * self.embeddings_per_tile
        where = splice(is_image, counts, self.length - num_before)
        text = tokens.gather(1, where.token).masked_fill(~where.is_text, self.pad)
        for token in self.special_token_ids.values():
            text = text.masked_fill(text == token, self.pad)
        ids = text.masked_fill(where.is_image, self.special_token_ids["images"])
        labels = where.labels(torch.as_tensor(sample["labels"])[None])
        mask = where.loss_mask(torch.as_tensor(sample["loss_mask"])[None])
        before = ids.new_full((num_before,), self.special_token_ids.get("audios", self.pad))
        row = {
            "tokens": torch.cat([before, ids[0]]),
            "labels": torch.cat([torch.zeros_like(before), labels[0]]),
            "loss_mask": torch.cat([mask.new_zeros(num_before), mask[0]]),
            "position_ids": torch.arange(self.length).clamp(max=self.num_positions - 1),
            "images": torch.as_tensor(sample["images"]).float(),
        }
        return row if sounds is None else row | {"audios": sounds.float()}


@dataclass(kw_only=True)
class MimoImageTextConfig(ImageTextDatasetConfig):
    """``rows`` makes the rows; ``audio_shape``: frequencies and frames of a spectrogram."""

    rows: Callable[[Sample], Sample]
    audio_shape: tuple[int, int] | None = None


class MimoImageTextDataset(ImageTextDataset):
    """Samples of image-text shards, which have no sound."""

    config: MimoImageTextConfig

    def __getitem__(self, idx: int | None) -> Sample:
        sample = super().__getitem__(idx)
        if self.config.audio_shape is not None:
            sample["audios"] = torch.zeros(0, *self.config.audio_shape)
        return self.config.rows(sample)


@dataclass(kw_only=True)
class MockMimoConfig(MultimodalDatasetConfig):
    """``image_h`` is the height of all ``num_frames`` frames of a video, one below the other.

    ``preprocess_func`` puts the image before the text; ``rows`` makes the rows afterwards.
    """

    rows: Callable[[Sample], Sample]
    num_frames: int = 1
    audio_shape: tuple[int, int] | None = None


class MockMimoDataset(MockMultimodalDataset):
    """Synthetic samples: a sound, an image or video, then text."""

    config: MockMimoConfig

    def __getitem__(self, idx: int | None) -> Sample:
        sample = super().__getitem__(idx)
        if self.config.audio_shape is not None:
            random = self.random_of(0 if idx is None else int(idx), _SOUND_STREAM)
            sound = random.standard_normal((1, *self.config.audio_shape), np.float32)
            sample["audios"] = torch.from_numpy(sound)
        sample["images"] = sample["images"][0].unflatten(1, (self.config.num_frames, -1))
        sample["images"] = sample["images"].transpose(0, 1).contiguous()
        sample["num_tiles"] = sample["num_tiles"] * self.config.num_frames
        return self.config.rows(sample)
