"""Images: decoded, divided into tiles or patches, as normalized pixel values.

A file is decoded into RGB, in the orientation in which the image is shown.  Values are bitwise
identical to those of the Pillow processors of Hugging Face transformers with the same settings:
CLIP, SigLIP, ViT, GOT-OCR2 (InternVL's tiles), LLaVA-NeXT and Qwen2-VL.

``t`` tiles, ``H`` x ``W`` pixels of a tile.  A grid of tiles is (columns, rows); it depends only on
the size of the image in pixels.  ``p`` side of a patch, ``g`` blocks of 2 x 2 patches of an image.
"""

from __future__ import annotations

import io
import math
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from typing import Any, Literal

import numpy as np

from megatron.core.config.errors import ConfigError, DataError
from megatron.core.optional import require
from megatron.core.tile_arrangement import TileArrangement

# Without formats such as EPS, for which Pillow starts another program.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
MAX_PIXELS = 1 << 27  # 134 million; a decoded image has 3 bytes per pixel
_DEEP_GREY = ("I;16", "I;16L", "I;16B", "I;16N")

_SCAN = b"\xff\xda"  # before each scan of a JPEG
_MOST_SCANS = 100  # a progressive JPEG has some ten; a decoder goes over all pixels for each
_ORIENTATION = 0x0112  # of EXIF data
_TURNED = (5, 6, 7, 8)  # orientations that swap width and height

# Exceptions of Pillow's decoders on damaged files.
_DAMAGED = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    OverflowError,
    IndexError,
    KeyError,
    TypeError,
    RuntimeError,
    struct.error,
    zlib.error,
)


@cache
def pillow(module: str = "PIL.Image") -> Any:
    """Return a module of Pillow; raise MissingDependency if it is not installed."""
    return require(module, "images")


def decode_image(data: bytes, name: str, max_pixels: int = MAX_PIXELS) -> Any:
    """Decode the bytes of an image file to a PIL image of mode RGB, the first if it has several.

    The orientation in its EXIF data is applied.  Transparent pixels are blended with white.
    16-bit grey values keep their upper 8 bits.  Raises DataError, which begins with ``name``, for
    damaged, truncated and unknown files, images of more than ``max_pixels`` pixels, and modes
    without a range of values, such as float.
    """
    with _opened(data, name, max_pixels) as image:
        image.load()
        upright = pillow("PIL.ImageOps").exif_transpose(image)
    return to_rgb(upright, name)


def size_of_image(data: bytes, name: str) -> tuple[int, int]:
    """Return (width, height) of an image file as `decode_image` returns it, from its header alone.

    Raises DataError for files whose header cannot be read, and images of more than `MAX_PIXELS`.
    """
    with _opened(data, name, MAX_PIXELS) as image:
        width, height = image.size
        is_turned = image.getexif().get(_ORIENTATION, 1) in _TURNED
    return (height, width) if is_turned else (width, height)


@contextmanager
def _opened(data: bytes, name: str, max_pixels: int) -> Iterator[Any]:
    """Yield a PIL image whose header has been read; raise DataError for a damaged file."""
    if data.startswith(b"\xff\xd8") and data.count(_SCAN) > _MOST_SCANS:
        raise DataError(f"{name}: a JPEG of more than {_MOST_SCANS} scans: save it as baseline")
    image_module = pillow()
    try:
        with warnings.catch_warnings():
            # Pillow warns of large images, which are refused, and of odd metadata.
            warnings.simplefilter("ignore")
            image = image_module.open(io.BytesIO(data), formats=FORMATS)
            width, height = image.size
            if width * height > max_pixels:
                raise DataError(
                    f"{name}: an image of {width} x {height} pixels, at most {max_pixels} pixels "
                    "are decoded: reduce it"
                )
            yield image
    except DataError:  # a ValueError too
        raise
    except (image_module.DecompressionBombError, *_DAMAGED) as error:
        reason = str(error).partition(" <_io")[0].partition("\n")[0]  # without addresses
        raise DataError(
            f"{name}: no image that can be decoded ({type(error).__name__}: {reason[:120]})"
        ) from error


