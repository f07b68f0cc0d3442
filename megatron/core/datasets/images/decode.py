"""Decode image files into RGB, in the orientation in which they are shown."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from megatron.core.config.errors import DataError
from megatron.core.optional import require

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
    ops = pillow("PIL.ImageOps")
    with _readable(name):
        image = _opened(data, name, max_pixels)
        image.load()
        upright = ops.exif_transpose(image)
    return to_rgb(upright, name)


def size_of_image(data: bytes, name: str, max_pixels: int = MAX_PIXELS) -> tuple[int, int]:
    """Return (width, height) of an image file as `decode_image` returns it, from its header alone.

    Raises DataError for files whose header cannot be read, and images of more than ``max_pixels``.
    """
    with _readable(name):
        image = _opened(data, name, max_pixels)
        width, height = image.size
        is_turned = image.getexif().get(_ORIENTATION, 1) in _TURNED
    return (height, width) if is_turned else (width, height)


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Raise DataError for what Pillow raises of a damaged file, and show no warning."""
    try:
        with warnings.catch_warnings():
            # Pillow warns of large images, which are refused, and of odd metadata.
            warnings.simplefilter("ignore")
            yield
    except DataError:  # a ValueError too
        raise
    except _DAMAGED as error:
        raise DataError(f"{name}: no image that can be decoded ({_short(error)})") from error


def _opened(data: bytes, name: str, max_pixels: int) -> Any:
    """Return a PIL image whose header has been read."""
    image_module = pillow()
    if data.startswith(b"\xff\xd8") and data.count(_SCAN) > _MOST_SCANS:
        raise DataError(f"{name}: a JPEG of more than {_MOST_SCANS} scans: save it as baseline")
    try:
        image = image_module.open(io.BytesIO(data), formats=FORMATS)
    except image_module.DecompressionBombError as error:
        raise DataError(f"{name}: more than {max_pixels} pixels ({error}): reduce it") from error
    width, height = image.size
    if width * height > max_pixels:
        raise DataError(
            f"{name}: an image of {width} x {height} pixels, at most {max_pixels} pixels are "
            "decoded: reduce it"
        )
    return image


def to_rgb(image: Any, name: str = "image") -> Any:
    """Convert a PIL image of any mode to RGB; see `decode_image`."""
    image_module = pillow()
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
            image = image.convert("RGBA")
            white = image_module.new("RGBA", image.size, (255, 255, 255, 255))
            image = image_module.alpha_composite(white, image)
        return image.convert("RGB")
    except _DAMAGED as error:
        raise DataError(f"{name}: mode {mode} has no conversion to RGB ({error})") from error


def _short(error: Exception) -> str:
    text = str(error).partition(" <_io")[0].partition("\n")[0]  # without addresses
    return f"{type(error).__name__}: {text[:120]}"
