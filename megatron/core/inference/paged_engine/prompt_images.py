"""Images in prompts: pixels, and an id for each of their embeddings.  It imports no torch.

Each embedding of an image is a row of the prompt.  Its id is `FIRST_ID` or more and tells its
image, by the pixels, and its place in the image: requests with equal images share their pages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

FIRST_ID = 1 << 62
PLACE_BITS = 20
_KEY_BITS = 62 - PLACE_BITS

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PromptImage:
    """An image of a prompt: ``pixels`` f32 [t, 3, H, W] of its tiles, and how many rows it has."""

    pixels: npt.NDArray[np.float32]
    num_rows: int

    def __post_init__(self) -> None:
        assert 0 < self.num_rows < 1 << PLACE_BITS

    @cached_property
    def key(self) -> int:
        """The image's content as a number."""
        seen = hashlib.blake2b(repr(self.pixels.shape).encode(), digest_size=8)
        seen.update(np.ascontiguousarray(self.pixels).tobytes())
        return int.from_bytes(seen.digest()) >> (64 - _KEY_BITS)

    @property
    def ids(self) -> list[int]:
        """The ids of its rows."""
        first = FIRST_ID + (self.key << PLACE_BITS)
        return list(range(first, first + self.num_rows))

    def to_array(self) -> Ids:
        """Return the image as one array of int64."""
        bits = np.ascontiguousarray(self.pixels).ravel().view(np.int32).astype(np.int64)
        return np.concatenate([[self.num_rows, *self.pixels.shape], bits])

    @staticmethod
    def size_of(head: Ids) -> int:
        """Return the length of the array that begins with the five numbers ``head``."""
        return 5 + int(np.prod(head[1:5]))

    @staticmethod
    def from_array(array: Ids) -> PromptImage:
        """Return the image that `to_array` wrote."""
        pixels = array[5:].astype(np.int32).view(np.float32).reshape(array[1:5])
        return PromptImage(pixels, int(array[0]))


def text_of(ids: Iterable[int]) -> list[int]:
    """Return the ids of a prompt that are tokens of text."""
    return [token for token in ids if token < FIRST_ID]


def images_to_arrays(images: Mapping[int, tuple[PromptImage, ...]]) -> list[Ids]:
    """Return images by slot as arrays: slot and number, then each image."""
    parts: list[Ids] = []
    for slot, found in images.items():
        parts.append(np.array([slot, len(found)]))
        parts += (image.to_array() for image in found)
    return parts