def to_rgb(image: Any, name: str = "image") -> Any:
    """Convert a PIL image of any mode to RGB; see `decode_image`."""
    mode = image.mode
    if mode == "RGB" and "transparency" not in image.info:
        return image
    if mode in _DEEP_GREY:
        # convert() would clip: each value above 255 would become white.
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    elif mode in ("I", "F"):
        raise DataError(f"{name}: pixels of mode {mode} have no range: store 8 or 16 bits")
    try:
        if "A" in image.getbands() or image.info.get("transparency") is not None:
            white = pillow().new("RGBA", image.size, "white")
            image = pillow().alpha_composite(white, image.convert("RGBA"))
        return image.convert("RGB")
    except _DAMAGED as error:
        raise DataError(f"{name}: mode {mode} has no conversion to RGB ({error})") from error


# Grids of LLaVA-NeXT in pixels (height, width), for tiles of 336 x 336.
LLAVA_NEXT_GRIDS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
_MOST_MAGNIFICATION = 0.6  # share of an image's area beyond which a larger grid gains nothing


@cache
def grids(max_num_tiles: int) -> tuple[tuple[int, int], ...]:
    """Return all grids of 1 to ``max_num_tiles`` tiles, smallest first."""
    sides = range(1, max_num_tiles + 1)
    fitting = (grid for grid in product(sides, sides) if math.prod(grid) <= max_num_tiles)
    return tuple(sorted(fitting, key=math.prod))


def closest_grid(
    size: tuple[int, int], tile: tuple[int, int], max_num_tiles: int
) -> tuple[int, int]:
    """Return the grid whose number of columns per row is closest to width / height (InternVL).

    ``size`` and ``tile`` are (width, height) in pixels.  Of equally close grids, such as 1 x 1 and
    2 x 2, the largest wins of which the image has more than half of the pixels.
    """
    width, height = size
    best = (1, 1)
    best_difference = math.inf
    for grid in grids(max_num_tiles):
        difference = abs(width / height - grid[0] / grid[1])
        has_pixels = width * height > 0.5 * tile[0] * tile[1] * grid[0] * grid[1]
        if difference < best_difference or (difference == best_difference and has_pixels):
            best = grid
            best_difference = difference
    return best


def area_weighted_grid(
    size: tuple[int, int], tile: tuple[int, int], max_num_tiles: int
) -> tuple[int, int]:
    """Return the grid with the best product of area and aspect ratio.

    Area counts up to 0.6 of the image, aspect ratio as the smaller of both divided by the larger.
    """
    width, height = size

    def merit(grid: tuple[int, int]) -> float:
        area = grid[0] * grid[1] * tile[0] * tile[1] / (width * height)
        ratio = grid[0] / grid[1] / (width / height)
        return min(area, _MOST_MAGNIFICATION) * min(ratio, 1 / ratio)

    return max(grids(max_num_tiles), key=merit)  # the first of equals


