"""Synthetic samples of text with one image, for vision-language models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from megatron.core.config.errors import ConfigError
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.megatron_dataset import Sample

_IMAGE_STREAM = 1  # random numbers of the pixels; those of the text are stream 0


@dataclass(kw_only=True)
class MultimodalDatasetConfig(GPTDatasetConfig):
    """Settings of text samples, and the size of the image of each sample."""

    image_h: int | None = None  # height in pixels
    image_w: int | None = None  # width in pixels
    preprocess_func: Callable[[Sample], Sample] = lambda sample: sample  # changes each sample

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, size in (("image_h", self.image_h), ("image_w", self.image_w)):
            if size is None or size < 1:
                raise ConfigError(f"{name} is {size}: give the size of the images, 1 or more")


class MockMultimodalDataset(MockGPTDataset):
    """Samples of MockGPTDataset with one more key: image f32 [3, image_h, image_w].

    Pixels are normally distributed, like normalized ones, and depend only on the seed, the split
    and the sample number.  ``preprocess_func`` of the config receives the sample with its image,
    and returns the final sample.
    """

    config: MultimodalDatasetConfig

    def __getitem__(self, idx: int | None) -> Sample:
        height = self.config.image_h
        width = self.config.image_w
        assert height is not None
        assert width is not None
        random = self.random_of(0 if idx is None else int(idx), _IMAGE_STREAM)
        image = torch.from_numpy(random.standard_normal((3, height, width), np.float32))
        return self.config.preprocess_func({**super().__getitem__(idx), "image": image})
