"""Turn an image of any size into a row of patches, as Qwen2-VL reads it.

Values are bitwise identical to those of transformers' Pillow processor.  ``p`` side of a patch,
``g`` blocks of 2 x 2 patches of an image.
"""

from __future__ import annotations

import math

import numpy as np

from megatron.core.config.errors import DataError

MERGE = 2  # neighbours in each direction that become one embedding of the language model
FRAMES = 2  # of a patch; an image is a video of two equal frames
_LEAST_BLOCKS = 4  # of an image; smaller ones are magnified
_MOST_ELONGATED = 200  # longer side : shorter side


def size_in_blocks(size: tuple[int, int], block: int, max_blocks: int) -> tuple[int, int]:
    """Return (columns, rows) of blocks for an image of ``size`` (width, height) in pixels.

    Each side is rounded to a multiple of ``block`` pixels.  If these are fewer than 4 or more than
    ``max_blocks`` blocks, both sides are scaled by the same factor first.  Raises DataError for an
    image that is more than 200 times longer than wide.
    """
    width, height = size
    if max(size) > _MOST_ELONGATED * min(size):
        raise DataError(
            f"an image of {width} x {height} pixels is too long and narrow: one side may be "
            f"{_MOST_ELONGATED} times as long as the other"
        )
    columns = round(width / block)
    rows = round(height / block)
    area = width * height
    if columns * rows > max_blocks:
        scale = math.sqrt(area / (max_blocks * block**2))
        columns = max(1, math.floor(width / scale / block))
        rows = max(1, math.floor(height / scale / block))
    elif columns * rows < _LEAST_BLOCKS:
        scale = math.sqrt(_LEAST_BLOCKS * block**2 / area)
        columns = math.ceil(width * scale / block)
        rows = math.ceil(height * scale / block)
    return columns, rows


def patches_of(pixels: np.ndarray, patch_dim: int) -> np.ndarray:
    """Return the values of the patches of an image [3, H, W]: f32 [g, 4, 3 f p p] for f frames."""
    _, height, width = pixels.shape
    side = MERGE * patch_dim
    blocks = pixels.reshape(
        3, height // side, MERGE, patch_dim, width // side, MERGE, patch_dim
    ).transpose(1, 4, 2, 5, 0, 3, 6)
    frames = np.stack([blocks] * FRAMES, 5)
    return np.ascontiguousarray(frames).reshape(-1, MERGE**2, 3 * FRAMES * patch_dim**2)