def best_resolution(
    size: tuple[int, int], resolutions: tuple[tuple[int, int], ...]
) -> tuple[int, int]:
    """Return the (height, width) of ``resolutions`` that keeps most pixels (LLaVA-NeXT).

    The image of ``size`` (width, height) is scaled to fit.  Among equals the smallest wins.
    """
    width, height = size

    def merit(resolution: tuple[int, int]) -> tuple[int, int]:
        scale = min(resolution[1] / width, resolution[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - resolution[0] * resolution[1]

    return max(resolutions, key=merit)


def size_within(size: tuple[int, int], resolution: tuple[int, int]) -> tuple[int, int]:
    """Return (width, height) of an image scaled, with its aspect ratio, to fit ``resolution``."""
    width, height = size
    to_height, to_width = resolution
    scale = min(to_width / width, to_height / height)
    return min(math.ceil(width * scale), to_width), min(math.ceil(height * scale), to_height)


def tile_tags(num_tiles: int, ends_with_whole_image: bool) -> list[str]:
    """Return NVLM's tags, which precede the tiles of an image as text, in their order."""
    tags = [f"<tile_{number}>" for number in range(1, num_tiles + 1)]
    if ends_with_whole_image:
        tags[-1] = "<tile_global_thumbnail>"
    return tags


MERGE = 2  # neighbours in each direction that become one embedding of the language model
FRAMES = 2  # of a patch; an image is a video of two equal frames
_MOST_ELONGATED = 200  # longer side : shorter side


def size_in_blocks(
    size: tuple[int, int], block: int, max_blocks: int, least_blocks: int = 4
) -> tuple[int, int]:
    """Return (columns, rows) of blocks for an image of ``size`` (width, height) in pixels.

    Each side is rounded to a multiple of ``block`` pixels.  If these are fewer than
    ``least_blocks`` or more than ``max_blocks`` blocks, both sides are scaled by the same factor
    first.  Raises DataError for an image that is more than 200 times longer than wide.
    """
    width, height = size
    if max(size) > _MOST_ELONGATED * min(size):
        raise DataError(
            f"an image of {width} x {height} pixels is too long and narrow: one side may be "
            f"{_MOST_ELONGATED} times as long as the other"
        )
    columns, rows = (round(side / block) for side in size)
    if columns * rows > max_blocks:
        scale = math.sqrt(width * height / (max_blocks * block**2))
        columns, rows = (max(1, math.floor(side / scale / block)) for side in size)
    elif columns * rows < least_blocks:
        scale = math.sqrt(least_blocks * block**2 / (width * height))
        columns, rows = (math.ceil(side * scale / block) for side in size)
    return columns, rows


def fitting_blocks(size: tuple[int, int], block: int, largest: tuple[int, int]) -> tuple[int, int]:
    """Return (columns, rows) of blocks that cover an image, scaled to fit ``largest`` (Pixtral)."""
    scale = max(1, *(side / most for side, most in zip(size, largest, strict=True)))
    columns, rows = (max(1, -(-math.floor(side / scale) // block)) for side in size)
    return columns, rows


def patches_of(pixels: np.ndarray, patch_dim: int, num_frames: int = FRAMES) -> np.ndarray:
    """Return the values of the patches of an image [3, H, W]: f32 [g, 4, 3 f p p] for f frames."""
    _, height, width = pixels.shape
    side = MERGE * patch_dim
    blocks = pixels.reshape(
        3, height // side, MERGE, patch_dim, width // side, MERGE, patch_dim
    ).transpose(1, 4, 2, 5, 0, 3, 6)
    frames = np.stack([blocks] * num_frames, 5)
    return np.ascontiguousarray(frames).reshape(-1, MERGE**2, 3 * num_frames * patch_dim**2)


Triple = tuple[float, float, float]


@dataclass(frozen=True)
class PixelStatistics:
    """What an encoder was trained with: mean and standard deviation of red, green and blue."""

    mean: Triple
    std: Triple
    resample: Literal["bicubic", "bilinear"] = "bicubic"
    frames: int = FRAMES  # of a patch
    least_blocks: int = 4  # of an image of any size; smaller ones are magnified
    ends_rows: bool = False  # an embedding ends each row; no image is magnified


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
    "gemma3": PixelStatistics(_HALF.mean, _HALF.std, "bilinear"),
    "qwen2_vl": _CLIP,
    "qwen3_vl": PixelStatistics(_HALF.mean, _HALF.std, least_blocks=64),
    "pixtral": PixelStatistics(_CLIP.mean, _CLIP.std, frames=1, ends_rows=True),
}


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """Size and number of tiles of images, and normalization of their pixels: it processes images.

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
        if self.vision_model_type not in STATISTICS:
            raise ConfigError(
                f"--vision-model-type {self.vision_model_type}: the mean and deviation of its "
                f"pixels are not known; known are {', '.join(STATISTICS)}"
            )
        if self.fit == "crop" and self.img_h != self.img_w:
            raise ConfigError(
                f"--img-h {self.img_h} and --img-w {self.img_w} differ: images are cropped to "
                "squares; give equal sizes, or stretch images"
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
            if self._statistics.ends_rows:
                return fitting_blocks((width, height), block, (self.img_w, self.img_h))
            most = self.img_h * self.img_w // block**2
            least = min(self._statistics.least_blocks, most)
            return size_in_blocks((width, height), block, most, least)
        choose = area_weighted_grid if self.use_area_weighted_aspect_ratio else closest_grid
        return choose((width, height), (self.img_w, self.img_h), self.max_num_tiles)

    def num_tiles(self, width: int, height: int) -> int:
        """Return the number of tiles of an image of this size, with its thumbnail."""
        columns, rows = self.grid(width, height)
        if self.tiling == "anyres":
            return 1 + columns * rows
        has_thumbnail = self.use_thumbnail and self.tiling == "dynamic" and columns * rows > 1
        return columns * rows + has_thumbnail

    def num_positions(self, width: int, height: int, per_tile: int) -> int:
        """Return how many positions of a row an image takes, with ``per_tile`` of a tile."""
        if self.tiling == "anyres":
            size = self.image_size(width, height)
            return len(TileArrangement.of_size(size, per_tile).order)
        ends = self.grid(width, height)[1] if self._statistics.ends_rows else 0
        return self.num_tiles(width, height) * per_tile + ends

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
            return MERGE**2, 3 * self._statistics.frames * self.patch_dim**2
        return 3, self.img_h, self.img_w

    def ends_with_whole_image(self, num_tiles: int) -> bool:
        """Return whether the last of ``num_tiles`` tiles of an image is the complete image."""
        return num_tiles == 1 or (self.tiling == "dynamic" and self.use_thumbnail)

    def read(self, data: bytes, name: str) -> tuple[np.ndarray, tuple[int, int]]:
        """Return pixel values of an image file, and width and height of the image in pixels.

        Values are f32 [t, 3, H, W], with patches [blocks, 4, values of a patch].  See
        `decode_image` for errors.
        """
        image = decode_image(data, name, self.max_pixels)
        return self.process(image, name), image.size

    def process(self, image: Any, name: str = "image") -> np.ndarray:
        """Process a PIL image.

        The order of tiles is row by row; a thumbnail is last, the complete image that anyres adds
        is first.  Raises DataError if the image would become too large by scaling.
        """
        rgb = to_rgb(image, name)
        tile = self.img_w, self.img_h
        columns, rows = self.grid(*rgb.size)
        canvas_size = columns * tile[0], rows * tile[1]
        if self.tiling == "none":
            is_cropped = self.fit == "crop"
            tiles = [self._cropped(rgb, name) if is_cropped else self._resized(rgb, tile)]
        elif self.tiling == "patches":
            block = MERGE * self.patch_dim
            scaled = self._resized(rgb, (columns * block, rows * block))
            pixels = self._normalized([scaled])[0]
            return patches_of(pixels, self.patch_dim, self._statistics.frames)
        elif self.tiling == "anyres":
            tiles = [self._resized(rgb, tile), *self._tiles(self._padded(rgb, canvas_size))]
        else:
            tiles = self._tiles(self._resized(rgb, canvas_size))
            if self.use_thumbnail and len(tiles) > 1:
                tiles.append(self._resized(rgb, tile))
        return self._normalized(tiles)

    def _resized(self, rgb: Any, size: tuple[int, int]) -> np.ndarray:
        """Return u8 [h, w, 3] for ``size`` (w, h)."""
        resample = getattr(pillow().Resampling, self._statistics.resample.upper())
        return np.asarray(rgb.resize(size, resample=resample))

    def _cropped(self, rgb: Any, name: str) -> np.ndarray:
        """Return the middle of the image whose shorter side was scaled to that of a tile."""
        width, height = rgb.size
        side = self.img_w
        scaled = int(side * max(rgb.size) / min(rgb.size))
        if scaled * side > self.max_pixels:
            raise DataError(
                f"{name}: an image of {width} x {height} pixels becomes {side} x {scaled} before "
                f"it is cropped, at most {self.max_pixels} pixels are made: reduce it"
            )
        size = (side, scaled) if width <= height else (scaled, side)
        left, top = ((length - side) // 2 for length in size)
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
        h = self.img_h
        w = self.img_w
        corners = product(range(0, canvas.shape[0], h), range(0, canvas.shape[1], w))
        return [canvas[y : y + h, x : x + w] for y, x in corners]

    def _normalized(self, tiles: Sequence[np.ndarray]) -> np.ndarray:
        """Return f32 [t, 3, H, W] for tiles u8 [H, W, 3], by one table look-up per value."""
        pixels = np.empty((len(tiles), 3, *tiles[0].shape[:2]), np.float32)
        for tile, out in zip(tiles, pixels, strict=True):
            for color in range(3):
                np.take(self._table[color], tile[..., color], out=out[color], mode="clip")
        return pixels

    @property
    def _statistics(self) -> PixelStatistics:
        return STATISTICS[self.vision_model_type]

    @cached_property
    def _table(self) -> np.ndarray:
        """f32 [3, 256]: normalized value of each 8-bit value of each color.

        Rounded like transformers: v / 255 in float64, then float32.
        """
        values = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
        mean = np.array(self._statistics.mean, np.float32)[:, None]
        std = np.array(self._statistics.std, np.float32)[:, None]
        table: np.ndarray = (values - mean) / std
        return table
