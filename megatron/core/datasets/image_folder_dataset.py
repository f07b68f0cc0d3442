"""Images of a folder for each class, for image classifiers.

``H`` x ``W`` pixels of a processed image.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.images import ImageSettings, decode_image, pillow
from megatron.core.datasets.megatron_dataset import (
    LowLevelDataset,
    ReplacedSamples,
    ReplacedSamplesConfig,
    Sample,
    SyntheticDataset,
    given_path,
)
from megatron.core.datasets.tar_shards import IMAGE_SUFFIXES
from megatron.core.datasets.utils import Split

_AREA = (0.08, 1.0)  # of the part, as a share of the image's
_MAX_ASPECT_RATIO = 4 / 3  # width : height of the part, or height : width
_ATTEMPTS = 10  # to find a part within the image
_JITTER = 0.4  # factors of brightness, contrast and saturation are 1 - _JITTER to 1 + _JITTER


def augment(image: Any, size: tuple[int, int], random: np.random.Generator) -> Any:
    """Return a random part of a PIL image of mode RGB, scaled to ``size`` (w, h).

    It is mirrored with probability 1/2; brightness, contrast and saturation change by up to 40 %.
    The result is a function of the image and of ``random``.
    """
    part = _random_box(image.size, random)
    image_module = pillow()
    enhance = pillow("PIL.ImageEnhance")
    image = image.resize(size, resample=image_module.Resampling.BICUBIC, box=part)
    if random.random() < 0.5:
        image = image.transpose(image_module.Transpose.FLIP_LEFT_RIGHT)
    enhancers = (enhance.Brightness, enhance.Contrast, enhance.Color)
    for i in random.permutation(len(enhancers)):
        image = enhancers[i](image).enhance(random.uniform(1 - _JITTER, 1 + _JITTER))
    return image


def _random_box(size: tuple[int, int], random: np.random.Generator) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom; the middle of the image if no random part fits."""
    width, height = size
    for _ in range(_ATTEMPTS):
        area = width * height * random.uniform(*_AREA)
        ratio = _MAX_ASPECT_RATIO ** random.uniform(-1, 1)
        w = round(math.sqrt(area * ratio))
        h = round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = int(random.integers(width - w + 1))
            top = int(random.integers(height - h + 1))
            return left, top, left + w, top + h
    w = min(width, round(height * _MAX_ASPECT_RATIO))
    h = min(height, round(width * _MAX_ASPECT_RATIO))
    left = (width - w) // 2
    top = (height - h) // 2
    return left, top, left + w, top + h


_ORDER_SEED = 0  # of the files: a split must not depend on the seed of a run
_AUGMENTATION_STREAM = 1 << 20  # beyond the streams of replaced samples


@dataclass(kw_only=True)
class ImageFolderDatasetConfig(ReplacedSamplesConfig):
    """Size of processed images, and the classes and images that are used.

    ``classes_fraction`` and ``data_per_class_fraction`` keep the first classes, and the first
    images of each class, in the order of their names; at least one.
    """

    img_h: int = 224
    img_w: int = 224
    num_classes: int = 1000
    classes_fraction: float = 1.0
    data_per_class_fraction: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for flag, share in (
            ("--classes-fraction", self.classes_fraction),
            ("--data-per-class-fraction", self.data_per_class_fraction),
        ):
            if not 0 < share <= 1:
                raise ConfigError(f"{flag} {share}: give a number over 0, at most 1")


def list_images(root: str, config: ImageFolderDatasetConfig) -> list[tuple[str, int]]:
    """Return image files of ``root``/CLASS/ and the numbers of their classes, in a fixed order.

    The order is random and depends on the names only: a contiguous part of it has images of all
    classes.  Files with another suffix than an image's are ignored.  Raises DataError for a folder
    without classes or with more of them than ``num_classes``, and for a class without images.
    """
    try:
        with os.scandir(root) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except OSError as error:
        raise DataError(
            f"{root}: {error.strerror}; give --data-path a folder that has a folder of images for "
            "each class"
        ) from error
    if not names:
        raise DataError(f"{root} has no folders: give it one for each class")
    names = _first(names, config.classes_fraction)
    if len(names) > config.num_classes:
        raise DataError(
            f"{root} has {len(names)} classes, --num-classes is {config.num_classes}: "
            f"give --num-classes {len(names)}"
        )
    files: list[tuple[str, int]] = []
    for label, name in enumerate(names):
        folder = os.path.join(root, name)
        found = [
            os.path.join(where, file)
            for where, _, below in os.walk(folder, followlinks=True)
            for file in below
            if file.rpartition(".")[2].lower() in IMAGE_SUFFIXES
        ]
        if not found:
            raise DataError(
                f"{folder} has no image file (.{', .'.join(IMAGE_SUFFIXES)}): remove this folder, "
                "or add images of its class"
            )
        files += [(file, label) for file in _first(sorted(found), config.data_per_class_fraction)]
    order = np.random.Generator(np.random.Philox(_ORDER_SEED)).permutation(len(files))
    return [files[i] for i in order]


class ImageFolderDataset(ReplacedSamples):
    """Samples of one split: images f32 [3, H, W], labels i64 [], loss_mask f32 [].

    Images of the training split are augmented, as a function of the seed and the sample number;
    those of other splits are scaled, and cut to their middle if H equals W.
    """

    config: ImageFolderDatasetConfig
    dataset: list[tuple[str, int]]
    split_unit = "images"

    @cached_property
    def _settings(self) -> ImageSettings:
        height = self.config.img_h
        width = self.config.img_w
        is_cut = height == width and self.index_split != Split.train
        fit: Literal["crop", "stretch"] = "crop" if is_cut else "stretch"
        return ImageSettings(img_h=height, img_w=width, vision_model_type="vit", fit=fit)

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: BlendedMegatronDatasetConfig
    ) -> LowLevelDataset:
        """List the images of a folder."""
        assert isinstance(config, ImageFolderDatasetConfig)
        return list_images(given_path(dataset_path), config)

    def _content(self, element: int) -> tuple[str, Any]:
        path, label = self.dataset[element]
        try:
            with open(path, "rb") as file:
                return path, (path, label, file.read())
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; it was there at the start") from error

    def _sample(self, content: Any, number: int) -> Sample:
        path, label, data = content
        image = decode_image(data, path)
        if self.index_split == Split.train:
            size = self.config.img_w, self.config.img_h
            image = augment(image, size, self.random_of(number, _AUGMENTATION_STREAM))
        return _tensors(self._settings.process(image, path)[0], label)


class MockImageFolderDataset(SyntheticDataset, ImageFolderDataset):
    """Synthetic, learnable samples: noise over a pattern of the class, from seed and number.

    The pattern of a class is the same in every split.
    """

    def __getitem__(self, idx: int | None) -> Sample:
        config = self.config
        random = self.random_of(0 if idx is None else int(idx))
        label = int(random.integers(config.num_classes))
        pattern = np.random.Generator(np.random.Philox(key=[_ORDER_SEED, label]))
        shape = (3, config.img_h, config.img_w)
        pixels = pattern.standard_normal(shape, np.float32)
        sample = _tensors(pixels + random.standard_normal(shape, np.float32), label)
        if idx is None:
            sample["loss_mask"].zero_()
        return sample


def _tensors(pixels: np.ndarray, label: int) -> Sample:
    return {
        "images": torch.from_numpy(pixels),
        "labels": torch.tensor(label),
        "loss_mask": torch.ones(()),
    }


def _first(names: list[str], fraction: float) -> list[str]:
    """Return the first ``fraction`` of ``names``, at least one."""
    return names[: max(1, int(len(names) * fraction))]
