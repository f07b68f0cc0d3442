"""Random changes of training images: a part of the image, mirrored, with other colours."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from megatron.core.datasets.images.decode import pillow

_AREA = (0.08, 1.0)  # of the part, as a share of the image's
_MAX_ASPECT_RATIO = 4 / 3  # width : height of the part, or height : width
_ATTEMPTS = 10  # to find a part within the image
_JITTER = 0.4  # factors of brightness, contrast and saturation are 1 - _JITTER to 1 + _JITTER


def augmented(image: Any, size: tuple[int, int], random: np.random.Generator) -> Any:
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
    w = max(1, min(width, round(height * _MAX_ASPECT_RATIO)))
    h = max(1, min(height, round(width * _MAX_ASPECT_RATIO)))
    left = (width - w) // 2
    top = (height - h) // 2
    return left, top, left + w, top + h
