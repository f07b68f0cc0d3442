"""Turn images into normalised pixel values of one or several tiles.

Values are bitwise identical to those of the Pillow processors of Hugging Face transformers with the
same settings: CLIP, SigLIP, ViT, GOT-OCR2 (InternVL's tiles) and LLaVA-NeXT.

``t`` tiles, ``H`` x ``W`` pixels of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.datasets.images.decode import MAX_PIXELS, decode_image, pillow, to_rgb
from megatron.core.datasets.images.patches import FRAMES, MERGE, patches_of, size_in_blocks
from megatron.core.datasets.images.tiling import (
    LLAVA_NEXT_GRIDS,
    area_weighted_grid,
    best_resolution,
    closest_grid,
    size_within,
)

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class PixelStatistics:
    """What an encoder was trained with: mean and standard deviation of red, green and blue."""

    mean: Triple
    std: Triple
    resample: Literal["bicubic", "bilinear"] = "bicubic"


_CLIP = PixelStatistics((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_HALF = PixelStatistics((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_IMAGENET = PixelStatistics((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
# Kinds of encoders (--vision-model-type).
STATISTICS = {
    "clip": _CLIP,
    "siglip": _HALF,
    "siglip_without_norm": _HALF,
    "internvit": _IMAGENET,
    "internvit300M": _IMAGENET,
    "radio": _CLIP,
    "vit": PixelStatistics(_HALF.mean, _HALF.std, "bilinear"),
    "qwen2_vl": _CLIP,
}


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """Size and number of tiles of an image, and the normalisation of its pixels.

    ``fit``: stretch changes the aspect ratio; crop scales the shorter side and cuts the rest off,
    as CLIP.  ``tiling``: none; dynamic divides an image into the grid closest to its aspect ratio
    (InternVL, NVLM); anyres pads it to one of ``resolutions`` (LLaVA-NeXT); patches makes blocks of
    patches with sides of ``patch_dim``, after scaling to at most the area ``img_h`` x ``img_w``
    (Qwen2-VL).
    """

    img_h: int
    img_w: int
    vision_model_type: str = "clip"
    fit: Literal["stretch", "crop"] = "stretch"
    tiling: Literal["none", "dynamic", "anyres", "patches"] = "none"
    max_num_tiles: int = 1  # of dynamic tiling, without the thumbnail
    use_thumbnail: bool = False  # with dynamic tiling: the complete image as one more, last tile
    use_area_weighted_aspect_ratio: bool = False
    resolutions: tuple[tuple[int, int], ...] = LLAVA_NEXT_GRIDS  # (height, width)
    max_pixels: int = MAX_PIXELS  # of an image, also after scaling
    patch_dim: int = 14  # only with patches

    def __post_init__(self) -> None:
        if self.img_h < 1 or self.img_w < 1:
            raise ConfigError(f"--img-h {self.img_h} --img-w {self.img_w}: give 1 pixel or more")
        if self.vision_model_type not in STATISTICS:
            raise ConfigError(
                f"--vision-model-type {self.vision_model_type}: the mean and deviation of its "
                f"pixels are not known; known are {', '.join(STATISTICS)}"
            )
        if self.max_num_tiles < 1:
            raise ConfigError(f"--max-num-tiles {self.max_num_tiles}: give 1 or more")
        if self.fit == "crop" and self.img_h != self.img_w:
            raise ConfigError(
                f"--img-h {self.img_h} and --img-w {self.img_w} differ: images are cropped to "
                "squares; give equal sizes, or stretch images"
            )
        if self.fit == "crop" and self.tiling == "dynamic":
            raise ConfigError("dynamic tiling covers the complete image: stretch it, do not crop")
        if self.tiling == "anyres":
            self._check_resolutions()

    def _check_resolutions(self) -> None:
        wrong = [r for r in self.resolutions if r[0] % self.img_h or r[1] % self.img_w]
        if wrong or not self.resolutions:
            raise ConfigError(
                f"resolutions {wrong} are no multiples of tiles of {self.img_h} x {self.img_w} "
                "pixels (--img-h, --img-w): give (height, width) in multiples"
            )

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the (columns, rows) into which an image of this size is divided."""
        if self.tiling == "anyres":
            to_height, to_width = best_resolution((width, height), self.resolutions)
            return to_width // self.img_w, to_height // self.img_h
        if self.tiling == "none":
            return 1, 1
        if self.tiling == "patches":
            block = MERGE * self.patch_dim
            return size_in_blocks((width, height), block, self.img_h * self.img_w // block**2)
        weighted = self.use_area_weighted_aspect_ratio
        choose = area_weighted_grid if weighted else closest_grid
        return choose((width, height), (self.img_w, self.img_h), self.max_num_tiles)

    def num_tiles(self, width: int, height: int) -> int:
        """Return the number of tiles of an image of this size, with its thumbnail."""
        columns, rows = self.grid(width, height)
        if self.tiling == "anyres":
            return 1 + columns * rows
        has_thumbnail = self.use_thumbnail and self.tiling == "dynamic" and columns * rows > 1
        return columns * rows + has_thumbnail

    def image_size(self, width: int, height: int) -> tuple[int, ...]:
        """Return what a model must know of an image of this size in pixels.

        With anyres: rows and columns of tiles, height and width in pixels.  With patches: their
        number along time, height and width.  Empty otherwise.
        """
        columns, rows = self.grid(width, height)
        if self.tiling == "anyres":
            return rows, columns, height, width
        return (1, MERGE * rows, MERGE * columns) if self.tiling == "patches" else ()

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """Shape of a tile's values, or of those of a block of patches."""
        if self.tiling == "patches":
            return MERGE**2, 3 * FRAMES * self.patch_dim**2
        return 3, self.img_h, self.img_w

    def ends_with_whole_image(self, num_tiles: int) -> bool:
        """Return whether the last of ``num_tiles`` tiles of an image is the complete image."""
        return num_tiles == 1 or (self.tiling == "dynamic" and self.use_thumbnail)


class ImageProcessor:
    """Maps images to pixel values f32 [t, 3, H, W] as ``settings`` describe.

    With patches they are f32 [blocks, 4, values of a patch].
    """

    def __init__(self, settings: ImageSettings) -> None:
        self.settings = settings

    def decode(self, data: bytes, name: str) -> np.ndarray:
        """Decode an image file and process it; see `decode_image` for errors."""
        return self.read(data, name)[0]

    def read(self, data: bytes, name: str) -> tuple[np.ndarray, tuple[int, int]]:
        """Return the same, and width and height of the image in pixels."""
        image = decode_image(data, name, self.settings.max_pixels)
        return self.process(image, name), image.size

    def process(self, image: Any, name: str = "image") -> np.ndarray:
        """Process a PIL image.

        The order of tiles is row by row; a thumbnail is last, the complete image that anyres adds
        is first.  Raises DataError if the image would become too large by scaling.
        """
        rgb = to_rgb(image, name)
        settings = self.settings
        if settings.tiling == "none":
            return self._normalised([self._fitted(rgb, name)])
        columns, rows = settings.grid(*rgb.size)
        if settings.tiling == "patches":
            block = MERGE * settings.patch_dim
            scaled = self._resized(rgb, (columns * block, rows * block))
            return patches_of(self._normalised([scaled])[0], settings.patch_dim)
        if settings.tiling == "anyres":
            canvas = self._padded(rgb, (columns * settings.img_w, rows * settings.img_h))
            whole = self._resized(rgb, (settings.img_w, settings.img_h))
            return self._normalised([whole, *self._tiles(canvas)])
        canvas = self._resized(rgb, (columns * settings.img_w, rows * settings.img_h))
        tiles = self._tiles(canvas)
        if settings.use_thumbnail and len(tiles) > 1:
            tiles.append(self._resized(rgb, (settings.img_w, settings.img_h)))
        return self._normalised(tiles)

    def _resized(self, rgb: Any, size: tuple[int, int]) -> np.ndarray:
        """Return u8 [h, w, 3] for ``size`` (w, h)."""
        resample = getattr(pillow().Resampling, self._statistics.resample.upper())
        return np.asarray(rgb.resize(size, resample=resample))

    def _fitted(self, rgb: Any, name: str) -> np.ndarray:
        settings = self.settings
        if settings.fit == "stretch":
            return self._resized(rgb, (settings.img_w, settings.img_h))
        width, height = rgb.size
        side = settings.img_w
        short = min(rgb.size)
        long = max(rgb.size)
        scaled = int(side * long / short)
        if scaled * side > settings.max_pixels:
            raise DataError(
                f"{name}: an image of {width} x {height} pixels becomes {side} x {scaled} before "
                f"it is cropped, at most {settings.max_pixels} pixels are made: reduce it"
            )
        size = (side, scaled) if width <= height else (scaled, side)
        left = (size[0] - side) // 2
        top = (size[1] - side) // 2
        return self._resized(rgb, size)[top : top + side, left : left + side]

    def _padded(self, rgb: Any, canvas_size: tuple[int, int]) -> np.ndarray:
        """Return the image scaled into the middle of a black canvas of size (w, h)."""
        width, height = canvas_size
        part = self._resized(rgb, size_within(rgb.size, (height, width)))
        canvas = np.zeros((height, width, 3), np.uint8)
        top = (height - part.shape[0]) // 2
        left = (width - part.shape[1]) // 2
        canvas[top : top + part.shape[0], left : left + part.shape[1]] = part
        return canvas

    def _tiles(self, canvas: np.ndarray) -> list[np.ndarray]:
        h = self.settings.img_h
        w = self.settings.img_w
        return [
            canvas[y : y + h, x : x + w]
            for y in range(0, canvas.shape[0], h)
            for x in range(0, canvas.shape[1], w)
        ]

    def _normalised(self, tiles: Sequence[np.ndarray]) -> np.ndarray:
        """Return f32 [t, 3, H, W] for tiles u8 [H, W, 3], by one table look-up per value."""
        pixels = np.empty((len(tiles), 3, *tiles[0].shape[:2]), np.float32)
        for tile, out in zip(tiles, pixels, strict=True):
            for colour in range(3):
                np.take(self._table[colour], tile[..., colour], out=out[colour], mode="clip")
        return pixels

    @property
    def _statistics(self) -> PixelStatistics:
        return STATISTICS[self.settings.vision_model_type]

    @cached_property
    def _table(self) -> np.ndarray:
        """f32 [3, 256]: normalised value of each 8-bit value of each colour.

        Rounded like transformers: v / 255 in float64, then float32.
        """
        values = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
        mean = np.array(self._statistics.mean, np.float32)[:, None]
        std = np.array(self._statistics.std, np.float32)[:, None]
        table: np.ndarray = (values - mean) / std
        return table
