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
    """An image of a prompt: ``pixels`` f32 [t, 3, H, W] of its tiles, and how many rows it has.

    ``size``: what the model must know of an image whose tiles it arranges (rows and columns of
    tiles, height and width in pixels), or that has any size (patches along time, height and width;
    ``pixels`` are then [blocks, 4, values of a patch]).
    """

    pixels: npt.NDArray[np.float32]
    num_rows: int
    size: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert 0 < self.num_rows < 1 << PLACE_BITS

    @cached_property
    def key(self) -> int:
        """The image's content as a number."""
        seen = hashlib.blake2b(repr((self.pixels.shape, self.size)).encode(), digest_size=8)
        seen.update(np.ascontiguousarray(self.pixels).tobytes())
        return int.from_bytes(seen.digest()) >> (64 - _KEY_BITS)

    @property
    def ids(self) -> list[int]:
        """The ids of its rows."""
        first = FIRST_ID + (self.key << PLACE_BITS)
        return list(range(first, first + self.num_rows))

    def to_array(self) -> Ids:
        """Return the image as one array of int64, which begins with its length."""
        bits = np.ascontiguousarray(self.pixels).ravel().view(np.int32).astype(np.int64)
        shape = self.pixels.shape
        head = [self.num_rows, len(self.size), *self.size, len(shape), *shape]
        return np.concatenate([[1 + len(head) + len(bits), *head], bits])

    @staticmethod
    def from_array(array: Ids) -> PromptImage:
        """Return the image that `to_array` wrote."""
        _, num_rows, num_sizes = array[:3].tolist()
        end = 3 + num_sizes
        begin = end + 1 + int(array[end])
        pixels = array[begin:].astype(np.int32).view(np.float32).reshape(array[end + 1 : begin])
        return PromptImage(pixels, num_rows, tuple(array[3:end].tolist()))


def text_of(ids: Iterable[int]) -> list[int]:
    """Return the ids of a prompt that are tokens of text."""
    return [token for token in ids if token < FIRST_ID]


def starts_of_images(ids: Ids) -> list[int]:
    """Return where the first row of each image is."""
    is_first = (ids >= FIRST_ID) & ((ids - FIRST_ID) % (1 << PLACE_BITS) == 0)
    found: list[int] = np.flatnonzero(is_first).tolist()
    return found


def images_to_arrays(images: Mapping[int, tuple[PromptImage, ...]]) -> list[Ids]:
    """Return images by slot as arrays: slot and number, then each image."""
    parts: list[Ids] = []
    for slot, found in images.items():
        parts.append(np.array([slot, len(found)]))
        parts += (image.to_array() for image in found)
    return parts
