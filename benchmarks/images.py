"""Time decoding and processing of images on one core, in processor time.

    python -m benchmarks.images [--rounds 5]

Contenders on the same JPEG bytes: this project's `ImageSettings`; plain Pillow and numpy (decode,
resize, float32, subtract, divide, transpose); transformers' Pillow processors, which round as this
project does.  Images per second, medians of rounds in which the contenders alternate.  Dated
results are in images.md.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Callable

import numpy as np
import PIL
import torch
import transformers
from PIL import Image

from megatron.core.datasets.images import STATISTICS, ImageSettings

Call = Callable[[bytes], object]

_IMAGES = 12
_SIZES = [(640, 480), (1920, 1080)]
_TILED = {"tiling": "dynamic", "max_num_tiles": 6, "use_thumbnail": True}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"Pillow {PIL.__version__}, numpy {np.__version__}, transformers", end=" ")
    print(transformers.__version__)
    print(
        "| JPEG | to | this project | plain Pillow + numpy | transformers |\n|---|---|---|---|---|"
    )
    for width, height in _SIZES:
        files = [_jpeg(width, height, seed) for seed in range(_IMAGES)]
        for name, ours, plain, theirs in _contenders():
            rates = _rates((ours, plain, theirs), files, rounds)
            cells = " | ".join(f"{rate:.0f}" for rate in rates)
            print(f"| {width} x {height} | {name} | {cells} |", flush=True)


def _contenders() -> list[tuple[str, Call, Call, Call]]:
    clip = ImageSettings(img_h=336, img_w=336, vision_model_type="siglip")
    hf_clip = transformers.SiglipImageProcessorPil(size={"height": 336, "width": 336})
    tiled = ImageSettings(img_h=448, img_w=448, vision_model_type="internvit", **_TILED)
    hf_tiled = transformers.GotOcr2ImageProcessorPil(
        size={"height": 448, "width": 448}, crop_to_patches=True, max_patches=6
    )
    return [
        (
            "336 x 336",
            lambda data: clip.read(data, "image"),
            lambda data: _plain(_open(data), 336, 336),
            lambda data: hf_clip(_open(data)),
        ),
        (
            "tiles of 448 x 448",
            lambda data: tiled.read(data, "image"),
            lambda data: _plain_tiles(data, tiled),
            lambda data: hf_tiled(_open(data)),
        ),
    ]


def _jpeg(width: int, height: int, seed: int) -> bytes:
    """A smooth picture with some noise, which compresses like a photo."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (height // 16, width // 16, 3), np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((width, height)), np.int16)
    noisy = smooth + random.integers(-12, 13, smooth.shape)
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def _open(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def _plain(image: Image.Image, width: int, height: int) -> np.ndarray:
    known = STATISTICS["internvit"]
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    values = np.asarray(resized, np.float32) / 255
    normalized = (values - np.array(known.mean, np.float32)) / np.array(known.std, np.float32)
    return np.ascontiguousarray(normalized.transpose(2, 0, 1))


def _plain_tiles(data: bytes, settings: ImageSettings) -> np.ndarray:
    image = _open(data)
    columns, rows = settings.grid(*image.size)
    canvas = _plain(image, columns * 448, rows * 448)
    tiles = canvas.reshape(3, rows, 448, columns, 448).transpose(1, 3, 0, 2, 4)
    whole = _plain(image, 448, 448)[None]
    return np.concatenate([tiles.reshape(-1, 3, 448, 448), whole])


def _rates(contenders: tuple[Call, ...], files: list[bytes], rounds: int) -> list[float]:
    """Return the median images per second of processor time of each contender."""
    found: list[list[float]] = [[] for _ in contenders]
    for _ in range(rounds):
        for contender, rates in zip(contenders, found, strict=True):
            contender(files[0])
            started_s = time.process_time()
            for data in files:
                contender(data)
            rates.append(len(files) / (time.process_time() - started_s))
    return [statistics.median(rates) for rates in found]


if __name__ == "__main__":
    main()
